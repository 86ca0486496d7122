"""neighbour_sum: weighted sums over in-edges.

The operator itself has no gradient. :class:`NeighbourSum` differentiates it together with the
identity of `feat`, so that the gradient of other uses of `feat` is added inside the sum over
reversed edges instead of in a pass of its own; an operator cannot return its own input.
"""

import torch

from .registry import EDGES, Op

neighbour_sum = Op(
    f"neighbour_sum({EDGES}, Tensor? weights, Tensor? back_weights, Tensor? source_scale,"
    " Tensor? target_scale, Tensor feat, Tensor? more) -> Tensor"
)


@neighbour_sum.fake
def _(indptr, *indices_to_more):
    feat = indices_to_more[-2]
    return feat.new_empty(indptr.shape[0] - 1, feat.shape[1])


class NeighbourSum(torch.autograd.Function):
    """Compute (more + sums, feat) from (feat, more, *edges_and_scales)."""

    @staticmethod
    def forward(ctx, feat, more, *edges_and_scales):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*edges_and_scales)
        return torch.ops.metselect.neighbour_sum(*edges_and_scales, feat, more), feat

    @staticmethod
    def backward(ctx, grad, to_feat):
        if grad is not None:
            indptr, indices, back_indptr, back_indices, *scales = ctx.saved_tensors
            weights, back_weights, source_scale, target_scale = scales
            reverse = back_indptr, back_indices, indptr, indices
            scales = back_weights, weights, target_scale, source_scale
            to_feat, _ = NeighbourSum.apply(grad, to_feat, *reverse, *scales)
        return to_feat, grad if ctx.needs_input_grad[1] else None, *(8 * [None])
