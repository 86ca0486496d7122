"""Layers and indices in the form the operators take."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..checks import check_not_mask

Tensors = Sequence[Tensor]
Index = Tensor | None | Sequence[Tensor | None]


def index_per_layer(index: Index, layers: Tensors) -> list[Tensor | None]:
    """Return one int64 index per layer, None where all rows are picked."""
    if index is None or isinstance(index, Tensor):
        index = [index] * len(layers)
    return [_numbers(rows, h) for rows, h in zip(index, layers, strict=True)]


def _numbers(index: Tensor | None, h: Tensor) -> Tensor | None:
    """Return the row numbers that an index or a bool mask of the rows of `h` picks."""
    if index is None:
        return None
    if index.dtype == torch.bool:
        if index.shape != h.shape[:1]:
            raise ValueError(f"the mask has shape {tuple(index.shape)} for {len(h)} rows")
        return index.nonzero().squeeze(1)
    index = index.long().contiguous()
    check_not_mask(index, len(h))
    return index


def same_dtype(layers: Tensors) -> list[Tensor]:
    """Return the layers in the widest of their dtypes, which differ under autocast; on a CPU, where
    no backend computes in half precision, at least float32."""
    least = {torch.float32} if layers[0].device.type == "cpu" else set()
    widest = reduce(torch.promote_types, least | {h.dtype for h in layers})
    return [h.to(widest) for h in layers]
