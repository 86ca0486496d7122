"""Tables 2, 4 and 5 of the paper: test accuracies of selectors on all datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .. import paper
from ..experiment import Experiment, searched_experiment
from ..reproduce_settings import ReproduceSettings
from ..result_rows import Rows, delta_max, mean_accuracies, paired_difference, rows_by_model
from .accuracy_table import accuracy_table, gain_table
from .study import StoredResults, Study, gcn_datasets


@dataclass(frozen=True)
class Accuracy(Study):
    """All backbones with all selectors, without self-loops."""

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        experiments = []
        for dataset in settings.datasets:
            for backbone in settings.backbones:
                for selector in settings.selectors:
                    base = replace(
                        settings.recipe, dataset=dataset, backbone=backbone, selector=selector
                    )
                    experiments.append(searched_experiment(base, settings.splits))
        return experiments

    def section(self, results: StoredResults) -> list[str]:
        rows = results.rows[self.name]
        paragraphs = [f"## {self.title}"]
        for backbone, printed in paper.ACCURACY.items():
            table = accuracy_table(rows, backbone, printed, paper.DELTA_MAX[backbone])
            if table:
                paragraphs += [f"### {backbone.upper()}", table]
            paragraphs += gain_table(rows, backbone, "metselect")
        shares = _layer_shares(rows)
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
        return [*_against_paper(rows), *_delta_max(rows), *_against_final(rows)]


@dataclass(frozen=True)
class GCNAccuracy(Study):
    """GCN with some selectors."""

    selectors: Sequence[str] = ()
    self_loop: bool = False
    printed: Mapping[str, Mapping[str, paper.Figure]] = field(default_factory=dict)
    printed_delta: Mapping[str, float] = field(default_factory=dict)
    gain_of: str = "metselect"
    note: str = ""

    def datasets(self, settings: ReproduceSettings) -> Sequence[str]:
        return gcn_datasets(settings)

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        experiments = []
        recipe = replace(settings.recipe, self_loop=self.self_loop)
        for dataset in self.datasets(settings):
            for selector in self.selectors:
                base = replace(recipe, dataset=dataset, selector=selector)
                experiments.append(searched_experiment(base, settings.splits))
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
        paragraphs = [f"## {self.title}"]
        paragraphs.append(accuracy_table(compared, "gcn", printed, self.printed_delta))
        if self.note:
            paragraphs.append(self.note)
        return [*paragraphs, *gain_table(rows, "gcn", self.gain_of)]


def _layer_shares(rows: Rows) -> dict[str, dict[str, np.ndarray]]:
    """Return MetSelect's share of test nodes per layer, by backbone and dataset."""
    groups = rows_by_model(rows)
    shares = {}
    for backbone in paper.ACCURACY:
        for dataset in paper.DATASETS:
            group = groups.get((backbone, "metselect", dataset))
            if group:
                mean = np.mean([row["layer_share"] for row in group], 0)
                shares.setdefault(backbone.upper(), {})[dataset] = mean
    return shares


def _against_paper(rows: Rows) -> list[str]:
    """Compare our MetSelect with the paper's, table cell by table cell."""
    differences, below = [], []
    for backbone, printed in paper.ACCURACY.items():
        for dataset, ours in mean_accuracies(rows, backbone).get("metselect", {}).items():
            figure = printed["metselect"][dataset]
            difference = ours - figure.mean
            differences.append(difference)
            if difference < -(figure.std or 0) / 10**0.5:
                below.append(f"{backbone.upper()} on {dataset} ({difference:+.1f})")
    if not differences:
        return []
    exceptions = f" (not: {', '.join(below)})" if below else ""
    return [
        f"Our MetSelect is at least the paper's minus one standard error in "
        f"{len(differences) - len(below)} of {len(differences)} cells of Table 2{exceptions}; "
        f"the mean difference is {np.mean(differences):+.1f} points."
    ]


def _delta_max(rows: Rows) -> list[str]:
    """Compare the Δ max of our MetSelect with the paper's."""
    parts = []
    for backbone, printed in paper.DELTA_MAX.items():
        ours = delta_max(mean_accuracies(rows, backbone))
        if "metselect" in ours:
            parts.append(
                f"{ours['metselect']:.2f} {backbone.upper()} (paper {printed['metselect']:.2f})"
            )
    return [f"Its Δ max over the datasets run: {', '.join(parts)}."] if parts else []


def _against_final(rows: Rows) -> list[str]:
    """Compare MetSelect with FinalSelect of the same backbone, run by run."""
    groups = rows_by_model(rows)
    above, level, below = 0, 0, []
    for (backbone, selector, dataset), group in groups.items():
        final = groups.get((backbone, "final", dataset))
        if selector != "metselect" or not final:
            continue
        difference, error = paired_difference(group, final)
        if not np.isfinite(error):  # a single run has no standard error
            continue
        if difference > 2 * error:
            above += 1
        elif difference < -2 * error:
            model = f"{backbone.upper()} on {dataset}"
            below.append(f"{model} ({difference:+.1f}, standard error {error:.1f})")
        else:
            level += 1
    if above + level + len(below) == 0:
        return []
    exceptions = f": {'; '.join(below)}" if below else ""
    return [
        "Against FinalSelect of the same backbone (paired, two standard errors): above in "
        f"{above} cells, level in {level}, below in {len(below)}{exceptions}."
    ]
