"""The operators `torch.ops.metselect`: one file per operator, with its fake and gradient.

Importing this package registers the operators and the kernels of the available backends; which
these are is described in `metselect_dgl.backends`.
"""

from collections.abc import Callable
from importlib import import_module

import torch

from .. import backends, reference
from . import (  # noqa: F401  each file registers its operators
    attention_sum,
    class_distances,
    fingerprint,
    linear_relu,
    metric_logits,
    moments,
    neighbour_sum,
    registry,
    select_layer,
    selected_cross_entropy,
    selected_logits,
    whitening,
)

OPS = tuple(registry.names)
functions = registry.functions
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # dispatch keys


def _triton_kernel(name: str) -> Callable:
    """Return a function that imports the Triton kernel when it is called; on a GPU or for a dtype
    that Triton does not support it calls the reference."""
    no_float64 = not backends.triton_has_float64()

    def run(*inputs):
        if backends.gpu_too_old() or (no_float64 and _has_float64(inputs)):
            return getattr(reference, name)(*inputs)
        return getattr(import_module("metselect_dgl.kernels"), name)(*inputs)

    return run


def _has_float64(inputs: tuple) -> bool:
    lists = [value if isinstance(value, list) else [value] for value in inputs]
    tensors = (value for values in lists for value in values if isinstance(value, torch.Tensor))
    return any(tensor.dtype == torch.float64 for tensor in tensors)


backends.check_requested()
_native_unavailable = backends.native_unavailable()  # "" after it has registered its kernels
_triton_unavailable = {device: backends.triton_unavailable(device) for device in backends.DEVICES}
for _device in backends.DEVICES:
    if not _triton_unavailable[_device]:
        for _name in backends.TRITON_OPS:
            registry.library.impl(_name, _triton_kernel(_name), _KEYS[_device])

NATIVE = not _native_unavailable


def compiled(name: str, device: torch.device) -> bool:
    """Return whether a backend other than the reference implements the operator on the device."""
    operator, key = getattr(torch.ops.metselect, name).default, _KEYS.get(device.type)
    return key is not None and operator.has_kernel_for_dispatch_key(key)


def backend_of(name: str, device: str) -> str:
    """Return the backend that implements the operator: "native", "triton" or "reference"."""
    if not compiled(name, torch.device(device)):
        return "reference"
    if name not in backends.TRITON_OPS or _triton_unavailable[device]:
        return "native"
    return "reference" if device == "cuda" and backends.gpu_too_old() else "triton"


def unavailable(device: str) -> dict[str, str]:
    """Return the backends that implement no operator on the device, and why."""
    reasons = {"native": _native_unavailable, "triton": _triton_unavailable[device]}
    if device == "cuda":
        reasons["triton"] = reasons["triton"] or backends.gpu_too_old()
        if NATIVE and not compiled("moments", torch.device(device)):
            reasons["native"] = "the extension is built without CUDA"
    return {backend: reason for backend, reason in reasons.items() if reason}


def keep_freed_memory(keep: bool = True) -> bool:
    """Keep the memory of freed tensors in the process for later ones, which avoids page faults.

    Return whether the C library supports it; False without the extension.
    """
    return NATIVE and import_module("metselect_dgl._C").keep_freed_memory(keep)
