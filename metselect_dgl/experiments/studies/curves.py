"""The paper's figures: accuracy against depth, and against the share of attacked edges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .. import paper
from ..experiment import Experiment
from ..result_rows import Rows, format_mean, sorted_by_run
from ..tables import markdown
from .study import ReproduceSettings, StoredResults, Study

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

    gcn_only: bool = True
    splits: int = 1
    seeds: int = 1

    axis: ClassVar[str]
    corner: ClassVar[str]
    paper_text: ClassVar[str]
    parts: ClassVar[Sequence[str]] = ("test",)
    log_scale: ClassVar[bool] = False

    def datasets(self, settings: ReproduceSettings) -> Sequence[str]:
        return [name for name in super().datasets(settings) if name in ("cora", "citeseer")]

    def points(self, settings: ReproduceSettings) -> list[dict]:
        """Return the settings of every dataset and position on the x axis."""
        raise NotImplementedError

    def place(self, row: dict) -> tuple[str, int]:
        """Return the dataset of a row and its position on the x axis."""
        raise NotImplementedError

    def experiments(self, settings: ReproduceSettings) -> list[Experiment]:
        splits = min(self.splits, settings.splits)
        experiments = []
        for point in self.points(settings):
            for model in MODELS:
                config = replace(settings.recipe, self_loop=True, **point, **model)
                experiments.append(Experiment(config, splits=splits, seeds=self.seeds))
        return experiments

    def curves(self, rows: Rows, part: str = "test") -> dict[str, Curves]:
        """Return the curves by dataset."""
        values = {}
        for row in sorted_by_run(rows):
            dataset, x = self.place(row)
            model = PLAIN
            if row["selector"] != "final":
                model = f"GCN + MetSelect, {row['settings'].get('loss', 'ce')}"
            points = values.setdefault(dataset, {}).setdefault(model, {})
            points.setdefault(x, []).append(100 * row[f"{part}_accuracy"])
        for models in values.values():
            for model, points in models.items():
                models[model] = {x: np.array(points[x]) for x in sorted(points)}
        return values

    def section(self, results: StoredResults) -> list[str]:
        from ...plots import plot_curves

        rows = results.rows[self.name]
        by_part = {part: self.curves(rows, part) for part in self.parts}
        panels = {}
        for dataset in by_part["test"]:
            for part, curves in by_part.items():
                panels[dataset if len(by_part) == 1 else f"{dataset}, {part}"] = curves[dataset]
        plot_curves(panels, self.axis, results.folder / f"{self.name}.png", log=self.log_scale)
        picture = f"![{self.title}]({results.link / f'{self.name}.png'})"
        paragraphs = [f"## {self.title}", self.paper_text, picture]
        for title, panel in panels.items():
            positions = sorted({x for points in panel.values() for x in points})
            table = []
            for model, points in panel.items():
                cells = [format_mean(points[x]) if x in points else "not run" for x in positions]
                table.append([model, *cells])
            header = [f"{title}, {self.corner}", *map(str, positions)]
            paragraphs.append(markdown((header, table)))
        return paragraphs


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

    def points(self, settings: ReproduceSettings) -> list[dict]:
        datasets = self.datasets(settings)
        return [{"dataset": name, "num_layers": n} for n in self.depths for name in datasets]

    def place(self, row: dict) -> tuple[str, int]:
        return row["dataset"], row["settings"].get("num_layers", 2)

    def findings(self, rows: Rows) -> list[str]:
        sentences = []
        for dataset, models in self.curves(rows).items():
            for model, points in models.items():
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

    def points(self, settings: ReproduceSettings) -> list[dict]:
        suffixes = [f"_{rate:02}" if rate else "" for rate in self.rates]
        names = [self.dataset_prefix + name for name in self.datasets(settings)]
        return [{"dataset": name + suffix} for name in names for suffix in suffixes]

    def place(self, row: dict) -> tuple[str, int]:
        """Return (cora, 20) for `mettack_cora_20`."""
        _, dataset, *rate = row["dataset"].split("_")
        return dataset, int(rate[0]) if rate else 0

    def findings(self, rows: Rows) -> list[str]:
        sentences = []
        for dataset, models in self.curves(rows).items():
            plain = models.pop(PLAIN, None)
            for model, points in models.items() if plain else ():
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
