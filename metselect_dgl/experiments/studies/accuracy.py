"""Tables 2, 4 and 5 of the paper: test accuracies of selectors on all datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from ...config import SELECTOR_TITLES
from .. import paper
from ..experiment import Experiment, searched_experiment
from ..result_rows import (
    Rows,
    accuracies,
    delta_max,
    format_difference,
    format_mean,
    mean_accuracies,
    paired_difference,
    rows_by_model,
    selection_gain,
)
from ..tables import markdown, percent
from .study import ReproduceSettings, StoredResults, Study

TITLES = SELECTOR_TITLES | {
    "metselect": "**MetSelect** (our default)",
    "metselect-paper": "MetSelect as in the paper",
}


@dataclass(frozen=True)
class SelectorTable(Study):
    """Selectors on all datasets; without `selectors`, those of the settings."""

    selectors: Sequence[str] = ()
    self_loop: bool = False
    printed: Mapping[str, Mapping[str, paper.Figure]] = field(default_factory=dict)
    printed_delta: Mapping[str, float] = field(default_factory=dict)
    gain_of: str = "metselect"
    note: str = ""

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        backbones = ("gcn",) if self.gcn_only else settings.backbones
        selectors = self.selectors or settings.selectors
        recipe = replace(settings.recipe, self_loop=self.self_loop)
        experiments = []
        for model in product(self.datasets(settings), backbones, selectors):
            names = dict(zip(("dataset", "backbone", "selector"), model, strict=True))
            experiments.append(searched_experiment(replace(recipe, **names), settings.splits))
        return experiments

    def section(self, results: StoredResults) -> list[str]:
        """Return the table; FinalSelect's row of Table 2 is added if the study has none."""
        rows = results.rows[self.name]
        compared, printed = list(rows), dict(self.printed)
        if "final" not in self.selectors:
            datasets = {row["dataset"] for row in rows}
            printed["final"] = paper.ACCURACY["gcn"]["final"]
            for row in results.rows["accuracy"]:
                model = (row["backbone"], row["selector"])
                if model == ("gcn", "final") and row["dataset"] in datasets:
                    compared.append(row)
        table = accuracy_table(compared, "gcn", printed, self.printed_delta)
        paragraphs = [f"## {self.title}", table, self.note, *gain_table(rows, "gcn", self.gain_of)]
        return [paragraph for paragraph in paragraphs if paragraph]


@dataclass(frozen=True)
class AllBackbones(SelectorTable):
    """Table 2: all backbones with all selectors, without self-loops."""

    def section(self, results: StoredResults) -> list[str]:
        rows = results.rows[self.name]
        groups = rows_by_model(rows)
        paragraphs = [f"## {self.title}"]
        shares = {}  # of test nodes per layer, by backbone and dataset
        for backbone, printed in paper.ACCURACY.items():
            table = accuracy_table(rows, backbone, printed, paper.DELTA_MAX[backbone])
            if table:
                paragraphs += [f"### {backbone.upper()}", table]
            paragraphs += gain_table(rows, backbone, "metselect")
            for dataset in paper.DATASETS:
                group = groups.get((backbone, "metselect", dataset))
                if group:
                    mean = np.mean([row["layer_share"] for row in group], 0)
                    shares.setdefault(backbone.upper(), {})[dataset] = mean
        if shares:
            from ...plots import plot_shares

            plot_shares(shares, results.folder / "layers.png")
            paragraphs += [
                "## Layers that MetSelect selected",
                "Share of the test nodes at each layer, mean over splits, with our defaults.",
                f"![layers]({results.link / 'layers.png'})",
            ]
        return paragraphs

    def findings(self, rows: Rows) -> list[str]:
        return [*_against_paper(rows), *_against_final(rows)]


def accuracy_table(
    rows: Rows,
    backbone: str,
    printed: Mapping[str, Mapping[str, paper.Figure]],
    printed_delta: Mapping[str, float],
) -> str | None:
    """Return a table of selectors and datasets beside the paper's; None if the backbone was not
    run."""
    groups = rows_by_model(rows)
    deltas = delta_max(mean_accuracies(rows, backbone))
    table = []
    for selector, title in TITLES.items():
        if selector not in printed and selector not in deltas:
            continue
        printed_name = "metselect" if selector == "metselect-paper" else selector
        cells = [title]
        for dataset in paper.DATASETS:
            group = groups.get((backbone, selector, dataset))
            final = groups.get((backbone, "final", dataset))
            lines = [format_mean(accuracies(group)) if group else "not run"]
            if group and final and selector != "final":
                lines.append(format_difference(group, final))
            figure = printed[printed_name][dataset]
            deviation = f" *±{figure.std:g}*" if figure.std else ""
            cells.append("<br>".join([*lines, f"*{figure.mean:g}*{deviation}"]))
        delta = f"{deltas[selector]:.2f}" if selector in deltas else ""
        if delta and printed_name in printed_delta:
            delta += f"<br>*{printed_delta[printed_name]:.2f}*"
        table.append([*cells, delta])
    return markdown((["", *paper.DATASETS, "Δ max"], table)) if deltas else None


def gain_table(rows: Rows, backbone: str, selector: str) -> list[str]:
    """Return the table of fixed layers, selection and oracles; nothing if there are no layers to
    compare."""
    columns = {}
    for dataset in paper.DATASETS:
        group = rows_by_model(rows).get((backbone, selector, dataset))
        gain = selection_gain(group) if group else {}
        if gain:
            columns[dataset] = gain
    if not columns:
        return []
    table = []
    for title in next(iter(columns.values())):
        bold = f"**{title}**" if title == "selected per node" else title
        table.append([bold, *(percent(column[title]) for column in columns.values())])
    return [markdown(([f"{SELECTOR_TITLES[selector]}, {backbone.upper()}, %", *columns], table))]


def _against_paper(rows: Rows) -> list[str]:
    """Compare our MetSelect with the paper's: table cell by table cell, and its Δ max."""
    differences, below, deltas = [], [], []
    for backbone, printed in paper.ACCURACY.items():
        means = mean_accuracies(rows, backbone)
        for dataset, ours in means.get("metselect", {}).items():
            figure = printed["metselect"][dataset]
            difference = ours - figure.mean
            differences.append(difference)
            if difference < -(figure.std or 0) / 10**0.5:
                below.append(f"{backbone.upper()} on {dataset} ({difference:+.1f})")
        delta = delta_max(means).get("metselect")
        if delta is not None:
            printed_delta = paper.DELTA_MAX[backbone]["metselect"]
            deltas.append(f"{delta:.2f} {backbone.upper()} (paper {printed_delta:.2f})")
    if not differences:
        return []
    exceptions = f" (not: {', '.join(below)})" if below else ""
    sentences = [
        f"Our MetSelect is at least the paper's minus one standard error in "
        f"{len(differences) - len(below)} of {len(differences)} cells of Table 2{exceptions}; "
        f"the mean difference is {np.mean(differences):+.1f} points."
    ]
    if deltas:
        sentences.append(f"Its Δ max over the datasets run: {', '.join(deltas)}.")
    return sentences


def _against_final(rows: Rows) -> list[str]:
    """Compare MetSelect with FinalSelect of the same backbone, run by run."""
    groups = rows_by_model(rows)
    above, level, below = 0, 0, []
    for (backbone, selector, dataset), group in groups.items():
        final = groups.get((backbone, "final", dataset))
        if selector != "metselect" or not final:
            continue
        difference, error = paired_difference(group, final)
        if difference < -2 * error:
            model = f"{backbone.upper()} on {dataset}"
            below.append(f"{model} ({difference:+.1f}, standard error {error:.1f})")
        elif difference > 2 * error:
            above += 1
        elif np.isfinite(error):  # a single run has no standard error
            level += 1
    if above + level + len(below) == 0:
        return []
    exceptions = f": {'; '.join(below)}" if below else ""
    return [
        "Against FinalSelect of the same backbone (paired, two standard errors): above in "
        f"{above} cells, level in {level}, below in {len(below)}{exceptions}."
    ]
