"""class_distances: squared Mahalanobis distances of nodes to class means."""

import torch

from .registry import METRIC, Op, empty_like, n_picked, no_gradient, save_lists, saved_lists

class_distances = Op(f"class_distances({METRIC}, Tensor?[] index) -> Tensor")
class_distances_backward = Op(
    f"class_distances_backward(Tensor grad, {METRIC}, Tensor?[] index) -> Tensor[]"
)


@class_distances.fake
def _(layers, means, factors, valid, index):
    return means[0].new_empty(len(layers), n_picked(layers, index), len(valid))


@class_distances_backward.fake
def _(grad, layers, means, factors, valid, index):
    return empty_like(layers)


def _save(ctx, inputs, output):
    layers, means, factors, valid, index = inputs
    save_lists(ctx, valid, layers, means, factors, index)


@class_distances.gradient(setup=_save)
def _(ctx, grad):
    valid, layers, means, factors, index = saved_lists(ctx)
    grads = torch.ops.metselect.class_distances_backward(grad, layers, means, factors, valid, index)
    constants = len(layers) * [None]
    return grads, constants, constants, None, no_gradient(index)
