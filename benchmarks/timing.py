"""Contestants take turns, so that a noisy machine is noisy for all of them: what counts is the
ratio of two turns of one round."""

import gc
import random
import time
from collections.abc import Callable, Iterable
from math import ceil

from metselect_dgl.experiments.bench import spread

TURN = 0.02  # seconds; what is shorter is repeated within its turn
LEAST = 3  # turns that everybody takes, however slow

Turns = dict[int, float]  # seconds by round


def take_turns(
    contestants: dict[str, Callable],
    rounds: int,
    seconds: float,
    progress: Callable[[range], Iterable[int]] = iter,
    clocks: set[str] = frozenset(),
) -> dict[str, Turns]:
    """Seconds of every turn of every contestant, after a turn that does not count.

    Every round has an order of its own, so that nobody always comes after the same one. Who has
    used up `seconds` sits out the remaining rounds, except for the LEAST first ones. `clocks` are
    those that return the time themselves.
    """
    gc.collect()
    gc.freeze()  # what is there now need not be looked at again
    try:
        return _take_turns(contestants, rounds, seconds, progress, clocks)
    finally:
        gc.unfreeze()


def _take_turns(contestants, rounds, seconds, progress, clocks) -> dict[str, Turns]:
    first = {name: _turn(run, 1, name in clocks) for name, run in contestants.items()}
    repeats = {
        name: 1 if name in clocks else ceil(TURN / max(took, 1e-7)) for name, took in first.items()
    }
    turns = {name: {} for name in contestants}
    for at in progress(range(rounds)):
        gc.collect()
        for name in random.Random(at).sample(list(contestants), len(contestants)):
            used = sum(turns[name].values()) * repeats[name]
            if at < LEAST or used < seconds:
                turns[name][at] = _turn(contestants[name], repeats[name], name in clocks)
    return turns


def _turn(run: Callable, repeats: int, clock: bool) -> float:
    """Seconds of one call, without those of the garbage collector."""
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(repeats):
            said = run()
        took = (time.perf_counter() - start) / repeats
    finally:
        gc.enable()
    return said if clock else took


def paired_ratio(above: Turns, below: Turns) -> dict[str, float]:
    """Median and quartiles of above / below over the rounds in which both took their turn."""
    both = [at for at in above if at in below]
    return spread([above[at] / below[at] for at in both])
