"""select_layer: the layer of each node, with its class and score."""

import torch

from .registry import METRIC, Op, n_picked

select_layer = Op(
    f"select_layer({METRIC}, Tensor temperature, Tensor?[] index, Tensor? labels, str rule)"
    " -> (Tensor, Tensor, Tensor)"
)


@select_layer.fake
def _(layers, means, factors, valid, temperature, index, labels, rule):
    n = n_picked(layers, index)
    layer = layers[0].new_empty(n, dtype=torch.int64)
    return layer, torch.empty_like(layer), means[0].new_empty(n)
