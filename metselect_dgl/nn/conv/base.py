"""How one kind of convolution is made and computed; a new kind is a subclass in a file of its own.

Only `make` is required; the other methods make it faster, or exact on blocks.
"""

from dataclasses import dataclass

import torch
from dgl import DGLGraph
from torch import Tensor, nn

from ..adjacency import Adjacency, SparseRows
from ..layer_rows import LayerRows
from ..sampler import no_in_edges


@dataclass
class Convolution:
    """One kind of convolution, with the options that all kinds have.

    Parameters
    ----------
    self_loop : the backbone adds a self-loop to every node
    allow_zero_in_degree : let nodes without in-edges pass instead of DGL's error
    """

    self_loop: bool = False
    allow_zero_in_degree: bool = False

    fused = False  # `on_edges` is implemented
    propagates = False  # `propagate` and `transform` are implemented
    needs_degrees = False  # the DGL module counts degrees inside a block
    rows_are_independent = True  # else a layer is computed for all nodes, whichever are asked for

    def make(self, in_feats: int, out_feats: int) -> nn.Module:
        """Return the DGL module; its output is flattened to [N, out_feats]."""
        raise NotImplementedError(f"{type(self).__name__} does not say which module it is")

    def on_graph(self, conv: nn.Module, graph: DGLGraph, h: Tensor) -> Tensor:
        """Return the next layer: the DGL module as it is, and a ReLU."""
        return torch.relu(conv(graph, h).flatten(1))

    def edges(self, graph: DGLGraph, index: Tensor | None) -> Adjacency:
        """Return the edges that `on_edges` follows, into all nodes or into those of `index`."""
        if not self.allow_zero_in_degree and (graph.in_degrees() == 0).any():
            raise no_in_edges()
        return Adjacency.of(graph, index)

    def on_edges(
        self,
        conv: nn.Module,
        edges: Adjacency,
        h: Tensor,
        index: Tensor | None,
        sparse: SparseRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next layer at the targets of `edges`, and `h` for further use, the gradient
        of which is added inside the backward pass; `sparse` is `h` where it is mostly 0."""
        raise NotImplementedError(f"{type(self).__name__} is not computed on edges")

    def on_degrees(self, conv: nn.Module, block: DGLGraph, h: Tensor) -> Tensor | None:
        """Return the convolution before its ReLU on a block that knows the degrees of the whole
        graph; None where degrees make no difference."""

    def propagate(self, graph: DGLGraph, feat: Tensor) -> Tensor:
        """Return the part of the convolution before its weights, [N, F]."""
        raise NotImplementedError(f"{type(self).__name__} has weights from the start")

    def transform(self, conv: nn.Module, propagated: Tensor, own: LayerRows) -> Tensor:
        """Return the rest of the convolution and the ReLU; `own` is its input at these rows."""
        raise NotImplementedError(f"{type(self).__name__} has weights from the start")
