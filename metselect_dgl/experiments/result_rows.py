"""Result rows of studies: stored as JSON lines, and the statistics of tables and findings."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..atomic_file import write_atomic

Rows = list[dict]


def read_rows(path: Path) -> Rows:
    """Return the rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        rows.append(parse_row(line, f"{path}, line {number}"))
    return rows


def parse_row(line: str | bytes, where: str) -> dict:
    """Return the row that a JSON line holds; an error names the place."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error}); remove the line or the file") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a result; remove the line or the file")
    return row


def add_rows(rows: Rows, path: Path) -> None:
    """Write rows; stored rows of the same models on the same data are replaced, others stay."""
    new = {_model_key(row) for row in rows}
    kept = [row for row in read_rows(path) if _model_key(row) not in new]
    text = "".join(json.dumps(row) + "\n" for row in [*kept, *rows])
    write_atomic(path, lambda file: file.write(text.encode()))


def _model_key(row: dict) -> tuple:
    settings = row.get("settings", {})
    model = (row["dataset"], row["backbone"], row["selector"])
    return *model, settings.get("num_layers"), settings.get("loss")


def sorted_by_run(rows: Rows) -> Rows:
    """Return rows in the order of splits and seeds."""
    return sorted(rows, key=lambda row: (row["split"], row["seed"]))


def rows_by_model(rows: Rows) -> dict[tuple[str, str, str], Rows]:
    """Group rows by (backbone, selector, dataset), in the order of splits and seeds."""
    groups = defaultdict(list)
    for row in sorted_by_run(rows):
        groups[row["backbone"], row["selector"], row["dataset"]].append(row)
    return dict(groups)


def accuracies(rows: Rows, part: str = "test") -> np.ndarray:
    """Return the accuracies in per cent."""
    return 100 * np.array([row[f"{part}_accuracy"] for row in rows])


def mean_accuracies(rows: Rows, backbone: str) -> dict[str, dict[str, float]]:
    """Return mean test accuracies in per cent by selector and dataset."""
    means = defaultdict(dict)
    for (row_backbone, selector, dataset), group in rows_by_model(rows).items():
        if row_backbone == backbone:
            means[selector][dataset] = float(accuracies(group).mean())
    return dict(means)


def paired_difference(rows: Rows, baseline: Rows) -> tuple[float, float]:
    """Return the mean difference of test accuracies in points over common runs, and its standard
    error (NaN for a single run)."""
    by_run = {(row["split"], row["seed"]): row["test_accuracy"] for row in baseline}
    points = []
    for row in rows:
        run = (row["split"], row["seed"])
        if run in by_run:
            points.append(100 * (row["test_accuracy"] - by_run[run]))
    error = np.std(points, ddof=1) / len(points) ** 0.5 if len(points) > 1 else np.nan
    return float(np.mean(points)), float(error)


def format_difference(rows: Rows, baseline: Rows) -> str:
    """Return a paired difference as `+1.6 (0.2)`; without the error for a single run."""
    difference, error = paired_difference(rows, baseline)
    return f"{difference:+.1f}" + (f" ({error:.1f})" if np.isfinite(error) else "")


def format_mean(values: np.ndarray) -> str:
    """Return `85.0 ±1.2`: mean and standard deviation."""
    deviation = f" ±{values.std(ddof=1):.1f}" if len(values) > 1 else ""
    return f"{values.mean():.1f}{deviation}"


def selection_gain(rows: Rows) -> dict[str, float | None]:
    """Return mean accuracies of fixed layers, selection and oracles, as shares by title, and the
    share of the gap between the best layer and the oracle that the selection closes (None without a
    gap); nothing if the layers have no decoders of their own."""
    if "fixed" not in rows[0]:
        return {}
    names = ("fixed", "test_accuracy", "oracle", "lucky_oracle")
    fixed, selected, oracle, shuffled = (np.mean([row[name] for row in rows], 0) for name in names)
    gap = oracle - fixed.max()
    return {
        **{f"all at layer {depth}": share for depth, share in enumerate(fixed)},
        "selected per node": selected,
        "oracle": oracle,
        "shuffled oracle": shuffled,
        "share of the oracle's gain realised": (selected - fixed.max()) / gap if gap > 0 else None,
    }


def delta_max(means: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return by method the mean distance to the best method, over the datasets that all have."""
    datasets = set.intersection(*map(set, means.values())) if means else set()
    distances = {}
    for method, row in means.items() if datasets else ():
        gaps = [max(other[d] for other in means.values()) - row[d] for d in datasets]
        distances[method] = float(np.mean(gaps))
    return distances
