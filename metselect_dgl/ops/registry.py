"""The `metselect` operator library: an operator's schema, reference, fake and gradient.

Layers may be of a narrower dtype than the constants (means, shifts, factors, weights): operators
compute in the dtype of the constants, which is also the dtype of every result except a gradient
with respect to a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import reference

library = torch.library.Library("metselect", "DEF")
names: list[str] = []


class Op:
    """Define `torch.ops.metselect.<name>` from its schema, implemented on every device by the
    function of the same name in `reference.py`, which also computes the shapes of the results
    where it does not look at values."""

    def __init__(self, schema: str) -> None:
        self.name = schema.partition("(")[0]
        library.define(schema)
        library.impl(self.name, getattr(reference, self.name), "CompositeExplicitAutograd")
        names.append(self.name)

    def fake(self, function: Callable) -> None:
        """Register another function that computes the shapes and dtypes of the results."""
        torch.library.register_fake(f"metselect::{self.name}", function, lib=library)

    def gradient(self, setup: Callable) -> Callable[[Callable], None]:
        """Register the gradient; `setup(ctx, inputs, output)` saves what it needs."""
        register = torch.library.register_autograd
        return partial(register, f"metselect::{self.name}", setup_context=setup, lib=library)


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
