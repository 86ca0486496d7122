"""The base of all backbones: a stack of convolutions that returns every layer (Eq. 1)."""

from collections.abc import Sequence
from itertools import pairwise
from operator import index

import torch
from dgl import DGLGraph
from torch import Tensor, nn

from ..checks import check_feat, check_finite, in_autocast
from ..functional import graph as MG
from .conv.base import Convolution
from .plain_modules import is_hooked, settings_of
from .prepared import PreparedGraphs, add_self_loops
from .sampler import knows_degrees, sampling_graph
from .source import BatchedSource, GraphSource, LayerSource, StoredLayers, layer_source
from .streams import check_stream


class Backbone(nn.Module):
    r"""A stack of convolutions that returns [h_0, ..., h_depth].

    .. math:: h_0 = W_0 X + b_0, \quad h_1 = \mathrm{ReLU}(\mathrm{conv}_1(G, X)), \quad
              h_{l+1} = \mathrm{ReLU}(\mathrm{conv}_{l+1}(G, h_l))

    `prepared` keeps what is derived from graph, features and index while they stay the same. A
    subclass that overrides `make_conv` runs its modules as they are.

    Parameters
    ----------
    in_feats : width of the node features
    hidden : width of every layer, or one width for each of the num_layers + 1 layers
    convolution : how a layer is made of the one before; GCN, GAT and GIN bring theirs, which takes
        `self_loop` (see every node as its own neighbour; the caller's graph is not touched) and
        `allow_zero_in_degree` (let nodes without in-edges pass instead of DGL's error)
    num_layers : depth; the stack has one layer more, the features
    dropout : on the input of every layer
    propagate_once : aggregate the features once while graph and features stay the same: the same
        model up to rounding. Not for features under dropout, of blocks, or mostly 0 (with the
        compiled backend, to multiply these by the weights first costs less). By default on for
        convolutions that aggregate before their weights, unless ``engine="dgl"``
    engine : ``"dgl"``: DGL's convolutions; ``"fused"``: ours with the same parameters, on a whole
        graph; ``"auto"``: fused where the compiled backend is available
    """

    ENGINES = ("auto", "dgl", "fused")
    own_modules = False  # whether a subclass overrides make_conv

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.own_modules = cls.own_modules or "make_conv" in vars(cls)

    def __init__(
        self,
        in_feats: int,
        hidden: int | Sequence[int],
        convolution: Convolution,
        *,
        num_layers: int = 2,
        dropout: float = 0.0,
        propagate_once: bool | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; a backbone has at least one")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout is {dropout}; it is a probability from 0 to 1")
        widths = layer_widths(hidden, num_layers + 1)
        if engine not in self.ENGINES:
            raise ValueError(f"engine is {engine!r}; use one of {', '.join(self.ENGINES)}")
        if engine == "fused" and (self.own_modules or not convolution.fused):
            raise ValueError(f"engine='fused' is not for {type(self).__name__}")
        propagates = convolution.propagates and not self.own_modules
        if propagate_once and not propagates:
            raise ValueError(f"propagate_once is not for {type(self).__name__}")
        if propagate_once is None:
            propagate_once = propagates and engine != "dgl"
        self.convolution, self.self_loop = convolution, convolution.self_loop
        self.propagate_once, self.engine = propagate_once, engine
        self.in_feats, self.layer_feats, self.num_layers = in_feats, widths, num_layers
        self.input = nn.Linear(in_feats, widths[0])
        self.convs = nn.ModuleList(self._make_convs())
        self._made = [settings_of(conv) for conv in self.convs]
        self.dropout = nn.Dropout(dropout)
        self.prepared = PreparedGraphs(self.self_loop)

    def _make_convs(self) -> list[nn.Module]:
        return [self.make_conv(*pair) for pair in pairwise([self.in_feats, *self.layer_feats[1:]])]

    def make_conv(self, in_feats: int, out_feats: int) -> nn.Module:
        """Return one convolution; its output is flattened to [N, out_feats]."""
        return self.convolution.make(in_feats, out_feats)

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        self.input.reset_parameters()
        for conv, fresh in zip(self.convs, self._make_convs(), strict=True):
            conv.load_state_dict(fresh.state_dict())

    def forward(self, graph: DGLGraph | Sequence[DGLGraph], feat: Tensor) -> list[Tensor]:
        """Return [h_0, ..., h_depth] on a graph, or of the seeds on one block per layer."""
        blocks = blocks_of(graph)
        if blocks is None:
            self.check_inputs(graph, feat)
            return GraphSource(self, graph, feat).stack().rows()
        if len(blocks) != self.num_layers:
            raise ValueError(f"got {len(blocks)} blocks for {self.num_layers} layers")
        self.check_inputs(blocks[0], feat)
        check_finite([feat])
        seeds = blocks[-1].num_dst_nodes()
        layers, h = [self.first_layer(feat[:seeds])], feat
        for depth, block in enumerate(blocks, 1):
            h = self.layer_on_block(depth, block, h)
            layers.append(h if len(h) == seeds else h[:seeds])  # a slice costs a copy backward
        return layers

    def first_layer(self, feat: Tensor) -> Tensor:
        """Return layer 0 of the nodes whose features are given."""
        return self.input(self.dropped(feat))

    def layer_on_block(self, depth: int, block: DGLGraph, h: Tensor) -> Tensor:
        """Return layer `depth` (1, 2, ...) at the targets of a block from the layer before, or the
        features, at its sources: that of the whole graph if the block has all neighbours of its
        targets and knows their degrees (:class:`DegreeSampler`)."""
        conv, h = self.convs[depth - 1], self.dropped(h)
        if not self.runs_as_module(conv, h) and knows_degrees(block, self.self_loop):
            out = self.convolution.on_degrees(conv, block, h)
            if out is not None:
                return torch.relu(out)
        block = add_self_loops(block) if self.self_loop else block
        return self.convolution.on_graph(conv, block, h)

    def check_inputs(self, graph: DGLGraph, feat: Tensor) -> None:
        """Raise an error if features do not fit the graph or the backbone."""
        if not isinstance(graph, DGLGraph):
            raise TypeError(f"graph is {type(graph).__name__}; pass a DGLGraph, then the features")
        if len(graph.ntypes) > 1 + graph.is_block:
            raise ValueError("the graph has several types of nodes; pass one type of nodes")
        check_feat(feat, graph.num_src_nodes(), self.in_feats, next(self.parameters()))
        if graph.device != feat.device:
            raise ValueError(f"graph is on {graph.device}, feat on {feat.device}; use .to()")
        check_stream(graph)

    def check_exact_on_blocks(self) -> None:
        """Raise an error if a block with all neighbours does not give the layer of the graph."""
        for conv in self.convs:
            if self.convolution.needs_degrees and self.runs_as_module(conv, self.input.weight):
                raise ValueError(
                    "a GraphConv that is hooked, under autocast or put in by a subclass counts "
                    "degrees inside a batch; leave out batch_size"
                )

    @property
    def drops(self) -> bool:
        """Whether dropout is active."""
        return self.training and self.dropout.p > 0

    def dropped(self, h: Tensor) -> Tensor:
        """Apply dropout if it is active; at 0 the module would still make a copy."""
        return self.dropout(h) if self.drops else h

    def runs_as_module(self, conv: nn.Module, h: Tensor) -> bool:
        """Return whether the module itself is called: of a subclass, with hooks, changed after it
        was made, in autocast."""
        changed = is_hooked(conv) or settings_of(conv) not in self._made
        return self.own_modules or changed or in_autocast(h.device)

    def fuses(self, h: Tensor) -> bool:
        """Return whether unchanged convolutions are computed on edges instead of by modules."""
        wanted = self.engine == "fused" or (self.engine == "auto" and MG.compiled(h.device))
        return wanted and self.convolution.fused

    def extra_repr(self) -> str:
        return (
            f"in_feats={self.in_feats}, layer_feats={self.layer_feats}, "
            f"self_loop={self.self_loop}, propagate_once={self.propagate_once}, "
            f"engine={self.engine!r}"
        )


def layer_widths(hidden: int | Sequence[int], n_layers: int) -> list[int]:
    """Return the width of every layer."""
    try:
        widths = [int(index(width)) for width in (hidden if is_sequence(hidden) else [hidden])]
    except TypeError:
        raise TypeError(f"hidden is {hidden!r}; pass a width, or one for every layer") from None
    widths = widths if is_sequence(hidden) else widths * n_layers
    if len(widths) != n_layers:
        raise ValueError(f"hidden has {len(widths)} widths for {n_layers} layers")
    if min(widths) < 1:
        raise ValueError(f"hidden is {hidden}; a layer has at least one feature")
    return widths


def is_sequence(value: object) -> bool:
    """Return whether it is a list or tuple of values."""
    return isinstance(value, list | tuple)


def blocks_of(graph: DGLGraph | Sequence[DGLGraph]) -> list[DGLGraph] | None:
    """Return the blocks, one per layer, or None for a whole graph."""
    if is_sequence(graph):
        return list(graph)
    return [graph] if isinstance(graph, DGLGraph) and graph.is_block else None


@layer_source.register
def _(backbone: Backbone, graph, feat: Tensor, batch_size: int | None = None) -> LayerSource:
    blocks = blocks_of(graph)
    if blocks is not None:
        seeds = blocks[-1].num_dst_nodes() if blocks else 0
        return StoredLayers(lambda: backbone(graph, feat), backbone.layer_feats, seeds)
    backbone.check_inputs(graph, feat)
    if batch_size is None:
        return GraphSource(backbone, graph, feat)
    backbone.check_exact_on_blocks()
    sampled = sampling_graph(backbone, graph)
    return BatchedSource(backbone, sampled, feat, batch_size, loops=backbone.self_loop)
