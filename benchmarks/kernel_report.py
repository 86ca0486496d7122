"""Registers, shared memory and spills of every GPU kernel, compiled ahead of time without a GPU.

Every Triton kernel in every config that the tuning may choose, and every CUDA kernel if nvcc is
found. All widths that are multiples of 4 floats, with rows aligned to 16 bytes, share one version
of a kernel, which reads 16 bytes at a time; other widths such as 37 share another. On gfx942 spills
are those of vector registers; tf32x3 exists on NVIDIA GPUs only.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from . import kernel_report_cuda
from .op_cases import make_case

COLUMNS = ("kernel", "config", "target", "registers", "shared", "stack", "spills")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDTHS = (16, 37, 64, 128, 256)
Job = tuple[str, int, int, str, str, str]  # name, config, width, dtype, precision, target


def calls(
    width: int, dtype: str = "float32", n: int = 64, n_layers: int = 2, n_classes: int = 40
) -> dict[str, Callable]:
    """Return calls of the ops that launch each kernel, in training and in inference."""
    from metselect_dgl import kernels

    case = make_case(n, n_layers * (width,), n_classes, picked=n, dtype=torch.float32)
    known, index = case.metric(), [case.index] * n_layers
    layers, constants = [h.to(getattr(torch, dtype)) for h in case.layers], torch.float32
    if dtype == "float64":
        constants = torch.float64
    means, factors, weights, biases = (
        [each.to(constants) for each in part]
        for part in (known["means"], known["factors"], case.weights, case.biases)
    )
    metric = layers, means, factors, known["valid"]
    decoders = layers, weights, biases, torch.zeros(n, dtype=torch.int64)
    t, learn = torch.ones(n_layers, dtype=constants), [True] * n_layers
    grad = torch.zeros(n_layers, n, n_classes, dtype=constants)

    every_row = [None] * n_layers

    def select(labels, rule):
        return lambda: kernels.select_layer(*metric, t, index, labels, rule)

    def backward(index):
        return lambda: kernels.class_distances_backward(grad, *metric, index)

    def loss(deep_supervision, index=index, keep_logits=False):
        rest = case.labels, index, deep_supervision, learn, keep_logits
        return lambda: kernels.selected_cross_entropy(*decoders, *rest)

    return {
        "class_distances": lambda: kernels.class_distances(*metric, index),
        "class_distances_backward": backward(index),
        "class_distances_backward, all rows": backward(every_row),
        "select_layer": select(case.labels, "confidence"),
        "select_layer, no labels": select(None, "confidence"),
        "select_layer, by distance": select(case.labels, "distance"),
        "selected_cross_entropy": loss(1.0),
        "selected_cross_entropy, all rows, logits kept": loss(1.0, every_row, True),
        "selected_cross_entropy, no deep supervision": loss(0.0),
        "selected_logits": lambda: kernels.selected_logits(*decoders, index),
    }


def jobs(
    widths: Sequence[int] = WIDTHS,
    targets: Sequence[str] = TARGETS,
    dtypes: Sequence[str] = ("float32",),
    precisions: Sequence[str] = ("ieee",),
) -> Iterator[Job]:
    """Yield the jobs, without repeating those that compile the same code."""
    from .compile_ahead import recorded_launches

    for dtype in dtypes:
        seen = set()
        for width in widths:
            for name, call in calls(width, dtype).items():
                for at, launch in enumerate(recorded_launches(call)):
                    kind = name, launch.config, str(launch.constants)
                    if kind in seen:
                        continue
                    seen.add(kind)
                    for precision in precisions:
                        for target in targets:
                            if not (precision == "tf32x3" and target.startswith("gfx")):
                                yield name, at, width, dtype, precision, target


def compiled(job: Job) -> dict:
    """Compile a job and return its row of the table."""
    name, at, width, dtype, precision, target = job
    os.environ["METSELECT_PRECISION"] = precision
    from .compile_ahead import recorded_launches, resources

    launch = recorded_launches(calls(width, dtype)[name])[at]
    c = launch.config
    reads = f"{launch.constants.get('VECTOR', 1)} x {dtype}"
    config = f"{c.BN} x {c.BC} x {c.BK}, {c.num_warps} warps, {reads}, {precision}"
    stage = launch.kernel.__name__.removesuffix("_kernel").rpartition("_")[2]
    kernel = f"{name} ({stage})" if stage == "pull" else name
    return {"kernel": kernel, "config": config, "target": target, **resources(launch, target)}


def rows(every: Sequence[Job], workers: int = 2) -> list[dict]:
    """Compile all jobs in new processes: it is slow, and not possible in Triton's interpreter."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        done = pool.map(compiled, every)
        return list(tqdm(done, total=len(every), unit="kernel", disable=not sys.stderr.isatty()))


def table(found: list[dict]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + len(COLUMNS) * "---|"]
    lines += ["| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in found]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write the table to")
    args = parser.parse_args()
    nvidia = [target for target in TARGETS if target.startswith("sm")]
    narrow_and_wide = jobs([64], nvidia, ["bfloat16", "float64"])
    precise = jobs([64], nvidia, precisions=["tf32", "tf32x3"])
    every = [*jobs(), *narrow_and_wide, *precise]
    print(f"compiling {len(every)} kernels", flush=True)
    found = rows(every) + kernel_report_cuda.rows()
    text = table(found)
    print(text)
    if args.out:
        args.out.write_text(f"# Resources of the GPU kernels\n\n{__doc__}\n{text}\n")
    spilling = [row for row in found if row["stack"] or row["spills"]]
    if spilling:
        raise SystemExit(f"{len(spilling)} kernels spill:\n{table(spilling)}")


if __name__ == "__main__":
    main()
