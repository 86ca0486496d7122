"""Operators on edges: weighted sums and attention over in-edges; and max(0, h W + b)."""

import torch

from .registry import Op, check_first_order

EDGES = "Tensor indptr, Tensor indices, Tensor back_indptr, Tensor back_indices"

Op(
    f"neighbour_sum({EDGES}, Tensor? weights, Tensor? back_weights, Tensor? source_scale,"
    " Tensor? target_scale, Tensor feat, Tensor? more) -> Tensor"
)
attention_sum = Op(
    f"attention_sum({EDGES}, Tensor back_edges, Tensor feat, Tensor source, Tensor target,"
    " float slope) -> (Tensor out, Tensor attention)"
)
Op(
    f"attention_sum_backward(Tensor grad, {EDGES}, Tensor back_edges, Tensor feat, Tensor source,"
    " Tensor target, Tensor attention, float slope) -> (Tensor, Tensor, Tensor)"
)
linear_relu = Op("linear_relu(Tensor feat, Tensor weight, Tensor bias) -> Tensor")
Op(
    "linear_relu_backward(Tensor grad, Tensor feat, Tensor weight, Tensor out, bool wanted)"
    " -> (Tensor, Tensor, Tensor)"
)


class NeighbourSum(torch.autograd.Function):
    """Compute (more + sums, feat) from (feat, more, *edges_and_scales).

    An operator cannot return its own input: the gradient of other uses of `feat` is here added
    inside the sum over reversed edges instead of in a pass of its own.
    """

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


def _save_attention(ctx, inputs, output):
    *tensors, ctx.slope = inputs
    _, attention = output
    ctx.save_for_backward(*tensors, attention)
    ctx.mark_non_differentiable(attention)
    ctx.set_materialize_grads(False)


@attention_sum.gradient(setup=_save_attention)
def _(ctx, grad, _):
    check_first_order("attention_sum")
    if grad is None:
        return 9 * (None,)
    grads = torch.ops.metselect.attention_sum_backward(grad, *ctx.saved_tensors, ctx.slope)
    return *(5 * (None,)), *grads, None


def _save_linear(ctx, inputs, output):
    feat, weight, _ = inputs
    ctx.save_for_backward(feat, weight, output)


@linear_relu.gradient(setup=_save_linear)
def _(ctx, grad):
    check_first_order("linear_relu")
    feat, weight, out = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    to_feat, *rest = torch.ops.metselect.linear_relu_backward(grad, feat, weight, out, wanted)
    return to_feat if wanted else None, *rest
