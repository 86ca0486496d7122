"""Operators that estimate class moments and whiten their covariances."""

import torch

from .registry import Op

moments = Op(
    "moments(Tensor[] layers, Tensor labels, Tensor?[] index, Tensor[] shifts)"
    " -> (Tensor, Tensor[], Tensor[])"
)
Op("whitening(Tensor[] covariances, Tensor rho, float eps) -> Tensor[]")


@moments.fake
def _(layers, labels, index, shifts):
    sums = [shift.new_empty(shift.shape, dtype=torch.float64) for shift in shifts]
    grams = [shift.new_empty(2 * shift.shape[1:], dtype=torch.float64) for shift in shifts]
    return sums[0].new_empty(shifts[0].shape[0]), sums, grams
