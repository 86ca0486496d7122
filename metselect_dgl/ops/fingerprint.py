"""fingerprint: a hash of all bits of a matrix and their positions."""

import torch

from .registry import Op

fingerprint = Op("fingerprint(Tensor bits) -> Tensor")


@fingerprint.fake
def _(bits):
    return bits.new_empty((), dtype=torch.int64)
