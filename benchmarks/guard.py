"""The guard against regressions: how long our ops take as a multiple of their bare products, at a
size that takes seconds, with bounds that noise does not reach but a lost optimisation does.

`python -m benchmarks.guard FILE.json` measures it ten times, alone and beside a process that keeps
a core busy; the tests (tests/test_speed.py) measure it once."""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pytest_benchmark.utils import get_commit_info
from tqdm import tqdm

from .ops import BARE, OPS, Inputs, Rows
from .timing import paired_ratio, take_turns

# Native / bare products, in one thread: between the largest that was measured and the smallest of
# an op that does its work twice (results/guard.json).
BOUNDS = {
    "moments": 2.0,
    "class_distances": 2.8,
    "class_distances_gradient": 3.6,
    "select_layer": 3.3,
    "selected_cross_entropy": 2.5,
    "selected_cross_entropy_gradient": 2.35,
    "head": 3.4,
}
ROWS = Rows(n=8192)


def measure(op: str, x: Inputs, rounds: int = 15) -> dict[str, float]:
    """Medians of the paired ratios to the bare products: of ours, and of ours done twice, which
    stands for a regression."""
    every = OPS[op](x)
    native, limit = every["native"], next(every[name] for name in BARE if name in every)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = Inputs(ROWS)
    found = {}
    for busy in (False, True):
        with neighbour(busy):
            found["beside a busy process" if busy else "alone"] = [
                {op: measure(op, x) for op in BOUNDS} for _ in tqdm(range(args.runs), disable=None)
            ]
    commit = {"id": get_commit_info()["id"], "torch": torch.__version__}
    said = {"commit_info": commit, "rows": vars(ROWS), "bounds": BOUNDS, "runs": found}
    args.file.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
