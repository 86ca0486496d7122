"""Table 3: the time of a training epoch under every selector, as a ratio to FinalSelect's.

The selectors take turns, a few epochs each, so that a slow moment of the machine meets all.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..data import load_dataset
from ..train import TrainingLoop, prepare
from .lines import add_lines, read_lines
from .scope import Scope

TIMED = ("final", "ndls", "metselect", "metselect-paper")
LARGE = "arxiv-twin"
ROUNDS = {LARGE: 5}  # 15 of the others
_WARM_UP = 3
_TURN = 0.05  # seconds that a turn takes, at least


def epoch_times(scope: Scope, data_dir: str | None, out: Path) -> None:
    """Add a line for every dataset, backbone and selector; races that are there are not run."""
    names = [*scope.datasets, LARGE]
    pairs = [(dataset, backbone) for dataset in names for backbone in scope.backbones]
    done = {(each["dataset"], each["backbone"]) for each in read_lines(out, "time")}
    for pair in tqdm(pairs, unit="race"):
        if pair not in done:
            add_lines(list(_lines(scope, data_dir, *pair)), out, "time")


def _lines(scope: Scope, data_dir: str | None, dataset: str, backbone: str) -> Iterator[dict]:
    config = replace(scope.recipe, dataset=dataset, backbone=backbone, validate_every=10**9)
    data = prepare(config, load_dataset(dataset, data_dir))
    loops = {
        name: TrainingLoop(replace(config, selector=name, epochs=10**9), data, None)
        for name in TIMED
    }
    seconds = _race(loops, ROUNDS.get(dataset, 15))
    for name, times in seconds.items():
        low, ratio, high = np.quantile(times / seconds["final"], (0.25, 0.5, 0.75))
        yield {
            "study": "time",
            "dataset": dataset,
            "backbone": backbone,
            "selector": name,
            "ratio": round(ratio, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "seconds": round(float(np.median(times)), 6),
            "rounds": len(times),
        }


def _race(loops: dict[str, TrainingLoop], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of an epoch of every loop in every round; the first to run changes."""
    for loop in loops.values():
        for _ in range(_WARM_UP):
            loop.epoch()
    turns = {name: max(1, round(_TURN / _seconds(loop, 1))) for name, loop in loops.items()}
    times = {name: [] for name in loops}
    order = list(loops)
    for start in range(rounds):
        for name in order[start % len(order) :] + order[: start % len(order)]:
            times[name].append(_seconds(loops[name], turns[name]))
    return {name: np.array(values) for name, values in times.items()}


def _seconds(loop: TrainingLoop, epochs: int) -> float:
    """Of an epoch, the mean of several."""
    start = time.perf_counter()
    for _ in range(epochs):
        loop.epoch()
    return (time.perf_counter() - start) / epochs
