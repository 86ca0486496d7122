"""GAT: attention over in-edges, as :class:`dgl.nn.GATConv` computes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dgl.nn import GATConv
from torch import nn

from ...functional import graph as MG
from ..backbone import Backbone
from .base import Convolution


@dataclass
class GATConvolution(Convolution):
    """:class:`dgl.nn.GATConv` with `heads` attention heads side by side."""

    heads: int = 4

    fused = True

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"heads is {self.heads}; there is at least one")

    def make(self, in_feats: int, out_feats: int) -> nn.Module:
        width, rest = divmod(out_feats, self.heads)
        if rest:
            raise ValueError(
                f"a layer of {out_feats} features does not divide by {self.heads} heads"
            )
        return GATConv(in_feats, width, self.heads, allow_zero_in_degree=self.allow_zero_in_degree)

    def on_edges(self, conv, edges, h, index, sparse):
        """The attention vectors are multiplied by the weights first: they see h, not its image."""
        weight = conv.fc.weight.view(self.heads, -1, h.shape[1])  # [H, F, D]
        ends = torch.cat([(a[0].unsqueeze(-1) * weight).sum(1) for a in (conv.attn_l, conv.attn_r)])
        if sparse is None:
            logits, feat = h @ ends.T, h @ conv.fc.weight.T
        else:
            logits, feat = sparse.times(ends.T), sparse.times(conv.fc.weight.T)
        source, target = logits.split(self.heads, 1)  # [N, H] each
        target = target if index is None else target[index]
        slope = conv.leaky_relu.negative_slope
        feat = feat.view(len(h), self.heads, -1)
        out = MG.attention_sum(*edges[:5], feat, source, target, slope=slope)
        return torch.relu(out.flatten(1) + conv.bias), h


class GAT(Backbone):
    """Layers of :class:`dgl.nn.GATConv`, `heads` attention heads side by side.

    The width of a layer, of all its heads together, must divide by `heads`. Other options are those
    of :class:`Backbone`.

    Examples
    --------
    >>> import dgl, torch
    >>> layers = GAT(8, 16, heads=4, self_loop=True)(dgl.rand_graph(30, 200), torch.randn(30, 8))
    >>> [tuple(h.shape) for h in layers]
    [(30, 16), (30, 16), (30, 16)]
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int | Sequence[int],
        *,
        heads: int = 4,
        self_loop: bool = False,
        allow_zero_in_degree: bool = False,
        **options,
    ) -> None:
        self.heads = heads
        convolution = GATConvolution(self_loop, allow_zero_in_degree, heads)
        super().__init__(in_feats, hidden, convolution, **options)
