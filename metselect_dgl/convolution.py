"""What convolutions are made of: sums and attention over edges, linear maps with a ReLU.

Edges are two compressed lists: the in-edges of target i come from the sources
`indices[indptr[i] : indptr[i + 1]]`, and `back_indptr`, `back_indices` say of every source where
its out-edges go. M targets, N sources, E edges, H heads of F features.
"""

import torch
from torch import Tensor

from . import ops

__all__ = ["attention_sum", "compiled", "linear_relu", "neighbour_sum"]

_ops = torch.ops.metselect


def compiled(device: torch.device) -> bool:
    """Whether a compiled engine serves the operators on this device."""
    return ops.compiled("neighbour_sum", device)


def linear_relu(feat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """max(0, h W + b); `weight` is [in, out], as in :class:`dgl.nn.GraphConv`."""
    return _ops.linear_relu(feat, weight, bias)


def neighbour_sum(
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    feat: Tensor,
    *,
    weights: Tensor | None = None,
    back_weights: Tensor | None = None,
    source_scale: Tensor | None = None,
    target_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sums, feat): sums_i = t_i times the sum over in-edges j -> i of w_ij s_j h_j, and `feat`
    again.

    What else is made of `feat` should be made of the one returned: the gradient of that use is
    then added inside the sum along the reversed edges, not in a pass of its own.

    Parameters
    ----------
    indptr, indices : the in-edges of target i come from sources `indices[indptr[i]:indptr[i + 1]]`
    back_indptr, back_indices : the same edges by source: where they go
    weights, back_weights : w [E] of the edges in either order; both or none
    source_scale, target_scale : s [N] and t [M]; ones by default
    """
    edges = indptr, indices, back_indptr, back_indices, weights, back_weights
    return _NeighbourSum.apply(feat, *edges, source_scale, target_scale)


def attention_sum(
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    back_edges: Tensor,
    feat: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    slope: float = 0.2,
) -> Tensor:
    """Graph attention: out_i = sum over in-edges j -> i of a_ij feat_j, [M, H, F], with
    a_i = softmax over these edges of leaky_relu(source_j + target_i), for each of H heads.

    Parameters
    ----------
    indptr, indices, back_indptr, back_indices : the edges, as for :func:`neighbour_sum`
    back_edges : where among `indices` the edges of `back_indices` are
    feat, source, target : [N, H, F], [N, H] and [M, H]
    slope : of the leaky ReLU
    """
    edges = indptr, indices, back_indptr, back_indices, back_edges
    return _ops.attention_sum(*edges, feat, source, target, slope)[0]


class _NeighbourSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, feat, *edges_and_scales):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*edges_and_scales)
        return _ops.neighbour_sum(*edges_and_scales, feat, None), feat

    @staticmethod
    def backward(ctx, grad, other):
        if grad is not None:
            other = _ops.neighbour_sum(*ops.reversed_edges(*ctx.saved_tensors), grad, other)
        return other, *(8 * [None])
