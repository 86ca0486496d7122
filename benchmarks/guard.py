"""The guard against regressions: how long our ops take as a multiple of their bare products, and an
epoch of MetSelect as a multiple of a plain DGL loop's, at sizes that take seconds, with bounds that
noise does not reach but an op that does its work twice does.

`python -m benchmarks.guard FILE.json` measures it ten times, alone and beside a process that keeps
a core busy; the tests (tests/test_speed.py) measure it once."""

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

from .inputs import Inputs, Rows
from .models import PROVIDERS, Epochs, Size
from .ops import LIMIT, OPS
from .timing import paired_ratio, take_turns

# In one thread: between the largest that was measured and the smallest of an op that does its work
# twice (results/guard.json).
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
    """Rows for the ops, and a graph for the epochs."""
    return Inputs(ROWS), contextual_sbm(ROWS.n, n_feats=ROWS.D, degree=14)


def contestants(what: str) -> tuple[Callable, Callable]:
    """Ours, and what it is measured against."""
    x, data = inputs()
    if what in OPS:
        runs = OPS[what](x)
        return runs["native"], runs[LIMIT]
    size = Size(what.removeprefix("epoch "))
    return tuple(Epochs(PROVIDERS[name], size, data) for name in ("MetSelect", "plain-DGL"))


def measure(what: str, rounds: int = 15) -> dict[str, float]:
    """Medians of the paired ratios: of ours, and of ours done twice, which stands for a
    regression."""
    native, limit = contestants(what)
    runs = {"native": native, "twice": lambda: (native(), native()), "limit": limit}
    turns = take_turns(runs, rounds, seconds=10)
    return {
        name: paired_ratio(turns[name], turns["limit"])["median"] for name in ("native", "twice")
    }


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """Another process that computes without end."""
    if not busy:
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
    found = {}
    for busy in (False, True):
        with neighbour(busy):
            found["beside a busy process" if busy else "alone"] = [
                {what: measure(what) for what in BOUNDS}
                for _ in tqdm(range(args.runs), disable=None)
            ]
    commit = {"id": get_commit_info()["id"], "torch": torch.__version__, "cpu": _cpu()}
    said = {"commit_info": commit, "rows": vars(ROWS), "bounds": BOUNDS, "runs": found}
    args.file.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
