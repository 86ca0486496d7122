"""Values that a backbone derives from a graph, features and an index, computed once and kept.

Nothing that is kept can go stale: features are recognised by a fingerprint of all their bits, an
index and labels by comparison with a private copy, and a graph by DGL's structure object, which DGL
replaces when the graph is edited.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import dgl
import torch
from dgl import DGLGraph
from torch import Tensor

from ..checks import check_finite
from ..functional.graph import fingerprint
from .adjacency import Adjacency
from .feature_rows import FeatureRows, once

_GRAPHS = 2  # training and evaluation may take turns between two graphs
_INDICES = 4  # of training, calibration, prediction, and one more


class PreparedGraph:
    """Values derived from one graph, with its self-loops if they are wanted, and its features."""

    def __init__(self, graph: DGLGraph, self_loop: bool) -> None:
        self.structure = weakref.ref(graph._graph, partial(_forget, weakref.ref(self)))
        self.looped = add_self_loops(graph) if self_loop else None
        self.fingerprint: tuple = ()
        self.indices: list[Tensor] = []
        self.of_graph: dict[tuple, Any] = {}
        self.of_features: dict[tuple, Any] = {}

    def update(self, graph: DGLGraph, feat: Tensor) -> None:
        """Take the graph and features of this call; forget what was derived from others."""
        self._graph = weakref.ref(graph)
        if feat.requires_grad:
            check_finite([feat])
            return
        known = feat.shape, feat.dtype, feat.device, fingerprint(feat)
        if known != self.fingerprint:
            check_finite([feat])
            self.fingerprint = known
            self.of_features.clear()

    @property
    def graph(self) -> DGLGraph:
        """The graph of this call, which is not kept alive for the next, or that with self-loops."""
        return self._graph() if self.looped is None else self.looped

    def known(self, index: Tensor | None) -> Tensor | None:
        """Return the private copy of an index, which is the same object for equal contents."""
        if index is None:
            return None
        for copy in self.indices:
            if torch.equal(copy, index):
                return copy
        with torch.inference_mode(False):
            copy = index.clone()
        self.indices = [copy, *self.indices[: _INDICES - 1]]
        kept = {id(None), *(id(copy) for copy in self.indices)}
        for derived in (self.of_graph, self.of_features):
            for key in [key for key in derived if key[1] not in kept]:
                del derived[key]
        return copy

    def edges(self, index: Tensor | None, make: Callable[..., Adjacency]) -> Adjacency:
        """Return the edges into all nodes, or into those of a known index."""
        return once(self.of_graph, ("edges", id(index)), lambda: make(self.graph, index))

    def features(self, feat: Tensor, index: Tensor | None) -> FeatureRows:
        """Return the rows of constant features at a known index."""
        rows = once(self.of_features, ("rows", id(index)), lambda: FeatureRows(feat, index))
        rows.feat = feat  # of the same contents
        return rows

    def propagated(self, feat: Tensor, index: Tensor | None, propagate: Callable) -> Tensor:
        """Return the rows of the propagated features at a known index."""
        whole = once(
            self.of_features, ("propagated", id(None)), lambda: propagate(self.graph, feat)
        )
        if index is None:
            return whole
        return once(self.of_features, ("propagated", id(index)), lambda: whole[index])


class PreparedGraphs:
    """The graphs that a backbone was last called with, as it prepared them; see `clear`."""

    def __init__(self, self_loop: bool) -> None:
        self.self_loop = self_loop
        self.graphs: list[PreparedGraph] = []

    def get(self, graph: DGLGraph, feat: Tensor) -> PreparedGraph:
        """Return what was prepared for this graph, up to date with these features."""
        alive = [known for known in self.graphs if known.structure() is not None]
        same = [known for known in alive if known.structure() is graph._graph]
        others = [known for known in alive if known.structure() is not graph._graph]
        prepared = same[0] if same else PreparedGraph(graph, self.self_loop)
        prepared.update(graph, feat)
        self.graphs = [prepared, *others[: _GRAPHS - 1]]
        return prepared

    def clear(self) -> None:
        """Free everything that is kept."""
        self.graphs = []

    def __getstate__(self) -> dict:
        """Return what copies and pickles take along: the option alone."""
        return {"self_loop": self.self_loop, "graphs": []}


def _forget(prepared: weakref.ref, _: weakref.ref) -> None:
    """Free what was derived from a graph that has been freed."""
    if prepared() is not None:
        prepared().of_graph.clear()
        prepared().of_features.clear()
        prepared().looped = None


def add_self_loops(graph: DGLGraph) -> DGLGraph:
    """Return the structure of a graph or block with exactly one self-loop on every target."""
    source, target = graph.edges()
    other = source != target  # in a block, equal numbers are the same node
    loop = torch.arange(graph.num_dst_nodes(), dtype=source.dtype, device=source.device)
    edges = torch.cat([source[other], loop]), torch.cat([target[other], loop])
    if graph.is_block:
        return dgl.create_block(edges, graph.num_src_nodes(), graph.num_dst_nodes())
    return dgl.graph(edges, num_nodes=graph.num_nodes())
