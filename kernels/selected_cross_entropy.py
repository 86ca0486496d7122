"""selected_cross_entropy: loss and all gradients in one pass over the rows of every layer.

    a = W_l h + b_l,   loss = sum_i k_i (log sum_c exp(a_c) - a_y),
    da = k (softmax(a) - onehot(y)),   dh = da W,   dW = sum_i da h^T,   db = sum_i da

k_i = ([layer_i = l] + deep_supervision / L) / n. Without deep supervision a layer decodes only the
nodes that selected it, which are consecutive after a sort. Logits are written only if requested:
those of a tile stay in registers or, with many classes, are recomputed for each block of classes.

Several programs process a layer; each sums dW and db of its tiles in its own slot, and the slots
are summed at the end, so that these sums do not depend on the order of the programs. The last bits
of dh of a row that is picked three times or more do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .tiles import (
    DTYPES,
    Config,
    arithmetic,
    check,
    class_numbers,
    matrix,
    number,
    number_bits,
    own_fields,
    picked_count,
    picked_rows,
    row_pointers,
    rows_fields,
    table,
)

WEIGHTS, BIASES, TO_ROWS, TO_WEIGHTS, TO_BIASES, SHARE, DEEP_SHARE, FIELDS = own_fields(7)
# The first keeps the logits of up to 64 classes in registers between loss and gradient; the second
# computes them twice, with half as many partial sums of the decoders' gradients.
CONFIGS = (Config(32, 64, 16, 8), Config(64, 32, 16, 8))
LOGITS_CONFIGS = (Config(64, 32, 16, 8), Config(32, 32, 16, 8))


@triton.jit
def decoded(
    x_rows,
    step,
    width,
    row,
    c,
    n_classes,
    inside,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """W h + b of the classes c, [BN, BC]; -inf for c >= n_classes."""
    weight, known = matrix(row, WEIGHTS, WEIGHT), c < n_classes
    a = tl.zeros([BN, BC], ACC)
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        within = k < width
        x = tl.load(x_rows + k[None, :] * step, mask=inside[:, None] & within[None, :], other=0.0)
        w = tl.load(
            weight + c[None, :] * width + k[:, None],
            mask=within[:, None] & known[None, :],
            other=0.0,
        )
        a = tl.dot(x.to(ACC), w.to(ACC), a, input_precision=PRECISION, out_dtype=ACC)
    bias = tl.load(matrix(row, BIASES, WEIGHT) + c, mask=known, other=0.0).to(ACC)
    return tl.where(known[None, :], a + bias[None, :], float("-inf"))


@triton.jit
def selected_cross_entropy_kernel(
    layers,
    order,
    starts,
    chosen,
    labels,
    loss_parts,
    logits,
    n,
    n_classes,
    BUCKETED: tl.constexpr,
    LABELLED: tl.constexpr,
    LEARNING: tl.constexpr,
    KEEP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """Program (p, l) of (P, L) processes every P-th tile of the rows of layer l."""
    slot, depth = tl.program_id(0), tl.program_id(1)
    row = layers + depth * FIELDS
    begin, end = 0, n
    if BUCKETED:
        begin, end = tl.load(starts + depth).to(tl.int32), tl.load(starts + depth + 1).to(tl.int32)
    own_share, share = number(row + SHARE).to(ACC), number(row + DEEP_SHARE).to(ACC)
    loss = tl.zeros([BN], ACC)
    for tile in range(begin + slot * BN, end, tl.num_programs(0) * BN):
        i = tile + tl.arange(0, BN)
        here = i < end
        if BUCKETED:
            i = tl.load(order + i, mask=here, other=0).to(tl.int32)
            own = here
        else:
            own = here & (tl.load(chosen + i, mask=here, other=0) == depth)
        place, inside = picked_rows(row, i, here)
        x_rows, step, width = row_pointers(row, place, DTYPE, VECTOR)
        top, total = tl.full([BN], float("-inf"), ACC), tl.zeros([BN], ACC)
        right = tl.zeros([BN], ACC)
        a = tl.zeros([BN, BC], ACC)
        if LABELLED:
            y = class_numbers(labels, i, here, n_classes)
        for first in range(0, n_classes, BC):
            c = first + tl.arange(0, BC)
            a = decoded(
                x_rows, step, width, row, c, n_classes, inside, WEIGHT, ACC, PRECISION, BN, BC, BK
            )
            if KEEP:
                to = logits + i.to(tl.int64)[:, None] * n_classes + c[None, :]
                value = tl.where(inside[:, None], a, float("nan"))
                tl.store(to, value, mask=own[:, None] & (c < n_classes)[None, :])
            if LABELLED:
                right += tl.sum(tl.where(c[None, :] == y[:, None], a, 0.0), axis=1)
                most = tl.maximum(top, tl.max(a, axis=1))
                total = total * tl.exp(top - most) + tl.sum(tl.exp(a - most[:, None]), axis=1)
                top = most
        if LABELLED:
            scale = tl.where(own, own_share + share, share)
            one = tl.where(inside & (y >= 0), scale * (tl.log(total) + (top - right)), float("nan"))
            loss += tl.where(here, one, 0.0)
        if LEARNING:
            tl.debug_barrier()  # other threads write the slots of the previous tile
            weight = matrix(row, WEIGHTS, WEIGHT)
            to_rows = matrix(row, TO_ROWS, ACC) + place[:, None] * width
            to_weight = matrix(row, TO_WEIGHTS, ACC) + slot.to(tl.int64) * n_classes * width
            to_bias = matrix(row, TO_BIASES, ACC) + slot * n_classes
            wanted = tl.load(row + TO_ROWS) != 0
            for first in range(0, n_classes, BC):
                c = first + tl.arange(0, BC)
                known = c < n_classes
                if not ONE_BLOCK:
                    a = decoded(
                        x_rows,
                        step,
                        width,
                        row,
                        c,
                        n_classes,
                        inside,
                        WEIGHT,
                        ACC,
                        PRECISION,
                        BN,
                        BC,
                        BK,
                    )
                onehot = tl.where(c[None, :] == y[:, None], 1.0, 0.0)
                softmax = tl.exp(a - top[:, None]) / total[:, None]
                da = scale[:, None] * (softmax - onehot)
                da = tl.where(inside[:, None], da, 0.0)
                db = tl.load(to_bias + c, mask=known, other=0.0) + tl.sum(da, axis=0)
                tl.store(to_bias + c, db, mask=known)
                for start in range(0, width, BK):
                    k = start + tl.arange(0, BK)
                    within = k < width
                    there = known[:, None] & within[None, :]
                    x = tl.load(
                        x_rows + k[None, :] * step,
                        mask=inside[:, None] & within[None, :],
                        other=0.0,
                    )
                    dw = tl.load(to_weight + c[:, None] * width + k[None, :], mask=there, other=0.0)
                    dw = tl.dot(
                        tl.trans(da), x.to(ACC), dw, input_precision=PRECISION, out_dtype=ACC
                    )
                    tl.store(to_weight + c[:, None] * width + k[None, :], dw, mask=there)
                    if wanted:
                        w = tl.load(weight + c[:, None] * width + k[None, :], mask=there, other=0.0)
                        dh = tl.dot(da, w.to(ACC), input_precision=PRECISION, out_dtype=ACC)
                        seat = inside[:, None] & within[None, :]
                        if ADD:
                            tl.atomic_add(to_rows + k[None, :], dh, mask=seat, sem="relaxed")
                        else:
                            tl.store(to_rows + k[None, :], dh, mask=seat)
    if LABELLED:
        tl.store(loss_parts + depth * tl.num_programs(0) + slot, tl.sum(loss, axis=0))


def selected_cross_entropy(
    layers: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    layer: Tensor,
    labels: Tensor,
    index: list[Tensor | None],
    deep_supervision: float,
    wanted: list[bool],
    keep_logits: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return (loss, logits, *gradients); see `reference.selected_cross_entropy`."""
    decoders = layers, weights, biases, layer
    loss, logits, *grads = _decode(*decoders, labels, index, deep_supervision, wanted, keep_logits)
    return loss if len(labels) else loss / 0, logits, *grads


def selected_logits(
    layers: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    layer: Tensor,
    index: list[Tensor | None],
) -> Tensor:
    """Return the logits [n, C] of each picked row from the decoder of its layer."""
    _, logits, *_ = _decode(layers, weights, biases, layer, None, index, 0.0, [], True)
    return logits


def _buckets(layer: Tensor, n_layers: int) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by selected layer, and the first position of each layer."""
    by_layer, order = layer.sort(stable=True)
    depths = torch.arange(n_layers + 1, device=layer.device)
    return order, torch.searchsorted(by_layer, depths)


def _programs(n: int, config: Config, device: torch.device) -> int:
    """Return the number of programs per layer: two per multiprocessor; 3 on a CPU, for tests."""
    busy = 3
    if device.type == "cuda":
        busy = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return min(busy, triton.cdiv(n, config.BN))


class _Gradients:
    """Memory for the wanted gradients to rows, and for the gradients to decoders in each slot."""

    def __init__(self, layers, weights, wanted: list[bool], slots: int, zeros: bool) -> None:
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        allocate = torch.zeros if zeros else torch.empty
        shapes = [h.shape if want else (0,) for h, want in zip(layers, wanted, strict=True)]
        options = {"dtype": wide, "device": weights[0].device}
        self.to_rows = [allocate(shape, **options) for shape in shapes]
        self.to_weights = [torch.zeros(slots, *w.shape, **options) for w in weights]
        self.to_biases = [torch.zeros(slots, len(w), **options) for w in weights]

    def addresses(self, depth: int) -> list[int]:
        parts = self.to_rows, self.to_weights, self.to_biases
        return [part[depth].data_ptr() for part in parts]

    def summed(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the gradients to rows, at least float32 because a scaled loss still multiplies
        them, and the sums over slots in the dtype of the decoders."""
        to_weights = [slots.sum(0).to(dtype) for slots in self.to_weights]
        to_biases = [slots.sum(0).to(dtype) for slots in self.to_biases]
        return self.to_rows, to_weights, to_biases


def _decode(layers, weights, biases, layer, labels, index, deep_supervision, wanted, keep_logits):
    check(layers, index, layer=layer, labels=labels)
    n, n_classes, learning = picked_count(layers, index), len(weights[0]), bool(wanted)
    weights = [weight.contiguous() for weight in weights]
    biases = [bias.contiguous() for bias in biases]
    wanted = wanted or [False] * len(layers)
    bucketed = deep_supervision == 0
    order, starts = _buckets(layer, len(layers)) if bucketed else (None, None)
    shares = [number_bits(share / max(n, 1)) for share in (1.0, deep_supervision / len(layers))]
    given = {"order": order, "starts": starts, "chosen": layer, "labels": labels}
    given |= {"n": n, "n_classes": n_classes, "BUCKETED": bucketed, "KEEP": keep_logits}
    given |= {"LABELLED": labels is not None, "LEARNING": learning}
    given |= {"WEIGHT": DTYPES[weights[0].dtype], **arithmetic(layers, weights)}

    def run(config: Config) -> tuple:
        programs, one_block = _programs(n, config, layer.device), n_classes <= config.BC
        add = not one_block or any(picked is not None for picked in index)
        grads = _Gradients(layers, weights, wanted, learning * programs, add or bucketed)
        loss = grads.to_biases[0].new_zeros(len(layers), programs)
        logits = weights[0].new_empty(n if keep_logits else 0, n_classes)
        rows = [
            [*rows_fields(h, at), w.data_ptr(), b.data_ptr(), *grads.addresses(depth), *shares]
            for depth, (h, at, w, b) in enumerate(zip(layers, index, weights, biases, strict=True))
        ]
        outputs = {"layers": table(rows, layer.device), "loss_parts": loss, "logits": logits}
        outputs |= {"ONE_BLOCK": one_block, "ADD": add}
        grid = programs, len(layers)
        tiles.launch(selected_cross_entropy_kernel, grid, config, **given, **outputs)
        summed = grads.summed(weights[0].dtype) if learning else ([], [], [])
        return loss.sum().to(weights[0].dtype), logits, *summed

    configs = CONFIGS if learning else LOGITS_CONFIGS
    return tiles.tuned("selected_cross_entropy", given, layers, configs, run)
