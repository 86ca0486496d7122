"""Sources of layers: a whole graph, stored layers (of blocks or of any module), and batches.

Heads consume the layers of a source without knowing how they are computed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import singledispatch

import torch
from dgl import DGLGraph
from torch import Tensor, nn

from ..checks import check_feat, check_finite, check_layers
from .layer_rows import LayerRows, LayerStack
from .plain_modules import is_plain_linear
from .sampler import DegreeSampler
from .streams import check_stream

BATCH = 65536  # nodes whose neighbours are looked up together, unless another number is given
TILE = 8192  # rows of stored layers that are looked at together

Rows = slice | Tensor
Batches = Iterator[tuple[Rows, Tensor]]


class LayerSource:
    """The layers of one graph and its features; subclasses implement `stack` and `sweep`."""

    n_rows: int  # nodes, or whatever the rows of a layer are
    n_edges: int | None = None  # edges that were aggregated so far, where they are counted

    def stack(self, index: Tensor | None = None) -> LayerStack:
        """Return the rows `index` of every layer; differentiable, except from batches."""
        raise NotImplementedError(f"{type(self).__name__} does not give its layers together")

    def sweep(self, first: int = 0) -> Iterator[tuple[int, Batches]]:
        """Yield every depth from `first` on with an iterator over (rows, the layer there), without
        gradients; the layers before are computed only as far as these need them."""
        raise NotImplementedError(f"{type(self).__name__} does not give its layers in order")

    def repeatable(self) -> "LayerSource":
        """Return a source that can be swept again at the least cost that memory allows."""
        return self

    def settle(self, depth: int, pending: Tensor) -> None:
        """After layer `depth`, compute deeper layers only as far as the mask `pending` [n_rows]
        needs them; nothing is saved where all rows of a layer are computed together."""


class StoredLayers(LayerSource):
    """Layers that are computed together by one call: of blocks, or of any module."""

    def __init__(
        self,
        compute: Callable[[], Sequence[Tensor]],
        layer_feats: Sequence[int] | None,
        n_rows: int | None = None,
    ) -> None:
        self._compute, self._layer_feats, self._n_rows = compute, layer_feats, n_rows
        self._layers: list[Tensor] | None = None

    @property
    def layers(self) -> list[Tensor]:
        """The layers; of blocks, the first rows of each are the seeds."""
        if self._layers is None:
            self._layers = list(self._compute())
            if self._layer_feats is not None:
                self._layers = check_layers(self._layers, self._layer_feats, self._layers[-1])
        return self._layers

    @property
    def n_rows(self) -> int:
        """The number of rows of a layer, if need be after computing it."""
        return len(self.layers[-1]) if self._n_rows is None else self._n_rows

    def stack(self, index: Tensor | None = None) -> LayerStack:
        return LayerStack.of(self.layers, index)

    def sweep(self, first: int = 0) -> Iterator[tuple[int, Batches]]:
        for depth, h in enumerate(self.layers[first:], first):
            yield depth, batches_of(h, TILE)


class GraphSource(LayerSource):
    """The layers of a whole graph, computed by a :class:`Backbone`."""

    def __init__(self, backbone: nn.Module, graph: DGLGraph, feat: Tensor) -> None:
        self.backbone, self.graph, self.feat = backbone, graph, feat
        self.n_rows = graph.num_nodes()

    def stack(self, index: Tensor | None = None) -> LayerStack:
        """Return the rows `index` of every layer; of the last one no others are computed."""
        prepared = self._prepare()
        index = prepared.known(index)
        layers, h = [self._first(prepared, index)], self.feat
        last = self.backbone.num_layers - 1
        for depth in range(last + 1):
            at_rows = depth == last and self.backbone.convolution.rows_are_independent
            out, h, reduced = self._next(depth, prepared, h, index if at_rows else None)
            if depth > 0:
                layers.append(LayerRows(h, index))
            h = out
        return LayerStack([*layers, LayerRows(h, None if reduced else index)])

    def sweep(self, first: int = 0) -> Iterator[tuple[int, Batches]]:
        prepared, h = self._prepare(), self.feat
        if first == 0:
            yield 0, _whole(0, self._first(prepared, None).rows())
        for depth in range(1, self.backbone.num_layers + 1):
            h = self._next(depth - 1, prepared, h, None)[0]
            if depth >= first:
                yield depth, _whole(depth, h)

    def repeatable(self) -> LayerSource:
        return StoredLayers(lambda: self.stack().rows(), self.backbone.layer_feats, self.n_rows)

    def _prepare(self):
        return self.backbone.prepared.get(self.graph, self.feat)

    def _first(self, prepared, index: Tensor | None) -> LayerRows:
        """Return layer 0, a linear map of the features."""
        backbone, feat = self.backbone, self.feat
        if backbone.drops or feat.requires_grad or not is_plain_linear(backbone.input):
            return LayerRows(backbone.first_layer(LayerRows(feat, index).rows()))
        return LayerRows(feat, index, backbone.input, prepared.features(feat, index))

    def _next(
        self, depth: int, prepared, h: Tensor, index: Tensor | None
    ) -> tuple[Tensor, Tensor, bool]:
        """Return the next layer, `h` for further use, and whether only `index` was computed."""
        backbone, convolution = self.backbone, self.backbone.convolution
        conv = backbone.convs[depth]
        as_module = backbone.runs_as_module(conv, h)
        fuses = not as_module and backbone.fuses(h)
        constant = depth == 0 and not backbone.drops and not h.requires_grad
        once = constant and backbone.propagate_once and not as_module
        sparse = prepared.features(h, None).sparse() if fuses and constant else None
        if once and sparse is None:
            propagated = prepared.propagated(h, index, convolution.propagate)
            out = convolution.transform(conv, propagated, LayerRows(h, index))
            return out, h, index is not None
        if not fuses:
            return convolution.on_graph(conv, prepared.graph, backbone.dropped(h)), h, False
        edges = prepared.edges(index, convolution.edges)
        out, again = convolution.on_edges(conv, edges, backbone.dropped(h), index, sparse)
        return out, h if backbone.drops else again, index is not None


def _whole(depth: int, h: Tensor) -> Batches:
    check_finite([h], first=depth)
    yield slice(None), h


class BatchedSource(LayerSource):
    """The layers of a graph, computed one after the other in batches of nodes that see all of
    their neighbours: two layers are in memory at a time.

    Parameters
    ----------
    backbone : a module with `layer_feats` and two methods: `first_layer(feat)` returns layer 0 of
        the nodes whose features are given; `layer_on_block(depth, block, h)` returns layer `depth`
        (1, 2, ...) at the targets of a block from layer depth - 1, or from the features if depth
        is 1, at its sources. The block is of a :class:`DegreeSampler` and has all in-neighbours
    loops : the backbone adds a self-loop to every node, which counts as an edge
    """

    def __init__(
        self,
        backbone: nn.Module,
        graph: DGLGraph,
        feat: Tensor,
        batch_size: int,
        *,
        loops: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a batch has at least one node")
        try:
            self.first_layer, self.layer_on_block = backbone.first_layer, backbone.layer_on_block
        except AttributeError:
            raise TypeError(
                f"a {type(backbone).__name__} cannot be computed in batches: it needs the methods "
                "first_layer(feat) and layer_on_block(depth, block, h) (see BatchedSource); leave "
                "out batch_size to compute all nodes at once"
            ) from None
        self.layer_feats = backbone.layer_feats
        self.graph, self.feat, self.batch_size, self.loops = graph, feat, batch_size, loops
        self.sampler = DegreeSampler([-1], graph)
        self.pending: list[Tensor | None] = [None] * len(self.layer_feats)
        self.n_edges = 0

    @property
    def n_rows(self) -> int:
        """The number of nodes that are computed here."""
        return self.graph.num_nodes()

    def stack(self, index: Tensor | None = None) -> LayerStack:
        """Return the rows `index` of every layer, without gradients."""
        if index is None:
            index = torch.arange(self.n_rows, device=self.feat.device)
        _, back = index.unique(return_inverse=True)  # a node may be asked for twice
        wanted = torch.zeros(self.n_rows, dtype=torch.bool, device=index.device)
        wanted[index] = True
        layers = []
        for _, batches in self.sweep():
            parts = [h[wanted[rows]] for rows, h in batches]
            layers.append(torch.cat(parts)[back])
        return LayerStack.of(layers)

    def sweep(self, first: int = 0) -> Iterator[tuple[int, Batches]]:
        h, last = self.feat, len(self.layer_feats) - 1
        for depth, width in enumerate(self.layer_feats):
            if depth == 0 < first:
                continue  # no other layer is computed from it
            out = self.store(depth, width) if 0 < depth < last else None
            if depth >= first:
                yield depth, self._batches(depth, h, out)
            else:
                deque(self._batches(depth, h, out), maxlen=0)
            self.layer_done()
            h = h if out is None else out

    def _batches(self, depth: int, h: Tensor, out) -> Batches:
        for rows, nodes in self.nodes(depth):
            layer = self._rows(depth, nodes, h)
            check_feat(layer, len(nodes), self.layer_feats[depth], layer, f"layer {depth}")
            check_finite([layer], first=depth, nodes=nodes)
            if out is not None:
                out[nodes] = layer
            yield rows, layer

    @torch.no_grad()
    def _rows(self, depth: int, nodes: Tensor, h: Tensor) -> Tensor:
        if depth == 0:
            return self.first_layer(h[nodes])
        sources, _, (block,) = self.sampler.sample_blocks(self.graph, nodes.to(self.graph.idtype))
        self.n_edges += block.num_edges() + len(nodes) * self.loops
        return self.layer_on_block(depth, block, h[sources])

    def nodes(self, depth: int) -> Iterator[tuple[Rows, Tensor]]:
        """Return an iterator over the rows and nodes of every batch of a layer."""
        pending = self.pending[depth]
        if pending is None:
            everything = torch.arange(self.n_rows, device=self.feat.device)
            return batches_of(everything, self.batch_size)
        return ((nodes, nodes) for nodes in pending.nonzero().squeeze(1).split(self.batch_size))

    def store(self, depth: int, width: int) -> Tensor:
        """Return room for a layer of all nodes."""
        return self.feat.new_empty(self.graph.num_nodes(), width)

    def layer_done(self) -> None:
        """Called when all batches of a layer are computed."""

    def settle(self, depth: int, pending: Tensor) -> None:
        hops = len(self.layer_feats) - 2 - depth
        if hops < 0:
            return
        upstream, (source, target) = pending.clone(), self.graph.edges()
        for _ in range(hops):
            upstream[source[upstream[target]]] = True
        self.pending[depth + 1] = upstream


def batches_of(values: Tensor, batch_size: int) -> Batches:
    """Yield the positions and the entries of consecutive batches."""
    for start in range(0, len(values), batch_size):
        rows = slice(start, start + batch_size)
        yield rows, values[rows]


@singledispatch
def layer_source(
    backbone: nn.Module,
    graph: DGLGraph | Sequence[DGLGraph],
    feat: Tensor,
    batch_size: int | None = None,
) -> LayerSource:
    """Return the source of the layers of a graph, or of blocks.

    Any module that returns its layers will do; with a `batch_size`, see :class:`BatchedSource`.
    """
    check_stream(graph)
    if batch_size is None:
        return StoredLayers(lambda: backbone(graph, feat), backbone.layer_feats)
    if len(feat) != graph.num_nodes():
        raise ValueError(f"feat has {len(feat)} rows for {graph.num_nodes()} nodes")
    return BatchedSource(backbone, graph, feat, batch_size)
