"""selected_cross_entropy: loss of the selected decoders, and its gradients in the same pass."""

import torch
from torch import Tensor

from .registry import (
    DECODERS,
    Op,
    check_first_order,
    empty_like,
    no_gradient,
    save_lists,
    saved_lists,
)

selected_cross_entropy = Op(
    f"selected_cross_entropy({DECODERS}, Tensor labels, Tensor?[] index, float deep_supervision,"
    " bool[] wanted, bool keep_logits) -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])"
)


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
    return loss, logits, to_layers, empty_like(weights), empty_like(biases)


def _save(ctx, inputs, output):
    """Save the inputs and the gradients of the loss, which the operator returns with it. The
    gradients are not saved tensors: a backward pass hands them on without a copy."""
    layers, weights, biases, layer, labels, index, *ctx.options = inputs
    _, _, *grads = output
    ctx.set_materialize_grads(False)
    ctx.grads = [[g.detach() for g in part] for part in grads]
    save_lists(ctx, layer, layers, weights, biases, index, [labels])


def _is_one(grad: Tensor) -> bool:
    """Return whether the saved gradients need no scaling; False where the value is unknown (while
    tracing) or reading it would wait for a GPU."""
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.item() == 1


@selected_cross_entropy.gradient(setup=_save)
def _(ctx, grad_loss, grad_logits, *_):
    check_first_order("selected_cross_entropy")
    layer, layers, weights, biases, index, [labels] = saved_lists(ctx)
    grads, ctx.grads = ctx.grads, None
    deep_supervision, wanted, _ = ctx.options
    if grads is None:  # a second backward pass: the first one gave its gradients away
        inputs = layers, weights, biases, layer, labels, index, deep_supervision, wanted, False
        _, _, *grads = torch.ops.metselect.selected_cross_entropy(*inputs)
    if grad_loss is None:
        grads = [[torch.zeros_like(g) for g in part] for part in grads]
    elif not _is_one(grad_loss):
        grads = [[g * grad_loss for g in part] for part in grads]
    if grad_logits is not None and len(grad_logits):  # 0 rows if logits were not kept
        backward = torch.ops.metselect.selected_logits_backward
        from_logits = backward(grad_logits, layers, weights, layer, index)
        pairs = zip(grads, from_logits, strict=True)
        grads = [[g + m if len(g) else g for g, m in zip(*pair, strict=True)] for pair in pairs]
    to_layers, to_weights, to_biases = grads
    triples = zip(to_layers, layers, wanted, strict=True)
    to_layers = [g.to(h.dtype) if want else None for g, h, want in triples]
    return to_layers, to_weights, to_biases, None, None, no_gradient(index), None, None, None
