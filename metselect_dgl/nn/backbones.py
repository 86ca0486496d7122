"""Backbones of DGL's GraphConv, GATConv and GINConv that emit every layer (Eq. 1 of the paper)."""

from collections.abc import Sequence

import dgl
import torch
from dgl import DGLGraph
from dgl.nn import GATConv, GINConv, GraphConv
from torch import Tensor, nn

from ..checks import check_feat, check_finite
from .cache import GraphCache


class Backbone(nn.Module):
    r"""A stack of DGL convolutions that returns [h_0, ..., h_depth].

    .. math:: h_0 = W_0 X + b_0, \quad h_1 = \mathrm{ReLU}(\mathrm{conv}_1(G, X)), \quad
              h_{l+1} = \mathrm{ReLU}(\mathrm{conv}_{l+1}(G, h_l))

    Subclasses say what a convolution is (`make_conv`).

    Parameters
    ----------
    in_feats : width of the node features
    hidden : width of every layer, or one width for each of the num_layers + 1 layers
    num_layers : depth; the stack has one layer more, the features
    dropout : on the input of every layer
    self_loop : see every node as its own neighbour; the caller's graph is not touched
    allow_zero_in_degree : let nodes without in-edges pass instead of DGL's error
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int | Sequence[int],
        *,
        num_layers: int = 2,
        dropout: float = 0.0,
        self_loop: bool = False,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; a backbone has at least one")
        widths = [hidden] * (num_layers + 1) if isinstance(hidden, int) else list(hidden)
        if len(widths) != num_layers + 1:
            raise ValueError(f"hidden has {len(widths)} widths for {num_layers + 1} layers")
        self.in_feats, self.layer_feats, self.num_layers = in_feats, widths, num_layers
        self.self_loop, self.allow_zero_in_degree = self_loop, allow_zero_in_degree
        self.input = nn.Linear(in_feats, widths[0])
        sources = [in_feats, *widths[1:-1]]
        pairs = zip(sources, widths[1:], strict=True)
        self.convs = nn.ModuleList(self.make_conv(*pair) for pair in pairs)
        self.dropout = nn.Dropout(dropout)
        self._looped = GraphCache(_add_self_loop)
        self._finite = GraphCache(_check_finite)

    def make_conv(self, in_feats: int, out_feats: int) -> nn.Module:
        """One convolution; its output is flattened to [N, out_feats]."""
        raise NotImplementedError("a subclass says what a convolution is")

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, graph: DGLGraph | Sequence[DGLGraph], feat: Tensor) -> list[Tensor]:
        """[h_0, ..., h_depth] on a graph, or of the seeds on one block a layer."""
        graphs = list(graph) if isinstance(graph, list | tuple) else [graph] * self.num_layers
        if len(graphs) != self.num_layers:
            raise ValueError(f"got {len(graphs)} blocks for {self.num_layers} layers")
        check_feat(feat, graphs[0].num_src_nodes(), self.in_feats, self.input.weight)
        if graphs[0].device != feat.device:
            raise ValueError(f"graph is on {graphs[0].device}, feat on {feat.device}; use .to()")
        self._finite(graphs[0], feat)
        seeds = n_seeds(graphs)
        if self.self_loop:
            graphs = [self._looped(g) for g in graphs]
        layers = [self.input(self.dropout(feat[:seeds]))]
        h = feat
        for g, conv in zip(graphs, self.convs, strict=True):
            h = torch.relu(conv(g, self.dropout(h)).flatten(1))
            layers.append(h[:seeds])
        return layers

    def extra_repr(self) -> str:
        return (
            f"in_feats={self.in_feats}, layer_feats={self.layer_feats}, self_loop={self.self_loop}"
        )


def n_seeds(graph: DGLGraph | Sequence[DGLGraph]) -> int:
    """The nodes that are classified: all of a graph, or the seeds of blocks."""
    last = graph[-1] if isinstance(graph, list | tuple) else graph
    return last.num_dst_nodes()


def _check_finite(graph: DGLGraph, feat: Tensor) -> None:
    """Before a convolution: a BatchNorm would remember a NaN."""
    check_finite([feat])


def _add_self_loop(graph: DGLGraph) -> DGLGraph:
    """The structure of `graph` with exactly one self-loop on every (destination) node."""
    source, target = graph.edges()
    other = source != target  # in a block, equal numbers are the same node
    loop = torch.arange(graph.num_dst_nodes(), dtype=source.dtype, device=source.device)
    edges = torch.cat([source[other], loop]), torch.cat([target[other], loop])
    if graph.is_block:
        return dgl.create_block(edges, graph.num_src_nodes(), graph.num_dst_nodes())
    return dgl.graph(edges, num_nodes=graph.num_nodes())


class GCN(Backbone):
    r"""Layers of :class:`dgl.nn.GraphConv`: D^{-1/2} A D^{-1/2} h W + b.

    On blocks GraphConv counts the degrees inside the block, so that even with all neighbours
    sampled its layers are not those of the whole graph.

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
