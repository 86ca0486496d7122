"""What every backbone shares: a stack of convolutions of which each layer is given out (Eq. 1)."""

from collections.abc import Iterator, Sequence

import dgl
import torch
from dgl import DGLGraph
from torch import Tensor, nn

from ..checks import check_feat, check_finite
from ..functional import graph as MG
from .adjacency import Adjacency, SparseRows
from .cache import Cache
from .layers import Layer
from .sampling import check_loops, knows_degrees, no_in_edges


class Backbone(nn.Module):
    r"""A stack of DGL convolutions that returns [h_0, ..., h_depth].

    .. math:: h_0 = W_0 X + b_0, \quad h_1 = \mathrm{ReLU}(\mathrm{conv}_1(G, X)), \quad
              h_{l+1} = \mathrm{ReLU}(\mathrm{conv}_{l+1}(G, h_l))

    Subclasses say what a convolution is (`make_conv`), and may say how it is done on the edges
    alone (`fused_conv`) and how its first half, which has no weights, is done (`propagate`).

    Parameters
    ----------
    in_feats : width of the node features
    hidden : width of every layer, or one width for each of the num_layers + 1 layers
    num_layers : depth; the stack has one layer more, the features
    dropout : on the input of every layer
    self_loop : see every node as its own neighbour; the caller's graph is not touched
    allow_zero_in_degree : let nodes without in-edges pass instead of DGL's error
    propagate_once : aggregate the features once and for all, as long as graph and features stay
        the same: the same model up to rounding. Where the features go through dropout it is done
        anew every time, and so it is on blocks; features that are mostly 0 meet the weights
        first, where it is compiled, which costs less. A change of the features through ``.data`` or
        NumPy is not seen: pass a new tensor then
    engine : ``"dgl"``: DGL's convolutions; ``"fused"``: our own of the same parameters, on a whole
        graph; ``"auto"``: fused where it is compiled
    """

    ENGINES = ("auto", "dgl", "fused")
    rows_are_independent = True  # or else a layer is made of all nodes, whichever are asked for

    def __init__(
        self,
        in_feats: int,
        hidden: int | Sequence[int],
        *,
        num_layers: int = 2,
        dropout: float = 0.0,
        self_loop: bool = False,
        allow_zero_in_degree: bool = False,
        propagate_once: bool = False,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; a backbone has at least one")
        widths = [hidden] * (num_layers + 1) if isinstance(hidden, int) else list(hidden)
        if len(widths) != num_layers + 1:
            raise ValueError(f"hidden has {len(widths)} widths for {num_layers + 1} layers")
        if engine not in self.ENGINES:
            raise ValueError(f"engine is {engine!r}; use one of {', '.join(self.ENGINES)}")
        self._check_can("fused_conv", engine == "fused", "engine='fused'")
        self._check_can("propagate", propagate_once, "propagate_once")
        self.in_feats, self.layer_feats, self.num_layers = in_feats, widths, num_layers
        self.self_loop, self.allow_zero_in_degree = self_loop, allow_zero_in_degree
        self.propagate_once, self.engine = propagate_once, engine
        self.input = nn.Linear(in_feats, widths[0])
        sources = [in_feats, *widths[1:-1]]
        pairs = zip(sources, widths[1:], strict=True)
        self.convs = nn.ModuleList(self.make_conv(*pair) for pair in pairs)
        self.dropout = nn.Dropout(dropout)
        self._looped = Cache(_add_self_loop)
        self._finite = Cache(_check_finite)
        self._edges = Cache(self.edges)
        self._propagated = Cache(self.propagate)
        self._picked, self._propagated_picked = (Cache(Tensor.__getitem__) for _ in range(2))
        self._sparse, self._picked_sparse = (Cache(SparseRows.if_sparse) for _ in range(2))

    def _check_can(self, what: str, wanted: bool, option: str) -> None:
        if wanted and not self._knows(what):
            raise ValueError(f"{option} is not for {type(self).__name__}")

    def _knows(self, what: str) -> bool:
        """Whether the class that says `what` also says what its convolutions are: a subclass may
        have put others in their place."""
        owner = next(cls for cls in type(self).__mro__ if what in vars(cls))
        return owner is not Backbone and owner.make_conv is type(self).make_conv

    def make_conv(self, in_feats: int, out_feats: int) -> nn.Module:
        """One convolution; its output is flattened to [N, out_feats]."""
        raise NotImplementedError("a subclass says what a convolution is")

    def edges(self, graph: DGLGraph, index: Tensor | None) -> Adjacency:
        """What `fused_conv` goes along: the edges into all nodes, or into those of `index`."""
        if not self.allow_zero_in_degree and (graph.in_degrees() == 0).any():
            raise no_in_edges()
        return Adjacency.of(graph, index)

    def fused_conv(
        self, conv: nn.Module, edges: Adjacency, h: Tensor, index: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(ReLU of the convolution at the targets of `edges`, and `h` again for further use)."""
        raise NotImplementedError("a subclass may say how")

    def sampled_conv(self, conv: nn.Module, block: DGLGraph, h: Tensor) -> Tensor:
        """The convolution on a block that knows the degrees of the whole graph, without ReLU."""
        raise NotImplementedError("a subclass may say how")

    def propagate(self, graph: DGLGraph, feat: Tensor) -> Tensor:
        """The part of the first convolution that comes before its weights, [N, in_feats]."""
        raise NotImplementedError("a subclass may say how")

    def transform(self, conv: nn.Module, propagated: Tensor, own: Layer) -> Tensor:
        """The rest of it, and the ReLU; `own` is the input of the convolution at the same rows."""
        raise NotImplementedError("a subclass that propagates says how")

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, graph: DGLGraph | Sequence[DGLGraph], feat: Tensor) -> list[Tensor]:
        """[h_0, ..., h_depth] on a graph, or of the seeds on one block a layer."""
        return [layer.rows() for layer in self.stack(graph, feat)]

    def stack(
        self, graph: DGLGraph | Sequence[DGLGraph], feat: Tensor, index: Tensor | None = None
    ) -> list[Layer]:
        """The layers, of which only the rows `index` are to be used: the last one need not have
        others, and the first one is not stored."""
        if is_blocks(graph):
            blocks = list(graph) if isinstance(graph, list | tuple) else [graph]
            if len(blocks) != self.num_layers:
                raise ValueError(f"got {len(blocks)} blocks for {self.num_layers} layers")
            self._check(blocks[0], feat)
            return self._stack_on_blocks(blocks, feat, index)
        return self._stack_on_graph(self._checked_graph(graph, feat), feat, index)

    def stream(self, graph: DGLGraph, feat: Tensor) -> Iterator[Tensor]:
        """h_0, ..., h_depth of all nodes without gradients, one after the other: each is let go of
        when the one after the next is asked for."""
        graph = self._checked_graph(graph, feat)
        yield self._without_gradient(lambda: self._first(feat, None).rows())
        h = feat
        for conv in self.convs:
            h = self._without_gradient(self._conv, conv, graph, h, None)[0]
            yield h

    @torch.no_grad()
    def _without_gradient(self, make, *args):
        return make(*args)

    def _check(self, graph: DGLGraph, feat: Tensor) -> None:
        """Whether graph and features fit."""
        check_feat(feat, graph.num_src_nodes(), self.in_feats, self.input.weight)
        if graph.device != feat.device:
            raise ValueError(f"graph is on {graph.device}, feat on {feat.device}; use .to()")
        self._finite(graph, feat)

    def _checked_graph(self, graph: DGLGraph, feat: Tensor) -> DGLGraph:
        """The graph, which fits the features, with the self-loops that are wanted."""
        self._check(graph, feat)
        return self._looped(graph) if self.self_loop else graph

    def _stack_on_blocks(self, blocks, feat, index) -> list[Layer]:
        seeds = n_seeds(blocks)
        layers = [Layer(self.input(self._dropped(feat[:seeds])), index)]
        h = feat
        for block, conv in zip(blocks, self.convs, strict=True):
            h = self.block_conv(conv, block, h)
            layers.append(Layer(h if len(h) == seeds else h[:seeds], index))
        return layers

    @property
    def exact_on_blocks(self) -> bool:
        """Whether `block_conv` with all neighbours gives the layer of the whole graph."""
        counting = [conv for conv in self.convs if getattr(conv, "_norm", None) in ("both", "left")]
        ours = self._knows("sampled_conv")
        return all(ours and _is_plain(conv, self.input.weight) for conv in counting)

    def block_conv(self, conv: nn.Module, block: DGLGraph, h: Tensor) -> Tensor:
        """The next layer at the targets of a block; as on the whole graph if it has all of their
        neighbours and knows their degrees (`DegreeSampler`)."""
        if knows_degrees(block) and self._knows("sampled_conv") and _is_plain(conv, h):
            if self.self_loop:
                check_loops(block)
            return torch.relu(self.sampled_conv(conv, block, self._dropped(h)))
        return self._dgl_conv(conv, self._looped(block) if self.self_loop else block, h)

    def _stack_on_graph(self, graph, feat, index) -> list[Layer]:
        layers = [self._first(feat, index)]
        h = feat
        for depth, conv in enumerate(self.convs):
            rows = index if depth + 1 == self.num_layers and self.rows_are_independent else None
            out, h, reduced = self._conv(conv, graph, h, rows)
            if depth > 0:
                layers.append(Layer(h, index))
            h = out
        return [*layers, Layer(h, None if reduced else index)]

    def _first(self, feat: Tensor, index: Tensor | None) -> Layer:
        """Layer 0, a linear map of the features."""
        if self._drops():
            return Layer(self.input(self._dropped(Layer(feat, index).rows())))
        layer = Layer(feat, index, self.input)
        if layer.worth_mapping or feat.requires_grad:
            return layer
        rows = feat if index is None else self._picked(feat, index)
        sparse = self._sparse if index is None else self._picked_sparse
        return Layer(rows, None, self.input, sparse(rows))

    def _conv(self, conv, graph, h, index) -> tuple[Tensor, Tensor, bool]:
        """(the next layer, `h` for further use, whether just the rows `index` were made)."""
        reduced, plain = index is not None, _is_plain(conv, h)
        fuses = plain and self._fuses(h)
        sparse = fuses and isinstance(self.features(conv, h), SparseRows)
        if plain and self.propagate_once and not sparse and self._is_constant(conv, h):
            propagated = self._propagated(graph, h)
            if reduced:
                propagated = self._propagated_picked(propagated, index)
            return self.transform(conv, propagated, Layer(h, index)), h, reduced
        if not fuses:
            return self._dgl_conv(conv, graph, h), h, False
        edges = self._edges(graph, index)
        out, again = self.fused_conv(conv, edges, self._dropped(h), index)
        return out, h if self._drops() else again, reduced

    def features(self, conv: nn.Module, h: Tensor) -> Tensor | SparseRows:
        """`h`, or what is faster to multiply if it is features that are mostly 0."""
        return (self._is_constant(conv, h) and self._sparse(h)) or h

    def _is_constant(self, conv: nn.Module, h: Tensor) -> bool:
        """Whether `h` is features that are the same at the next call."""
        return conv is self.convs[0] and not self._drops() and not h.requires_grad

    def _dgl_conv(self, conv: nn.Module, graph: DGLGraph, h: Tensor) -> Tensor:
        return torch.relu(conv(graph, self._dropped(h)).flatten(1))

    def _drops(self) -> bool:
        return self.training and self.dropout.p > 0

    def _dropped(self, h: Tensor) -> Tensor:
        return self.dropout(h) if self._drops() else h  # at 0 it would still make a copy

    def _fuses(self, h: Tensor) -> bool:
        wanted = self.engine == "fused" or (self.engine == "auto" and MG.compiled(h.device))
        return wanted and self._knows("fused_conv")

    def extra_repr(self) -> str:
        return (
            f"in_feats={self.in_feats}, layer_feats={self.layer_feats}, "
            f"self_loop={self.self_loop}, propagate_once={self.propagate_once}, "
            f"engine={self.engine!r}"
        )


def _is_plain(conv: nn.Module, h: Tensor) -> bool:
    """Hooks on a convolution, and autocast, are for the convolution itself."""
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in conv.modules())
    return not hooked and not torch.is_autocast_enabled(h.device.type)


def is_blocks(graph: DGLGraph | Sequence[DGLGraph]) -> bool:
    """Whether it is one block a layer, or the only one, instead of a whole graph."""
    return isinstance(graph, list | tuple) or graph.is_block


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
