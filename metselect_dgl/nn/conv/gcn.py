"""GCN: D^{-1/2} A D^{-1/2} h W + b, as :class:`dgl.nn.GraphConv` computes it."""

from collections.abc import Sequence

import torch
from dgl import DGLGraph
from dgl.nn import GraphConv
from torch import Tensor, nn

from ...functional import graph as MG
from ..backbone import Backbone
from ..layer_rows import LayerRows
from ..sampler import IN_DEGREE, OUT_DEGREE, neighbour_sum, no_in_edges
from .base import Convolution


class GCNConvolution(Convolution):
    """:class:`dgl.nn.GraphConv` with symmetric normalisation."""

    fused = propagates = needs_degrees = True

    def make(self, in_feats: int, out_feats: int) -> nn.Module:
        return GraphConv(in_feats, out_feats, allow_zero_in_degree=self.allow_zero_in_degree)

    def propagate(self, graph: DGLGraph, feat: Tensor) -> Tensor:
        allow, width = self.allow_zero_in_degree, feat.shape[1]
        average = GraphConv(width, width, weight=False, bias=False, allow_zero_in_degree=allow)
        return average(graph, feat.detach())

    def transform(self, conv: nn.Module, propagated: Tensor, own: LayerRows) -> Tensor:
        return MG.linear_relu(propagated, conv.weight, conv.bias)

    def on_edges(self, conv, edges, h, index, sparse):
        in_feats, out_feats = conv.weight.shape
        if sparse is not None or in_feats > out_feats:  # less to sum after the weights
            product = h @ conv.weight if sparse is None else sparse.times(conv.weight)
            out, _ = edges.neighbour_sum(product, normalized=True)
            return torch.relu(out + conv.bias), h
        out, h = edges.neighbour_sum(h, normalized=True)
        return MG.linear_relu(out, conv.weight, conv.bias), h

    def on_degrees(self, conv, block, h):
        fine = self.self_loop or self.allow_zero_in_degree
        if not fine and (block.dstdata[IN_DEGREE] == 0).any():
            raise no_in_edges()
        degrees = block.srcdata[OUT_DEGREE].to(h.dtype), block.dstdata[IN_DEGREE].to(h.dtype)
        loops = int(self.self_loop)
        sources, targets = ((d + loops).clamp(min=1).sqrt().unsqueeze(1) for d in degrees)  # [n, 1]
        narrows = conv.weight.shape[0] > conv.weight.shape[1]
        h = (h @ conv.weight if narrows else h) / sources
        out = neighbour_sum(block, h)
        out = (out + h[: len(out)] if self.self_loop else out) / targets
        return (out if narrows else out @ conv.weight) + conv.bias


class GCN(Backbone):
    r"""Layers of :class:`dgl.nn.GraphConv`. Options are those of :class:`Backbone`.

    On blocks GraphConv counts the degrees inside the block, so that its layers are those of the
    whole graph only on blocks of a :class:`DegreeSampler`.

    Examples
    --------
    >>> import dgl, torch
    >>> graph = dgl.rand_graph(30, 200)
    >>> layers = GCN(8, 16, num_layers=2, self_loop=True)(graph, torch.randn(30, 8))
    >>> [tuple(h.shape) for h in layers]
    [(30, 16), (30, 16), (30, 16)]
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int | Sequence[int],
        *,
        self_loop: bool = False,
        allow_zero_in_degree: bool = False,
        **options,
    ) -> None:
        convolution = GCNConvolution(self_loop, allow_zero_in_degree)
        super().__init__(in_feats, hidden, convolution, **options)
