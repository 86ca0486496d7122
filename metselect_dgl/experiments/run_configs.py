"""Run many configs in parallel processes; a finished run is a JSON line of a log, from which an
interrupted call resumes."""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import warnings
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from threading import Thread

import torch
from tqdm import tqdm

from ..config import Config
from ..data import NodeDataset, load_dataset
from ..train import train
from .experiment import RUN_FIELDS
from .result_rows import parse_row


@dataclass(frozen=True)
class Execution:
    """Where the datasets are, how many processes run, and whether they keep freed memory."""

    data_dir: str | None = None
    jobs: int = 1
    keep_memory: bool = False


class RunProgress:
    """Counts finished runs, each once, and displays them on a progress bar."""

    def __init__(self, total: int | None = None, *, show: bool = True) -> None:
        self.finished: set[str] = set()  # keys of runs
        self.from_log = 0
        self._bar = tqdm(total=total, unit="run", smoothing=0, disable=not show)

    def add_logged(self, keys: Collection[str]) -> None:
        """Count runs of the log, which do not enter the displayed speed."""
        new = set(keys) - self.finished
        self.finished |= new
        self.from_log += len(new)
        self._bar.initial = self.from_log
        self._bar.update(len(new))

    def add(self, key: str, row: dict) -> None:
        """Count a run that just finished and display its name."""
        self.finished.add(key)
        self._bar.update()
        model = f"{row['backbone']}+{row['selector']}"
        self._bar.set_postfix_str(f"{row['dataset']} {model} split {row['split']}")

    def close(self) -> None:
        """Leave the final state of the progress bar on the screen."""
        self._bar.close()


def run_configs(
    configs: Sequence[Config], log: Path, execution: Execution, progress: RunProgress
) -> list[dict]:
    """Run the configs that `log` does not hold yet, low splits first, and return the rows of all
    in the order of `configs`."""
    rows = _read_log(log)
    other = sum(row.get("code") != code_version() for row in rows.values())
    if other:
        warnings.warn(
            f"{other} runs in {log} were made by another version of the code and are used as "
            "they are; remove the file to run them again",
            stacklevel=2,
        )
    keys, missing = [], {}
    for config in configs:
        key = _key(config, _fingerprint(config.dataset, execution.data_dir, config.seed))
        keys.append(key)
        if key not in rows:
            missing[key] = config
    progress.add_logged(set(keys) - set(missing))
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        for row in _run_all(sorted(missing.values(), key=attrgetter("split")), execution):
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            key = _row_key(row)
            rows[key] = row
            progress.add(key, row)
    return [rows[key] for key in keys]


def _run_all(configs: Sequence[Config], execution: Execution) -> Iterator[dict]:
    """Yield rows as runs finish."""
    if execution.jobs == 1 or len(configs) < 2:
        for config in configs:
            yield run_one(config, execution)
        return
    threads = max(1, (os.cpu_count() or 1) // execution.jobs)
    spawn, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    with ProcessPoolExecutor(execution.jobs, spawn, _start_worker, (threads,)) as pool:
        futures = [pool.submit(run_one, config, execution) for config in configs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # do not wait for runs that nobody will log
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _start_worker(threads: int) -> None:
    """Prepare a worker: Ctrl-C is left to its parent, and it ends when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def run_one(config: Config, execution: Execution) -> dict:
    """Train one model and return its row."""
    data = cached_dataset(config.dataset, execution.data_dir, config.seed)
    metrics = train(config, data, progress=False, keep_memory=execution.keep_memory).metrics
    return {
        **{name: getattr(config, name) for name in RUN_FIELDS},
        "data": data.fingerprint(),
        "code": code_version(),
        "val_accuracy": metrics["val"]["accuracy"],
        "test_accuracy": metrics["test"]["accuracy"],
        **metrics,
    }


@lru_cache(maxsize=12)
def cached_dataset(name: str, data_dir: str | None, seed: int) -> NodeDataset:
    """Load a dataset once for several runs."""
    return load_dataset(name, data_dir, seed=seed)


@lru_cache(maxsize=64)
def _fingerprint(name: str, data_dir: str | None, seed: int) -> str:
    return cached_dataset(name, data_dir, seed).fingerprint()


@cache
def code_version() -> str:
    """Return a digest of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _key(config: Config, fingerprint: str) -> str:
    """Return the identity of a run: the same settings on the same data."""
    return json.dumps([fingerprint, asdict(config)], sort_keys=True)


def _row_key(row: dict) -> str:
    return _key(Config(**row["config"]), row["data"])


def _read_log(log: Path) -> dict[str, dict]:
    """Return rows by key; an incomplete last line, left by a killed process, is cut off."""
    text = log.read_bytes() if log.exists() else b""
    complete = text[: text.rfind(b"\n") + 1]
    if len(complete) < len(text):
        os.truncate(log, len(complete))
    rows = {}
    for number, line in enumerate(complete.splitlines(), 1):
        where = f"{log}, line {number}"
        row = parse_row(line, where)
        try:
            rows[_row_key(row)] = row
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where} is not a run ({error}); remove the line or the file"
            ) from None
    return rows
