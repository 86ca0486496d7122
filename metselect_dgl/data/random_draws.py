"""Random draws for the synthetic datasets, vectorised over nodes or edges."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator


def class_means(rng: Generator, n_classes: int, n_feats: int) -> np.ndarray:
    """Return C orthonormal rows minus their mean, [C, F]."""
    if n_feats < n_classes:
        raise ValueError(f"{n_feats} features cannot keep {n_classes} class means orthogonal")
    columns, _ = np.linalg.qr(rng.standard_normal((n_feats, n_classes)))
    return columns.T - columns.mean(axis=1)


def random_masks(
    rng: Generator, n_nodes: int, n_splits: int, fractions: tuple[float, float] = (0.4, 0.2)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return train, validation and test masks [S, N]; the rest after the fractions is test."""
    place = rng.permuted(np.tile(np.arange(n_nodes), (n_splits, 1)), axis=1)
    train_end = round(fractions[0] * n_nodes)
    val_end = round(sum(fractions) * n_nodes)
    return place < train_end, (place >= train_end) & (place < val_end), place >= val_end


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Return integers in proportion to ``weights`` with sum ``total`` (largest remainders)."""
    shares = weights * (total / weights.sum())
    counts = np.floor(shares).astype(np.int64)
    largest = np.argsort(counts - shares, kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return counts


def draw_members(
    rng: Generator, group: np.ndarray, wanted: np.ndarray, weight: np.ndarray | None = None
) -> np.ndarray:
    """Draw a node of each wanted group, in proportion to ``weight``.

    Inverse CDF: with the nodes sorted by group, a group is an interval of the cumulative weight.
    """
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=wanted.max(initial=0) + 1))
    starts = np.append(0, ends[:-1])
    empty = np.flatnonzero((starts == ends)[wanted])
    if empty.size:
        raise ValueError(f"group {wanted[empty[0]]} has no node: take more nodes or fewer classes")
    mass = np.append(0.0, np.cumsum(np.ones(len(group)) if weight is None else weight[order]))
    low, high = mass[starts[wanted]], mass[ends[wanted]]
    at = np.searchsorted(mass, low + rng.random(wanted.size) * (high - low), side="right") - 1
    return order[np.clip(at, starts[wanted], ends[wanted] - 1)]


def block_edges(
    rng: Generator,
    labels: np.ndarray,
    n_edges: int,
    homophily: float,
    *,
    directed: bool,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """Draw distinct edges [E, 2] without loops, the share ``homophily`` of them within a class.

    Sources are uniform, targets in proportion to ``weight``.
    """
    n_nodes, anyone = len(labels), np.zeros_like(labels)

    def draw(size: int, same: bool) -> np.ndarray:
        src = rng.integers(n_nodes, size=size)
        group = labels if same else anyone
        dst = draw_members(rng, group, group[src], weight)
        keep = (src != dst) & ((labels[src] == labels[dst]) == same)
        pair = np.stack([src[keep], dst[keep]])
        return np.array([n_nodes, 1]) @ (pair if directed else np.sort(pair, axis=0))

    n_same = round(n_edges * homophily)
    _check_room(labels, n_same, n_edges - n_same, directed)
    keys = [
        _distinct(rng, n_same, lambda size: draw(size, True)),
        _distinct(rng, n_edges - n_same, lambda size: draw(size, False)),
    ]
    return np.stack(np.divmod(np.concatenate(keys), n_nodes), axis=1)


def _distinct(rng: Generator, count: int, draw: Callable[[int], np.ndarray]) -> np.ndarray:
    """Draw until there are ``count`` different keys."""
    keys = np.empty(0, dtype=np.int64)
    while keys.size < count:
        keys = np.unique(np.append(keys, draw(16 + (count - keys.size) * 5 // 4)))
    return rng.permutation(keys)[:count]


def _check_room(labels: np.ndarray, n_same: int, n_other: int, directed: bool) -> None:
    """Raise ValueError if edges fill a quarter of the pairs: distinct draws would take too long."""
    sizes = np.bincount(labels)
    per_pair = 1 if directed else 2
    same_pairs = (sizes * (sizes - 1)).sum() // per_pair
    other_pairs = len(labels) * (len(labels) - 1) // per_pair - same_pairs
    for edges, pairs, where in ((n_same, same_pairs, "within"), (n_other, other_pairs, "between")):
        if edges > pairs / 4:
            raise ValueError(
                f"{edges} edges {where} classes are too many for {pairs} pairs of nodes: "
                "take more nodes or fewer edges, or another homophily"
            )
