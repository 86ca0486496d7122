"""Predict the time of MetSelect's head on GPUs from its memory traffic, FLOP and kernel launches.

No time in this file was measured on a GPU, except the paper's epochs, which its authors measured.

- An op takes max(bytes / (0.8 bandwidth), FLOP / (0.6 peak rate)) + launches x 10 us. The fused
  kernels reach 0.3 of the peak rate: their float32 products read operands from shared memory.
- `eager` (the paper's formula and a plain loss in torch) and `reference` (plain torch, used without
  Triton) are counted while the code runs on the CPU: every aten op is one kernel that reads its
  inputs and writes its results once; a gather or scatter moves only the selected rows; FLOP are
  those of matrix products. This is a lower bound: some ops take several kernels.
- `fused` (Triton and CUDA) is counted likewise, with formulas for the fused kernels: a tile of rows
  is read from DRAM once, and sums over rows pass through slots, written and read once.
- A Cholesky factor, inverse or triangular solve of D columns counts as D / 8 launches.
- float32 products run on the FP32 units; with --precision tf32 on the tensor cores (not on a V100,
  and not for the moments). An exponential or logarithm counts as 8 FLOP.
"""

import argparse
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from metselect_dgl import functional as MF
from metselect_dgl import reference
from metselect_dgl.experiments.paper import EPOCH_SECONDS
from metselect_dgl.experiments.tables import markdown

from .baselines import paper_formula, plain_loss
from .op_cases import make_case


@dataclass(frozen=True)
class GPU:
    """Published peaks: bytes/s, FLOP/s of the FP32 units and of dense tf32 (0: none), and SMs."""

    name: str
    bandwidth: float
    fp32: float
    tf32: float
    multiprocessors: int


V100 = GPU("V100", 900e9, 15.7e12, 0, 80)  # SXM2
A100 = GPU("A100", 2039e9, 19.5e12, 156e12, 108)  # SXM4, 80 GB
H100 = GPU("H100", 3350e9, 66.9e12, 494.7e12, 132)  # SXM5
GPUS = (V100, A100, H100)


@dataclass(frozen=True)
class Size:
    """N nodes, n labelled rows, L layers, C classes, D features; by default those of ogbn-arxiv."""

    N: int = 169_343
    n: int = 90_941
    L: int = 3
    C: int = 40
    D: int = 64


@dataclass(frozen=True)
class Cost:
    """Bytes of DRAM traffic, FLOP of matrix products, other FLOP, kernel launches."""

    bytes: float = 0
    products: float = 0
    other: float = 0
    launches: float = 0

    def __add__(self, more: "Cost") -> "Cost":
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Cost(*(mine + theirs for mine, theirs in pairs))

    def __rmul__(self, times: float) -> "Cost":
        return Cost(*(times * each for each in vars(self).values()))

    def seconds(self, gpu: GPU, fused: bool = False, precision: str = "ieee") -> float:
        share = 0.3 if fused else 0.6
        rate = gpu.tf32 if precision == "tf32" and gpu.tf32 else gpu.fp32
        arithmetic = (self.products / rate + self.other / gpu.fp32) / share
        return max(self.bytes / (0.8 * gpu.bandwidth), arithmetic) + self.launches * 10e-6


def fused_costs(size: Size, gpu: GPU) -> dict[str, Cost]:
    """Return the costs of the ops that have a fused kernel, for float32 features."""
    N, n, L, C, D = vars(size).values()
    padded = max(16, 2 ** math.ceil(math.log2(C))) if C <= 64 else 64 * math.ceil(C / 64)
    gram_tiles = math.ceil(D / 64) * (math.ceil(D / 64) + 1) // 2  # 64 x 64, half of the matrix
    slots = 48 * gpu.multiprocessors * (64**2 + C * D / gram_tiles)
    return {
        "moments": Cost(
            bytes=L * n * (4 * D + 16) + slots,
            other=L * n * (2 * gram_tiles * 64**2 + 2 * D),
            launches=4,
        ),
        "select_layer": Cost(
            bytes=L * (n * (4 * D + 8) + 24 * D**2) + 28 * n,
            products=L * (2 * n * padded * D + 4 * C * D**2),
            other=L * n * (D + 8 * padded),
            launches=30,
        ),
        "selected_cross_entropy": Cost(
            bytes=L * (4 * N * D + n * (12 * D + 8) + 16 * gpu.multiprocessors * C * D) + 16 * n,
            products=L * 6 * n * padded * D,
            other=L * n * padded * 11,
            launches=5 * L + 3,
        ),
        "class_distances": Cost(  # whitens the rows anew for every 32 classes
            bytes=L * n * (4 * D + 8 + 4 * C),
            products=L * math.ceil(padded / 32) * n * D * (D + 1),
            other=L * 3 * n * padded * D,
            launches=28,
        ),
        "class_distances_backward": Cost(
            bytes=L * (4 * N * D + n * (20 * D + 16 + 4 * C)),
            products=L * (2 * n * D * (D + 1) + 2 * n * padded * D),
            other=L * 4 * n * D,
            launches=30 + 2 * L,
        ),
    }


FREE = {"new_empty", "empty_like", "promote_types"}
WRITE_ONLY = {"new_zeros", "new_full", "zeros_like", "ones_like"}
GATHERS = {"index", "gather"}
SCATTERS = {"index_add_": 3, "index_put_": 2, "index_put": 2}  # the argument that holds the rows
FACTORISATIONS = {"linalg_cholesky_ex", "linalg_inv_ex", "linalg_solve_triangular"}


class CostCounter(TorchDispatchMode):
    """Count bytes and launches of the aten ops that run inside, and the calls of metselect ops that
    are in `fused`; other metselect ops are replaced by the reference."""

    def __init__(self, fused: Collection[str] = ()) -> None:
        super().__init__()
        self.fused, self.cost, self.calls = fused, Cost(), Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, own_name = kwargs or {}, op.name().partition("::")[2]
        if op.namespace == "metselect" and own_name not in self.fused:
            with self:
                return getattr(reference, own_name)(*args, **kwargs)
        result = op(*args, **kwargs)
        if op.namespace == "metselect":
            self.calls[own_name] += 1
            return result
        name = op.__name__.split(".")[0]
        read, written = _tensors((args, kwargs)), _tensors(result)
        if name in FREE or (not name.endswith("_") and _is_view(read, written)):
            return result
        moved = _bytes(written) + (0 if name in WRITE_ONLY else _bytes(read))
        if name in GATHERS:
            moved -= max(0, _bytes([args[0]]) - _bytes(written))
        if name in SCATTERS:
            moved -= 2 * max(0, _bytes([args[0]]) - _bytes([args[SCATTERS[name]]]))
        launches = written[0].shape[-1] / 8 if name in FACTORISATIONS else 1
        self.cost += Cost(bytes=moved, launches=launches)
        return result


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_view(read: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in read if tensor.numel()}
    new = [t for t in written if t.numel() and t.untyped_storage().data_ptr() not in storages]
    return bool(written) and not new


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the size in memory; an expanded tensor, or one that is given twice, counts once."""
    unique = {(t.untyped_storage().data_ptr(), t.storage_offset()): t for t in tensors}
    total = 0
    for tensor in unique.values():
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        total += tensor.element_size() * math.prod(n for n, stride in dimensions if stride)
    return total


@cache
def counted_steps(path: str, size: Size) -> dict[str, tuple[Cost, Counter]]:
    """Run the steps of the head on the CPU, gradients included; return by name the cost of their
    aten ops and how often they call each fused op."""
    case = make_case(size.N, [size.D] * size.L, size.C, picked=size.n, dtype=torch.float32)
    labels, index, layer = case.labels, case.index, torch.arange(size.n) % size.L
    leaves = []
    for part in (case.layers, case.weights, case.biases):
        leaves.append([tensor.clone().requires_grad_() for tensor in part])
    twice = torch.tensor(2.0)  # a GPU does not know the gradient of the loss, and multiplies by it
    if path == "eager":
        rows, shrinkage = [h[index] for h in case.layers], torch.full((size.L,), 0.1)
        steps = {
            "moments, whitening, selection": lambda: paper_formula(rows, labels, size.C, shrinkage),
            "loss": lambda: plain_loss(*leaves, layer, labels, index).backward(twice),
        }
    else:
        metric = case.metric()
        moments = MF.moments(case.layers, labels, size.C, index=index)
        gradient = torch.ones(size.L, size.n, size.C)

        def loss():
            value, *_ = MF.selected_cross_entropy(*leaves, layer, labels, index=index)
            value.backward(twice)

        steps = {
            "moments": lambda: MF.moments(case.layers, labels, size.C, index=index),
            "whitening": lambda: (moments.means(), MF.whitening(moments)),
            "select_layer": lambda: MF.select_layer(
                case.layers, **metric, index=index, labels=labels
            ),
            "loss": loss,
            BESIDE: lambda: MF.class_distances(leaves[0], **metric, index=index).backward(gradient),
        }
    counted = {}
    for name, run in steps.items():
        fused = fused_costs(size, A100) if path == "fused" else ()
        with FlopCounterMode(display=False) as flops, CostCounter(fused) as counter:
            run()
        counted[name] = counter.cost + Cost(products=flops.get_total_flops()), counter.calls
    return counted


def head_costs(path: str, size: Size, gpu: GPU = A100) -> dict[str, Cost]:
    """Return the costs of the steps of the head, gradients included, by name: counted with 1/8 and
    1/4 of the rows and extended, since costs grow by the same amount with every row."""
    fewest, few = (replace(size, N=size.N // part, n=size.n // part) for part in (8, 4))
    at_fewest, at_few = counted_steps(path, fewest), counted_steps(path, few)
    share = (size.n - few.n) / (few.n - fewest.n)
    fused, costs = fused_costs(size, gpu), {}
    for name, (cost, calls) in at_few.items():
        growth = cost + -1 * at_fewest[name][0]
        costs[name] = sum((times * fused[op] for op, times in calls.items()), cost + share * growth)
    return costs


BESIDE = "class_distances"  # for losses made of distances; not part of the head's total
PATHS = ("eager", "reference", "fused")


def seconds(path: str, costs: dict[str, Cost], gpu: GPU, precision: str = "ieee") -> float:
    """Return the predicted time of the head."""
    total = 0.0
    for name, cost in costs.items():
        if name != BESIDE:
            total += cost.seconds(gpu, path == "fused", precision)
    return total


def op_table(size: Size, precision: str = "ieee") -> str:
    """Return traffic, FLOP, launches and predicted milliseconds of every step, for the A100 and
    H100."""
    header = ["", "MB", "GFLOP", "launches", "A100, ms", "H100, ms"]
    rows = []
    for path in PATHS:
        on_h100 = head_costs(path, size, H100)
        for name, cost in head_costs(path, size, A100).items():
            flops = (cost.products + cost.other) / 1e9
            row = [f"{path}: {name}", f"{cost.bytes / 1e6:.0f}", f"{flops:.1f}"]
            row.append(f"{cost.launches:.0f}")
            for each, gpu in ((cost, A100), (on_h100[name], H100)):
                row.append(f"{1e3 * each.seconds(gpu, path == 'fused', precision):.2f}")
            rows.append(row)
    return markdown((header, rows))


def head_table(widths: list[int], precision: str = "ieee") -> str:
    """Return the predicted milliseconds of the head by width and GPU, and as a share of the paper's
    epoch of FinalSelect on a V100."""
    epochs = {backbone: EPOCH_SECONDS[backbone]["FinalSelect"] for backbone in EPOCH_SECONDS}
    header = ["ms", *(gpu.name for gpu in GPUS)]
    header += [f"of {backbone}'s epoch, V100" for backbone in epochs]
    rows = []
    for width in widths:
        for path in PATHS:
            row = [f"D = {width}, {path}"]
            for gpu in GPUS:
                time = seconds(path, head_costs(path, Size(D=width), gpu), gpu, precision)
                row.append(f"{1e3 * time:.1f}")
                if gpu is V100:
                    shares = [f"{100 * time / epoch:.1f} %" for epoch in epochs.values()]
            rows.append(row + shares)
    return markdown((header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--precision", choices=("ieee", "tf32"), default="ieee")
    parser.add_argument("--out", type=Path, help="write a page of Markdown")
    args = parser.parse_args()
    parts = ["# Predicted time of the head on a GPU", __doc__.strip(), "## By op, D = 64"]
    parts += [op_table(Size(), args.precision), "## The head by width"]
    parts.append(head_table(args.width, args.precision))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
