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
from .experiment import Experiment, config_grid
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
    """Choose the settings of every experiment and run it on its splits; all runs are logged to
    `log`, from which the same call resumes."""
    experiments = list(experiments)
    tuning_splits, total = [], 0
    for i, experiment in enumerate(experiments):
        data = cached_dataset(experiment.base.dataset, execution.data_dir, experiment.base.seed)
        splits = min(experiment.splits, data.n_splits)
        experiments[i] = replace(experiment, splits=splits)
        wanted = math.ceil(TUNING_NODES / max(len(data.split(0).val), 1))
        tuning_splits.append(min(splits, max(2, wanted)))
        # The best settings on the first splits are shared between groups and with the final runs.
        others = sum(math.prod(map(len, group.values())) - 1 for group in experiment.search)
        total += others * tuning_splits[i] + splits * experiment.seeds

    with closing(RunProgress(total)) as progress:

        def run(batches: list[list[Config]]) -> list[list[dict]]:
            """Run the configs of all batches together; return the rows of each batch."""
            rows = iter(run_configs(list(chain(*batches)), log, execution, progress))
            return [[next(rows) for _ in batch] for batch in batches]

        for step in range(max((len(experiment.search) for experiment in experiments), default=0)):
            open_ = [i for i, experiment in enumerate(experiments) if step < len(experiment.search)]
            batches = []
            for i in open_:
                values = {**experiments[i].search[step], "split": range(tuning_splits[i])}
                batches.append(config_grid(experiments[i].base, values))
            for i, rows in zip(open_, run(batches), strict=True):
                best = best_settings(list(experiments[i].search[step]), rows)
                base = replace(experiments[i].base, **best)
                experiments[i] = replace(experiments[i], base=base)
        batches = []
        for experiment in experiments:
            seed = experiment.base.seed
            values = {
                "split": range(experiment.splits),
                "seed": range(seed, seed + experiment.seeds),
            }
            batches.append(config_grid(experiment.base, values))
        outcomes = []
        for experiment, rows in zip(experiments, run(batches), strict=True):
            outcomes.append(Outcome(experiment.base.selector, experiment.searched(), rows))
        return outcomes


def best_settings(names: list[str], rows: list[dict]) -> dict:
    """Return the settings with the highest mean validation accuracy; among those less than one
    standard error below it, the one with the strongest weight decay."""
    accuracies = defaultdict(list)  # by values of the settings, one accuracy per split
    for row in rows:
        values = tuple(row["config"][name] for name in names)
        accuracies[values].append(row["val_accuracy"])
    means = {values: np.mean(per_split) for values, per_split in accuracies.items()}
    best = max(means, key=means.get)
    if "weight_decay" in names:
        decay = names.index("weight_decay")
        level = []
        for values, per_split in accuracies.items():
            gaps = np.array(accuracies[best]) - np.array(per_split)
            error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0
            if not gaps.any() or gaps.mean() < error:
                level.append(values)
        best = max(level, key=lambda values: (values[decay], means[values]))
    return dict(zip(names, best, strict=True))
