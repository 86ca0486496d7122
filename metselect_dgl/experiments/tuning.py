"""Settings chosen on validation nodes alone, group after group, and then run on every split.

A cell is one model on one dataset. Its settings are compared on the first splits, as many as hold
`TUNING_NODES` validation nodes (two or more): of a group of settings every combination is run, the
best one is kept, and the next group is tried with it. Test accuracies take no part in it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..config import Config
from ..data import NodeDataset
from .grid import read_dataset, run_grid, settings_grid

TUNING_NODES = 300

# Groups of settings tried for every model, before them those of a backbone, after them those of a
# selector.
GROUPS = ({"weight_decay": (5e-4, 0.0)}, {"lr": (0.01, 0.03)})
BACKBONE_GROUPS = {"gin": ({"batch_norm": (False, True)},)}
SELECTOR_GROUPS = {"ndls": ({"eps": (0.03, 0.1, 0.3)},)}

Group = Mapping[str, Sequence]


@dataclass
class Cell:
    """One model on one dataset: settings that stay, groups of settings to choose, and runs."""

    base: Config
    groups: Sequence[Group] = ()
    splits: int = 10
    seeds: int = 1

    def start(self, data: NodeDataset) -> "Cell":
        """Every setting at the first of its values, and no more splits than there are."""
        first = {name: values[0] for group in self.groups for name, values in group.items()}
        splits = min(self.splits, data.n_splits)
        return replace(self, base=replace(self.base, **first), splits=splits)

    def runs(self) -> list[Config]:
        seed = self.base.seed
        runs = {"split": range(self.splits), "seed": range(seed, seed + self.seeds)}
        return settings_grid(self.base, runs)

    def tuning(self, group: Group, splits: int) -> list[Config]:
        return settings_grid(self.base, {**group, "split": range(splits)})

    def settings(self) -> dict:
        """What was chosen."""
        names = [name for group in self.groups for name in group]
        return {name: getattr(self.base, name) for name in names}


@dataclass
class Outcome:
    """A cell with the settings that validation chose, and its runs."""

    cell: Cell
    rows: list[dict]

    @property
    def selector(self) -> str:
        return self.cell.base.selector

    @property
    def settings(self) -> dict:
        return self.cell.settings()

    def test(self) -> np.ndarray:
        return np.array([row["test_accuracy"] for row in self.rows])

    def mean(self, name: str) -> float | None:
        values = [row.get(name) for row in self.rows]
        values = [value for value in values if value is not None]
        return float(np.mean(values)) if values else None


def tuned(
    base: Config, splits: int, seeds: int = 1, *, more: Group | None = None, fixed=frozenset()
) -> Cell:
    """A cell with the groups of its backbone and selector, those of `more` first, without the
    settings that are `fixed`."""
    own, last = BACKBONE_GROUPS.get(base.backbone, ()), SELECTOR_GROUPS.get(base.selector, ())
    asked = [more or {}, *own, *GROUPS, *last]
    open_ = [{k: values for k, values in group.items() if k not in fixed} for group in asked]
    return Cell(base, [group for group in open_ if group], splits, seeds)


def run_cells(
    cells: Sequence[Cell], data_dir: str | None, results: Path, *, jobs: int = 1
) -> list[Outcome]:
    """Choose the settings of every cell and run it on all of its splits; `results` (JSON lines)
    holds what is finished, so that the same call goes on after a stop. One bar counts it all."""
    datasets = [read_dataset(cell.base, data_dir) for cell in cells]
    cells = [cell.start(data) for cell, data in zip(cells, datasets, strict=True)]
    splits = [_tuning_splits(cell, data) for cell, data in zip(cells, datasets, strict=True)]
    total = sum(map(_count, cells, splits))
    with tqdm(total=total, unit="run", smoothing=0) as bar:

        def run(configs: list[Config]) -> list[dict]:
            return run_grid(configs, data_dir, results, jobs=jobs, bar=bar)

        for depth in range(max((len(cell.groups) for cell in cells), default=0)):
            open_ = [i for i, cell in enumerate(cells) if depth < len(cell.groups)]
            tried = [cells[i].tuning(cells[i].groups[depth], splits[i]) for i in open_]
            rows = iter(run([config for each in tried for config in each]))
            for i, configs in zip(open_, tried, strict=True):
                names = list(cells[i].groups[depth])
                chosen = choose(names, [next(rows) for _ in configs])
                cells[i] = replace(cells[i], base=replace(cells[i].base, **chosen))
        final = [cell.runs() for cell in cells]
        rows = iter(run([config for each in final for config in each]))
    return [
        Outcome(cell, [next(rows) for _ in configs])
        for cell, configs in zip(cells, final, strict=True)
    ]


def _tuning_splits(cell: Cell, data: NodeDataset) -> int:
    nodes = len(data.split(0).val)
    return min(cell.splits, max(2, math.ceil(TUNING_NODES / max(nodes, 1))))


def _count(cell: Cell, tuning_splits: int) -> int:
    """Runs of a cell; the settings that win were run on the first splits already."""
    tried = sum(math.prod(map(len, group.values())) - 1 for group in cell.groups)
    return tried * tuning_splits + cell.splits * cell.seeds


def choose(names: list[str], rows: list[dict]) -> dict:
    """The settings with the best mean validation accuracy; of those less than a standard error
    apart, the one with the stronger weight decay."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row["config"][name] for name in names)].append(row["val_accuracy"])
    val = {key: np.array(values) for key, values in groups.items()}
    best = max(val, key=lambda key: val[key].mean())
    level = [key for key in val if _level(val[best] - val[key])]
    decay = names.index("weight_decay") if "weight_decay" in names else None
    if decay is not None:
        best = max(level, key=lambda key: (key[decay], val[key].mean()))
    return dict(zip(names, best, strict=True))


def _level(gap: np.ndarray) -> bool:
    """Less than one standard error behind the best, paired run by run."""
    if not gap.any():
        return True
    return len(gap) > 1 and gap.mean() < gap.std(ddof=1) / math.sqrt(len(gap))
