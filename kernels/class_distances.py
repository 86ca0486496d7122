"""class_distances: dist2[l, i, c] = || R_l (h_i - mu_c) ||^2, and its gradient to the layers.

    z = R (h - center), m = R (mu - center):  dist2 = || z - m_c ||^2
    u = 2 sum_c g_c (z - m_c),  dh = u R

The centre of the means is subtracted before the product with R, because R (h - mu_c) would cost a
product with R per class. Nodes are whitened again for each block of classes, with the lower half of
R alone if R is triangular. Differences are squared directly: the expanded form
|z|^2 - 2 <z, m> + |m|^2 cancels for a small distance between large vectors. The gradient takes two
launches with u in memory between them: one program with both products spills registers, and a
single product with K^-1 = R^T R is inaccurate if K is ill-conditioned.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .metric import DENSE, metrics
from .tiles import (
    WIDTH,
    Config,
    addresses,
    arithmetic,
    check,
    matrix,
    own_fields,
    picked_count,
    picked_rows,
    row_pointers,
    rows_fields,
    table,
)

CONSTANTS = ("center", "middle", "factor", "kind")
CENTER, MIDDLE, FACTOR, KIND, RANK, PULL, GRADIENT, FIELDS = own_fields(len(CONSTANTS) + 3)
_DENSE = tl.constexpr(DENSE)
# BK x BN x BC differences are in registers at a time; with BN x BC = 64 x 32 they do not fit.
CONFIGS = (Config(32, 32, 16, 8), Config(64, 16, 16, 8))
BACKWARD_CONFIGS = (Config(32, 64, 16, 8), Config(32, 32, 16, 4))


@triton.jit
def whitened(
    row,
    x_rows,
    step,
    width,
    low,
    inside,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """z = R (h - center) in the dimensions low to low + BK, [BN, BK]; only the lower half of a
    triangular R is read."""
    center, factor = matrix(row, CENTER, ACC), matrix(row, FACTOR, ACC)
    dense = tl.load(matrix(row, KIND, tl.int32)) == _DENSE
    r = low + tl.arange(0, BK)
    known = r < tl.load(row + RANK)
    z = tl.zeros([BN, BK], ACC)
    for start in range(0, tl.where(dense, width, tl.minimum(width, low + BK)), BK):
        k = start + tl.arange(0, BK)
        within = k < width
        x = tl.load(x_rows + k[None, :] * step, mask=inside[:, None] & within[None, :], other=0.0)
        x = x.to(ACC) - tl.load(center + k, mask=within, other=0.0)[None, :]
        f = tl.load(
            factor + r[None, :] * width + k[:, None],
            mask=within[:, None] & known[None, :],
            other=0.0,
        )
        z = tl.dot(x, f, z, input_precision=PRECISION, out_dtype=ACC)
    return z


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
    """dist2 = || z - m_c ||^2, [n, C]; one program per layer and tile of nodes."""
    depth = tl.program_id(1)
    row = layers + depth * FIELDS
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    here = i < n
    number, inside = picked_rows(row, i, here)
    x_rows, step, width = row_pointers(row, number, DTYPE, VECTOR)
    middle, rank = matrix(row, MIDDLE, ACC), tl.load(row + RANK).to(tl.int32)
    for first in range(0, n_classes, BC):
        c = first + tl.arange(0, BC)
        known = c < n_classes
        dist2 = tl.zeros([BN, BC], ACC)
        for low in range(0, rank, BK):
            r = low + tl.arange(0, BK)
            z = whitened(row, x_rows, step, width, low, inside, ACC, PRECISION, BN, BK)
            m = tl.load(
                middle + c[None, :] * rank + r[:, None],
                mask=(r < rank)[:, None] & known[None, :],
                other=0.0,
            )
            gap = tl.trans(z)[:, :, None] - m[:, None, :]  # summed over axis 0, within a thread
            dist2 += tl.sum(gap * gap, axis=0)
        seen = tl.load(valid + c, mask=known, other=0) != 0
        dist2 = tl.where(seen[None, :], dist2, float("inf"))
        dist2 = tl.where(inside[:, None], dist2, float("nan"))
        out = dist2_out + (depth.to(tl.int64) * n + i)[:, None] * n_classes + c[None, :]
        tl.store(out, dist2, mask=here[:, None] & known[None, :])


@triton.jit
def class_distances_pull_kernel(
    layers,
    grad,
    grad_stride_l,
    grad_stride_n,
    grad_stride_c,
    valid,
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
    """u = 2 ((sum_c g_c) z - sum_c g_c m_c), [n, K]; one program per layer and tile of nodes."""
    depth = tl.program_id(1)
    row = layers + depth * FIELDS
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    here = i < n
    number, inside = picked_rows(row, i, here)
    x_rows, step, width = row_pointers(row, number, DTYPE, VECTOR)
    middle, rank = matrix(row, MIDDLE, ACC), tl.load(row + RANK).to(tl.int32)
    u_rows = matrix(row, PULL, ACC) + i.to(tl.int64)[:, None] * rank
    g_rows = grad + depth.to(tl.int64) * grad_stride_l + i.to(tl.int64)[:, None] * grad_stride_n
    for low in range(0, rank, BK):
        r = low + tl.arange(0, BK)
        z = whitened(row, x_rows, step, width, low, inside, ACC, PRECISION, BN, BK)
        pull = tl.zeros([BN, BK], ACC)
        total = tl.zeros([BN], ACC)
        for first in range(0, n_classes, BC):
            c = first + tl.arange(0, BC)
            seen = tl.load(valid + c, mask=c < n_classes, other=0) != 0
            g = tl.load(
                g_rows + c.to(tl.int64)[None, :] * grad_stride_c,
                mask=here[:, None] & seen[None, :],
                other=0.0,
            ).to(ACC)
            m = tl.load(
                middle + c[:, None] * rank + r[None, :],
                mask=seen[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            # Triton 3.7 fails to compile this one product in float64.
            if ACC == tl.float64:  # noqa: SIM300
                pull += tl.sum(g[:, :, None] * m[None, :, :], axis=1)
            else:
                pull = tl.dot(g, m, pull, input_precision=PRECISION, out_dtype=ACC)
            total += tl.sum(g, axis=1)
        u = 2.0 * (total[:, None] * z - pull)
        tl.store(u_rows + r[None, :], u, mask=here[:, None] & (r < rank)[None, :])


@triton.jit
def class_distances_backward_kernel(
    layers,
    n,
    ADD: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dh = u R; one program per layer and tile of nodes; ADD: rows may be picked twice."""
    depth = tl.program_id(1)
    row = layers + depth * FIELDS
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    here = i < n
    number, inside = picked_rows(row, i, here)
    width, rank = tl.load(row + WIDTH).to(tl.int32), tl.load(row + RANK).to(tl.int32)
    factor = matrix(row, FACTOR, ACC)
    dense = tl.load(matrix(row, KIND, tl.int32)) == _DENSE
    u_rows = matrix(row, PULL, ACC) + i.to(tl.int64)[:, None] * rank
    to_rows = matrix(row, GRADIENT, ACC) + number[:, None] * width
    for low in range(0, width, BK):
        k = low + tl.arange(0, BK)
        within = k < width
        dh = tl.zeros([BN, BK], ACC)
        for start in range(tl.where(dense, 0, low), rank, BK):
            r = start + tl.arange(0, BK)
            u = tl.load(u_rows + r[None, :], mask=here[:, None] & (r < rank)[None, :], other=0.0)
            f = tl.load(
                factor + r[:, None] * width + k[None, :],
                mask=(r < rank)[:, None] & within[None, :],
                other=0.0,
            )
            dh = tl.dot(u, f, dh, input_precision=PRECISION, out_dtype=ACC)
        there = inside[:, None] & within[None, :]
        if ADD:
            tl.atomic_add(to_rows + k[None, :], dh, mask=there, sem="relaxed")
        else:
            tl.store(to_rows + k[None, :], dh, mask=there)


def class_distances(
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    index: list[Tensor | None],
) -> Tensor:
    """Return dist2 [L, n, C]; see `reference.class_distances`."""
    check(layers, index, valid=valid)
    constants = metrics(means, factors, valid)
    n, n_classes = picked_count(layers, index), len(valid)
    rows = [
        [*rows_fields(h, picked), *addresses(known, CONSTANTS), len(factor), 0, 0]
        for h, picked, known, factor in zip(layers, index, constants, factors, strict=True)
    ]
    given = {
        "layers": table(rows, valid.device),
        "valid": valid,
        "n": n,
        "n_classes": n_classes,
    }
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
    """Return the gradients to the layers; see `reference.class_distances_backward`."""
    check(layers, index, valid=valid)
    constants = metrics(means, factors, valid)
    n, n_classes = picked_count(layers, index), len(valid)
    given = {"grad": grad, "valid": valid, "n": n, "n_classes": n_classes}
    strides = "grad_stride_l", "grad_stride_n", "grad_stride_c"
    given |= dict(zip(strides, grad.stride(), strict=True)) | arithmetic(layers, means)
    product = {name: given[name] for name in ("n", "ACC", "PRECISION")}
    add = any(picked is not None for picked in index)
    allocate = torch.zeros if add else torch.empty
    options = {"dtype": constants[0]["center"].dtype, "device": grad.device}

    def run(config: Config) -> list[Tensor]:
        pulls = [torch.empty(n, len(factor), **options) for factor in factors]
        grads = [allocate(h.shape, **options) for h in layers]
        per_layer = zip(layers, index, constants, pulls, grads, strict=True)
        rows = [
            [
                *rows_fields(h, picked),
                *addresses(known, CONSTANTS),
                u.shape[1],
                u.data_ptr(),
                out.data_ptr(),
            ]
            for h, picked, known, u, out in per_layer
        ]
        grid, entries = (triton.cdiv(n, config.BN), len(layers)), table(rows, grad.device)
        tiles.launch(class_distances_pull_kernel, grid, config, layers=entries, **given)
        tiles.launch(
            class_distances_backward_kernel, grid, config, layers=entries, **product, ADD=add
        )
        return [out.to(h.dtype) for out, h in zip(grads, layers, strict=True)]

    return tiles.tuned("class_distances_backward", given, layers, BACKWARD_CONFIGS, run)
