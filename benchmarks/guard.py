"""The guard against performance regressions: time of every op relative to its bare matrix products,
and of a MetSelect epoch relative to a plain DGL loop, at sizes that take seconds. The bounds are
above all measured noise and below the time of an op that does its work twice.

`python -m benchmarks.guard FILE.json` measures ten times, alone and beside a process that keeps a
core busy; the tests (tests/test_speed.py) measure once."""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from pytest_benchmark.plugin import pytest_benchmark_generate_machine_info
from pytest_benchmark.utils import get_commit_info
from tqdm import tqdm

from metselect_dgl.data import NodeDataset, contextual_sbm

from .head_ops import LIMIT, OPS
from .inputs import Inputs, Rows
from .interleaved_timing import paired_ratio, time_interleaved
from .models import PROVIDERS, Epochs, Size

# One thread. Between the largest measured ratio and the smallest of an op that does its work twice
# (results/guard.json).
BOUNDS = {
    "moments": 2.6,
    "class_distances": 2.75,
    "class_distances_gradient": 3.5,
    "select_layer": 3.3,
    "selected_cross_entropy": 2.5,
    "selected_cross_entropy_gradient": 2.3,
    "head": 3.4,
    "epoch gcn": 1.35,
    "epoch gat": 0.42,
    "epoch gin": 1.35,
}
ROWS = Rows(n=8192)


@cache
def inputs() -> tuple[Inputs, NodeDataset]:
    """Return rows for the ops and a graph for the epochs."""
    return Inputs(ROWS), contextual_sbm(ROWS.n, n_feats=ROWS.D, degree=14)


def pair(what: str) -> tuple[Callable, Callable]:
    """Return the implementation of this package and its denominator."""
    x, data = inputs()
    if what in OPS:
        runs = OPS[what](x)
        return runs["native"], runs[LIMIT]
    size = Size(what.removeprefix("epoch "))
    return tuple(Epochs(PROVIDERS[name], size, data) for name in ("MetSelect", "plain-DGL"))


def measure(what: str, rounds: int = 15) -> dict[str, float]:
    """Return the medians of the paired ratios, and of the work done twice, which stands for a
    regression."""
    native, limit = pair(what)
    runs = {"native": native, "twice": lambda: (native(), native()), "limit": limit}
    times = time_interleaved(runs, rounds, seconds=10)
    return {
        name: paired_ratio(times[name], times["limit"])["median"] for name in ("native", "twice")
    }


@contextmanager
def background_load(enabled: bool) -> Iterator[None]:
    """Keep one core busy with another process, if enabled."""
    if not enabled:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
    process.start()
    time.sleep(5)  # it has to import torch
    try:
        yield
    finally:
        process.kill()


def _compute() -> None:
    torch.set_num_threads(1)
    square = torch.rand(500, 500)
    while True:
        square @ square


def _cpu() -> str:
    return pytest_benchmark_generate_machine_info()["cpu"].get("brand_raw", "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {"alone": [], "beside a busy process": []}
    for condition, results in runs.items():
        with background_load(condition != "alone"):
            for _ in tqdm(range(args.runs), disable=None):
                results.append({what: measure(what) for what in BOUNDS})
    commit = {"id": get_commit_info()["id"], "torch": torch.__version__, "cpu": _cpu()}
    report = {"commit_info": commit, "rows": vars(ROWS), "bounds": BOUNDS, "runs": runs}
    args.file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
