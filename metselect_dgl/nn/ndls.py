"""NDLSelect: as many layers as NDLS needs hops to bring a node's features near their limit."""

from dataclasses import replace
from functools import partial

import dgl
import dgl.ops
import torch
from dgl import DGLGraph
from torch import Tensor, nn

from .decoders import LinearDecoders
from .head import LayerHead, Selection, evaluating
from .layer_rows import LayerRows
from .model import LayerSelect
from .prepared import PreparedGraphs
from .source import layer_source


@torch.inference_mode(False)
@torch.no_grad()
def local_hops(graph: DGLGraph, feat: Tensor, eps: float, depth: int) -> Tensor:
    r"""Return the first k, at most `depth`, that brings a node's features near their limit, [N]:
    :math:`\lVert (P^k X)_v - \pi^\top X \rVert < \epsilon`.

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
        x = dgl.ops.copy_u_mean(looped, x)
    return hops


class GivenHead(LayerHead):
    """Decode every node from a layer that is known beforehand: `layer` [N]."""

    decodes_layers = True

    def __init__(self, in_feats, n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.decoders = LinearDecoders(self.in_feats, n_classes)

    def forward(self, layers, layer: Tensor, *, labels=None, index=None) -> Selection:
        stack, labels, index = self.check(layers, labels, index)
        layer = LayerRows(layer, index).rows()
        return replace(self.select(stack, labels, layer=layer), index=index)

    def select(self, stack, labels, logits=True, *, layer: Tensor) -> Selection:
        kept, loss = stack.stored().decode(self.decoders, layer, labels, logits=logits)
        return Selection(kept, layer, loss=loss)


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
        self.eps = eps
        self.find_hops = partial(local_hops, eps=eps, depth=len(backbone.layer_feats) - 1)
        self.prepared = PreparedGraphs(self_loop=False)
        self.register_buffer("hops", None, persistent=False)

    def precompute(self, graph: DGLGraph, feat: Tensor) -> None:
        """Find the layer of every node of the graph that blocks will be taken from."""
        self.hops = self.find_hops(graph, feat)

    def forward(self, graph, feat, labels=None, index=None, logits: bool = True) -> Selection:
        source = layer_source(self.backbone, graph, feat)
        labels, index = self.head.check_targets(labels, index, source.n_rows)
        stack = source.stack(index).stored().checked(index)
        if not isinstance(graph, list | tuple):
            layer = self.prepared.get(graph, feat).propagated(feat, None, self.find_hops)
        elif self.hops is None:
            raise RuntimeError("call precompute(graph, feat) with the whole graph before blocks")
        else:
            layer = self.hops[graph[-1].dstdata[dgl.NID]]
        layer = LayerRows(layer, index).rows()
        return replace(self.head.select(stack, labels, logits, layer=layer), index=index)

    @torch.no_grad()
    def predict(self, graph, feat, batch_size=None, exit_at=1.0, progress=False) -> Selection:
        if batch_size is not None or exit_at != 1:
            raise ValueError("NDLSelect predicts all nodes at once; leave out batch_size, exit_at")
        with evaluating(self):
            return self(graph, feat)

    @torch.no_grad()
    def calibrate(self, graph, feat, labels, train_index, val_index=None, batch_size=None):
        if val_index is None:
            return None
        with evaluating(self):
            return self(graph, feat, index=val_index)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
