"""Interleaved timing: in every round each implementation runs once, so that noise on a shared
machine affects all of them. Report the ratio of two times of the same round."""

import gc
import random
import time
from collections.abc import Callable, Iterable
from math import ceil

from .runs import quartiles

MIN_SECONDS = 0.02  # a shorter call is repeated within its measurement
MIN_ROUNDS = 3  # measured for every implementation, however slow

Times = dict[int, float]  # seconds by round


def time_interleaved(
    implementations: dict[str, Callable],
    rounds: int,
    seconds: float,
    progress: Callable[[range], Iterable[int]] = iter,
    self_timed: set[str] = frozenset(),
) -> dict[str, Times]:
    """Return the seconds of every implementation in every round, after a warm-up call of each.

    The order changes from round to round, so that no implementation always follows the same one.
    An implementation that has used up `seconds` is left out of later rounds, but not of the first
    MIN_ROUNDS. Implementations in `self_timed` return their seconds themselves.
    """
    gc.collect()
    gc.freeze()  # existing objects are not scanned again
    try:
        return _time_rounds(implementations, rounds, seconds, progress, self_timed)
    finally:
        gc.unfreeze()


def _time_rounds(implementations, rounds, seconds, progress, self_timed) -> dict[str, Times]:
    repeats, times = {}, {}
    for name, run in implementations.items():
        warm_up = _time_call(run, 1, name in self_timed)
        repeats[name] = 1 if name in self_timed else ceil(MIN_SECONDS / max(warm_up, 1e-7))
        times[name] = {}
    for number in progress(range(rounds)):
        gc.collect()
        for name in random.Random(number).sample(list(implementations), len(implementations)):
            used = sum(times[name].values()) * repeats[name]
            if number < MIN_ROUNDS or used < seconds:
                run = implementations[name]
                times[name][number] = _time_call(run, repeats[name], name in self_timed)
    return times


def _time_call(run: Callable, repeats: int, self_timed: bool) -> float:
    """Return the seconds of one call, with the garbage collector off."""
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(repeats):
            result = run()
        elapsed = (time.perf_counter() - start) / repeats
    finally:
        gc.enable()
    return result if self_timed else elapsed


def paired_ratio(numerator: Times, denominator: Times) -> dict[str, float]:
    """Return median and quartiles of the ratio over the rounds in which both were measured."""
    common = [number for number in numerator if number in denominator]
    return quartiles([numerator[number] / denominator[number] for number in common])
