"""Compare selectors over several splits, each with the settings that validation nodes prefer."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import Config
from .experiment import searched_experiment
from .result_rows import accuracies, paired_difference, selection_gain
from .run_configs import Execution
from .tables import percent, text_table
from .tuning import Outcome, run_experiments

HEADER = ["%", "val", "test", "std", "- final", "std err", "macro F1", "weighted F1"]


def compare(
    base: Config,
    selectors: list[str],
    *,
    out: Path,
    splits: int = 10,
    seeds: int = 1,
    fixed: Collection[str] = (),
    execution: Execution = Execution(),  # noqa: B008  frozen
) -> list[Outcome]:
    """Choose the settings of every selector (see `tuning`), but not the `fixed` ones that the user
    gave, and run it on all splits."""
    self_loop = {"self_loop": (False, True)}
    experiments = []
    for selector in selectors:
        config = replace(base, selector=selector)
        experiments.append(searched_experiment(config, splits, seeds, first=self_loop, fixed=fixed))
    return run_experiments(experiments, out / "results.jsonl", execution)


def report(outcomes: list[Outcome]) -> str:
    """Return the table of accuracies, of differences to FinalSelect and of fixed layers."""
    final = next((outcome for outcome in outcomes if outcome.selector == "final"), None)
    table, chosen = [], []
    for outcome in outcomes:
        val, test = accuracies(outcome.rows, "val"), accuracies(outcome.rows)
        difference, error = "-", np.nan
        if final is not None and outcome is not final:
            points, error = paired_difference(outcome.rows, final.rows)
            difference = f"{points:+.1f}"
        cells = [outcome.selector, f"{val.mean():.1f}", f"{test.mean():.1f}"]
        cells.append(f"{test.std(ddof=1):.1f}" if len(test) > 1 else "-")
        cells += [difference, f"{error:.1f}" if np.isfinite(error) else "-"]
        for score in ("macro_f1", "weighted_f1"):
            cells.append(percent(np.mean([row["test"][score] for row in outcome.rows])))
        table += [cells, *_layer_rows(outcome)]
        if outcome.settings:
            settings = ", ".join(f"{name} {value}" for name, value in outcome.settings.items())
            chosen.append(f"chosen on validation for {outcome.selector}: {settings}")
    return "\n".join([text_table(HEADER, table), "", *chosen])


def _layer_rows(outcome: Outcome) -> list[list[str]]:
    """Return the rows below a selector: each fixed layer of its models, and the oracles."""
    gain = selection_gain(outcome.rows)
    gain.pop("selected per node", None)  # the selector's own row
    rows = []
    for depth, (title, value) in enumerate(gain.items()):
        if title.startswith("all at layer"):
            share = np.mean([row["layer_share"][depth] for row in outcome.rows])
            title += f" (selected for {100 * share:.0f} %)"
        rows.append([f"  {title}", "", percent(value), *[""] * (len(HEADER) - 3)])
    return rows


def check_selectors(names: list[str]) -> None:
    """Raise ValueError for an unknown or repeated name."""
    for name in names:
        Config(selector=name)  # raises the error for an unknown name
    if len(set(names)) < len(names):
        raise ValueError(f"a selector is named twice: {' '.join(names)}")
