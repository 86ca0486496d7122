"""Backbones of DGL's GraphConv, GATConv and GINConv that emit every layer (Eq. 1 of the paper)."""

from collections.abc import Sequence

import dgl
import torch
from dgl import DGLGraph
from dgl.nn import GATConv, GINConv, GraphConv
from torch import Tensor, nn

from ..functional import graph as MG
from .adjacency import Adjacency, SparseRows
from .backbone import Backbone
from .layers import Layer
from .sampling import IN, neighbour_sum, no_in_edges, root_degrees


def _product(rows: Tensor | SparseRows, weight: Tensor) -> Tensor:
    return rows.times(weight) if isinstance(rows, SparseRows) else rows @ weight


class GCN(Backbone):
    r"""Layers of :class:`dgl.nn.GraphConv`: D^{-1/2} A D^{-1/2} h W + b.

    On blocks GraphConv counts the degrees inside the block, so that even with all neighbours
    sampled its layers are not those of the whole graph; they are on those of a `DegreeSampler`.

    Examples
    --------
    >>> import dgl, torch
    >>> graph = dgl.rand_graph(30, 200)
    >>> layers = GCN(8, 16, num_layers=2, self_loop=True)(graph, torch.randn(30, 8))
    >>> [tuple(h.shape) for h in layers]
    [(30, 16), (30, 16), (30, 16)]
    """

    def make_conv(self, in_feats: int, out_feats: int) -> nn.Module:
        return GraphConv(in_feats, out_feats, allow_zero_in_degree=self.allow_zero_in_degree)

    def propagate(self, graph: DGLGraph, feat: Tensor) -> Tensor:
        average = GraphConv(
            self.in_feats,
            self.in_feats,
            weight=False,
            bias=False,
            allow_zero_in_degree=self.allow_zero_in_degree,
        )
        return average(graph, feat.detach())

    def transform(self, conv: nn.Module, propagated: Tensor, own: Layer) -> Tensor:
        return MG.linear_relu(propagated, conv.weight, conv.bias)

    def fused_conv(self, conv, edges, h, index):
        rows, (wide, narrow) = self.features(conv, h), conv.weight.shape
        if wide > narrow or isinstance(rows, SparseRows):  # less to sum after the weights
            out, _ = edges.neighbour_sum(_product(rows, conv.weight), normalized=True)
            return torch.relu(out + conv.bias), h
        out, h = edges.neighbour_sum(h, normalized=True)
        return self.transform(conv, out, Layer(h, index)), h

    def sampled_conv(self, conv, block, h):
        fine = self.self_loop or self.allow_zero_in_degree
        if not fine and (block.dstdata[IN] == 0).any():
            raise no_in_edges()
        sources, targets = root_degrees(block, int(self.self_loop), h)
        narrows = conv.weight.shape[0] > conv.weight.shape[1]
        h = (h @ conv.weight if narrows else h) / sources
        out = neighbour_sum(block, h)
        out = (out + h[: len(out)] if self.self_loop else out) / targets
        return (out if narrows else out @ conv.weight) + conv.bias


class GAT(Backbone):
    """Layers of :class:`dgl.nn.GATConv`, `heads` attention heads side by side.

    The width of a layer is that of all its heads together, so it must divide by `heads`.

    Examples
    --------
    >>> import dgl, torch
    >>> layers = GAT(8, 16, heads=4, self_loop=True)(dgl.rand_graph(30, 200), torch.randn(30, 8))
    >>> [tuple(h.shape) for h in layers]
    [(30, 16), (30, 16), (30, 16)]
    """

    def __init__(self, in_feats: int, hidden: int | Sequence[int], *, heads: int = 4, **options):
        if heads < 1:
            raise ValueError(f"heads is {heads}; there is at least one")
        self.heads = heads
        super().__init__(in_feats, hidden, **options)

    def make_conv(self, in_feats: int, out_feats: int) -> nn.Module:
        width, rest = divmod(out_feats, self.heads)
        if rest:
            raise ValueError(
                f"a layer of {out_feats} features does not divide by {self.heads} heads"
            )
        allow = self.allow_zero_in_degree
        return GATConv(in_feats, width, self.heads, allow_zero_in_degree=allow)

    def fused_conv(self, conv, edges, h, index):
        """The attention vectors are multiplied by the weights first: they see h, not its image."""
        weight = conv.fc.weight.view(self.heads, -1, h.shape[1])  # [H, F, D]
        ends = torch.cat(
            [(attn[0].unsqueeze(-1) * weight).sum(1) for attn in (conv.attn_l, conv.attn_r)]
        )
        rows = self.features(conv, h)
        source, target = _product(rows, ends.T).split(self.heads, 1)  # [N, H] each
        feat = _product(rows, conv.fc.weight.T).view(len(h), self.heads, -1)
        target = target if index is None else target[index]
        slope = conv.leaky_relu.negative_slope
        out = MG.attention_sum(*edges[:5], feat, source, target, slope=slope)
        return torch.relu(out.flatten(1) + conv.bias), h


class GIN(Backbone):
    """Layers of :class:`dgl.nn.GINConv`: MLP((1 + eps) h + sum of neighbours).

    The MLP is Linear, ReLU, Linear; `learn_eps` trains eps; `batch_norm` puts a BatchNorm1d
    before the ReLU, which large degrees may need.

    Examples
    --------
    >>> import dgl, torch
    >>> layers = GIN(8, 16, learn_eps=True)(dgl.rand_graph(30, 200), torch.randn(30, 8))
    >>> [tuple(h.shape) for h in layers]
    [(30, 16), (30, 16), (30, 16)]
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int | Sequence[int],
        *,
        learn_eps: bool = False,
        batch_norm: bool = False,
        **options,
    ):
        self.learn_eps, self.batch_norm = learn_eps, batch_norm
        super().__init__(in_feats, hidden, **options)
        self.rows_are_independent = not batch_norm

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for conv in self.convs:
            nn.init.zeros_(conv.eps)  # GINConv has no reset_parameters

    def make_conv(self, in_feats: int, out_feats: int) -> nn.Module:
        norm = nn.BatchNorm1d(out_feats) if self.batch_norm else nn.Identity()
        mlp = nn.Sequential(
            nn.Linear(in_feats, out_feats), norm, nn.ReLU(), nn.Linear(out_feats, out_feats)
        )
        return GINConv(mlp, "sum", learn_eps=self.learn_eps)

    def edges(self, graph: DGLGraph, index: Tensor | None) -> Adjacency:
        """With a loop more at every node: the part of its own features that eps does not touch."""
        return Adjacency.of(dgl.add_self_loop(graph), index)

    def propagate(self, graph: DGLGraph, feat: Tensor) -> Tensor:
        return GINConv(None, "sum")(graph, feat.detach())

    def transform(self, conv: nn.Module, summed: Tensor, own: Layer) -> Tensor:
        inner, _, _, outer = conv.apply_func
        if not self.batch_norm and not _counts(conv.eps):
            h = MG.linear_relu(summed, inner.weight.T, inner.bias)
            return MG.linear_relu(h, outer.weight.T, outer.bias)
        image = own.rows() @ inner.weight.T if _counts(conv.eps) else None
        return self._after_weights(conv, summed @ inner.weight.T, image)

    def _after_weights(self, conv: nn.Module, summed: Tensor, own: Tensor | None) -> Tensor:
        """The rest of the MLP; `summed` and `own` have met its first weights."""
        inner, norm, relu, outer = conv.apply_func
        h = summed + inner.bias
        if _counts(conv.eps):
            h = h + conv.eps * own
        return MG.linear_relu(relu(norm(h)), outer.weight.T, outer.bias)

    def sampled_conv(self, conv, block, h):
        own = h[: block.num_dst_nodes()]
        loops = 1 + conv.eps + int(self.self_loop)
        return conv.apply_func(neighbour_sum(block, h) + loops * own)

    def fused_conv(self, conv, edges, h, index):
        rows = self.features(conv, h)
        if isinstance(rows, SparseRows):
            summed, own = edges.neighbour_sum(rows.times(conv.apply_func[0].weight.T))
            return self._after_weights(conv, summed, own if index is None else own[index]), h
        summed, h = edges.neighbour_sum(h)
        return self.transform(conv, summed, Layer(h, index)), h


def _counts(eps: Tensor) -> bool:
    """Whether GIN's eps takes part: it is trained, or is not 0."""
    return eps.requires_grad or eps.item() != 0
