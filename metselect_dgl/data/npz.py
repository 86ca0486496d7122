"""Datasets in .npz files: features, labels, edges and splits as plain arrays, without pickles."""

from os import PathLike
from pathlib import Path

import dgl
import numpy as np
import torch

from ..atomic_file import write_atomic
from .dataset import NodeDataset, undirected_graph

PARTS = ("train", "val", "test")
ARRAYS = ("node_features", "node_labels", "n_classes", "node_type", "note", "directed")
ARRAYS += tuple(f"{part}_{kind}" for part in PARTS for kind in ("masks", "idx"))


def load_npz(path: str | PathLike, edges: str = "edges") -> NodeDataset:
    """Read a dataset from an .npz file.

    The file holds ``node_features`` [N, F], ``node_labels`` [N] (-1: no label), ``edges`` [E, 2]
    (undirected, each once) and either ``train_masks``, ``val_masks``, ``test_masks`` [S, N] or
    ``train_idx``, ``val_idx``, ``test_idx`` (one split). It may hold ``n_classes``, ``node_type``
    [N], ``note``, and ``directed``, if the edges are directed.

    Parameters
    ----------
    path : str or PathLike
    edges : str
        Name of the array of edges, for files with several: ``"edges_mettack_20"``.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            names = sorted(archive.files)
            arrays = {key: archive[key] for key in names if key in (edges, *ARRAYS)}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib, struct and numpy each raise their own
        raise ValueError(f"{path} is broken or no .npz file ({error}); copy it again") from error
    if edges not in names:
        raise ValueError(f"{path}: array {edges!r} is missing; the file has {', '.join(names)}")
    try:
        return dataset_from_arrays(arrays, name=path.stem, edges=edges)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def save_npz(dataset: NodeDataset, path: str | PathLike) -> None:
    """Write a dataset for ``load_npz``; an interrupted write leaves no file."""
    n_nodes = dataset.graph.num_nodes()
    edges = torch.stack(dataset.graph.edges(), dim=1)
    half = edges[edges[:, 0] <= edges[:, 1]]
    full = torch.stack(undirected_graph(half, n_nodes).edges(), dim=1)
    keys = (ends[:, 0] * n_nodes + ends[:, 1] for ends in (edges, full))
    symmetric = torch.equal(*(key.sort().values for key in keys))
    arrays = {
        "node_features": dataset.feat,
        "node_labels": dataset.labels,
        "edges": half if symmetric else edges,
        "n_classes": torch.tensor(dataset.n_classes),
        **{f"{part}_masks": getattr(dataset, f"{part}_masks") for part in PARTS},
    }
    if not symmetric:
        arrays["directed"] = torch.tensor(True)
    if dataset.node_type is not None:
        arrays["node_type"] = dataset.node_type
    arrays = {key: value.cpu().numpy() for key, value in arrays.items()}
    arrays["note"] = np.array(dataset.note)
    write_atomic(Path(path), lambda file: np.savez_compressed(file, **arrays))


def dataset_from_arrays(
    arrays: dict[str, np.ndarray], name: str, edges: str = "edges"
) -> NodeDataset:
    """Return the dataset of these arrays, named as in ``load_npz``."""
    feat = _features(arrays)
    labels = _integers(arrays, "node_labels")
    n_classes = arrays.get("n_classes", np.array(labels.max(initial=-1) + 1))
    directed = arrays.get("directed", np.array(False))
    if n_classes.shape or n_classes.dtype.kind not in "iu" or n_classes < 1:
        raise ValueError(f"n_classes is {n_classes}, expected an integer of at least 1")
    if directed.shape or directed.dtype.kind not in "biu":
        raise ValueError(f"directed is {directed}, expected True or False")
    pairs = _integers(arrays, edges)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"{edges} has shape {pairs.shape}, expected (E, 2)")
    outside = np.flatnonzero(((pairs < 0) | (pairs >= len(feat))).any(axis=1))
    if outside.size:
        ends = " and ".join(map(str, pairs[outside[0]]))
        known = f"the nodes are 0 to {len(feat) - 1}"
        raise ValueError(f"row {outside[0]} of {edges} joins nodes {ends}, but {known}")
    pairs = torch.from_numpy(pairs)
    if directed:
        graph = dgl.graph(pairs.unbind(dim=1), num_nodes=len(feat))
    else:
        graph = undirected_graph(pairs, len(feat))
    return NodeDataset(
        name,
        graph,
        feat,
        torch.from_numpy(labels[:, 0] if labels.shape[1:] == (1,) else labels),
        int(n_classes),
        *(torch.from_numpy(_masks(arrays, part, len(feat))) for part in PARTS),
        node_type=torch.from_numpy(arrays["node_type"]) if "node_type" in arrays else None,
        note=str(arrays.get("note", "")),
    )


def _take(arrays: dict[str, np.ndarray], key: str) -> np.ndarray:
    if key not in arrays:
        raise ValueError(f"array {key!r} is missing; the file has {', '.join(sorted(arrays))}")
    return arrays[key]


def _features(arrays: dict[str, np.ndarray]) -> torch.Tensor:
    array = _take(arrays, "node_features")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch has no other
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise TypeError(
            f"node_features is {array.dtype} of shape {array.shape}, expected real numbers (N, F)"
        )
    with np.errstate(over="ignore"):
        feat = torch.from_numpy(array.astype(np.float32, copy=False))
    lost = np.isfinite(array) & ~np.isfinite(feat.numpy())
    if lost.any():
        raise ValueError(f"node_features has {array[lost][0]}, which float32 cannot hold")
    return feat


def _integers(arrays: dict[str, np.ndarray], key: str) -> np.ndarray:
    array = _take(arrays, key)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{key} is {array.dtype}, expected integers")
    return array.astype(np.int64, copy=False)


def _masks(arrays: dict[str, np.ndarray], part: str, n_nodes: int) -> np.ndarray:
    """Return the masks [S, N] of one part; an index array is one split."""
    if f"{part}_idx" not in arrays:
        masks = np.atleast_2d(_take(arrays, f"{part}_masks"))
        if masks.dtype.kind not in "biu" or (masks > 1).any() or (masks < 0).any():
            raise ValueError(f"{part}_masks has other values than False and True")
        return masks.astype(bool)
    index = _integers(arrays, f"{part}_idx")
    outside = index[(index < 0) | (index >= n_nodes)]
    if outside.size:
        raise ValueError(f"{part}_idx has {outside[0]}, but the nodes are 0 to {n_nodes - 1}")
    return np.isin(np.arange(n_nodes), index)[None]
