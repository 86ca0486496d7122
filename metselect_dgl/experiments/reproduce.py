"""The paper's experiments as studies: which models on which data, and the lines they leave.

Every study leaves result lines below `<out>` (see `lines.path_of`); all runs, also those that only
served to choose settings, stay in `<out>/log/runs.jsonl`, from where a stopped run goes on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..config import Config
from ..data import load_dataset
from .epoch_times import epoch_times
from .lines import add_lines
from .mettack import poison
from .scope import STUDIES, Scope
from .tuning import Cell, Outcome, run_cells, tuned

AGGREGATORS = ("jknet-max", "jknet-cat", "jknet-lstm", "jknet-metselect")
# The models of the figures.
VARIANTS = (
    {"selector": "final"},
    {"selector": "metselect", "loss": "ce"},
    {"selector": "metselect", "loss": "distance"},
    {"selector": "metselect", "loss": "posterior"},
)
_NAMED = ("dataset", "backbone", "selector", "split", "seed")


def accuracy(scope: Scope) -> list[Cell]:
    """Table 2: every backbone under every selector, without self-loops."""
    return [
        _tuned(scope, dataset=dataset, backbone=backbone, selector=selector)
        for dataset in scope.datasets
        for backbone in scope.backbones
        for selector in scope.selectors
    ]


def self_loops(scope: Scope) -> list[Cell]:
    """Table 4: GCN with self-loops."""
    return [
        _tuned(scope, dataset=dataset, selector=selector, self_loop=True)
        for dataset in _gcn(scope)
        for selector in ("final", "metselect", "metselect-paper")
    ]


def aggregation(scope: Scope) -> list[Cell]:
    """Table 5: GCN with jumping knowledge."""
    return [
        _tuned(scope, dataset=dataset, selector=selector)
        for dataset in _gcn(scope)
        for selector in AGGREGATORS
    ]


def depth(scope: Scope) -> list[Cell]:
    """Accuracy against depth; GCN with self-loops, the same settings for all."""
    base, splits = replace(scope.recipe, self_loop=True), min(scope.depth_splits, scope.splits)
    return [
        Cell(replace(base, dataset=dataset, num_layers=layers, **model), splits=splits)
        for layers in scope.depths
        for dataset in _gcn(scope)
        if dataset in ("cora", "citeseer")
        for model in VARIANTS
    ]


def attack(scope: Scope) -> list[Cell]:
    """Accuracy against the share of edges that Mettack changed; the same settings for all."""
    base = replace(scope.recipe, self_loop=True)
    names = [
        f"mettack_{name}" + (f"_{rate:02}" if rate else "")
        for name in _gcn(scope)
        if name in scope.attacked
        for rate in scope.rates
    ]
    return [
        Cell(replace(base, dataset=name, **model), splits=1, seeds=scope.seeds)
        for name in names
        for model in VARIANTS
    ]


def _gcn(scope: Scope) -> Sequence[str]:
    """The datasets of a study that is of GCN alone."""
    return scope.datasets if "gcn" in scope.backbones else ()


def _tuned(scope: Scope, **settings) -> Cell:
    return tuned(replace(scope.recipe, **settings), scope.splits)


CELLS = {
    "accuracy": accuracy,
    "self-loops": self_loops,
    "aggregation": aggregation,
    "depth": depth,
    "attack": attack,
    "fresh-attack": attack,
}


def reproduce(scope: Scope, data_dir: str | None, out: Path, jobs: int) -> list[str]:
    """Run what is missing of the studies and write their lines; why datasets were left out."""
    found, missing = available(scope.datasets, data_dir)
    wanted = [f"mettack_{name}" for name in scope.attacked if name in found]
    poisoned, more = available(wanted, data_dir)
    attacked = [name.removeprefix("mettack_") for name in poisoned]
    scope = replace(scope, datasets=found, attacked=attacked)
    for name in scope.studies:
        print(f"{name}: {STUDIES[name]}", flush=True)
        if name == "time":
            epoch_times(scope, data_dir, out)
        elif name == "fresh-attack":
            folder = out / "poisoned"
            for each in attacked if _gcn(scope) else ():
                poison(each, scope.rates, data_dir, folder)
            run_study(name, scope, str(folder), out, jobs)
        else:
            run_study(name, scope, data_dir, out, jobs)
    return missing + more


def run_study(name: str, scope: Scope, data_dir: str | None, out: Path, jobs: int) -> None:
    """Run what is missing of a study and write its lines."""
    outcomes = run_cells(CELLS[name](scope), data_dir, out / "log" / "runs.jsonl", jobs=jobs)
    add_lines([_line(name, each, row) for each in outcomes for row in each.rows], out, name)


def _line(study: str, outcome: Outcome, row: dict) -> dict:
    """The figures of a run, and its settings that were chosen or are no defaults."""
    default = Config()
    settings = {
        key: value
        for key, value in asdict(Config(**row["config"])).items()
        if key not in _NAMED and value != getattr(default, key)
    }
    figures = ("fixed", "oracle", "lucky_oracle", "layer_share")
    kept = ("epochs", "best_epoch", "diverged", "seconds", "code", *figures)
    return {
        "study": study,
        **{key: row[key] for key in _NAMED},
        "val_accuracy": row["val_accuracy"],
        "test_accuracy": row["test_accuracy"],
        "train_accuracy": row["train"]["accuracy"],
        "macro_f1": row["test"]["macro_f1"],
        "weighted_f1": row["test"]["weighted_f1"],
        "settings": outcome.settings | settings,
        **{key: _rounded(row[key]) for key in kept if key in row},
    }


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def available(names: Iterable[str], data_dir: str | None) -> tuple[list[str], list[str]]:
    """The datasets that can be loaded, and the messages of those that cannot."""
    found, missing = [], []
    for name in names:
        try:
            load_dataset(name, data_dir)
            found.append(name)
        except (ImportError, RuntimeError) as error:
            missing.append(str(error))
    return found, missing
