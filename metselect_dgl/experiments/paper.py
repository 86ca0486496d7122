"""The figures that the paper prints, read from paper.yaml."""

from pathlib import Path
from typing import NamedTuple

import yaml

_PRINTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Figure(NamedTuple):
    """A mean over splits in per cent and, if printed, its standard deviation."""

    mean: float
    std: float | None = None


def _table(rows: dict[str, str]) -> dict[str, dict[str, Figure]]:
    """Parse rows of `mean±std` in the order of DATASETS; return figures by selector and dataset."""
    table = {}
    for selector, row in rows.items():
        table[selector] = {}
        for dataset, cell in zip(DATASETS, row.split(), strict=True):
            table[selector][dataset] = Figure(*map(float, cell.split("±")))
    return table


DATASETS = tuple(_PRINTED["datasets"].split())
ACCURACY = {backbone: _table(rows) for backbone, rows in _PRINTED["accuracy"].items()}
DELTA_MAX = _PRINTED["delta_max"]
SELF_LOOPS = _table(_PRINTED["self_loops"])
SELF_LOOPS_DELTA_MAX = _PRINTED["self_loops_delta_max"]
AGGREGATION = _table(_PRINTED["aggregation"])
AGGREGATION_DELTA_MAX = _PRINTED["aggregation_delta_max"]
DEPTH, ATTACK = _PRINTED["depth"], _PRINTED["attack"]
EPOCH_SECONDS, SMALL_EPOCH_SECONDS = _PRINTED["epoch_seconds"], _PRINTED["small_epoch_seconds"]
