"""The page of results: our figures and the paper's in one cell, pictures, and what was reached.

Everything is computed from the result lines that `reproduce` left; `reading.md` beside them, if it
is there, is put at the top as it is.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..files import write_atomic
from ..plots import plot_curves, plot_shares
from . import paper
from .bench import markdown
from .lines import (
    Lines,
    accuracies,
    attacked,
    cells,
    curves,
    delta_max,
    depth_of,
    means,
    paired,
    read_lines,
)
from .tables import percent
from .verdicts import verdicts

TITLE = {
    "final": "FinalSelect",
    "ndls": "NDLSelect",
    "attn": "AttnSelect",
    "metselect": "**MetSelect** (our default)",
    "metselect-paper": "MetSelect as in the paper",
    "metselect-max": "MetSelect-max",
    "jknet-max": "JKNet-Max",
    "jknet-cat": "JKNet-Cat",
    "jknet-lstm": "JKNet-LSTM",
    "jknet-metselect": "JKNet-MetSelect",
}
HEADER = """\
# Results

What `metselect reproduce` measured, beside the paper's figures. A cell has the mean test accuracy
and its standard deviation over splits; below, the paired difference to FinalSelect and its standard
error; below, the paper's figure. Runs differ in split and seed; the settings of every model were
chosen on validation nodes alone (`experiments/tuning.py` says how), and every line with its
settings is in [results/](results)."""


def write_page(folder: Path, page: Path) -> str:
    """Write the page, with its pictures in `folder`; returns what was reached."""
    studies = {name: read_lines(folder, name) for name in _SECTIONS}
    beside = Path(os.path.relpath(folder, page.parent))
    reached = verdicts(studies)
    reading = folder / "reading.md"
    parts = [HEADER, *([reading.read_text().strip()] if reading.exists() else [])]
    parts += ["## What was reached", *reached]
    for name, section in _SECTIONS.items():
        parts += section(studies[name], folder, beside)
    text = "\n\n".join(parts) + "\n"
    write_atomic(page, lambda file: file.write(text.encode()))
    return "\n".join(reached)


def headline(lines: Lines) -> str:
    """The table that the README quotes: FinalSelect, MetSelect, their difference, the paper's."""
    found = cells(lines)
    columns = [d for d in paper.DATASETS if any(key[2] == d for key in found)]
    rows = []
    for backbone in paper.ACCURACY:
        pairs = [
            (found.get((backbone, "final", d)), found.get((backbone, "metselect", d)))
            for d in columns
        ]
        if not all(final and ours for final, ours in pairs):
            continue
        name = backbone.upper()
        gaps = [paired(ours, final) for final, ours in pairs]
        theirs = [f"{paper.ACCURACY[backbone]['metselect'][d].mean:.1f}" for d in columns]
        rows += [
            [f"{name}, FinalSelect", *(f"{accuracies(final).mean():.1f}" for final, _ in pairs)],
            [f"{name}, MetSelect", *(f"{accuracies(ours).mean():.1f}" for _, ours in pairs)],
            ["difference (standard error)", *(f"{gap:+.1f} ({err:.1f})" for gap, err in gaps)],
            [f"paper, {name} + MetSelect", *theirs],
        ]
    return markdown((["%", *columns], rows))


def _accuracy(lines: Lines, folder: Path, beside: Path) -> list[str]:
    if not lines:
        return []
    parts = ["## Table 2: accuracy"]
    for backbone in paper.ACCURACY:
        table = _table(lines, backbone, paper.ACCURACY[backbone], paper.DELTA_MAX[backbone])
        if table:
            parts += [f"### {backbone.upper()}", table, _layers_table(lines, backbone)]
    plot_shares(_shares(lines), folder / "layers.png")
    parts += [
        "## Layers that MetSelect chose",
        "Share of the test nodes at every layer, mean over splits; our default.",
        f"![layers]({beside / 'layers.png'})",
    ]
    return parts


def _self_loops(lines: Lines, folder: Path, beside: Path) -> list[str]:
    return _one_table(
        "Table 4: GCN with self-loops", lines, paper.SELF_LOOPS, paper.SELF_LOOPS_DELTA_MAX
    )


def _aggregation(lines: Lines, folder: Path, beside: Path) -> list[str]:
    return _one_table(
        "Table 5: layer aggregation (GCN)", lines, paper.AGGREGATION, paper.AGGREGATION_DELTA_MAX
    )


def _one_table(title: str, lines: Lines, theirs: dict, delta: dict) -> list[str]:
    return [f"## {title}", _table(lines, "gcn", theirs, delta)] if lines else []


def _table(lines: Lines, backbone: str, theirs: dict, their_delta: dict) -> str | None:
    """Rows of selectors, columns of datasets; None if the backbone was not run."""
    found, ours = cells(lines), delta_max(means(lines, backbone))
    rows = []
    for name in (name for name in TITLE if name in means(lines, backbone)):
        known = "metselect" if name == "metselect-paper" else name
        row = [TITLE[name]]
        for d in paper.DATASETS:
            final = found.get((backbone, "final", d)) if name != "final" else None
            row.append(_cell(found.get((backbone, name, d)), final, theirs[known][d]))
        row.append(f"{ours[name]:.2f}<br>*{their_delta[known]:.2f}*" if name in ours else "")
        rows.append(row)
    return markdown((["", *paper.DATASETS, "Δ max"], rows)) if rows else None


def _cell(lines: Lines | None, final: Lines | None, theirs: paper.Figure) -> str:
    said = f"*{theirs.mean:.2f}*" + (f" *±{theirs.std:.2f}*" if theirs.std else "")
    if not lines:
        return f"not run<br>{said}"
    ours = accuracies(lines)
    spread = f" ±{ours.std(ddof=1):.1f}" if len(ours) > 1 else ""
    text = [f"{ours.mean():.1f}{spread}"]
    if final and len(final) == len(lines):
        gap, error = paired(lines, final)
        text.append(f"{gap:+.1f} ({error:.1f})")
    return "<br>".join([*text, said])


def _layers_table(lines: Lines, backbone: str) -> str:
    """What choosing is worth: every fixed layer of our models, the oracles, the share realised."""
    found = cells(lines)
    columns = [d for d in paper.DATASETS if (backbone, "metselect", d) in found]
    rows = {}
    for d in columns:
        runs = found[backbone, "metselect", d]
        fixed = np.mean([each["fixed"] for each in runs], 0)
        oracle, lucky = (np.mean([each[k] for each in runs]) for k in ("oracle", "lucky_oracle"))
        chosen = np.mean([each["test_accuracy"] for each in runs])
        gain = oracle - fixed.max()
        for depth, value in enumerate(fixed):
            rows.setdefault(f"all at layer {depth}", []).append(percent(value))
        rows.setdefault("**chosen per node**", []).append(percent(chosen))
        rows.setdefault("oracle", []).append(percent(oracle))
        rows.setdefault("lucky oracle", []).append(percent(lucky))
        share = (chosen - fixed.max()) / gain if gain > 0 else None
        rows.setdefault("share of the oracle's gain, %", []).append(percent(share))
    head = [f"our MetSelect, {backbone.upper()}", *columns]
    return markdown((head, [[name, *values] for name, values in rows.items()]))


def _shares(lines: Lines) -> dict[str, dict[str, Sequence[float]]]:
    found = cells(lines)
    return {
        backbone.upper(): {
            d: np.mean([each["layer_share"] for each in found[backbone, "metselect", d]], 0)
            for d in paper.DATASETS
            if (backbone, "metselect", d) in found
        }
        for backbone in paper.ACCURACY
        if any(key[:2] == (backbone, "metselect") for key in found)
    }


def _time(lines: Lines, folder: Path, beside: Path) -> list[str]:
    if not lines:
        return []
    names = {"ndls": "NDLSelect", "metselect": "MetSelect", "metselect-paper": "MetSelect"}
    rows = []
    for backbone in dict.fromkeys(each["backbone"] for each in lines):
        for where, seconds in (
            ("small", paper.SMALL_EPOCH_SECONDS),
            ("arxiv-twin", paper.EPOCH_SECONDS),
        ):
            theirs = seconds[backbone.upper()]
            row = [f"{backbone.upper()}, {where}"]
            for name in names:
                ratios = [
                    each["ratio"]
                    for each in lines
                    if (each["backbone"], each["selector"]) == (backbone, name)
                    and (each["dataset"] == "arxiv-twin") == (where == "arxiv-twin")
                ]
                said = theirs[names[name]] / theirs["FinalSelect"]
                row.append(f"{np.mean(ratios):.2f}<br>*{said:.2f}*" if ratios else "not run")
            rows.append(row)
    small = len({each["dataset"] for each in lines} - {"arxiv-twin"})
    return [
        "## Table 3: time of a training epoch",
        "Ratio to FinalSelect of the same backbone; the selectors take turns in one process. "
        f"Small: mean over {small} datasets. arxiv-twin: a synthetic graph of the size of "
        "ogbn-arxiv. Below: the paper's ratio, on a GPU and, for the last row of a backbone, on "
        "ogbn-arxiv itself. NDLSelect's search of hops, once per graph, is not part of an epoch.",
        markdown((["", *(TITLE[name] for name in names)], rows)),
    ]


def _depth(lines: Lines, folder: Path, beside: Path) -> list[str]:
    if not lines:
        return []
    panels = {
        d: curves([each for each in lines if each["dataset"] == d], depth_of)
        for d in dict.fromkeys(each["dataset"] for each in lines)
    }
    plot_curves(panels, "depth", folder / "depth.png", log=True)
    return [
        "## Accuracy against depth",
        f"![accuracy against depth]({beside / 'depth.png'})",
        *(_curve_table(f"{name}, depth", panel) for name, panel in panels.items()),
    ]


def _attack(lines: Lines, folder: Path, beside: Path) -> list[str]:
    return _poisoned("Mettack: the public poisoned graphs", "attack", lines, folder, beside)


def _fresh(lines: Lines, folder: Path, beside: Path) -> list[str]:
    return _poisoned("Mettack: poisoned here", "fresh-attack", lines, folder, beside)


def _poisoned(title: str, name: str, lines: Lines, folder: Path, beside: Path) -> list[str]:
    if not lines:
        return []
    panels = {}
    for base in dict.fromkeys(attacked(each)[0] for each in lines):
        some = [each for each in lines if attacked(each)[0] == base]
        for part in ("test", "train"):
            panels[f"{base}, {part}"] = curves(some, lambda each: attacked(each)[1], part)
    plot_curves(panels, "edges changed, %", folder / f"{name}.png")
    return [
        f"## {title}",
        f"![{title}]({beside / f'{name}.png'})",
        *(_curve_table(f"{key}, % changed", panel) for key, panel in panels.items()),
    ]


def _curve_table(corner: str, panel: dict[str, dict[int, np.ndarray]]) -> str:
    places = sorted({at for points in panel.values() for at in points})
    rows = [
        [name, *(_mean_std(points[at]) if at in points else "not run" for at in places)]
        for name, points in panel.items()
    ]
    return markdown(([corner, *map(str, places)], rows))


def _mean_std(values: np.ndarray) -> str:
    spread = f" ±{values.std(ddof=1):.1f}" if len(values) > 1 else ""
    return f"{values.mean():.1f}{spread}"


_SECTIONS = {
    "accuracy": _accuracy,
    "time": _time,
    "self-loops": _self_loops,
    "aggregation": _aggregation,
    "depth": _depth,
    "attack": _attack,
    "fresh-attack": _fresh,
}
