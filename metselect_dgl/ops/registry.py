"""The `metselect` operator library: an operator's schema, reference, fake and gradient.

Before torch 2.4 an operator can have neither a fake nor a Python gradient: fakes are left out, and
gradients belong to the function in `functions` that calls the operator.

Layers may be of a narrower dtype than the constants (means, shifts, factors, weights): operators
compute in the dtype of the constants, which is also the dtype of every result except a gradient
with respect to a layer.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from .. import reference

library = torch.library.Library("metselect", "DEF")
names: list[str] = []
functions = SimpleNamespace()  # what to call, by the name of the operator; differentiable
TORCH_2_4 = torch.__version__ >= "2.4"

METRIC = "Tensor[] layers, Tensor[] means, Tensor[] factors, Tensor valid"
DECODERS = "Tensor[] layers, Tensor[] weights, Tensor[] biases, Tensor layer"
EDGES = "Tensor indptr, Tensor indices, Tensor back_indptr, Tensor back_indices"


class Op:
    """Define `torch.ops.metselect.<name>` from its schema, implemented on every device by the
    function of the same name in `reference.py`."""

    def __init__(self, schema: str) -> None:
        self.name = schema.partition("(")[0]
        library.define(schema)
        library.impl(self.name, getattr(reference, self.name), "CompositeExplicitAutograd")
        names.append(self.name)
        setattr(functions, self.name, getattr(torch.ops.metselect, self.name))

    def fake(self, function: Callable) -> Callable:
        """Register the function that computes the shapes and dtypes of the results."""
        if TORCH_2_4:
            torch.library.register_fake(f"metselect::{self.name}", function, lib=library)
        return function

    def gradient(self, setup: Callable) -> Callable[[Callable], Callable]:
        """Register the gradient; `setup(ctx, inputs, output)` saves what it needs."""

        def register(function: Callable) -> Callable:
            if TORCH_2_4:
                torch.library.register_autograd(
                    f"metselect::{self.name}", function, setup_context=setup, lib=library
                )
            else:
                operator = getattr(torch.ops.metselect, self.name)
                setattr(functions, self.name, _differentiable(operator, setup, function))
            return function

        return register


def _differentiable(operator: Callable, setup: Callable, gradient: Callable) -> Callable:
    """Return a function that calls the operator in an `autograd.Function`. Lists are flattened for
    it: it differentiates only tensors that are arguments or results themselves."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *flat_and_lengths):
            *flat, ctx.lengths = flat_and_lengths
            inputs = _nested(flat, ctx.lengths.inputs)
            output = operator(*inputs)
            setup(ctx, inputs, output)
            flat, ctx.lengths.outputs = _flattened(_as_tuple(output))
            return tuple(flat)

        @staticmethod
        def backward(ctx, *flat):
            grads = _as_tuple(gradient(ctx, *_nested(flat, ctx.lengths.outputs)))
            pairs = zip(grads, ctx.lengths.inputs, strict=True)
            grads = [length * [None] if length and grad is None else grad for grad, length in pairs]
            return *_flattened(grads)[0], None

    def call(*inputs):
        flat, lengths = _flattened(inputs)
        lengths = SimpleNamespace(inputs=lengths)
        outputs = _nested(Differentiable.apply(*flat, lengths), lengths.outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call


def _as_tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _flattened(values: Sequence) -> tuple[list, list[int | None]]:
    """Return the values and the entries of lists among them; the length of each list, else None."""
    flat, lengths = [], []
    for value in values:
        is_list = isinstance(value, list)
        flat.extend(value if is_list else [value])
        lengths.append(len(value) if is_list else None)
    return flat, lengths


def _nested(flat: Sequence, lengths: Sequence[int | None]) -> list:
    """Return the values that :func:`_flattened` got."""
    rest = iter(flat)
    return [
        next(rest) if length is None else [next(rest) for _ in range(length)] for length in lengths
    ]


def n_picked(layers: list[Tensor], index: list[Tensor | None]) -> int:
    """Return the number of rows picked from each layer."""
    return (layers[0] if index[0] is None else index[0]).shape[0]


def empty_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous empty tensors of the same shapes and dtypes."""
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def save_lists(ctx, tensor: Tensor, *lists: Sequence[Tensor | None]) -> None:
    """Save a tensor and lists with one entry per layer (the last may be shorter) for the backward
    pass."""
    ctx.n_layers = len(lists[0])
    ctx.save_for_backward(tensor, *(entry for entries in lists for entry in entries))


def saved_lists(ctx) -> tuple:
    """Return the tensor and the lists passed to `save_lists`; empty lists are left out."""
    tensor, *entries = ctx.saved_tensors
    starts = range(0, len(entries), ctx.n_layers)
    return tensor, *(entries[start : start + ctx.n_layers] for start in starts)


def no_gradient(index: list[Tensor | None]) -> list[None] | None:
    """Return the missing gradient of an index in the form torch expects: a list for a list of
    tensors, None for a list with None in it."""
    return None if any(rows is None for rows in index) else len(index) * [None]


def check_first_order(name: str) -> None:
    """Raise RuntimeError in a backward pass with create_graph=True, which enables gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} can be differentiated only once; leave out create_graph=True")
