"""Choose the settings of experiments on validation nodes, then run them on all splits.

Settings are compared on the first splits, as many as hold `TUNING_NODES` validation nodes (at
least two). The groups of an experiment are searched in turn: all combinations of a group are run,
the best is kept, and the next group is searched with it. Test accuracies are not used.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import Config
from .experiment import Experiment
from .run_configs import Execution, RunProgress, cached_dataset, run_configs

TUNING_NODES = 300


class Outcome(NamedTuple):
    """A finished experiment: the settings that were chosen, and the rows of its runs."""

    selector: str
    settings: dict
    rows: list[dict]


def run_experiments(
    experiments: Sequence[Experiment], log: Path, execution: Execution
) -> list[Outcome]:
    """Choose the settings of every experiment and run it on its splits.

    All runs are logged to `log`; the same call resumes from it.
    """
    experiments = list(experiments)
    tuning_splits = []
    total = 0
    for i, experiment in enumerate(experiments):
        data = cached_dataset(experiment.base.dataset, execution.data_dir, experiment.base.seed)
        experiment = experiment.with_settings(experiment.first_values())
        experiment = replace(experiment, splits=min(experiment.splits, data.n_splits))
        wanted = math.ceil(TUNING_NODES / max(len(data.split(0).val), 1))
        experiments[i] = experiment
        tuning_splits.append(min(experiment.splits, max(2, wanted)))
        total += _count_runs(experiment, tuning_splits[i])

    with closing(RunProgress(total)) as progress:

        def run(batches: list[list[Config]]) -> list[list[dict]]:
            """Run the configs of all batches together; return the rows of each batch."""
            rows = iter(run_configs(list(chain(*batches)), log, execution, progress))
            return [[next(rows) for _ in batch] for batch in batches]

        for step in range(max((len(experiment.search) for experiment in experiments), default=0)):
            open_ = [i for i, experiment in enumerate(experiments) if step < len(experiment.search)]
            batches = []
            for i in open_:
                batches.append(experiments[i].trials(experiments[i].search[step], tuning_splits[i]))
            for i, rows in zip(open_, run(batches), strict=True):
                best = best_settings(list(experiments[i].search[step]), rows)
                experiments[i] = experiments[i].with_settings(best)
        final_rows = run([experiment.runs() for experiment in experiments])

    outcomes = []
    for experiment, rows in zip(experiments, final_rows, strict=True):
        outcomes.append(Outcome(experiment.base.selector, experiment.searched(), rows))
    return outcomes


def _count_runs(experiment: Experiment, tuning_splits: int) -> int:
    """Count the runs of an experiment; those of the best settings on the first splits are shared
    between groups and with the final runs."""
    others = sum(math.prod(map(len, group.values())) - 1 for group in experiment.search)
    return others * tuning_splits + experiment.splits * experiment.seeds


def best_settings(names: list[str], rows: list[dict]) -> dict:
    """Return the settings with the highest mean validation accuracy; among those less than one
    standard error below it, the one with the strongest weight decay."""
    accuracies = defaultdict(list)  # by values of the settings, one accuracy per split
    for row in rows:
        values = tuple(row["config"][name] for name in names)
        accuracies[values].append(row["val_accuracy"])
    accuracies = {values: np.array(per_split) for values, per_split in accuracies.items()}
    best = max(accuracies, key=lambda values: accuracies[values].mean())
    if "weight_decay" in names:
        decay = names.index("weight_decay")
        level = [v for v in accuracies if _is_level(accuracies[best] - accuracies[v])]
        best = max(level, key=lambda values: (values[decay], accuracies[values].mean()))
    return dict(zip(names, best, strict=True))


def _is_level(difference: np.ndarray) -> bool:
    """Return whether a paired difference, split by split, is below its standard error."""
    if not difference.any():
        return True
    n = len(difference)
    return n > 1 and difference.mean() < difference.std(ddof=1) / math.sqrt(n)
