"""The page of results: our figures and the paper's in one cell, pictures, and what was reached.

Everything is computed from the result lines that `reproduce` left; `reading.md` beside them, if it
is there, is put at the top as it is.
"""

import os
from pathlib import Path

import numpy as np

from ..atomic_file import write_atomic
from ..plots import NAMES, plot_curves, plot_shares
from . import paper
from .lines import (
    Lines,
    Worth,
    accuracies,
    attacked,
    cells,
    curves,
    delta_max,
    depth_of,
    means,
    read_lines,
    signed,
)
from .tables import markdown, percent
from .verdicts import verdicts

TITLE = NAMES | {
    "metselect": "**MetSelect** (our default)",
    "metselect-paper": "MetSelect as in the paper",
}
Studies = dict[str, Lines]
LARGE = ("arxiv-twin", "ogbn-arxiv")
HEADER = """\
# Results

What `metselect reproduce` measured, beside the paper's figures. A cell of a table has the mean test
accuracy in per cent and its standard deviation over splits; below, the paired difference to
FinalSelect and its standard error; below, in italics, the paper's figure. The settings of every
model in a table were chosen on validation nodes alone, from one small search that is the same for
all (`experiments/tuning.py`); those of the figures are the same for all models.
Every line, with its settings, is in [{beside}]({beside})."""


def write_page(folder: Path, page: Path) -> str:
    """Write the page, with its pictures in `folder`; returns what was reached."""
    studies = {name: read_lines(folder, name) for name in _SECTIONS}
    beside = Path(os.path.relpath(folder, page.parent))
    reached = verdicts(studies)
    reading = folder / "reading.md"
    parts = [HEADER.format(beside=beside)]
    parts += [reading.read_text().strip()] if reading.exists() else []
    parts += ["## What was reached", reached] if reached else []
    for name, section in _SECTIONS.items():
        if studies[name]:
            parts += section(studies, folder, beside)
    parts += _commands(studies)
    text = "\n\n".join(parts) + "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, lambda file: file.write(text.encode()))
    return reached


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
        theirs = [f"{paper.ACCURACY[backbone]['metselect'][d].mean:.1f}" for d in columns]
        rows += [
            [f"{name}, FinalSelect", *(f"{accuracies(final).mean():.1f}" for final, _ in pairs)],
            [f"{name}, MetSelect", *(f"{accuracies(ours).mean():.1f}" for _, ours in pairs)],
            ["difference (standard error)", *(signed(ours, final) for final, ours in pairs)],
            [f"paper, {name} + MetSelect", *theirs],
        ]
    return markdown((["%", *columns], rows))


def _accuracy(studies: Studies, folder: Path, beside: Path) -> list[str]:
    lines = studies["accuracy"]
    parts = ["## Table 2: accuracy"]
    for backbone in paper.ACCURACY:
        table = _table(lines, backbone, paper.ACCURACY[backbone], paper.DELTA_MAX[backbone])
        parts += [f"### {backbone.upper()}", table] if table else []
        parts += _layers_table(lines, backbone, "metselect")
    shares = _shares(lines)
    if shares:
        plot_shares(shares, folder / "layers.png")
        parts += [
            "## Layers that MetSelect chose",
            "Share of the test nodes at every layer, mean over splits; our default.",
            f"![layers]({beside / 'layers.png'})",
        ]
    return parts


def _self_loops(studies: Studies, folder: Path, beside: Path) -> list[str]:
    lines = studies["self-loops"]
    table = _table(lines, "gcn", paper.SELF_LOOPS, paper.SELF_LOOPS_DELTA_MAX)
    more = _layers_table(lines, "gcn", "metselect")
    return ["## Table 4: GCN with self-loops", table, *more]


def _aggregation(studies: Studies, folder: Path, beside: Path) -> list[str]:
    """With FinalSelect's row of Table 2, which the paper's Table 5 has not."""
    lines = studies["aggregation"]
    final = [each for each in studies["accuracy"] if each["selector"] == "final"]
    known = {each["dataset"] for each in lines}
    final = [each for each in final if each["backbone"] == "gcn" and each["dataset"] in known]
    theirs = paper.AGGREGATION | {"final": paper.ACCURACY["gcn"]["final"]}
    table = _table(lines + final, "gcn", theirs, paper.AGGREGATION_DELTA_MAX)
    more = _layers_table(lines, "gcn", "jknet-metselect")
    text = "Layers 0, 1 and 2 of JKNet-MetSelect are JKNet-LSTM, -Cat and -Max."
    return ["## Table 5: layer aggregation (GCN)", table, text, *more]


def _table(lines: Lines, backbone: str, theirs: dict, their_delta: dict) -> str | None:
    """Rows of selectors, columns of datasets; None if the backbone was not run."""
    found, ours = cells(lines), delta_max(means(lines, backbone))
    rows = []
    for name in (name for name in TITLE if ours and (name in theirs or name in ours)):
        known = "metselect" if name == "metselect-paper" else name
        row = [TITLE[name]]
        for d in paper.DATASETS:
            final = found.get((backbone, "final", d)) if name != "final" else None
            row.append(_cell(found.get((backbone, name, d)), final, theirs[known][d]))
        said = f"<br>*{their_delta[known]:.2f}*" if known in their_delta else ""
        row.append(f"{ours[name]:.2f}{said}" if name in ours else "")
        rows.append(row)
    return markdown((["", *paper.DATASETS, "Δ max"], rows)) if rows else None


def _cell(lines: Lines | None, final: Lines | None, theirs: paper.Figure) -> str:
    said = f"*{theirs.mean:g}*" + (f" *±{theirs.std:g}*" if theirs.std else "")
    if not lines:
        return f"not run<br>{said}"
    difference = [signed(lines, final)] if final else []
    return "<br>".join([_mean_std(accuracies(lines)), *difference, said])


def _layers_table(lines: Lines, backbone: str, selector: str) -> list[str]:
    """What choosing is worth: every fixed layer of the models, the oracles, the share realised."""
    worth = {
        dataset: Worth.of(some)
        for (other, name, dataset), some in cells(lines).items()
        if (other, name) == (backbone, selector)
    }
    columns = [d for d in paper.DATASETS if worth.get(d)]
    if not columns:
        return []
    depth = len(worth[columns[0]].fixed)
    rows = [
        *(
            [f"all at layer {k}", *(percent(worth[d].fixed[k]) for d in columns)]
            for k in range(depth)
        ),
        ["**chosen per node**", *(percent(worth[d].chosen) for d in columns)],
        ["oracle", *(percent(worth[d].oracle) for d in columns)],
        ["lucky oracle", *(percent(worth[d].lucky_oracle) for d in columns)],
        ["share of the oracle's gain, %", *(percent(worth[d].realised()) for d in columns)],
    ]
    return [markdown(([f"{NAMES[selector]}, {backbone.upper()}", *columns], rows))]


def _shares(lines: Lines) -> dict[str, dict[str, np.ndarray]]:
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


def _time(studies: Studies, folder: Path, beside: Path) -> list[str]:
    lines = studies["time"]
    names = {"ndls": "NDLSelect", "metselect": "MetSelect", "metselect-paper": "MetSelect"}
    small = [each for each in lines if each["dataset"] not in LARGE]
    groups = {"small": (small, paper.SMALL_EPOCH_SECONDS)}
    for name in LARGE:
        some = [each for each in lines if each["dataset"] == name]
        groups |= {name: (some, paper.EPOCH_SECONDS)} if some else {}
    rows = []
    for backbone in dict.fromkeys(each["backbone"] for each in lines):
        for where, (some, seconds) in groups.items():
            theirs = seconds[backbone.upper()]
            row = [f"{backbone.upper()}, {where}"]
            for name, method in names.items():
                key = (backbone, name)
                ratios = [e["ratio"] for e in some if (e["backbone"], e["selector"]) == key]
                said = theirs[method] / theirs["FinalSelect"]
                row.append(f"{np.mean(ratios):.2f}<br>*{said:.2f}*" if ratios else "not run")
            rows.append(row)
    return [
        "## Table 3: time of a training epoch",
        "Ratio to FinalSelect of the same backbone; the selectors take turns in one process. "
        f"Small: mean over {len({each['dataset'] for each in small})} datasets. arxiv-twin: a "
        "synthetic graph of the size of ogbn-arxiv. Below: the paper's ratio, on a GPU, beside the "
        "twin that on ogbn-arxiv itself. NDLSelect's search of hops, once for a graph, is not part "
        "of an epoch here.",
        markdown((["", *(TITLE[name] for name in names)], rows)),
    ]


def _depth(studies: Studies, folder: Path, beside: Path) -> list[str]:
    lines = studies["depth"]
    panels = {
        d: curves([each for each in lines if each["dataset"] == d], depth_of)
        for d in dict.fromkeys(each["dataset"] for each in lines)
    }
    plot_curves(panels, "depth", folder / "depth.png", log=True)
    return [
        "## Accuracy against depth",
        paper.DEPTH,
        f"![accuracy against depth]({beside / 'depth.png'})",
        *(_curve_table(f"{name}, depth", panel) for name, panel in panels.items()),
    ]


def _attack(studies: Studies, folder: Path, beside: Path) -> list[str]:
    return _poisoned("Mettack: the public poisoned graphs", "attack", studies, folder, beside)


def _fresh(studies: Studies, folder: Path, beside: Path) -> list[str]:
    return _poisoned("Mettack: poisoned here", "fresh-attack", studies, folder, beside)


def _poisoned(title: str, name: str, studies: Studies, folder: Path, beside: Path) -> list[str]:
    panels = {}
    for base in dict.fromkeys(attacked(each)[0] for each in studies[name]):
        some = [each for each in studies[name] if attacked(each)[0] == base]
        for part in ("test", "train"):
            panels[f"{base}, {part}"] = curves(some, lambda each: attacked(each)[1], part)
    plot_curves(panels, "edges changed, %", folder / f"{name}.png")
    return [
        f"## {title}",
        paper.ATTACK,
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


def _commands(studies: Studies) -> list[str]:
    """How every study is run, and what its lines took; runs that only chose settings excepted."""
    rows = []
    for name, lines in studies.items():
        trained = [each for each in lines if "epochs" in each]
        seeds = sorted({each["seed"] for each in trained})
        minutes = sum(each["seconds"] for each in trained) / 60
        rows.append(
            [
                f"`metselect reproduce {name}`",
                str(len(lines)),
                ", ".join(map(str, seeds)) or "-",
                f"{minutes:.0f}" if trained else "-",
            ]
        )
    return [
        "## Commands",
        "All of it: `make results`. Minutes are of training on one core, summed over the lines of "
        "the page; runs that only served to choose settings come on top.",
        markdown((["", "lines", "seeds", "minutes"], rows)),
    ]


_SECTIONS = {
    "accuracy": _accuracy,
    "time": _time,
    "self-loops": _self_loops,
    "aggregation": _aggregation,
    "depth": _depth,
    "attack": _attack,
    "fresh-attack": _fresh,
}
