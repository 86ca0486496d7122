"""Several selectors over several splits, each with the settings that validation prefers."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import SELECTORS, Config
from .lines import Worth, paired
from .tables import percent, text_table
from .tuning import Outcome, run_cells, tuned


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
    """Run every selector with the settings that validation prefers; see `tuning`.

    `fixed` names the settings of `base` that the user chose and the search must not change.
    """
    more = {"self_loop": (False, True)}
    cells = [
        tuned(replace(base, selector=name), splits, seeds, more=more, fixed=fixed)
        for name in selectors
    ]
    return run_cells(cells, data_dir, out / "results.jsonl", jobs=jobs)


def report(outcomes: list[Outcome]) -> str:
    """The table: test accuracy, paired difference to FinalSelect, and what choosing is worth."""
    final = next((outcome for outcome in outcomes if outcome.selector == "final"), None)
    header = ["", "val", "test", "std", "- final", "std err", "macro F1", "weighted F1"]
    rows = []
    for outcome in outcomes:
        test = outcome.test()
        difference = ("-", "-") if final is None or outcome is final else _signed(outcome, final)
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


def _signed(outcome: Outcome, final: Outcome) -> tuple[str, str]:
    gap, error = paired(outcome.rows, final.rows)
    return f"{gap:+.1f}", f"{error:.1f}" if np.isfinite(error) else "-"


def _layers(outcome: Outcome, width: int) -> list[list[str]]:
    """Rows below a selector: every fixed layer of its models, and the oracles."""
    worth = Worth.of(outcome.rows)
    if worth is None:
        return []
    share = np.mean([row["layer_share"] for row in outcome.rows], 0)
    named = {
        f"all at layer {depth} (chosen by {100 * share[depth]:.0f} %)": value
        for depth, value in enumerate(worth.fixed)
    } | {
        "oracle": worth.oracle,
        "lucky oracle": worth.lucky_oracle,
        "share of the oracle's gain realised": worth.realised(),
    }
    blank = (width - 3) * [""]
    return [[f"  {name}", "", percent(value), *blank] for name, value in named.items()]


def check_selectors(names: list[str]) -> None:
    """Each name once, each known."""
    for name in names:
        if name not in SELECTORS:
            raise ValueError(f"selector is {name!r}; use one of {', '.join(SELECTORS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"a selector is named twice: {' '.join(names)}")
