"""Operators on class means and whitening factors: distances, logits, the selected layer."""

import torch

from .registry import Op, no_gradient, save_lists, saved_lists

METRIC = "Tensor[] layers, Tensor[] means, Tensor[] factors, Tensor valid"

class_distances = Op(f"class_distances({METRIC}, Tensor?[] index) -> Tensor")
Op(f"class_distances_backward(Tensor grad, {METRIC}, Tensor?[] index) -> Tensor[]")
Op(f"metric_logits({METRIC}, Tensor temperature, Tensor?[] index) -> Tensor")
Op(
    f"select_layer({METRIC}, Tensor temperature, Tensor?[] index, Tensor? labels, str rule)"
    " -> (Tensor, Tensor, Tensor)"
)


def _save(ctx, inputs, output):
    layers, means, factors, valid, index = inputs
    save_lists(ctx, valid, layers, means, factors, index)


@class_distances.gradient(setup=_save)
def _(ctx, grad):
    valid, layers, means, factors, index = saved_lists(ctx)
    grads = torch.ops.metselect.class_distances_backward(grad, layers, means, factors, valid, index)
    constants = len(layers) * [None]
    return grads, constants, constants, None, no_gradient(index)
