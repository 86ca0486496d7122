"""Result lines of studies, and the statistics that tables and verdicts share."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..atomic_file import write_atomic

Lines = list[dict]


# Studies whose models go by the names of Table 2 and have other settings: apart from its lines.
VARIATIONS = ("self-loops", "depth", "fresh-attack", "time")


def path_of(folder: Path, study: str) -> Path:
    """Where the lines of a study are."""
    return Path(folder) / ("variations" if study in VARIATIONS else "") / f"{study}.jsonl"


def read_lines(folder: Path, study: str) -> Lines:
    """The lines of a study, none if it was not run."""
    path = path_of(folder, study)
    return [json.loads(each) for each in path.read_text().splitlines()] if path.exists() else []


def add_lines(lines: Lines, folder: Path, study: str) -> None:
    """Put lines in the place of those of the same models and data; others stay."""
    new = {_model(each) for each in lines}
    kept = [each for each in read_lines(folder, study) if _model(each) not in new]
    text = "".join(json.dumps(each) + "\n" for each in kept + lines)
    path = path_of(folder, study)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: file.write(text.encode()))


def _model(line: dict) -> tuple:
    names, settings = ("dataset", "backbone", "selector"), line.get("settings", {})
    return *(line[name] for name in names), settings.get("num_layers"), settings.get("loss")


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
    """Mean difference of test accuracy in points over the runs that both have, and its standard
    error; NaN of a single run."""
    first, second = (
        {(each["split"], each["seed"]): 100 * each["test_accuracy"] for each in some}
        for some in (lines, other)
    )
    gap = np.array([first[run] - second[run] for run in first if run in second])
    return gap.mean(), gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else np.nan


def signed(lines: Lines, other: Lines) -> str:
    """`+1.6 (0.2)`: `paired`, without the error where there is none."""
    gap, error = paired(lines, other)
    return f"{gap:+.1f}" + (f" ({error:.1f})" if np.isfinite(error) else "")


class Worth(NamedTuple):
    """What choosing per node is worth, as shares: mean over runs."""

    fixed: np.ndarray  # [L]
    chosen: float
    oracle: float
    lucky_oracle: float

    @classmethod
    def of(cls, lines: Lines) -> "Worth | None":
        """None where layers have no decoders of their own."""
        if "fixed" not in lines[0]:
            return None
        names = ("fixed", "test_accuracy", "oracle", "lucky_oracle")
        return cls(*(np.mean([each[name] for each in lines], 0) for name in names))

    def realised(self) -> float | None:
        """The share of the way from the best fixed layer to the oracle."""
        gain = self.oracle - self.fixed.max()
        return (self.chosen - self.fixed.max()) / gain if gain > 0 else None


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
