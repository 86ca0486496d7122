"""GIN: MLP((1 + eps) h + sum of neighbours), as :class:`dgl.nn.GINConv` computes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import dgl
from dgl import DGLGraph
from dgl.nn import GINConv
from torch import Tensor, nn

from ...functional import graph as MG
from ..adjacency import Adjacency
from ..backbone import Backbone
from ..layer_rows import LayerRows
from ..sampler import neighbour_sum
from .base import Convolution


@dataclass
class GINConvolution(Convolution):
    """:class:`dgl.nn.GINConv` over an MLP of Linear, optional BatchNorm, ReLU, Linear."""

    learn_eps: bool = False
    batch_norm: bool = False

    fused = propagates = True

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row can be computed without the others: not under a BatchNorm."""
        return not self.batch_norm

    def make(self, in_feats: int, out_feats: int) -> nn.Module:
        norm = nn.BatchNorm1d(out_feats) if self.batch_norm else nn.Identity()
        mlp = nn.Sequential(
            nn.Linear(in_feats, out_feats), norm, nn.ReLU(), nn.Linear(out_feats, out_feats)
        )
        return GINConv(mlp, "sum", learn_eps=self.learn_eps)

    def edges(self, graph: DGLGraph, index: Tensor | None) -> Adjacency:
        """Return the edges with one more loop at every node: its own features without eps."""
        return Adjacency.of(dgl.add_self_loop(graph), index)

    def propagate(self, graph: DGLGraph, feat: Tensor) -> Tensor:
        return GINConv(None, "sum")(graph, feat.detach())

    def transform(self, conv: nn.Module, propagated: Tensor, own: LayerRows) -> Tensor:
        inner, _, _, outer = conv.apply_func
        if not self.batch_norm and not _counts(conv.eps):
            h = MG.linear_relu(propagated, inner.weight.T, inner.bias)
            return MG.linear_relu(h, outer.weight.T, outer.bias)
        image = own.rows() @ inner.weight.T if _counts(conv.eps) else None
        return self._after_weights(conv, propagated @ inner.weight.T, image)

    def _after_weights(self, conv: nn.Module, summed: Tensor, own: Tensor | None) -> Tensor:
        """Return the MLP after its first product: `summed` and `own` are multiplied already."""
        inner, norm, relu, outer = conv.apply_func
        h = summed + inner.bias
        if _counts(conv.eps):
            h = h + conv.eps * own
        return MG.linear_relu(relu(norm(h)), outer.weight.T, outer.bias)

    def on_edges(self, conv, edges, h, index, sparse):
        if sparse is not None:
            summed, own = edges.neighbour_sum(sparse.times(conv.apply_func[0].weight.T))
            return self._after_weights(conv, summed, own if index is None else own[index]), h
        summed, h = edges.neighbour_sum(h)
        return self.transform(conv, summed, LayerRows(h, index)), h

    def on_degrees(self, conv, block, h):
        loops = 1 + conv.eps + int(self.self_loop)
        return conv.apply_func(neighbour_sum(block, h) + loops * h[: block.num_dst_nodes()])


def _counts(eps: Tensor) -> bool:
    """Return whether eps takes part: it is trained, or is not 0."""
    return eps.requires_grad or eps.item() != 0


class GIN(Backbone):
    """Layers of :class:`dgl.nn.GINConv` over an MLP of Linear, ReLU, Linear.

    `learn_eps` trains eps; `batch_norm` puts a BatchNorm1d before the ReLU, which large degrees may
    need. Other options are those of :class:`Backbone`.

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
        self_loop: bool = False,
        allow_zero_in_degree: bool = False,
        **options,
    ) -> None:
        convolution = GINConvolution(self_loop, allow_zero_in_degree, learn_eps, batch_norm)
        super().__init__(in_feats, hidden, convolution, **options)
