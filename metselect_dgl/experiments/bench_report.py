"""`metselect bench report`: one page of Markdown and its pictures from the JSON of runs."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

from ..atomic_file import write_atomic
from .bench import (
    LIMITS,
    TABLES,
    Entry,
    Run,
    disagreement,
    exponent,
    growth_table,
    info,
    memory_table,
    milliseconds,
    of,
    provider,
    same_setting,
)
from .paper import EPOCH_SECONDS
from .tables import Table, markdown

INTRODUCTION = """\
# Benchmarks

Made by `metselect bench report` from the JSON of `pytest benchmarks`; every figure is in one of
the files named below.

How to read it. The machine is shared and noisy: times in ms (medians) mean little by themselves.
Ratios do. The contestants of a race take turns in one process, round by round, and `a [b, c]` is
the median and the quartiles, over the rounds, of a contestant's time divided by that of the one
named in the head of the column, in the same round. Below 1 is faster. A contestant whose result is
not that of the reference is not timed. "-": not run, or not measured against that one."""

EPOCHS = """\
`plain-DGL`: DGL's convolutions, ReLU and a linear decoder on the last layer, cross entropy on the
training nodes; `-classes-last`: as in DGL's examples, the last convolution gives the logits.
`FinalSelect`, `NDLSelect`, `AttnSelect`, `MetSelect`: ours, in their default setting; `-paper`:
without deep supervision; `-DGL-convs`: on DGL's convolutions; `-once`: features aggregated once
and for all (`propagate_once`, GCN and GIN). AttnSelect is timed at depth 2, hidden 64 only: its
LSTM has the width of all layers. The paper's column has its own times, on a V100, as ratios.

What is done once is not in an epoch: the hops of NDLSelect, the edges in the order that our
convolutions take them, class moments of the features (of which those of layer 0 are made). Ours
compute the last layer at the training nodes alone; the plain loops at all nodes, as DGL does."""

HEAD = """\
Rows of the classes of ogbn-arxiv's training nodes, drawn at random. Each cell is a multiple of the
limit: torch's own matrix products of the op, of whole matrices into memory that is there, and
nothing else (for whitening: torch's Cholesky factors). `_gradient` is forward and backward pass;
moments, whitening and select_layer have no gradient. `head` is moments, whitening and select_layer
together."""

MEMORY = """\
Peak of the resident memory beyond inputs and what was there before, in a process of its own.
`head`: by rows of 3 layers of 64 features, 40 classes, with the results, 20 bytes a row; the
exponent is that of the three largest. `epoch`: a GCN, depth 2, hidden 64, and three epochs, with
all that it keeps between them; beyond the dataset."""

GROWTH = """\
Milliseconds of the head (moments, whitening, selection), one of its sizes varied and the others at
{base}. The exponent of time ~ size^exponent is fitted by least squares within every round; median
and quartiles."""

BACKBONES = ("gcn", "gat", "gin")


def report(paths: list[Path], again: list[Path], guard: Path | None, out: Path) -> str:
    """Write `out` and the pictures beside it; returns the headline."""
    every = {*paths, *again}
    unlike = len({path.name for path in every}) == len(every)
    runs, repeated = (
        {path.name if unlike else str(path): Run.load(path) for path in some}
        for some in (paths, again)
    )
    pictures = _pictures(runs, out.parent)
    text = page(runs, pictures, repeated)
    if guard:
        text += f"\n{_guard(guard)}\n"
    write_atomic(out, lambda file: file.write(text.encode()))
    return headline(runs)


def page(runs: dict[str, Run], pictures: dict[str, str], again: dict[str, Run]) -> str:
    """The whole of it."""
    parts = [INTRODUCTION, markdown(_files(runs | again))]
    for title, kind, section in SECTIONS:
        found = _shown(runs, kind)
        if not found:
            continue
        parts.append(f"## {title}")
        parts += [TEXTS[kind]] if kind in TEXTS else []
        if kind in pictures:
            parts.append(f"![{title}]({pictures[kind]})")
        for name, run in found.items():
            data = f": {run.data()}" if kind in ("epoch", "inference") else ""
            parts += section(run, name + data + ", freed memory kept" * run.kept)
    if again:
        parts += _agreement(again if len(again) > 1 else _like(runs, again) | again)
    return "\n\n".join(parts) + "\n"


def _shown(runs: dict[str, Run], kind: str) -> dict[str, Run]:
    """Those that have it; of quick ones the first, if it has a race that no other has. Freed
    memory kept or not are two things."""
    shown = {}
    for kept in (False, True):
        found = {name: run for name, run in runs.items() if run.kept == kept and run.races(kind)}
        wide = {name: run for name, run in found.items() if run.scope != "quick"}
        known = {race[0]["group"] for run in wide.values() for race in run.races(kind)}
        for name, run in [each for each in found.items() if each[0] not in wide][:1]:
            if {race[0]["group"] for race in run.races(kind)} - known:
                wide[name] = run
        shown |= wide
    return shown


def _files(runs: dict[str, Run]) -> Table:
    header = ["file", "set", "date", "commit", "measured on"]
    rows = [[name, run.scope, run.date, run.commit, run.stamp()] for name, run in runs.items()]
    return header, rows


def _epochs(run: Run, where: str) -> list[str]:
    parts = []
    for backbone in BACKBONES:
        base = run.race("epoch", backbone=backbone, depth=2, hidden=64)
        if base:
            parts.append(f"### {backbone.upper()}, depth 2, hidden 64 ({where})")
            parts.append(markdown(_epoch_table(base, backbone.upper())))
        for other in ("plain-DGL", "FinalSelect"):
            grid = _grid(run, backbone, other)
            if len(grid[0]) > 2:
                parts.append(f"### {backbone.upper()} of {other}, by depth and hidden ({where})")
                parts.append(markdown(grid))
    return parts


def _epoch_table(race: list[Entry], backbone: str) -> Table:
    """Beside the paper's ratios, where it has them."""
    header = ["", "ms", "of plain-DGL", "of FinalSelect", "of FinalSelect, same setting"]
    header += ["paper, of FinalSelect", "turns"]
    seconds, rows = EPOCH_SECONDS[backbone], []
    for each in race:
        name = provider(each)
        paper = {"MetSelect-paper": "MetSelect"}.get(name, name)
        printed = seconds[paper] / seconds["FinalSelect"] if paper in seconds else None
        rows.append(
            [
                name,
                milliseconds(each),
                of(each, "plain-DGL"),
                of(each, "FinalSelect"),
                of(each, same_setting(name)),
                "-" if printed is None or name == "MetSelect" else f"{printed:.2f}",
                str(each["stats"]["rounds"]),
            ]
        )
    return header, rows


def _grid(run: Run, backbone: str, other: str) -> Table:
    """Ratios to `other` at every depth and width that was run."""
    races = [race for race in run.races("epoch") if info(race[0], "at")["backbone"] == backbone]
    header = [""]
    cells: dict[str, list[str]] = {}
    for column, race in enumerate(races):
        at = info(race[0], "at")
        header.append(f"{at['depth']}, {at['hidden']}")
        for each in race:
            row = cells.setdefault(provider(each), [])
            row += ["-"] * (column - len(row)) + [of(each, other)]
    full = {name: row + ["-"] * (len(races) - len(row)) for name, row in cells.items()}
    rows = [[name, *row] for name, row in full.items() if row.count("-") < len(row) - 1]
    return header, rows


def _heads(run: Run, where: str) -> list[str]:
    parts = []
    for width in sorted({info(race[0], "at")["D"] for race in run.races("head")}):
        races = [race for race in run.races("head") if info(race[0], "at")["D"] == width]
        at = info(races[0][0], "at")
        sizes = f"{at['n']:,} rows, {at['L']} layers, {at['C']} classes, {width} features"
        parts += [f"### {sizes} ({where})", markdown(_head_table(races))]
    return parts


COLUMNS = "reference paper-formula careful-torch torch.cdist scipy.cdist sklearn-LDA native".split()


def _head_table(races: list[list[Entry]]) -> Table:
    shown = {provider(each) for race in races for each in race}
    columns = [name for name in COLUMNS if name in shown]
    header = ["op", *columns, "native: share of the limit", "native of reference"]
    header.append("native of careful-torch")
    rows = []
    for race in races:
        by_name = {provider(each): each for each in race}
        limit = next((name for name in LIMITS if name in by_name), "")
        native = by_name.get("native")
        found = info(native, "ratios").get(limit) if native else None
        rows.append(
            [
                info(race[0], "at")["op"],
                *(of(by_name.get(name), limit) for name in columns),
                "-" if found is None else f"{100 / found['median']:.0f} %",
                of(native, "reference"),
                of(native, "careful-torch"),
            ]
        )
    return header, rows


def _races(kind: str, run: Run, where: str) -> list[str]:
    """Every race of a kind as it is printed in the terminal."""
    parts = [f"{where}:"]
    for race in run.races(kind):
        parts += [f"### {race[0]['group']}", markdown(TABLES[kind](race))]
    return parts


def _growth(run: Run, where: str) -> list[str]:
    at = info(run.races("growth")[0][0], "at")
    base = ", ".join(f"{letter} = {at[letter]:,}" for letter in "nLCD")
    tables = [markdown(growth_table(race)) for race in run.races("growth")]
    return [GROWTH.format(base=base), f"{where}:", *tables]


TEXTS = {"epoch": EPOCHS, "head": HEAD, "memory": MEMORY}
SECTIONS = (
    ("Epochs", "epoch", _epochs),
    ("The head, op by op", "head", _heads),
    ("Inference over all nodes", "inference", partial(_races, "inference")),
    ("Start-up", "startup", partial(_races, "startup")),
    ("Memory", "memory", partial(_races, "memory")),
    ("Growth", "growth", _growth),
)


def _like(runs: dict[str, Run], again: dict[str, Run]) -> dict[str, Run]:
    """The first run of the same kind as the one that was made again."""
    (repeated,) = again.values()
    kind = repeated.scope, repeated.kept, repeated.dataset, repeated.machine["threads"]
    for name, run in runs.items():
        if (run.scope, run.kept, run.dataset, run.machine["threads"]) == kind:
            return {name: run}
    raise ValueError("no run is of the same set, dataset, threads and memory as that of --again")


def _agreement(runs: dict[str, Run]) -> list[str]:
    """Of each with the next one."""
    parts = ["## Do two runs agree?"]
    for (name, run), (other, again) in pairwise(runs.items()):
        total, differing = disagreement(run, again)
        agreeing = total - len(differing[1])
        parts.append(f"{name} and {other}: {agreeing} of {total} ratios agree within 10 %.")
        if differing[1]:
            parts += ["These do not:", markdown(differing)]
    return parts


GUARD = """\
## The guard against regressions

CI measures our ops at {n:,} rows, {L} layers, {C} classes, {D} features, in one thread, as
multiples of their bare products, and epochs of MetSelect on a graph of as many nodes as multiples
of a plain DGL loop's, and fails above the bound ({name}, {runs} runs each way; smallest and largest
of their medians). Of the {planted} runs of an op that does its work twice, {found}
are above the bound."""


def _guard(path: Path) -> str:
    """How the guard's ratios varied over its runs."""
    said = json.loads(path.read_text())
    runs, bounds = said["runs"], said["bounds"]
    header = ["op", *runs, "twice, smallest", "bound"]
    rows, found = [], 0
    for op, bound in bounds.items():
        ours = {way: [each[op]["native"] for each in some] for way, some in runs.items()}
        twice = [each[op]["twice"] for some in runs.values() for each in some]
        found += sum(each > bound for each in twice)
        cells = [f"{min(some):.2f} to {max(some):.2f}" for some in ours.values()]
        rows.append([op, *cells, f"{min(twice):.2f}", f"{bound:.2f}"])
    number = len(next(iter(runs.values())))
    planted = number * len(runs) * len(bounds)
    counts = {"runs": number, "planted": planted, "found": found}
    text = GUARD.format(**said["rows"], name=path.name, **counts)
    return f"{text}\n\n{markdown((header, rows))}"


def headline(runs: dict[str, Run]) -> str:
    """What the README quotes."""
    parts = []
    for run in _shown(runs, "epoch").values():
        kept = "kept" if run.kept else "returned"
        parts.append(f"Epochs on {run.data()}; freed memory {kept} by all:")
        parts.append(markdown(_quoted_epochs(run)))
    for run in _shown(runs, "head").values():
        parts += [QUOTED_HEAD, markdown(_quoted_heads(run))]
    for run in _shown(runs, "memory").values():
        if run.race("memory", what="head"):
            parts += [QUOTED_MEMORY, markdown(memory_table(run.race("memory", what="head")))]
    return "\n\n".join(parts)


QUOTED_EPOCHS = (
    ("MetSelect-DGL-convs", "FinalSelect-DGL-convs"),
    ("MetSelect", "plain-DGL"),
    ("MetSelect", "FinalSelect"),
    ("MetSelect-once", "plain-DGL"),
    ("MetSelect-once", "FinalSelect-once"),
)
QUOTED_HEAD = "The head (moments, whitening, selection) as a share of other ways to do it:"
QUOTED_MEMORY = "Its peak memory beyond the layers, by the number of rows, with the results:"


def _quoted_epochs(run: Run) -> Table:
    rows = []
    for name, other in QUOTED_EPOCHS:
        races = [run.race("epoch", backbone=each, depth=2, hidden=64) for each in BACKBONES]
        rows.append([f"{name} / {other}", *(of(_entry(race, name), other) for race in races)])
    return ["", *(name.upper() for name in BACKBONES)], rows


def _quoted_heads(run: Run) -> Table:
    races = [race for race in run.races("head") if info(race[0], "at")["op"] == "head"]
    others = ("paper-formula", "careful-torch", "bare-products")
    rows = [
        [f"native / {other}", *(of(_entry(race, "native"), other) for race in races)]
        for other in others
    ]
    return ["", *("{n:,} rows, D = {D}".format(**info(race[0], "at")) for race in races)], rows


def _entry(race: list[Entry], name: str) -> Entry | None:
    return next((each for each in race if provider(each) == name), None)


def _pictures(runs: dict[str, Run], folder: Path) -> dict[str, str]:
    """Drawn into the folder; their file names by section."""
    from ..plots import plot_epochs, plot_growth, plot_memory

    drawn = {}
    for kind in ("epoch", "growth", "memory"):
        for run in list(_shown(runs, kind).values())[:1]:
            file = folder / f"{kind}.png"
            peaks = {provider(each): info(each, "peaks") for each in run.race(kind, what="head")}
            if kind == "epoch":
                plot_epochs(_bars(run), run.data(), file)
            elif kind == "growth":
                plot_growth(_curves(run), file)
            elif peaks:
                plot_memory(peaks, file)
            else:
                continue
            drawn[kind] = file.name
    return drawn


def _bars(run: Run) -> dict[str, dict[str, dict]]:
    """Ratios to the plain DGL loop by backbone and provider."""
    bars = {}
    for backbone in BACKBONES:
        race = run.race("epoch", backbone=backbone, depth=2, hidden=64)
        ratios = {provider(each): info(each, "ratios").get("plain-DGL") for each in race}
        bars[backbone.upper()] = {name: found for name, found in ratios.items() if found}
    return bars


def _curves(run: Run) -> dict[str, dict[str, tuple]]:
    """By axis and provider: sizes, seconds, exponent."""
    curves = {}
    for race in run.races("growth"):
        axis = curves.setdefault(info(race[0], "at")["axis"], {})
        for name in dict.fromkeys(info(each, "of") for each in race):
            points = [each for each in race if info(each, "of") == name]
            points.sort(key=lambda each: info(each, "size"))
            sizes = [info(each, "size") for each in points]
            seconds = [each["stats"]["median"] for each in points]
            fitted = exponent(points)["median"] if len(points) > 1 else None
            axis[name] = sizes, seconds, fitted
    return curves
