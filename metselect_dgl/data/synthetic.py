"""Synthetic datasets: ``hop_chain``, a contextual SBM, and a graph of the size of ogbn-arxiv."""

import warnings
from dataclasses import replace
from os import PathLike
from pathlib import Path

import dgl
import numpy as np
import torch

from ..atomic_file import write_atomic
from ..build import cache_home
from .dataset import NodeDataset, undirected_graph
from .npz import PARTS, dataset_from_arrays, load_npz
from .random_draws import apportion, block_edges, class_means, draw_members, random_masks

ARXIV_EDGES = 1_166_243
ARXIV_HOMOPHILY = 0.65
ARXIV_FEATS = 128
ARXIV_PARTS = (90_941, 29_799, 48_603)
ARXIV_TRAIN_PER_CLASS = np.array(
    "437 382 3604 1014 2864 2933 703 380 4056 2245 5182 391 21 1290 473 248 9998 202 402 1873 "
    "1495 304 1268 1539 6989 457 2854 1661 16284 239 4334 1350 270 926 5426 75 2506 1615 1100 "
    "1551".split(),
    dtype=np.int64,
)
TWIN_SIGNAL = 1.0  # accuracy of a linear model: 0.27 on X, 0.58 after one hop, 0.89 after two
TWIN_TAIL = 1.5  # Pareto exponent of the in-degree


def hop_chain(
    n_nodes: int = 3000,
    *,
    n_classes: int = 5,
    n_feats: int = 32,
    depth: int = 2,
    degree: int = 6,
    homophily: float = 0.8,
    signal: float = 3.5,
    seed: int = 0,
    n_splits: int = 10,
) -> NodeDataset:
    r"""Generate a directed graph in which the class of a node is visible at its own number of hops.

    Label :math:`y` and hidden type :math:`t \in \{0..depth\}` are uniform and independent;
    with M the class means, :math:`x_i = signal\,[t_i = 0]\,M_{y_i} + N(0, I)`. Node i draws
    ``degree`` in-neighbours: at :math:`t_i = 0` uniformly from all nodes; at :math:`t_i \ge 1`
    uniformly from type :math:`t_i - 1` and one class, which is :math:`y_i` with probability
    ``homophily`` and uniform otherwise. Draws are independent, so an edge may occur twice.

    No fixed layer suits all nodes: only type 0 has its class in its features, and a node of type t
    reaches those features exactly t hops upstream. Layer l is informative for the nodes of type l,
    about one in depth + 1; for the others it holds noise or the wrong hop.

    Examples
    --------
    >>> from metselect_dgl.data import hop_chain
    >>> data = hop_chain(seed=1)
    >>> data.node_type.unique()
    tensor([0, 1, 2])
    """
    counts = {"n_nodes": n_nodes, "n_classes": n_classes, "n_splits": n_splits, "depth": depth}
    _check_parameters(homophily, **counts)
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=n_nodes)
    types = rng.integers(depth + 1, size=n_nodes)
    means = class_means(rng, n_classes, n_feats) * signal
    feat = rng.standard_normal((n_nodes, n_feats)) + (types == 0)[:, None] * means[labels]
    dst = np.repeat(np.arange(n_nodes), degree)
    wanted = labels[dst]
    other = rng.random(dst.size) >= homophily
    wanted[other] = rng.integers(n_classes, size=other.sum())
    src = rng.integers(n_nodes, size=dst.size)  # neighbours of type 0
    deep = types[dst] > 0
    upstream = (types[dst] - 1) * n_classes + wanted
    src[deep] = draw_members(rng, types * n_classes + labels, upstream[deep])
    return NodeDataset(
        "hop_chain",
        dgl.graph((torch.from_numpy(src), torch.from_numpy(dst)), num_nodes=n_nodes),
        torch.from_numpy(feat).float(),
        torch.from_numpy(labels),
        n_classes,
        *map(torch.from_numpy, random_masks(rng, n_nodes, n_splits)),
        node_type=torch.from_numpy(types),
        note="synthetic: a node of type t has its class t hops upstream",
    )


def contextual_sbm(
    n_nodes: int = 1000,
    *,
    n_classes: int = 5,
    n_feats: int = 32,
    degree: float = 10.0,
    homophily: float = 0.5,
    signal: float = 1.5,
    seed: int = 0,
    n_splits: int = 10,
) -> NodeDataset:
    """Generate a contextual stochastic block model: an undirected graph with given homophily.

    ``homophily`` is the share of edges that join two nodes of one class; the other edges join two
    classes at random. Features are ``signal`` times the class mean plus unit noise. ``degree`` is
    the mean degree.
    """
    _check_parameters(homophily, n_nodes=n_nodes, n_classes=n_classes, n_splits=n_splits)
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=n_nodes)
    edges = block_edges(rng, labels, round(n_nodes * degree / 2), homophily, directed=False)
    means = class_means(rng, n_classes, n_feats) * signal
    feat = rng.standard_normal((n_nodes, n_feats)) + means[labels]
    return NodeDataset(
        "csbm",
        undirected_graph(torch.from_numpy(edges), n_nodes),
        torch.from_numpy(feat).float(),
        torch.from_numpy(labels),
        n_classes,
        *map(torch.from_numpy, random_masks(rng, n_nodes, n_splits)),
        note=f"synthetic: edge homophily {homophily:g}",
    )


def arxiv_twin(
    seed: int = 0, cache_dir: str | PathLike | None = None, scale: float = 1.0
) -> NodeDataset:
    """Generate a graph with the sizes of ogbn-arxiv, to measure cost where that is not available.

    At ``scale`` 1 it has 169,343 nodes, 1,166,243 directed edges before they are made bidirected,
    128 features, 40 classes, edge homophily 0.65, a heavy-tailed in-degree, ogbn-arxiv's split
    sizes and its training nodes per class. Like ``load_dataset("ogbn-arxiv")`` it has both
    directions of every edge and self-loops. Accuracies on it do not predict those on ogbn-arxiv. It
    is generated once and then read from ``cache_dir`` (default: ``$XDG_CACHE_HOME`` or
    ``~/.cache``, under ``metselect_dgl``).
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}, expected a positive number such as 0.05")
    path = Path(cache_dir or cache_home()) / f"arxiv-twin-1-seed{seed}-scale{float(scale)}.npz"
    try:
        dataset = load_npz(path)
    except (FileNotFoundError, ValueError):  # not cached yet, or damaged
        arrays = _twin_arrays(seed, scale)
        try:
            write_atomic(path, lambda file: np.savez(file, **arrays))
        except OSError as error:
            warnings.warn(f"{path} cannot be written, so it is not cached: {error}", stacklevel=2)
        dataset = dataset_from_arrays(arrays, name=path.stem)
    return replace(dataset, name="arxiv-twin", graph=dgl.add_self_loop(dataset.graph))


def _twin_arrays(seed: int, scale: float) -> dict[str, np.ndarray]:
    """Return the arrays of ``load_npz``; their edges become undirected when they are read."""
    rng = np.random.default_rng(seed)
    n_classes, n_edges = len(ARXIV_TRAIN_PER_CLASS), round(ARXIV_EDGES * scale)
    counts = [apportion(ARXIV_TRAIN_PER_CLASS, round(size * scale)) for size in ARXIV_PARTS]
    labels = np.concatenate([np.repeat(np.arange(n_classes), count) for count in counts])
    part = np.repeat(np.arange(3), [count.sum() for count in counts])  # 0 train, 1 val, 2 test
    n_nodes = len(labels)
    order = rng.permutation(n_nodes)
    labels, part = labels[order], part[order]
    means = class_means(rng, n_classes, ARXIV_FEATS).astype(np.float32) * TWIN_SIGNAL
    feat = rng.standard_normal((n_nodes, ARXIV_FEATS), dtype=np.float32) + means[labels]
    weight = rng.pareto(TWIN_TAIL, n_nodes)
    edges = block_edges(rng, labels, n_edges, ARXIV_HOMOPHILY, directed=True, weight=weight)
    return {
        "node_features": feat,
        "node_labels": labels,
        "edges": edges,
        "n_classes": np.array(n_classes),
        "note": np.array("synthetic: the sizes of ogbn-arxiv, not its papers"),
        **{f"{name}_masks": (part == i)[None] for i, name in enumerate(PARTS)},
    }


def _check_parameters(homophily: float, **counts: int) -> None:
    if not 0 <= homophily <= 1:
        raise ValueError(f"homophily is {homophily}, expected a share from 0 to 1")
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}, expected at least 1")
