"""Random draws for the synthetic datasets, vectorised over nodes or edges."""

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
    n_nodes, sizes = len(labels), np.bincount(labels)
    entries = 1 if directed else 2  # of a pair in the adjacency matrix
    same_pairs = (sizes * (sizes - 1)).sum() // entries
    other_pairs = n_nodes * (n_nodes - 1) // entries - same_pairs
    n_same = round(n_edges * homophily)
    keys = []
    for same, count, pairs in ((True, n_same, same_pairs), (False, n_edges - n_same, other_pairs)):
        if count > pairs / 4:  # distinct draws would take too long
            raise ValueError(
                f"{count} edges {'within' if same else 'between'} classes are too many for {pairs} "
                "pairs of nodes: take more nodes or fewer edges, or another homophily"
            )
        group = labels if same else np.zeros_like(labels)
        drawn = np.empty(0, dtype=np.int64)
        while drawn.size < count:
            src = rng.integers(n_nodes, size=16 + (count - drawn.size) * 5 // 4)
            dst = draw_members(rng, group, group[src], weight)
            keep = (src != dst) & ((labels[src] == labels[dst]) == same)
            pair = np.stack([src[keep], dst[keep]])
            key = np.array([n_nodes, 1]) @ (pair if directed else np.sort(pair, axis=0))
            drawn = np.unique(np.append(drawn, key))
        keys.append(rng.permutation(drawn)[:count])
    return np.stack(np.divmod(np.concatenate(keys), n_nodes), axis=1)
