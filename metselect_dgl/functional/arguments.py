"""Layers and indices in the form the operators take."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Index = Tensor | None | Sequence[Tensor | None]


def index_per_layer(index: Index, layers: Tensors) -> list[Tensor | None]:
    """Return one int64 index per layer, None where all rows are picked."""
    if index is None or isinstance(index, Tensor):
        index = [index] * len(layers)
    return [None if rows is None else rows.long().contiguous() for rows in index]


def same_dtype(layers: Tensors) -> list[Tensor]:
    """Return the layers in the widest of their dtypes, which differ under autocast; on a CPU, where
    no backend computes in half precision, at least float32."""
    least = {torch.float32} if layers[0].device.type == "cpu" else set()
    widest = reduce(torch.promote_types, least | {h.dtype for h in layers})
    return [h.to(widest) for h in layers]
