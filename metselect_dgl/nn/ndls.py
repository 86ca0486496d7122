"""NDLSelect: as many layers as NDLS needs hops to bring a node's features near their limit."""

from dataclasses import replace
from functools import partial

import dgl
import dgl.function as fn
import torch
from dgl import DGLGraph
from torch import Tensor, nn

from .cache import Cache
from .heads import DecodersHead, Selection
from .layers import Layer
from .model import LayerSelect


@torch.inference_mode(False)
@torch.no_grad()
def local_hops(graph: DGLGraph, feat: Tensor, eps: float, depth: int) -> Tensor:
    r"""First k with :math:`\lVert (P^k X)_v - \pi^\top X \rVert < \epsilon`, at most `depth`, [N].

    :math:`P = (D + I)^{-1} (A + I)`, :math:`\pi_j = (d_j + 1) / (2m + n)`, X row-normalised.
    """
    looped = dgl.add_self_loop(dgl.remove_self_loop(graph.local_var()))
    x = feat / feat.abs().sum(1, keepdim=True).clamp(min=torch.finfo(feat.dtype).tiny)
    degree = looped.in_degrees().to(x.dtype)
    limit = (degree / degree.sum()) @ x  # [F]
    hops = torch.full((graph.num_nodes(),), depth, device=feat.device)
    for k in range(depth):
        near = (x - limit).norm(dim=1) < eps
        hops = torch.where(near & (hops == depth), k, hops)
        with looped.local_scope():
            looped.ndata["x"] = x
            looped.update_all(fn.copy_u("x", "m"), fn.mean("m", "x"))
            x = looped.ndata["x"]
    return hops


class GivenHead(DecodersHead):
    """Decode every node from a layer that is known beforehand: `layer` [N]."""

    def forward(self, layers, layer: Tensor, *, labels=None, index=None) -> Selection:
        layers, labels, index = self.check(layers, labels, index)
        return replace(self.forward_rows(layers, labels, Layer(layer, index).rows()), index=index)

    def forward_rows(self, layers, labels, layer: Tensor) -> Selection:
        logits, loss = self.decode(layers, layer, labels)
        return Selection(logits, layer, loss=loss)


class NDLSelect(LayerSelect):
    """The layer that NDLS gives a node, whatever the model and the labels.

    It is computed once per graph and features. On blocks it is looked up by ``dgl.NID``, so call
    `precompute(graph, feat)` with the whole graph first.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> model = NDLSelect(GCN(8, 16, self_loop=True), 3, eps=0.5)
    >>> model(dgl.rand_graph(30, 99), torch.rand(30, 8)).layer.max() <= 2
    tensor(True)
    """

    head_class = GivenHead

    def __init__(self, backbone: nn.Module, n_classes: int, *, eps: float = 0.03) -> None:
        super().__init__(backbone, n_classes)
        depth = len(backbone.layer_feats) - 1
        self.eps = eps
        self._hops = Cache(partial(local_hops, eps=eps, depth=depth))
        self.register_buffer("hops", None, persistent=False)

    def precompute(self, graph: DGLGraph, feat: Tensor) -> None:
        """Find the layer of every node of the graph that blocks will be taken from."""
        self.hops = local_hops(graph, feat, **self._hops.make.keywords)

    def choose(self, layers, graph, feat, labels=None, index=None) -> Selection:
        layer = Layer(self._layer(graph, feat), index).rows()
        return replace(self.head.forward_rows(layers, labels, layer), index=index)

    def _layer(self, graph, feat) -> Tensor:
        if not isinstance(graph, list | tuple):
            return self._hops(graph, feat)
        if self.hops is None:
            raise RuntimeError("call precompute(graph, feat) with the whole graph before blocks")
        return self.hops[graph[-1].dstdata[dgl.NID]]

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
