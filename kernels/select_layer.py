"""select_layer: layer, class and score of every node; nothing of size N x L x C is written.

    a_c = (<h - center, slope_c> - offset_c) / T,   score = a_y - log sum_{c != y} exp(a_c)

a_c is -dist2 / 2T up to a constant per node, so the rule "confidence" needs no D x D product. The
rule "distance" computes -|| R (h - mu_y) ||^2 for the class y only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .metric import DEAD, DENSE, metrics
from .tiles import (
    Config,
    addresses,
    arithmetic,
    check,
    class_numbers,
    matrix,
    own_fields,
    picked_count,
    picked_rows,
    row_pointers,
    rows_fields,
    table,
)

CONSTANTS = ("center", "slope", "offset", "kind", "mean", "factor")
CENTER, SLOPE, OFFSET, KIND, MEAN, FACTOR, RANK, FIELDS = own_fields(len(CONSTANTS) + 1)
# Up to 64 classes at a time, or 16 classes and more nodes.
CONFIGS = (Config(32, 64, 16, 8), Config(64, 16, 16, 8))
# Smaller tiles, because the distance needs more registers.
DISTANCE_CONFIGS = (Config(64, 16, 16, 8), Config(32, 32, 16, 8))
_DEAD, _DENSE = tl.constexpr(DEAD), tl.constexpr(DENSE)


@triton.jit
def log_add(top, total, value, weight):
    """Return (exponent, factor) of exp(top) total + exp(value) weight; exp(-inf) is 0."""
    most = tl.maximum(top, value)
    base = tl.where(most == float("-inf"), 0.0, most)
    return most, total * tl.exp(top - base) + weight * tl.exp(value - base)


@triton.jit
def tile_logits(
    x_rows,
    step,
    width,
    row,
    c,
    n_classes,
    inside,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """<h - center, slope_c> - offset_c, [BN, BC]."""
    center, slope = matrix(row, CENTER, ACC), matrix(row, SLOPE, ACC)
    a = tl.zeros([BN, BC], ACC)
    known = c < n_classes
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        within = k < width
        x = tl.load(x_rows + k[None, :] * step, mask=inside[:, None] & within[None, :], other=0.0)
        x = x.to(ACC) - tl.load(center + k, mask=within, other=0.0)[None, :]
        s = tl.load(
            slope + c[None, :] * width + k[:, None],
            mask=within[:, None] & known[None, :],
            other=0.0,
        )
        a = tl.dot(x, s, a, input_precision=PRECISION, out_dtype=ACC)
    return a - tl.load(matrix(row, OFFSET, ACC) + c, mask=known, other=0.0)[None, :]


@triton.jit
def own_distance(
    x_rows,
    step,
    width,
    row,
    asked,
    inside,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """|| R (h - mu_y) ||^2 with y = asked, [BN]; only the lower half of a triangular R is read."""
    mean, factor = matrix(row, MEAN, ACC), matrix(row, FACTOR, ACC)
    rank = tl.load(row + RANK).to(tl.int32)
    dense = tl.load(matrix(row, KIND, tl.int32)) == _DENSE
    dist2 = tl.zeros([BN], ACC)
    for first in range(0, rank, BK):
        r = first + tl.arange(0, BK)
        z = tl.zeros([BN, BK], ACC)
        for start in range(0, tl.where(dense, width, tl.minimum(width, first + BK)), BK):
            k = start + tl.arange(0, BK)
            within = k < width
            tile = inside[:, None] & within[None, :]
            x = tl.load(x_rows + k[None, :] * step, mask=tile, other=0.0).to(ACC)
            x -= tl.load(mean + asked[:, None] * width + k[None, :], mask=tile, other=0.0)
            f = tl.load(
                factor + r[None, :] * width + k[:, None],
                mask=within[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            z = tl.dot(x, f, z, input_precision=PRECISION, out_dtype=ACC)
        dist2 += tl.sum(z * z, axis=1)
    return dist2


@triton.jit
def select_layer_kernel(
    layers,
    valid,
    temperature,
    labels,
    layer_out,
    class_out,
    score_out,
    n,
    n_layers,
    n_classes,
    RULE: tl.constexpr,
    GUIDED: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per tile of nodes, which loops over the layers and keeps the best one."""
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    here = i < n
    if GUIDED:
        y = class_numbers(labels, i, here, n_classes)
    best_rank = tl.zeros([BN], ACC)
    best_score = tl.zeros([BN], ACC)
    best_layer = tl.zeros([BN], tl.int32)
    best_class = tl.zeros([BN], tl.int32)
    for depth in range(n_layers):
        row = layers + depth * FIELDS
        number, inside = picked_rows(row, i, here)
        x_rows, step, width = row_pointers(row, number, DTYPE, VECTOR)
        t = tl.load(temperature + depth).to(ACC)
        top = tl.full([BN], float("-inf"), ACC)
        answer = tl.zeros([BN], tl.int32)
        rest, weight = tl.full([BN], float("-inf"), ACC), tl.zeros([BN], ACC)
        own = tl.zeros([BN], ACC)
        for first in range(0, n_classes, BC):
            c = first + tl.arange(0, BC)
            a = tile_logits(
                x_rows, step, width, row, c, n_classes, inside, ACC, PRECISION, BN, BC, BK
            )
            seen = tl.load(valid + c, mask=c < n_classes, other=0) != 0
            own += tl.sum(0.0 * tl.where(seen[None, :], a, 0.0), axis=1)  # NaN if not finite
            a = tl.where(seen[None, :], a / t, float("-inf"))
            most, place = tl.max(a, axis=1, return_indices=True)
            if GUIDED:
                excluded = y
                own += tl.sum(tl.where(c[None, :] == y[:, None], a, 0.0), axis=1)
            else:
                excluded = first + place
            others = tl.where(c[None, :] == excluded[:, None], float("-inf"), a)
            second = tl.max(others, axis=1)
            base = tl.where(second == float("-inf"), 0.0, second)
            total = tl.sum(tl.exp(others - base[:, None]), axis=1)
            rest, weight = log_add(rest, weight, second, total)
            if not GUIDED:  # add the second of the two best classes to the rest
                rest, weight = log_add(rest, weight, tl.minimum(top, most), 1.0)
            answer = tl.where(most > top, first + place, answer)
            top = tl.maximum(top, most)
        if GUIDED:
            asked = y
        else:
            asked = answer
            own += top
        if RULE == "distance":
            dist2 = own_distance(
                x_rows, step, width, row, asked, inside & (asked >= 0), ACC, PRECISION, BN, BK
            )
            seen = tl.load(valid + asked, mask=asked >= 0, other=0) != 0
            score = tl.where(seen, 0.0 * own - dist2, float("-inf"))
        else:
            score = own - tl.where(weight > 0, rest + tl.log(weight), float("-inf"))
        score = tl.where(inside & (asked >= 0), score, float("nan"))
        rank = score
        if RULE == "opposite":
            rank = -score
        rank = tl.where(tl.load(matrix(row, KIND, tl.int32)) == _DEAD, float("-inf"), rank)
        # as torch.argmax: NaN is the largest value, and the first of equal values is selected
        better = (depth == 0) | (rank > best_rank) | ((rank != rank) & (best_rank == best_rank))
        best_rank = tl.where(better, rank, best_rank)
        best_score = tl.where(better, score, best_score)
        best_layer = tl.where(better, depth, best_layer)
        best_class = tl.where(better, answer, best_class)
    tl.store(layer_out + i, best_layer, mask=here)
    tl.store(class_out + i, best_class, mask=here)
    tl.store(score_out + i, best_score, mask=here)


def select_layer(
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    temperature: Tensor,
    index: list[Tensor | None],
    labels: Tensor | None,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (layer, class, score) of each picked row; see `reference.select_layer`."""
    check(layers, index, valid=valid, temperature=temperature, labels=labels)
    constants = metrics(means, factors, valid)
    n, n_classes = picked_count(layers, index), len(valid)
    rows = [
        [*rows_fields(h, picked), *addresses(known, CONSTANTS), len(factor)]
        for h, picked, known, factor in zip(layers, index, constants, factors, strict=True)
    ]
    given = {"layers": table(rows, valid.device), "n_layers": len(layers), "n": n}
    given |= {"valid": valid, "n_classes": n_classes, "temperature": temperature}
    given |= {"labels": labels, "GUIDED": labels is not None, "RULE": rule}
    given |= arithmetic(layers, means)

    def run(config: Config) -> tuple[Tensor, Tensor, Tensor]:
        layer = torch.empty(n, dtype=torch.int64, device=valid.device)
        answer, score = torch.empty_like(layer), means[0].new_empty(n)
        outputs = {"layer_out": layer, "class_out": answer, "score_out": score}
        grid = (triton.cdiv(n, config.BN),)
        tiles.launch(select_layer_kernel, grid, config, **given, **outputs)
        return layer, answer, score

    configs = DISTANCE_CONFIGS if rule == "distance" else CONFIGS
    return tiles.tuned("select_layer", given, layers, configs, run)
