"""Table 3 of the paper: the time of a training epoch, as a ratio to FinalSelect's."""

import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from ...config import Config
from .. import paper
from ..result_rows import Rows, add_rows, read_rows
from ..tables import markdown
from .accuracy import TITLES
from .study import ReproduceSettings, StoredResults, Study

if TYPE_CHECKING:
    from ..run_configs import Execution

SELECTORS = ("final", "ndls", "metselect", "metselect-paper")
PAPER_NAMES = {"ndls": "NDLSelect", "metselect": "MetSelect", "metselect-paper": "MetSelect"}
LARGE_DATASETS = ("arxiv-twin", "ogbn-arxiv")
ENDLESS = 10**9
WARM_UP_EPOCHS = 3
TURN_SECONDS = 0.05  # shortest measured time; quicker epochs are repeated


@dataclass(frozen=True)
class EpochTime(Study):
    """Time of a training epoch with each selector; they take turns, so that a slow moment of the
    machine affects all of them."""

    large: str = "arxiv-twin"
    large_rounds: int = 5
    rounds: int = 15

    def run(self, settings: ReproduceSettings, out: Path, execution: "Execution") -> None:
        stored = {(row["dataset"], row["backbone"]) for row in read_rows(self.path(out))}
        models = product((*settings.datasets, self.large), settings.backbones)
        for dataset, backbone in tqdm([m for m in models if m not in stored], unit="model"):
            config = replace(settings.recipe, dataset=dataset, backbone=backbone)
            add_rows(self._measure(config, execution.data_dir), self.path(out))

    def _measure(self, config: Config, data_dir: str | None) -> Rows:
        """Time all selectors on one dataset and return their rows."""
        from ...data import load_dataset
        from ...train import TrainingLoop, prepare

        config = replace(config, epochs=ENDLESS, validate_every=ENDLESS)
        data = prepare(config, load_dataset(config.dataset, data_dir))
        loops, turns = {}, {}
        for selector in SELECTORS:
            loops[selector] = TrainingLoop(replace(config, selector=selector), data, None)
            for _ in range(WARM_UP_EPOCHS):
                loops[selector].epoch()
            turns[selector] = max(1, round(TURN_SECONDS / _epoch_seconds(loops[selector], 1)))
        seconds = {selector: [] for selector in SELECTORS}
        for start in range(self.large_rounds if config.dataset == self.large else self.rounds):
            shift = start % len(SELECTORS)  # the order changes from round to round
            for selector in SELECTORS[shift:] + SELECTORS[:shift]:
                seconds[selector].append(_epoch_seconds(loops[selector], turns[selector]))
        rows = []
        for selector, times in seconds.items():
            ratios = np.array(times) / np.array(seconds["final"])
            low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75))
            rows.append(
                {
                    "study": self.name,
                    "dataset": config.dataset,
                    "backbone": config.backbone,
                    "selector": selector,
                    "ratio": round(ratio, 4),
                    "quartiles": [round(low, 4), round(high, 4)],
                    "seconds": round(float(np.median(times)), 6),
                    "rounds": len(times),
                }
            )
        return rows

    def section(self, results: StoredResults) -> list[str]:
        rows = results.rows[self.name]
        groups = {"small": [row for row in rows if row["dataset"] not in LARGE_DATASETS]}
        for dataset in LARGE_DATASETS:
            groups[dataset] = [row for row in rows if row["dataset"] == dataset]
        table = []
        for backbone in dict.fromkeys(row["backbone"] for row in rows):
            for group, group_rows in groups.items():
                if group in LARGE_DATASETS and not group_rows:
                    continue
                seconds = paper.SMALL_EPOCH_SECONDS if group == "small" else paper.EPOCH_SECONDS
                printed = seconds[backbone.upper()]
                cells = [f"{backbone.upper()}, {group}"]
                for selector, paper_name in PAPER_NAMES.items():
                    ratios = []
                    for row in group_rows:
                        if (row["backbone"], row["selector"]) == (backbone, selector):
                            ratios.append(row["ratio"])
                    ratio = printed[paper_name] / printed["FinalSelect"]
                    cells.append(f"{np.mean(ratios):.2f}<br>*{ratio:.2f}*" if ratios else "not run")
                table.append(cells)
        n_small = len({row["dataset"] for row in groups["small"]})
        return [
            f"## {self.title}",
            "Ratio to FinalSelect of the same backbone; the selectors take turns in one process. "
            f"Small: mean over {n_small} datasets. arxiv-twin: a synthetic graph of the size of "
            "ogbn-arxiv. In italics: the paper's ratio, measured on a GPU; for the twin, its ratio "
            "on ogbn-arxiv itself. NDLSelect's search of hops runs once per graph and is not part "
            "of an epoch here.",
            markdown((["", *(TITLES[selector] for selector in PAPER_NAMES)], table)),
        ]


def _epoch_seconds(loop, epochs: int) -> float:
    """Return the mean time of an epoch."""
    start = time.perf_counter()
    for _ in range(epochs):
        loop.epoch()
    return (time.perf_counter() - start) / epochs
