"""Operators on the decoders of the selected layers: their logits, and their cross entropy with its
gradients in the same pass."""

import torch
from torch import Tensor

from .registry import Op, check_first_order, no_gradient, save_lists, saved_lists

DECODERS = "Tensor[] layers, Tensor[] weights, Tensor[] biases, Tensor layer"

selected_logits = Op(f"selected_logits({DECODERS}, Tensor?[] index) -> Tensor")
Op(
    "selected_logits_backward(Tensor grad, Tensor[] layers, Tensor[] weights, Tensor layer,"
    " Tensor?[] index) -> (Tensor[], Tensor[], Tensor[])"
)
selected_cross_entropy = Op(
    f"selected_cross_entropy({DECODERS}, Tensor labels, Tensor?[] index, float deep_supervision,"
    " bool[] wanted, bool keep_logits) -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])"
)


@selected_logits.fake
def _(layers, weights, biases, layer, index):
    return weights[0].new_empty(layer.shape[0], weights[0].shape[0])


def _save_logits(ctx, inputs, output):
    layers, weights, _, layer, index = inputs
    save_lists(ctx, layer, layers, weights, index)


@selected_logits.gradient(setup=_save_logits)
def _(ctx, grad):
    layer, layers, weights, index = saved_lists(ctx)
    grads = torch.ops.metselect.selected_logits_backward(grad, layers, weights, layer, index)
    return *grads, None, no_gradient(index)


@selected_cross_entropy.fake
def _(layers, weights, biases, layer, labels, index, deep_supervision, wanted, keep_logits):
    rows = layer.shape[0] if keep_logits else 0
    logits = weights[0].new_empty(rows, weights[0].shape[0])
    loss = logits.new_empty(())
    if not wanted:
        return loss, logits, [], [], []
    wide = torch.promote_types(loss.dtype, torch.float32)
    pairs = zip(layers, wanted, strict=True)
    to_layers = [loss.new_empty(h.shape if want else 0, dtype=wide) for h, want in pairs]
    to_weights, to_biases = ([p.new_empty(p.shape) for p in part] for part in (weights, biases))
    return loss, logits, to_layers, to_weights, to_biases


def _save_gradients(ctx, inputs, output):
    layers, weights, _, layer, _, index, _, ctx.wanted, _ = inputs
    ctx.set_materialize_grads(False)
    save_lists(ctx, layer, layers, weights, index, *output[2:])


def _is_one(grad: Tensor) -> bool:
    """Return whether the saved gradients need no scaling; False where the value is unknown (while
    tracing) or reading it would wait for a GPU."""
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.item() == 1


@selected_cross_entropy.gradient(setup=_save_gradients)
def _(ctx, grad_loss, grad_logits, *_):
    check_first_order("selected_cross_entropy")
    layer, layers, weights, index, *grads = saved_lists(ctx)
    if grad_loss is None:
        grads = [[torch.zeros_like(g) for g in part] for part in grads]
    elif not _is_one(grad_loss) or torch._C._autograd._get_current_graph_task_keep_graph():
        grads = [[g * grad_loss for g in part] for part in grads]
    if grad_logits is not None and len(grad_logits):  # 0 rows if logits were not kept
        backward = torch.ops.metselect.selected_logits_backward
        from_logits = backward(grad_logits, layers, weights, layer, index)
        pairs = zip(grads, from_logits, strict=True)
        grads = [[g + m if len(g) else g for g, m in zip(*pair, strict=True)] for pair in pairs]
    to_layers, to_weights, to_biases = grads
    triples = zip(to_layers, layers, ctx.wanted, strict=True)
    to_layers = [g.to(h.dtype) if want else None for g, h, want in triples]
    return to_layers, to_weights, to_biases, None, None, no_gradient(index), None, None, None
