"""selected_logits: logits of each node from the decoder of its layer."""

import torch

from .registry import DECODERS, Op, empty_like, no_gradient, save_lists, saved_lists

selected_logits = Op(f"selected_logits({DECODERS}, Tensor?[] index) -> Tensor")
selected_logits_backward = Op(
    "selected_logits_backward(Tensor grad, Tensor[] layers, Tensor[] weights, Tensor layer,"
    " Tensor?[] index) -> (Tensor[], Tensor[], Tensor[])"
)


@selected_logits.fake
def _(layers, weights, biases, layer, index):
    return weights[0].new_empty(layer.shape[0], weights[0].shape[0])


@selected_logits_backward.fake
def _(grad, layers, weights, layer, index):
    to_biases = [weight.new_empty(weight.shape[0]) for weight in weights]
    return empty_like(layers), empty_like(weights), to_biases


def _save(ctx, inputs, output):
    layers, weights, _, layer, index = inputs
    save_lists(ctx, layer, layers, weights, index)


@selected_logits.gradient(setup=_save)
def _(ctx, grad):
    layer, layers, weights, index = saved_lists(ctx)
    grads = torch.ops.metselect.selected_logits_backward(grad, layers, weights, layer, index)
    return *grads, None, no_gradient(index)
