"""Several selectors over several splits, each with the settings that validation prefers."""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import SELECTORS, Config
from .grid import run_grid, settings_grid
from .tables import percent, text_table

# What is tried for every selector unless the user fixes it.
GRID = {"weight_decay": (0.0, 5e-4), "self_loop": (False, True)}
SELECTOR_GRID = {"ndls": {"eps": (0.03, 0.1, 0.3)}}


@dataclass
class Outcome:
    """One selector with the settings that validation chose."""

    selector: str
    settings: dict
    rows: list[dict]

    def test(self) -> np.ndarray:
        return np.array([row["test_accuracy"] for row in self.rows])

    def mean(self, name: str) -> float | None:
        values = [row.get(name) for row in self.rows]
        values = [value for value in values if value is not None]
        return float(np.mean(values)) if values else None


def compare(
    base: Config,
    selectors: list[str],
    *,
    splits: int = 10,
    seeds: int = 1,
    fixed: set[str] = frozenset(),
    data_dir: str | None = None,
    out: Path,
    jobs: int = 1,
) -> list[Outcome]:
    """Run the grid of every selector and choose its settings by mean validation accuracy; of
    those less than a standard error apart, the one with the stronger weight decay.

    `fixed` names the settings of `base` that the user chose and the grid must not change.
    """
    runs = {"split": range(splits), "seed": range(base.seed, base.seed + seeds)}
    grids = {}
    for selector in selectors:
        tried = {**GRID, **SELECTOR_GRID.get(selector, {})}
        tried = {name: values for name, values in tried.items() if name not in fixed}
        grids[selector] = (tried, {"selector": [selector], **tried, **runs})
    configs = [config for _, grid in grids.values() for config in settings_grid(base, grid)]
    rows = run_grid(configs, data_dir, out / "results.jsonl", jobs=jobs)
    return [
        _best(name, list(tried), [row for row in rows if row["selector"] == name])
        for name, (tried, _) in grids.items()
    ]


def _best(selector: str, names: list[str], rows: list[dict]) -> Outcome:
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row["config"][name] for name in names)].append(row)
    val = {key: np.array([row["val_accuracy"] for row in group]) for key, group in groups.items()}
    best = max(val, key=lambda key: val[key].mean())
    level = [key for key in val if _level(val[best] - val[key])]
    decay = names.index("weight_decay") if "weight_decay" in names else None
    chosen = max(level, key=lambda key: (decay is not None and key[decay], val[key].mean()))
    return Outcome(selector, dict(zip(names, chosen, strict=True)), groups[chosen])


def _level(gap: np.ndarray) -> bool:
    """Less than one standard error behind the best, paired run by run."""
    if not gap.any():
        return True
    return len(gap) > 1 and gap.mean() < gap.std(ddof=1) / math.sqrt(len(gap))


def report(outcomes: list[Outcome]) -> str:
    """The table: test accuracy, paired difference to FinalSelect, and what choosing is worth."""
    final = next((outcome for outcome in outcomes if outcome.selector == "final"), None)
    header = ["", "val", "test", "std", "- final", "std err", "macro F1", "weighted F1"]
    rows = []
    for outcome in outcomes:
        test = outcome.test()
        difference = ("-", "-") if final is None or outcome is final else _paired(outcome, final)
        f1 = [
            percent(np.mean([row["test"][name] for row in outcome.rows]))
            for name in ("macro_f1", "weighted_f1")
        ]
        std = percent(test.std(ddof=1)) if len(test) > 1 else "-"
        val = percent(outcome.mean("val_accuracy"))
        rows.append([outcome.selector, val, percent(test.mean()), std, *difference, *f1])
        rows += _layers(outcome, len(header))
    chosen = [
        f"chosen on validation for {o.selector}: "
        + ", ".join(f"{name} {value}" for name, value in o.settings.items())
        for o in outcomes
        if o.settings
    ]
    return "\n".join([text_table(header, rows), "", *chosen])


def _paired(outcome: Outcome, final: Outcome) -> tuple[str, str]:
    gap = outcome.test() - final.test()
    error = gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else None
    return f"{100 * gap.mean():+.1f}", percent(error)


def _layers(outcome: Outcome, width: int) -> list[list[str]]:
    """Rows below a selector: every fixed layer of its models, and the oracles."""
    blank = (width - 3) * [""]
    rows = []
    if "fixed" in outcome.rows[0]:
        fixed = np.mean([row["fixed"] for row in outcome.rows], 0)
        share = np.mean([row["layer_share"] for row in outcome.rows], 0)
        for depth, value in enumerate(fixed):
            name = f"  all at layer {depth} (chosen by {100 * share[depth]:.0f} %)"
            rows.append([name, "", percent(value), *blank])
        for name in ("oracle", "lucky_oracle"):
            rows.append([f"  {name.replace('_', ' ')}", "", percent(outcome.mean(name)), *blank])
        gain = outcome.mean("oracle") - fixed.max()
        realised = (outcome.test().mean() - fixed.max()) / gain if gain > 0 else None
        rows.append(["  share of the oracle's gain realised", "", percent(realised), *blank])
    return rows


def check_selectors(names: list[str]) -> None:
    """Each name once, each known."""
    for name in names:
        if name not in SELECTORS:
            raise ValueError(f"selector is {name!r}; use one of {', '.join(SELECTORS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"a selector is named twice: {' '.join(names)}")
