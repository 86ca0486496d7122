"""The `torch.ops.metselect` operators: schemas, shapes, gradients, and which engine serves them.

The only file that names an engine. The plain torch reference serves every device; a compiled
engine registers itself on its own dispatch key and takes over there.
"""

import os
from importlib import import_module

import torch
from torch import Tensor

from . import reference

_library = torch.library.Library("metselect", "DEF")
_METRIC = "Tensor[] layers, Tensor[] means, Tensor[] factors, Tensor valid"
_DECODERS = "Tensor[] layers, Tensor[] weights, Tensor[] biases, Tensor layer"
_SCHEMAS = (
    "moments(Tensor[] layers, Tensor labels, Tensor? index, Tensor[] shifts)"
    " -> (Tensor, Tensor[], Tensor[])",
    "whitening(Tensor[] covariances, Tensor rho, float eps) -> Tensor[]",
    f"class_distances({_METRIC}, Tensor? index) -> Tensor",
    f"class_distances_backward(Tensor grad, {_METRIC}, Tensor? index) -> Tensor[]",
    f"metric_logits({_METRIC}, Tensor temperature, Tensor? index) -> Tensor",
    f"select_layer({_METRIC}, Tensor temperature, Tensor? index, Tensor? labels, str rule)"
    " -> (Tensor, Tensor, Tensor)",
    f"selected_logits({_DECODERS}, Tensor? index) -> Tensor",
    "selected_logits_backward(Tensor grad, Tensor[] layers, Tensor[] weights, Tensor layer,"
    " Tensor? index) -> (Tensor[], Tensor[], Tensor[])",
    f"selected_cross_entropy({_DECODERS}, Tensor labels, Tensor? index, float deep_supervision)"
    " -> (Tensor, Tensor)",
    f"selected_cross_entropy_backward(Tensor grad_loss, Tensor grad_logits, {_DECODERS},"
    " Tensor labels, Tensor logits, Tensor? index, float deep_supervision)"
    " -> (Tensor[], Tensor[], Tensor[])",
)
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")


def _load_native(wish: str) -> bool:
    """Import the compiled engine, which registers itself on the CPU key, unless told not to."""
    if wish not in ("auto", "native", "reference"):
        raise ValueError(f"METSELECT_BACKEND is {wish!r}; use auto, native or reference")
    if wish == "reference":
        return False
    try:
        import_module("metselect_dgl._C")
    except ImportError as error:
        if wish == "auto":
            return False
        raise ImportError(
            f"METSELECT_BACKEND=native, but the extension cannot be imported ({error}); build it "
            "with `pip install --no-build-isolation --no-deps -e .`"
        ) from error
    return True


NATIVE = _load_native(os.environ.get("METSELECT_BACKEND", "auto"))
OPS = tuple(schema.partition("(")[0] for schema in _SCHEMAS)


def _picked(layers: list[Tensor], index: Tensor | None) -> int:
    return layers[0].shape[0] if index is None else index.shape[0]


def _like(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def _moments_fake(layers, labels, index, shifts):
    sums = [shift.new_empty(shift.shape, dtype=torch.float64) for shift in shifts]
    grams = [shift.new_empty(2 * shift.shape[1:], dtype=torch.float64) for shift in shifts]
    return sums[0].new_empty(shifts[0].shape[0]), sums, grams


def _whitening_fake(covariances, rho, eps):
    return [
        covariance.new_empty(covariance.shape, dtype=torch.float64) for covariance in covariances
    ]


def _class_distances_fake(layers, means, factors, valid, index):
    return layers[0].new_empty(len(layers), _picked(layers, index), len(valid))


def _class_distances_backward_fake(grad, layers, means, factors, valid, index):
    return _like(layers)


def _metric_logits_fake(layers, means, factors, valid, temperature, index):
    return layers[0].new_empty(len(layers), _picked(layers, index), len(valid))


def _select_layer_fake(layers, means, factors, valid, temperature, index, labels, rule):
    n = _picked(layers, index)
    layer = layers[0].new_empty(n, dtype=torch.int64)
    return layer, torch.empty_like(layer), layers[0].new_empty(n)


def _selected_logits_fake(layers, weights, biases, layer, index):
    return layers[0].new_empty(layer.shape[0], weights[0].shape[0])


def _selected_logits_backward_fake(grad, layers, weights, layer, index):
    return _like(layers), _like(weights), [weight.new_empty(weight.shape[0]) for weight in weights]


def _selected_cross_entropy_fake(layers, weights, biases, layer, labels, index, deep_supervision):
    return layers[0].new_empty(()), _selected_logits_fake(layers, weights, biases, layer, index)


def _selected_cross_entropy_backward_fake(
    grad_loss, grad_logits, layers, weights, biases, *labels_to_deep_supervision
):
    return _like(layers), _like(weights), _like(biases)


for _name in OPS:
    torch.library.register_fake(f"metselect::{_name}", globals()[f"_{_name}_fake"], lib=_library)


def _save(ctx, inputs, output):
    """Keep the inputs for the backward op: tensors and lists of them, flattened, and the rest."""
    tensors = []
    ctx.layout = []
    for value in inputs:
        if isinstance(value, Tensor):
            ctx.layout.append(("tensor", len(tensors)))
            tensors.append(value)
        elif isinstance(value, list | tuple):
            ctx.layout.append(("list", (len(tensors), len(tensors) + len(value))))
            tensors.extend(value)
        else:
            ctx.layout.append(("value", value))
    ctx.n_inputs = len(tensors)
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.save_for_backward(*tensors, *outputs)


def _saved(ctx) -> tuple[list, tuple[Tensor, ...]]:
    """The inputs as they were passed, and the outputs."""
    tensors = ctx.saved_tensors
    restore = {
        "tensor": lambda at: tensors[at],
        "list": lambda span: list(tensors[slice(*span)]),
        "value": lambda value: value,
    }
    return [restore[kind](what) for kind, what in ctx.layout], tensors[ctx.n_inputs :]


def _class_distances_gradient(ctx, grad):
    inputs, _ = _saved(ctx)
    grads = torch.ops.metselect.class_distances_backward(grad, *inputs)
    constants = len(grads) * [None]
    return grads, constants, constants, None, None


def _selected_logits_gradient(ctx, grad):
    (layers, weights, _, layer, index), _ = _saved(ctx)
    grads = torch.ops.metselect.selected_logits_backward(grad, layers, weights, layer, index)
    return *grads, None, None


def _selected_cross_entropy_gradient(ctx, grad_loss, grad_logits):
    (*decoders, labels, index, deep_supervision), (_, logits) = _saved(ctx)
    grads = torch.ops.metselect.selected_cross_entropy_backward(
        grad_loss, grad_logits, *decoders, labels, logits, index, deep_supervision
    )
    return *grads, None, None, None, None


for _name in ("class_distances", "selected_logits", "selected_cross_entropy"):
    torch.library.register_autograd(
        f"metselect::{_name}",
        globals()[f"_{_name}_gradient"],
        setup_context=_save,
        lib=_library,
    )
