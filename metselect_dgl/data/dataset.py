"""Graphs from edge lists, and a graph with features, labels and splits, checked when created."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import dgl
import torch
from torch import Tensor


def undirected_graph(edges: Tensor, n_nodes: int) -> dgl.DGLGraph:
    """Return a graph with both directions of every edge [E, 2], each once; self-loops stay."""
    src, dst = edges.unbind(dim=1)
    keys = torch.cat([src * n_nodes + dst, dst * n_nodes + src]).unique()
    return dgl.graph((keys // n_nodes, keys % n_nodes), num_nodes=n_nodes)


def edge_homophily(graph: dgl.DGLGraph, labels: Tensor) -> float:
    """Return the share of edges within a class, among edges of two different labelled nodes."""
    src, dst = graph.edges()
    counted = (src != dst) & (labels[src] >= 0) & (labels[dst] >= 0)
    return (labels[src] == labels[dst])[counted].float().mean().item()


class Split(NamedTuple):
    """Node indices (int64) of one split."""

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class NodeDataset:
    """A node classification task on one graph of N nodes, with S splits.

    Parameters
    ----------
    name : str
    graph : dgl.DGLGraph
    feat : Tensor
        float [N, F].
    labels : Tensor
        int64 [N] in 0..n_classes-1; -1 marks a node without label.
    n_classes : int
    train_masks, val_masks, test_masks : Tensor
        bool [S, N]; within a split no node is in two of them.
    node_type : Tensor, optional
        int64 [N], the hidden type of each node, known for ``hop_chain``.
    note : str
        Origin of the data, for readers of a result.

    Examples
    --------
    >>> from metselect_dgl.data import hop_chain
    >>> data = hop_chain(n_nodes=300)
    >>> data
    NodeDataset(hop_chain: 300 nodes, 1800 edges, 32 features, 5 classes, 10 splits)
    >>> len(data.split(0).train)
    120
    """

    name: str
    graph: dgl.DGLGraph
    feat: Tensor
    labels: Tensor
    n_classes: int
    train_masks: Tensor
    val_masks: Tensor
    test_masks: Tensor
    node_type: Tensor | None = None
    note: str = ""

    def __post_init__(self) -> None:
        n_nodes = self.graph.num_nodes()
        if not self.feat.is_floating_point():
            raise TypeError(f"feat is {self.feat.dtype}; convert it with feat.float()")
        if self.feat.dim() != 2 or len(self.feat) != n_nodes:
            shape = tuple(self.feat.shape)
            raise ValueError(f"feat has shape {shape}, expected ({n_nodes}, n_feats)")
        _check_index("labels", self.labels, n_nodes)
        if self.n_classes > max(n_nodes, 1000):
            raise ValueError(
                f"there are {self.n_classes} classes for {n_nodes} nodes; check labels"
            )
        wrong = ((self.labels < -1) | (self.labels >= self.n_classes)).nonzero()
        if len(wrong):
            node = int(wrong[0])
            raise ValueError(
                f"label {int(self.labels[node])} of node {node} is outside 0 to "
                f"{self.n_classes - 1} (-1 marks a node without label)"
            )
        _check_masks(self.train_masks, self.val_masks, self.test_masks, n_nodes)
        if self.node_type is not None:
            _check_index("node_type", self.node_type, n_nodes)
            if ((self.node_type < 0) | (self.node_type >= max(n_nodes, 1))).any():
                raise ValueError(f"node_type has values outside 0 to {n_nodes - 1}")

    @property
    def n_splits(self) -> int:
        return len(self.train_masks)

    def split(self, i: int) -> Split:
        """Return the node indices of split ``i``, counted from 0."""
        if not 0 <= i < self.n_splits:
            raise ValueError(f"split {i} of {self.name}: it has splits 0 to {self.n_splits - 1}")
        masks = self.train_masks, self.val_masks, self.test_masks
        return Split(*(mask[i].nonzero().squeeze(1) for mask in masks))

    def row_normalized(self) -> NodeDataset:
        """Return a copy whose feature rows have absolute sum 1; rows of zeros stay zero."""
        total = self.feat.abs().sum(dim=1, keepdim=True)  # [N, 1]
        return replace(self, feat=self.feat / total.where(total > 0, 1.0))

    def to(self, device: str | torch.device) -> NodeDataset:
        """Return a copy with graph and tensors on `device`."""
        moved = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor | dgl.DGLGraph):
                moved[name] = value.to(device)
        return replace(self, **moved)

    def fingerprint(self) -> str:
        """Return a digest of the content, which identifies the data of a result."""
        content = hashlib.sha256()
        edges = torch.stack(self.graph.edges())
        masks = (self.train_masks, self.val_masks, self.test_masks)
        for tensor in (edges, self.feat, self.labels, *masks):
            content.update(tensor.cpu().contiguous().numpy())
        return content.hexdigest()[:16]

    def __repr__(self) -> str:
        return (
            f"NodeDataset({self.name}: {self.graph.num_nodes()} nodes, "
            f"{self.graph.num_edges()} edges, {self.feat.shape[1]} features, "
            f"{self.n_classes} classes, {self.n_splits} splits)"
        )


def _check_index(what: str, value: Tensor, n_nodes: int) -> None:
    if value.dtype != torch.int64:
        raise TypeError(f"{what} is {value.dtype}, expected torch.int64")
    if tuple(value.shape) != (n_nodes,):
        raise ValueError(f"{what} has shape {tuple(value.shape)}, expected ({n_nodes},)")


def _check_masks(train: Tensor, val: Tensor, test: Tensor, n_nodes: int) -> None:
    for name, mask in {"train_masks": train, "val_masks": val, "test_masks": test}.items():
        if mask.dtype != torch.bool:
            raise TypeError(f"{name} is {mask.dtype}, expected torch.bool")
        if mask.dim() != 2 or mask.shape[1] != n_nodes or not len(mask):
            raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected (S, {n_nodes})")
    if not len(train) == len(val) == len(test):
        raise ValueError(f"{len(train)} train, {len(val)} val and {len(test)} test masks")
    twice = ((train & val) | (train & test) | (val & test)).nonzero()
    if len(twice):
        split, node = twice[0].tolist()
        raise ValueError(f"split {split} has node {node} in two of train, val and test")
