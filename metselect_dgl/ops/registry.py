"""The `metselect` operator library: an operator's schema, reference, fake and gradient.

Layers may be of a narrower dtype than the constants (means, shifts, factors, weights): operators
compute in the dtype of the constants, which is also the dtype of every result except a gradient
with respect to a layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import reference

library = torch.library.Library("metselect", "DEF")
names: list[str] = []

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

    def fake(self, function: Callable) -> Callable:
        """Register the function that computes the shapes and dtypes of the results."""
        torch.library.register_fake(f"metselect::{self.name}", function, lib=library)
        return function

    def gradient(self, setup: Callable) -> Callable[[Callable], Callable]:
        """Register the gradient; `setup(ctx, inputs, output)` saves what it needs."""

        def register(function: Callable) -> Callable:
            torch.library.register_autograd(
                f"metselect::{self.name}", function, setup_context=setup, lib=library
            )
            return function

        return register


def n_picked(layers: list[Tensor], index: list[Tensor | None]) -> int:
    """Return the number of rows picked from each layer."""
    return (layers[0] if index[0] is None else index[0]).shape[0]


def empty_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous empty tensors of the same shapes and dtypes."""
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def save_lists(ctx, tensor: Tensor, *lists: Sequence[Tensor | None]) -> None:
    """Save a tensor and lists with one entry per layer for the backward pass."""
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
    """Raise RuntimeError in a backward pass with create_graph=True."""
    if torch.is_grad_enabled() and torch._C._autograd._get_current_graph_task_keep_graph():
        raise RuntimeError(f"{name} can be differentiated only once; leave out create_graph=True")
