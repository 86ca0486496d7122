"""The paper's figures: accuracy against depth, and against the share of attacked edges."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .. import paper
from ..experiment import Experiment
from ..reproduce_settings import ReproduceSettings
from ..result_rows import Rows, accuracies, format_mean, sorted_by_run
from ..tables import markdown
from .study import StoredResults, Study, gcn_datasets

if TYPE_CHECKING:
    from ..run_configs import Execution

MODELS = (
    {"selector": "final"},
    {"selector": "metselect", "loss": "ce"},
    {"selector": "metselect", "loss": "distance"},
    {"selector": "metselect", "loss": "posterior"},
)
PLAIN = "GCN"

# Accuracies in per cent, one per run, by model and position on the x axis.
Curves = dict[str, dict[int, np.ndarray]]


@dataclass(frozen=True)
class CurveStudy(Study):
    """A figure of GCN with self-loops on Cora and Citeseer; all models have the same settings."""

    axis: ClassVar[str]
    corner: ClassVar[str]
    paper_text: ClassVar[str]
    parts: ClassVar[Sequence[str]] = ("test",)
    log_scale: ClassVar[bool] = False

    def datasets(self, settings: ReproduceSettings) -> Sequence[str]:
        return [name for name in gcn_datasets(settings) if name in ("cora", "citeseer")]

    def place(self, row: dict) -> tuple[str, int]:
        """Return the dataset of a row and its position on the x axis."""
        raise NotImplementedError

    def rows_by_dataset(self, rows: Rows) -> dict[str, Rows]:
        """Group rows by dataset, in their order."""
        groups = defaultdict(list)
        for row in rows:
            groups[self.place(row)[0]].append(row)
        return groups

    def curves(self, rows: Rows, part: str = "test") -> Curves:
        """Return the curves of one dataset."""
        groups = defaultdict(lambda: defaultdict(list))
        for row in sorted_by_run(rows):
            model = PLAIN
            if row["selector"] != "final":
                model = f"GCN + MetSelect, {row['settings'].get('loss', 'ce')}"
            groups[model][self.place(row)[1]].append(row)
        curves = {}
        for model, points in groups.items():
            curves[model] = {x: accuracies(points[x], part) for x in sorted(points)}
        return curves

    def section(self, results: StoredResults) -> list[str]:
        from ...plots import plot_curves

        panels = {}
        for dataset, rows in self.rows_by_dataset(results.rows[self.name]).items():
            for part in self.parts:
                title = dataset if len(self.parts) == 1 else f"{dataset}, {part}"
                panels[title] = self.curves(rows, part)
        plot_curves(panels, self.axis, results.folder / f"{self.name}.png", log=self.log_scale)
        picture = f"![{self.title}]({results.link / f'{self.name}.png'})"
        paragraphs = [f"## {self.title}", self.paper_text, picture]
        for title, panel in panels.items():
            paragraphs.append(_curve_table(f"{title}, {self.corner}", panel))
        return paragraphs


def _curve_table(corner: str, panel: Curves) -> str:
    positions = sorted({x for points in panel.values() for x in points})
    table = []
    for model, points in panel.items():
        cells = [format_mean(points[x]) if x in points else "not run" for x in positions]
        table.append([model, *cells])
    return markdown(([corner, *map(str, positions)], table))


@dataclass(frozen=True)
class Depth(CurveStudy):
    """Test accuracy against the number of convolutions."""

    depths: Sequence[int] = (2, 4, 8, 16, 32, 64, 128)
    splits: int = 3

    axis = "depth"
    corner = "depth"
    paper_text = paper.DEPTH
    log_scale = True

    def quick(self) -> Study:
        return replace(self, depths=(2, 16), splits=1)

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        splits = min(self.splits, settings.splits)
        experiments = []
        for depth in self.depths:
            for dataset in self.datasets(settings):
                base = replace(settings.recipe, self_loop=True, dataset=dataset, num_layers=depth)
                for model in MODELS:
                    experiments.append(Experiment(replace(base, **model), splits=splits))
        return experiments

    def place(self, row: dict) -> tuple[str, int]:
        return row["dataset"], row["settings"].get("num_layers", 2)

    def findings(self, rows: Rows) -> list[str]:
        sentences = []
        for dataset, group in self.rows_by_dataset(rows).items():
            for model, points in self.curves(group).items():
                means = {depth: values.mean() for depth, values in points.items()}
                best = max(means, key=means.get)
                lost = []
                for depth in (16, 32, 64, 128):
                    if depth in means:
                        lost.append(f"{means[best] - means[depth]:.1f} at {depth}")
                sentences.append(
                    f"{dataset}, {model}: best {means[best]:.1f} at depth {best}; "
                    f"points lost: {', '.join(lost)}."
                )
        return sentences


@dataclass(frozen=True)
class Attack(CurveStudy):
    """Accuracy against the share of edges that Mettack changed, on the public poisoned graphs."""

    rates: Sequence[int] = (0, 5, 10, 15, 20)  # per cent of the edges
    seeds: int = 5

    dataset_prefix = "mettack_"
    axis = "edges changed, %"
    corner = "% changed"
    paper_text = paper.ATTACK
    parts = ("test", "train")

    def quick(self) -> Study:
        return replace(self, rates=(0, 20), seeds=2)

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        experiments = []
        for dataset in self.datasets(settings):
            for rate in self.rates:
                name = f"{self.dataset_prefix}{dataset}" + (f"_{rate:02}" if rate else "")
                base = replace(settings.recipe, self_loop=True, dataset=name)
                for model in MODELS:
                    config = replace(base, **model)
                    experiments.append(Experiment(config, splits=1, seeds=self.seeds))
        return experiments

    def place(self, row: dict) -> tuple[str, int]:
        """Return (cora, 20) for `mettack_cora_20`."""
        _, dataset, *rate = row["dataset"].split("_")
        return dataset, int(rate[0]) if rate else 0

    def findings(self, rows: Rows) -> list[str]:
        sentences = []
        for dataset, group in self.rows_by_dataset(rows).items():
            curves = self.curves(group)
            plain = curves.pop(PLAIN, None)
            if plain is None:
                continue
            for model, points in curves.items():
                differences = []
                for rate in (0, max(plain)):
                    points_above = (points[rate] - plain[rate]).mean()
                    differences.append(f"{points_above:+.1f} at {rate} %")
                sentences.append(
                    f"{self.title}, {dataset}: {model} against the plain GCN: "
                    f"{', '.join(differences)}."
                )
        return sentences


@dataclass(frozen=True)
class FreshAttack(Attack):
    """The same on graphs that our own Mettack poisons first."""

    def run(self, settings: ReproduceSettings, out: Path, execution: "Execution") -> None:
        from ..mettack import poison

        folder = out / "poisoned"
        for dataset in self.datasets(settings):
            poison(dataset, self.rates, execution.data_dir, folder)
        super().run(settings, out, replace(execution, data_dir=str(folder)))
