"""linear_relu: max(0, h W + b)."""

import torch

from .registry import Op, check_first_order

linear_relu = Op("linear_relu(Tensor feat, Tensor weight, Tensor bias) -> Tensor")
linear_relu_backward = Op(
    "linear_relu_backward(Tensor grad, Tensor feat, Tensor weight, Tensor out, bool wanted)"
    " -> (Tensor, Tensor, Tensor)"
)


@linear_relu.fake
def _(feat, weight, bias):
    return feat.new_empty(feat.shape[0], weight.shape[1])


@linear_relu_backward.fake
def _(grad, feat, weight, out, wanted):
    to_feat = feat.new_empty(feat.shape[0] if wanted else 0, feat.shape[1])
    return to_feat, weight.new_empty(weight.shape), weight.new_empty(weight.shape[1])


def _save(ctx, inputs, output):
    feat, weight, _ = inputs
    ctx.save_for_backward(feat, weight, output)


@linear_relu.gradient(setup=_save)
def _(ctx, grad):
    check_first_order("linear_relu")
    feat, weight, out = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    to_feat, *rest = torch.ops.metselect.linear_relu_backward(grad, feat, weight, out, wanted)
    return to_feat if wanted else None, *rest
