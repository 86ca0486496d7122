"""Contestants take turns, so that a noisy machine is noisy for all of them."""

import time
from collections.abc import Callable

import torch


def interleaved(contestants: dict[str, Callable], rounds: int) -> dict[str, float]:
    """The shortest time of each in seconds, after a round that does not count."""
    best = dict.fromkeys(contestants, float("inf"))
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            best[name] = min(best[name], seconds) if turn else best[name]
    return best


def table(best: dict[str, float], against: str) -> str:
    """Milliseconds, and how many times as long as `against`."""
    width = max(map(len, best))
    lines = [f"{'':{width}}  {'ms':>8}  of {against}"]
    for name, seconds in best.items():
        lines.append(f"{name:{width}}  {1e3 * seconds:8.1f}  {seconds / best[against]:.3f}")
    return "\n".join(lines)


def machine() -> str:
    """What the times were measured on."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"
