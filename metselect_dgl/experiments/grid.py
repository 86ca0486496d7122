"""Many runs: over processes, with one bar, and resumable, as every finished run is one line."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, lru_cache
from itertools import product
from operator import attrgetter
from pathlib import Path

import torch
from tqdm import tqdm

from ..config import Config
from ..data import NodeDataset, load_dataset
from ..train import train


def settings_grid(base: Config, grid: dict[str, Sequence]) -> list[Config]:
    """`base` with every combination of the values of `grid`."""
    combinations = product(*grid.values())
    return [dataclasses.replace(base, **dict(zip(grid, c, strict=True))) for c in combinations]


def run_grid(
    configs: Sequence[Config], data_dir: str | None, results: Path, *, jobs: int, bar: tqdm
) -> list[dict]:
    """Run what `results` (JSON lines) does not hold yet, the first splits of all first, and return
    the lines of `configs`. `bar` moves by every run that it has not counted yet."""
    done = _read(results)
    _warn_of_other_code(done.values(), results)
    keys = [_key(config, _fingerprint(config, data_dir)) for config in configs]
    todo = {key: config for key, config in zip(keys, configs, strict=True) if key not in done}
    counted = getattr(bar, "counted", set())
    found = len(set(keys) - set(todo) - counted)
    if not bar.disable:
        bar.initial += found  # they took no time: the time left is that of new runs
    bar.update(found)
    bar.counted = counted | set(keys)
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "ab") as file:
        for row in _run_all(sorted(todo.values(), key=attrgetter("split")), data_dir, jobs):
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            done[_row_key(row)] = row
            bar.update()
            bar.set_postfix_str(
                f"{row['dataset']} {row['backbone']}+{row['selector']} split {row['split']}"
            )
    return [done[key] for key in keys]


def _run_all(configs: list[Config], data_dir: str | None, jobs: int) -> Iterable[dict]:
    if jobs == 1 or len(configs) < 2:
        yield from (run_one(config, data_dir) for config in configs)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (threads,)) as pool:
        futures = [pool.submit(run_one, config, data_dir) for config in configs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_one(config: Config, data_dir: str | None) -> dict:
    """The result line of one run."""
    metrics = train(config, read_dataset(config, data_dir), progress=False).metrics
    names = ("dataset", "backbone", "selector", "split", "seed")
    return {
        **{name: getattr(config, name) for name in names},
        "data": _fingerprint(config, data_dir),
        "code": code_version(),
        "val_accuracy": metrics["val"]["accuracy"],
        "test_accuracy": metrics["test"]["accuracy"],
        **metrics,
    }


def read_dataset(config: Config, data_dir: str | None) -> NodeDataset:
    """The dataset of a run."""
    return _load(config.dataset, data_dir, config.seed)


@lru_cache(maxsize=12)
def _load(name: str, data_dir: str | None, seed: int) -> NodeDataset:
    return load_dataset(name, data_dir, seed=seed)


@lru_cache(maxsize=64)
def _fingerprint_of(name: str, data_dir: str | None, seed: int) -> str:
    return _load(name, data_dir, seed).fingerprint()


def _fingerprint(config: Config, data_dir: str | None) -> str:
    return _fingerprint_of(config.dataset, data_dir, config.seed)


@cache
def code_version() -> str:
    """A digest of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _warn_of_other_code(rows: Iterable[dict], results: Path) -> None:
    other = sum(row.get("code") != code_version() for row in rows)
    if other:
        warnings.warn(
            f"{other} runs in {results} were made by other code than there is now; "
            "they count as done: remove the file to make them anew",
            stacklevel=2,
        )


def _key(config: Config, fingerprint: str) -> str:
    """The same settings on the same data are the same run."""
    return json.dumps([fingerprint, dataclasses.asdict(config)], sort_keys=True)


def _row_key(row: dict) -> str:
    return _key(Config(**row["config"]), row["data"])


def _read(results: Path) -> dict[str, dict]:
    """Finished runs; what a killed process left of a line is cut off."""
    if not results.exists():
        return {}
    text = results.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(results, len(whole))
    rows = [json.loads(line) for line in whole.splitlines()]
    return {_row_key(row): row for row in rows}
