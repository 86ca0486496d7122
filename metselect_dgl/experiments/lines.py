"""Result lines of studies, and the statistics that tables and verdicts share."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ..files import write_atomic

Lines = list[dict]


def write_lines(lines: Iterable[dict], path: Path) -> None:
    """All of them or, if something fails, none."""
    text = "".join(json.dumps(each) + "\n" for each in lines)
    write_atomic(path, lambda file: file.write(text.encode()))


def read_lines(folder: Path, study: str) -> Lines:
    """The lines of a study, none if it was not run."""
    path = Path(folder) / f"{study}.jsonl"
    return [json.loads(each) for each in path.read_text().splitlines()] if path.exists() else []


def cells(lines: Lines) -> dict[tuple[str, str, str], Lines]:
    """Lines by (backbone, selector, dataset), in the order of splits and seeds."""
    found = defaultdict(list)
    for each in sorted(lines, key=lambda each: (each["split"], each["seed"])):
        found[each["backbone"], each["selector"], each["dataset"]].append(each)
    return dict(found)


def accuracies(lines: Lines, part: str = "test") -> np.ndarray:
    """In per cent."""
    return 100 * np.array([each[f"{part}_accuracy"] for each in lines])


def paired(lines: Lines, other: Lines) -> tuple[float, float]:
    """Mean difference of test accuracy in points, run by run, and its standard error."""
    gap = accuracies(lines) - accuracies(other)
    return gap.mean(), gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else np.nan


def delta_max(means: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """By method, the mean over datasets of how far it is behind the best method there."""
    datasets = set.intersection(*(set(row) for row in means.values())) if means else set()
    best = {name: max(row[name] for row in means.values()) for name in datasets}
    gaps = {key: [best[d] - row[d] for d in datasets] for key, row in means.items()}
    return {key: float(np.mean(values)) for key, values in gaps.items() if values}


def means(lines: Lines, backbone: str) -> dict[str, dict[str, float]]:
    """Mean test accuracy in per cent by selector and dataset."""
    found = defaultdict(dict)
    for (other, selector, dataset), some in cells(lines).items():
        if other == backbone:
            found[selector][dataset] = float(accuracies(some).mean())
    return dict(found)


def variant(line: dict) -> str:
    """The model of a figure: the plain GCN, or MetSelect under a loss."""
    if line["selector"] == "final":
        return "GCN"
    return f"GCN + MetSelect, {line['settings'].get('loss', 'ce')}"


def depth_of(line: dict) -> int:
    """How many convolutions it had."""
    return line["settings"].get("num_layers", 2)


def attacked(line: dict) -> tuple[str, int]:
    """(cora, 20) of `mettack_cora_20`."""
    _, base, *rate = line["dataset"].split("_")
    return base, int(rate[0]) if rate else 0


def curves(lines: Lines, x, part: str = "test") -> dict[str, dict[int, np.ndarray]]:
    """Per cent by variant and x, one for every run."""
    found = defaultdict(lambda: defaultdict(list))
    for each in sorted(lines, key=lambda each: (each["split"], each["seed"])):
        found[variant(each)][x(each)].append(each)
    return {
        name: {at: accuracies(points[at], part) for at in sorted(points)}
        for name, points in found.items()
    }
