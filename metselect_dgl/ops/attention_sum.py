"""attention_sum: graph attention, a softmax over in-edges and the weighted sum of sources."""

import torch

from .registry import EDGES, Op, check_first_order, empty_like

attention_sum = Op(
    f"attention_sum({EDGES}, Tensor back_edges, Tensor feat, Tensor source, Tensor target,"
    " float slope) -> (Tensor out, Tensor attention)"
)
attention_sum_backward = Op(
    f"attention_sum_backward(Tensor grad, {EDGES}, Tensor back_edges, Tensor feat, Tensor source,"
    " Tensor target, Tensor attention, float slope) -> (Tensor, Tensor, Tensor)"
)


@attention_sum.fake
def _(indptr, indices, back_indptr, back_indices, back_edges, feat, source, target, slope):
    n_heads, width = feat.shape[1:]
    out = feat.new_empty(target.shape[0], n_heads, width)
    return out, feat.new_empty(indices.shape[0], n_heads)


@attention_sum_backward.fake
def _(grad, *edges_to_slope):
    feat_source_target = edges_to_slope[5:8]
    return tuple(empty_like(feat_source_target))


def _save(ctx, inputs, output):
    *tensors, ctx.slope = inputs
    _, attention = output
    ctx.save_for_backward(*tensors, attention)
    ctx.mark_non_differentiable(attention)
    ctx.set_materialize_grads(False)


@attention_sum.gradient(setup=_save)
def _(ctx, grad, _):
    check_first_order("attention_sum")
    if grad is None:
        return 9 * (None,)
    grads = torch.ops.metselect.attention_sum_backward(grad, *ctx.saved_tensors, ctx.slope)
    return *(5 * (None,)), *grads, None
