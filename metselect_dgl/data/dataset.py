"""A graph with features, labels and splits, checked when it is created."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import dgl
import torch
from torch import Tensor


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
        _check_feat(self.feat, n_nodes)
        _check_index("labels", self.labels, n_nodes)
        _check_classes(self.labels, self.n_classes)
        _check_masks(self.train_masks, self.val_masks, self.test_masks, n_nodes)
        if self.node_type is not None:
            _check_index("node_type", self.node_type, n_nodes)

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
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | dgl.DGLGraph)
        }
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


def _check_feat(feat: Tensor, n_nodes: int) -> None:
    if not feat.is_floating_point():
        raise TypeError(f"feat is {feat.dtype}; convert it with feat.float()")
    if feat.dim() != 2 or len(feat) != n_nodes:
        raise ValueError(f"feat has shape {tuple(feat.shape)}, expected ({n_nodes}, n_feats)")


def _check_index(what: str, value: Tensor, n_nodes: int) -> None:
    if value.dtype != torch.int64:
        raise TypeError(f"{what} is {value.dtype}, expected torch.int64")
    if tuple(value.shape) != (n_nodes,):
        raise ValueError(f"{what} has shape {tuple(value.shape)}, expected ({n_nodes},)")


def _check_classes(labels: Tensor, n_classes: int) -> None:
    wrong = ((labels < -1) | (labels >= n_classes)).nonzero()
    if len(wrong):
        node = int(wrong[0])
        raise ValueError(
            f"label {int(labels[node])} of node {node} is outside 0 to {n_classes - 1} "
            "(-1 marks a node without label)"
        )


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
