"""metric_logits: logits of the class posterior in every layer."""

from .registry import METRIC, Op, n_picked

metric_logits = Op(f"metric_logits({METRIC}, Tensor temperature, Tensor?[] index) -> Tensor")


@metric_logits.fake
def _(layers, means, factors, valid, temperature, index):
    return means[0].new_empty(len(layers), n_picked(layers, index), len(valid))
