"""The `torch.ops.metselect` operators: schemas, shapes, gradients, and which engine serves them.

The only file that names an engine. The plain torch reference serves every device; the C++/CUDA
extension ("native") and the Triton kernels take over on the dispatch keys that they register.

Layers may be narrower than the constants (means, shifts, factors, weights): all arithmetic and
every result but a gradient to a layer is in the dtype of the constants.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from . import reference

_library = torch.library.Library("metselect", "DEF")
_METRIC = "Tensor[] layers, Tensor[] means, Tensor[] factors, Tensor valid"
_DECODERS = "Tensor[] layers, Tensor[] weights, Tensor[] biases, Tensor layer"
_EDGES = "Tensor indptr, Tensor indices, Tensor back_indptr, Tensor back_indices"
_SCHEMAS = (
    "moments(Tensor[] layers, Tensor labels, Tensor?[] index, Tensor[] shifts)"
    " -> (Tensor, Tensor[], Tensor[])",
    "whitening(Tensor[] covariances, Tensor rho, float eps) -> Tensor[]",
    f"class_distances({_METRIC}, Tensor?[] index) -> Tensor",
    f"class_distances_backward(Tensor grad, {_METRIC}, Tensor?[] index) -> Tensor[]",
    f"metric_logits({_METRIC}, Tensor temperature, Tensor?[] index) -> Tensor",
    f"select_layer({_METRIC}, Tensor temperature, Tensor?[] index, Tensor? labels, str rule)"
    " -> (Tensor, Tensor, Tensor)",
    f"selected_logits({_DECODERS}, Tensor?[] index) -> Tensor",
    "selected_logits_backward(Tensor grad, Tensor[] layers, Tensor[] weights, Tensor layer,"
    " Tensor?[] index) -> (Tensor[], Tensor[], Tensor[])",
    f"selected_cross_entropy({_DECODERS}, Tensor labels, Tensor?[] index, float deep_supervision,"
    " bool[] wanted, bool keep_logits) -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])",
    f"neighbour_sum({_EDGES}, Tensor? weights, Tensor? back_weights, Tensor? source_scale,"
    " Tensor? target_scale, Tensor feat, Tensor? more) -> Tensor",
    f"attention_sum({_EDGES}, Tensor back_edges, Tensor feat, Tensor source, Tensor target,"
    " float slope) -> (Tensor out, Tensor attention)",
    f"attention_sum_backward(Tensor grad, {_EDGES}, Tensor back_edges, Tensor feat, Tensor source,"
    " Tensor target, Tensor attention, float slope) -> (Tensor, Tensor, Tensor)",
    "linear_relu(Tensor feat, Tensor weight, Tensor bias) -> Tensor",
    "linear_relu_backward(Tensor grad, Tensor feat, Tensor weight, Tensor out, bool wanted)"
    " -> (Tensor, Tensor, Tensor)",
)
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")


OPS = tuple(schema.partition("(")[0] for schema in _SCHEMAS)
BACKENDS = ("auto", "native", "reference", "triton")
_TRITON_OPS = (
    "class_distances",
    "class_distances_backward",
    "select_layer",
    "selected_logits",
    "selected_cross_entropy",
)


def _load_native() -> str:
    """Import the compiled engine, which registers itself on the keys it was built for; returns
    why it does not serve, nothing if it does."""
    if _WISH not in ("auto", "native"):
        return f"METSELECT_BACKEND={_WISH}"
    try:
        import_module("metselect_dgl._C")
    except ImportError as error:
        return f"the extension cannot be imported ({error})"
    return ""


def _register_triton() -> dict[str, str]:
    """Register the Triton kernels, imported on first use, on the devices where they run; returns
    for each device why they do not serve, nothing if they do."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if _WISH not in ("auto", "triton"):
        everywhere = f"METSELECT_BACKEND={_WISH}"
    elif find_spec("triton") is None:
        everywhere = "triton is not installed"
    else:
        everywhere = ""
    absent = {
        "cpu": "" if interpreted and _WISH == "triton" else "only interpreted, for tests",
        "cuda": "" if torch.version.cuda or torch.version.hip else "torch is built without CUDA",
    }
    if interpreted:
        absent["cuda"] = absent["cuda"] or "TRITON_INTERPRET=1 reads no GPU's memory"
    absent = {device: everywhere or reason for device, reason in absent.items()}
    for device in (device for device, reason in absent.items() if not reason):
        for name in _TRITON_OPS:
            _library.impl(name, _first_use(name), _KEYS[device])
    return absent


def _first_use(name: str) -> Callable:
    """The Triton kernel of that name, which is imported when it is called; on a GPU that Triton
    does not know any more, the reference."""

    def serve(*inputs):
        if _too_old():
            return getattr(reference, name)(*inputs)
        return getattr(import_module("metselect_dgl.kernels"), name)(*inputs)

    return serve


@lru_cache
def _too_old() -> str:
    """Why Triton cannot serve the GPU that is seen, if there is one and it cannot."""
    if torch.version.hip or not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 8 else f"the GPU has compute capability {major}.{minor}, Triton needs 8.0"


def _insist() -> None:
    """What was asked for by name serves somewhere, or it is an error."""
    if _WISH == "native" and _NATIVE_ABSENT:
        raise ImportError(
            f"METSELECT_BACKEND=native, but {_NATIVE_ABSENT}; build it with "
            "`pip install --no-build-isolation --no-deps -e .`"
        )
    if _WISH == "triton" and _TRITON_ABSENT["cpu"]:
        unseen = "" if torch.cuda.is_available() else "no GPU is seen"
        reason = _TRITON_ABSENT["cuda"] or unseen or _too_old()
        if not reason:
            return
        raise ImportError(
            f"METSELECT_BACKEND=triton, but {reason}; TRITON_INTERPRET=1 runs its kernels on a "
            "CPU, slowly"
        )


_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_WISH = os.environ.get("METSELECT_BACKEND", "auto")
if _WISH not in BACKENDS:
    raise ValueError(f"METSELECT_BACKEND is {_WISH!r}; use one of {', '.join(BACKENDS)}")
_NATIVE_ABSENT, _TRITON_ABSENT = _load_native(), _register_triton()
_insist()
NATIVE = not _NATIVE_ABSENT


def serving(name: str, device: str) -> str:
    """Which engine serves the op there: native, triton or reference."""
    if not compiled(name, torch.device(device)):
        return "reference"
    if name not in _TRITON_OPS or _TRITON_ABSENT[device]:
        return "native"
    return "reference" if device == "cuda" and _too_old() else "triton"


def has(engine: str, name: str, device: str) -> bool:
    """Whether that engine, where it serves at all, has the op for the device."""
    if engine == "triton":
        return name in _TRITON_OPS
    return device == "cpu" or name == "moments"


def not_serving(device: str) -> dict[str, str]:
    """The engines that serve no op there, and why."""
    absent = {"native": _NATIVE_ABSENT, "triton": _TRITON_ABSENT[device]}
    if device == "cuda":
        absent["triton"] = absent["triton"] or _too_old()
        if not absent["native"] and not compiled("moments", torch.device(device)):
            absent["native"] = "the extension is built without CUDA"
    return {engine: reason for engine, reason in absent.items() if reason}


def keep_freed_memory(keep: bool = True) -> bool:
    """Let the process keep the memory of freed tensors for the next ones, which saves their page
    faults; returns whether that is possible here."""
    return NATIVE and import_module("metselect_dgl._C").keep_freed_memory(keep)


def compiled(name: str, device: torch.device) -> bool:
    """Whether an engine of its own, not the reference, serves this op there."""
    key = _KEYS.get(device.type, "Undefined")
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"metselect::{name}", key)


def _picked(layers: list[Tensor], index: list[Tensor | None]) -> int:
    return (layers[0] if index[0] is None else index[0]).shape[0]


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
    return means[0].new_empty(len(layers), _picked(layers, index), len(valid))


def _class_distances_backward_fake(grad, layers, means, factors, valid, index):
    return _like(layers)


def _metric_logits_fake(layers, means, factors, valid, temperature, index):
    return means[0].new_empty(len(layers), _picked(layers, index), len(valid))


def _select_layer_fake(layers, means, factors, valid, temperature, index, labels, rule):
    n = _picked(layers, index)
    layer = layers[0].new_empty(n, dtype=torch.int64)
    return layer, torch.empty_like(layer), means[0].new_empty(n)


def _selected_logits_fake(layers, weights, biases, layer, index):
    return weights[0].new_empty(layer.shape[0], weights[0].shape[0])


def _selected_logits_backward_fake(grad, layers, weights, layer, index):
    return _like(layers), _like(weights), [weight.new_empty(weight.shape[0]) for weight in weights]


def _selected_cross_entropy_fake(
    layers, weights, biases, layer, labels, index, deep_supervision, wanted, keep_logits
):
    rows = layer.shape[0] if keep_logits else 0
    logits = weights[0].new_empty(rows, weights[0].shape[0])
    loss = logits.new_empty(())
    if not wanted:
        return loss, logits, [], [], []
    wide = torch.promote_types(loss.dtype, torch.float32)
    pairs = zip(layers, wanted, strict=True)
    to_layers = [loss.new_empty(h.shape if want else 0, dtype=wide) for h, want in pairs]
    return loss, logits, to_layers, _like(weights), _like(biases)


def _neighbour_sum_fake(indptr, *indices_to_more):
    feat = indices_to_more[-2]
    return feat.new_empty(indptr.shape[0] - 1, feat.shape[1])


def _attention_sum_fake(
    indptr, indices, back_indptr, back_indices, back_edges, feat, source, target, slope
):
    n_heads, width = feat.shape[1:]
    out = feat.new_empty(target.shape[0], n_heads, width)
    return out, feat.new_empty(indices.shape[0], n_heads)


def _attention_sum_backward_fake(grad, *edges_to_slope):
    return tuple(_like(edges_to_slope[5:8]))


def _linear_relu_fake(feat, weight, bias):
    return feat.new_empty(feat.shape[0], weight.shape[1])


def _linear_relu_backward_fake(grad, feat, weight, out, wanted):
    to_feat = feat.new_empty(feat.shape[0] if wanted else 0, feat.shape[1])
    return to_feat, weight.new_empty(weight.shape), weight.new_empty(weight.shape[1])


for _name in OPS:
    torch.library.register_fake(f"metselect::{_name}", globals()[f"_{_name}_fake"], lib=_library)


def _save(ctx, inputs, output):
    """Keep the inputs for the backward op, flattened: tensors, lists of them, and the rest."""
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
    ctx.save_for_backward(*tensors)


def _saved(ctx) -> list:
    """The inputs as they were passed."""
    tensors = ctx.saved_tensors
    restore = {
        "tensor": lambda at: tensors[at],
        "list": lambda span: list(tensors[slice(*span)]),
        "value": lambda value: value,
    }
    return [restore[kind](what) for kind, what in ctx.layout]


def _constant(index: list[Tensor | None]) -> list[None] | None:
    """No gradient, in the shape torch wants: a list for a list of tensors, but not of optionals."""
    return None if any(each is None for each in index) else len(index) * [None]


def _class_distances_gradient(ctx, grad):
    inputs = _saved(ctx)
    grads = torch.ops.metselect.class_distances_backward(grad, *inputs)
    constants = len(grads) * [None]
    return grads, constants, constants, None, _constant(inputs[-1])


def _selected_logits_gradient(ctx, grad):
    layers, weights, _, layer, index = _saved(ctx)
    grads = torch.ops.metselect.selected_logits_backward(grad, layers, weights, layer, index)
    return *grads, None, _constant(index)


def _is_one(grad: Tensor) -> bool:
    """Whether the saved gradients are already the right ones: not known while tracing, nor
    without waiting for a GPU."""
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.item() == 1


def _save_cross_entropy(ctx, inputs, output):
    """The gradients were made together with the loss."""
    layers, weights, _, layer, _, index, _, wanted, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.wanted, ctx.depths = wanted, len(layers)
    _, _, *grads = output
    ctx.save_for_backward(layer, *layers, *weights, *index, *(g for part in grads for g in part))


def _only_once(name: str) -> None:
    """The gradients of these ops are numbers, not functions of what they were made of."""
    if torch.is_grad_enabled() and torch._C._autograd._get_current_graph_task_keep_graph():
        raise RuntimeError(f"{name} can be differentiated only once; leave out create_graph=True")


def _selected_cross_entropy_gradient(ctx, grad_loss, grad_logits, *_):
    _only_once("selected_cross_entropy")
    layer, *rest = ctx.saved_tensors
    parts = [rest[at : at + ctx.depths] for at in range(0, len(rest), ctx.depths)]
    layers, weights, index, *grads = parts
    if grad_loss is None:
        grads = [[torch.zeros_like(g) for g in part] for part in grads]
    elif not _is_one(grad_loss) or torch._C._autograd._get_current_graph_task_keep_graph():
        grads = [[g * grad_loss for g in part] for part in grads]
    if grad_logits is not None and len(grad_logits):  # of logits that were kept
        backward = torch.ops.metselect.selected_logits_backward
        more = backward(grad_logits, layers, weights, layer, index)
        pairs = zip(grads, more, strict=True)
        grads = [[g + m if len(g) else g for g, m in zip(*pair, strict=True)] for pair in pairs]
    to_layers, to_weights, to_biases = grads
    every = zip(to_layers, layers, ctx.wanted, strict=True)
    to_layers = [g.to(h.dtype) if want else None for g, h, want in every]
    return to_layers, to_weights, to_biases, None, None, _constant(index), None, None, None


def reversed_edges(
    indptr, indices, back_indptr, back_indices, weights, back_weights, source_scale, target_scale
) -> tuple:
    """The arguments of the neighbour_sum along which its gradient returns."""
    edges = back_indptr, back_indices, indptr, indices
    return *edges, back_weights, weights, target_scale, source_scale


def _save_neighbour_sum(ctx, inputs, output):
    *edges_and_scales, _, more = inputs
    ctx.save_for_backward(*edges_and_scales)
    ctx.more = more is not None


def _neighbour_sum_gradient(ctx, grad):
    to_feat = torch.ops.metselect.neighbour_sum(*reversed_edges(*ctx.saved_tensors), grad, None)
    return *(8 * [None]), to_feat, grad if ctx.more else None


def _save_attention_sum(ctx, inputs, output):
    """The attention is for reading: it has no gradient."""
    *tensors, ctx.slope = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _attention_sum_gradient(ctx, grad, _):
    _only_once("attention_sum")
    if grad is None:
        return 9 * (None,)
    grads = torch.ops.metselect.attention_sum_backward(grad, *ctx.saved_tensors, ctx.slope)
    return *(5 * (None,)), *grads, None


def _save_linear_relu(ctx, inputs, output):
    feat, weight, _ = inputs
    ctx.save_for_backward(feat, weight, output)


def _linear_relu_gradient(ctx, grad):
    _only_once("linear_relu")
    feat, weight, out = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    to_feat, *rest = torch.ops.metselect.linear_relu_backward(grad, feat, weight, out, wanted)
    return to_feat if wanted else None, *rest


for _name, _setup in (
    ("neighbour_sum", _save_neighbour_sum),
    ("attention_sum", _save_attention_sum),
    ("linear_relu", _save_linear_relu),
    ("class_distances", _save),
    ("selected_logits", _save),
    ("selected_cross_entropy", _save_cross_entropy),
):
    torch.library.register_autograd(
        f"metselect::{_name}", globals()[f"_{_name}_gradient"], setup_context=_setup, lib=_library
    )
