"""class_distances: dist2[l, i, c] = || R_l (h_i - mu_c) ||^2, and its gradient to the layers.

    z = R (h - center), m = R (mu - center):  dist2 = || z - m_c ||^2
    dh = 2 K^-1 sum_c g_c (h - mu_c) = 2 ((sum_c g_c) (h - center) - sum_c g_c (mu_c - center)) K^-1

A node is whitened once for a block of classes, by the lower half of R alone where R is triangular.
The differences are squared as they are: the expanded form |z|^2 - 2 <z, m> + |m|^2 would lose the
digits of a small distance between large vectors. The gradient goes through K^-1 = R^T R, which
takes as many products as two triangles and no whitened rows in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .metric import DENSE, metrics
from .tiles import (
    ROWS_FIELDS,
    Config,
    addresses,
    arithmetic,
    matrix,
    picked_count,
    picked_rows,
    row_pointers,
    rows_fields,
    table,
)

FIELDS = ("center", "middle", "factor", "kind")
N_FIELDS = tl.constexpr(ROWS_FIELDS.value + len(FIELDS) + 1)
_DENSE = tl.constexpr(DENSE)
CONFIGS = (Config(64, 32, 16, 8), Config(32, 32, 16, 8))
BACKWARD_CONFIGS = (Config(32, 64, 16, 8), Config(32, 32, 16, 4))


@triton.jit
def class_distances_kernel(
    layers,
    valid,
    dist2_out,
    n,
    n_classes,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per layer and tile of nodes."""
    depth = tl.program_id(1)
    row = layers + depth * N_FIELDS
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    here = i < n
    number, inside = picked_rows(row, i, here)
    x_rows, step, width = row_pointers(row, number, 0, DTYPE, VECTOR)
    x_rows = tl.trans(x_rows)  # [1, BN]
    center, middle, factor = matrix(row, 6, ACC), matrix(row, 7, ACC), matrix(row, 8, ACC)
    dense, rank = tl.load(matrix(row, 9, tl.int32)) == _DENSE, tl.load(row + 10)
    for first in range(0, n_classes, BC):
        c = first + tl.arange(0, BC)
        known = c < n_classes
        dist2 = tl.zeros([BN, BC], ACC)
        for low in range(0, rank, BK):
            r = low + tl.arange(0, BK)
            z = tl.zeros([BK, BN], ACC)
            for start in range(0, tl.where(dense, width, tl.minimum(width, low + BK)), BK):
                k = start + tl.arange(0, BK)
                within = k < width
                f = tl.load(
                    factor + r[:, None] * width + k[None, :],
                    mask=(r < rank)[:, None] & within[None, :],
                    other=0.0,
                )
                x = tl.load(
                    x_rows + k[:, None] * step, mask=within[:, None] & inside[None, :], other=0.0
                )
                x = x.to(ACC) - tl.load(center + k, mask=within, other=0.0)[:, None]
                z = tl.dot(f, x, z, input_precision=PRECISION, out_dtype=ACC)
            m = tl.load(
                middle + c[None, :] * rank + r[:, None],
                mask=(r < rank)[:, None] & known[None, :],
                other=0.0,
            )
            gap = z[:, :, None] - m[:, None, :]
            dist2 += tl.sum(gap * gap, axis=0)
        seen = tl.load(valid + c, mask=known, other=0) != 0
        dist2 = tl.where(seen[None, :], dist2, float("inf"))
        dist2 = tl.where(inside[:, None], dist2, float("nan"))
        out = dist2_out + (depth.to(tl.int64) * n + i)[:, None] * n_classes + c[None, :]
        tl.store(out, dist2, mask=here[:, None] & known[None, :])


BACKWARD_FIELDS = ("center", "gap", "inverse")
N_BACKWARD_FIELDS = tl.constexpr(ROWS_FIELDS.value + len(BACKWARD_FIELDS) + 1)


@triton.jit
def class_distances_backward_kernel(
    layers,
    grad,
    grad_stride_l,
    grad_stride_n,
    grad_stride_c,
    valid,
    n,
    n_classes,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per layer and tile of nodes; gradients of rows that are picked add up."""
    depth = tl.program_id(1)
    row = layers + depth * N_BACKWARD_FIELDS
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    number, inside = picked_rows(row, i, i < n)
    x_rows, step, width = row_pointers(row, number, 0, DTYPE, VECTOR)
    center, gap, inverse = matrix(row, 6, ACC), matrix(row, 7, ACC), matrix(row, 8, ACC)
    to_rows = matrix(row, 9, ACC) + number[:, None] * width
    g_rows = grad + depth.to(tl.int64) * grad_stride_l + i.to(tl.int64)[:, None] * grad_stride_n
    for low in range(0, width, BK):
        j = low + tl.arange(0, BK)
        dh = tl.zeros([BN, BK], ACC)
        for start in range(0, width, BK):
            k = start + tl.arange(0, BK)
            within = k < width
            x = tl.load(
                x_rows + k[None, :] * step, mask=inside[:, None] & within[None, :], other=0.0
            )
            x = x.to(ACC) - tl.load(center + k, mask=within, other=0.0)[None, :]
            pull = tl.zeros([BN, BK], ACC)
            total = tl.zeros([BN], ACC)
            for first in range(0, n_classes, BC):
                c = first + tl.arange(0, BC)
                seen = tl.load(valid + c, mask=c < n_classes, other=0) != 0
                g = tl.load(
                    g_rows + c[None, :] * grad_stride_c,
                    mask=inside[:, None] & seen[None, :],
                    other=0.0,
                ).to(ACC)
                m = tl.load(
                    gap + c[:, None] * width + k[None, :],
                    mask=seen[:, None] & within[None, :],
                    other=0.0,
                )
                pull = tl.dot(g, m, pull, input_precision=PRECISION, out_dtype=ACC)
                total += tl.sum(g, axis=1)
            p = tl.load(
                inverse + k[:, None] * width + j[None, :],
                mask=within[:, None] & (j < width)[None, :],
                other=0.0,
            )
            v = 2.0 * (total[:, None] * x - pull)
            dh = tl.dot(v, p, dh, input_precision=PRECISION, out_dtype=ACC)
        there = inside[:, None] & (j < width)[None, :]
        if ADD:
            tl.atomic_add(to_rows + j[None, :], dh, mask=there, sem="relaxed")
        else:
            tl.store(to_rows + j[None, :], dh, mask=there)


def class_distances(
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    index: list[Tensor | None],
) -> Tensor:
    constants = metrics(means, factors, valid)
    n, n_classes = picked_count(layers, index), len(valid)
    rows = [
        [*rows_fields(h, picked), *addresses(known, FIELDS), len(factor)]
        for h, picked, known, factor in zip(layers, index, constants, factors, strict=True)
    ]
    given = {"layers": table(rows, valid.device), "valid": valid, "n": n, "n_classes": n_classes}
    given |= arithmetic(layers, means)

    def run(config: Config) -> Tensor:
        dist2 = means[0].new_empty(len(layers), n, n_classes)
        grid = triton.cdiv(n, config.BN), len(layers)
        tiles.launch(class_distances_kernel, grid, config, **given, dist2_out=dist2)
        return dist2

    return tiles.tuned("class_distances", given, layers, CONFIGS, run)


def class_distances_backward(
    grad: Tensor,
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    index: list[Tensor | None],
) -> list[Tensor]:
    constants = metrics(means, factors, valid)
    n, n_classes = picked_count(layers, index), len(valid)
    given = {"grad": grad, "valid": valid, "n": n, "n_classes": n_classes}
    given |= dict(
        zip(("grad_stride_l", "grad_stride_n", "grad_stride_c"), grad.stride(), strict=True)
    )
    given |= arithmetic(layers, means)

    def run(config: Config) -> list[Tensor]:
        add = any(picked is not None for picked in index)
        make = torch.zeros if add else torch.empty
        grads = [make(h.shape, dtype=constants[0]["center"].dtype, device=h.device) for h in layers]
        rows = [
            [*rows_fields(h, picked), *addresses(known, BACKWARD_FIELDS), out.data_ptr()]
            for h, picked, known, out in zip(layers, index, constants, grads, strict=True)
        ]
        grid = triton.cdiv(n, config.BN), len(layers)
        entries = table(rows, valid.device)
        tiles.launch(
            class_distances_backward_kernel, grid, config, layers=entries, **given, ADD=add
        )
        return [out.to(h.dtype) for out, h in zip(grads, layers, strict=True)]

    return tiles.tuned("class_distances_backward", given, layers, BACKWARD_CONFIGS, run)
