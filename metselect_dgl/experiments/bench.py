"""Runs of `pytest benchmarks`: their tables, and whether two of them agree.

Everything that is printed is computed from the JSON that pytest-benchmark wrote."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from pathlib import Path
from statistics import fmean, median, quantiles

from .tables import Table, text_table

Entry = dict  # of pytest-benchmark's JSON
LIMITS = ("bare-products", "bare-Cholesky")  # they do less than an op, and give no result


@dataclass
class Run:
    """One session of benchmarks."""

    entries: list[Entry]
    machine: dict
    dataset: dict | None
    scope: str
    commit: str = ""
    date: str = ""

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Of a file that --benchmark-json wrote."""
        try:
            said = json.loads(Path(path).read_text())
            commit = said["commit_info"]["id"][:10]
            changed = " with changes" if said["commit_info"]["dirty"] else ""
            said["benchmarks"][0]["stats"]["data"]  # which --benchmark-save leaves out
            found = (said[key] for key in ("benchmarks", "machine_info", "dataset", "set"))
            return cls(*found, commit + changed, said["datetime"][:10])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} is not of our benchmarks ({type(error).__name__}: {error}); make it with "
                "pytest benchmarks --benchmark-json FILE"
            ) from error

    @property
    def kept(self) -> bool:
        """Whether freed memory was kept for the next tensor."""
        return self.machine["keep_memory"]

    def races(self, kind: str) -> list[list[Entry]]:
        """The entries that took turns with each other."""
        entries = [each for each in self.entries if each["extra_info"].get("kind") == kind]
        return [list(race) for _, race in groupby(entries, lambda each: each["group"])]

    def race(self, kind: str, **at) -> list[Entry]:
        """The one of these circumstances; empty if it was not run."""
        for race in self.races(kind):
            if at.items() <= info(race[0], "at").items():
                return race
        return []

    def data(self) -> str:
        """Which dataset, and whether it is the real one."""
        if self.dataset is None:
            return "no dataset"
        name, twin = self.dataset["name"], " (the synthetic twin of ogbn-arxiv)"
        twin = twin if name == "arxiv-twin" else ""
        return f"{name}{twin}, {self.dataset['nodes']:,} nodes, {self.dataset['edges']:,} edges"

    def stamp(self) -> str:
        """What the numbers depend on, in one sentence."""
        versions = ", ".join(f"{name} {v}" for name, v in self.machine["versions"].items())
        cpu, threads = self.machine["cpu"], self.machine["threads"]
        name, cores = cpu.get("brand_raw", "unknown CPU"), cpu.get("count", "?")
        engines = " and ".join(sorted(set(self.machine["served_by"].values())))
        kept = "kept for the next tensor" if self.kept else "returned, as usual"
        return (
            f"{name}, {cores} cores, {threads} threads; {versions}, ops by {engines}; "
            f"{self.data()}; freed memory {kept}"
        )


def info(entry: Entry, key: str):
    """What we entered, beside what pytest-benchmark did."""
    return entry["extra_info"][key]


def provider(entry: Entry) -> str:
    """Who was timed."""
    return info(entry, "provider")


def digits(value: float) -> str:
    """Three of them, or all that are before the point."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"


def milliseconds(entry: Entry) -> str:
    """The median time."""
    return digits(1e3 * entry["stats"]["median"])


def of(entry: Entry | None, other: str) -> str:
    """Median of the paired ratios to another provider, and its quartiles."""
    if entry is None or other not in info(entry, "ratios"):
        return "1" if entry is not None and provider(entry) == other else "-"
    return around(info(entry, "ratios")[other])


def around(found: dict[str, float]) -> str:
    """A median and its quartiles."""
    return f"{digits(found['median'])} [{digits(found['q1'])}, {digits(found['q3'])}]"


def same_setting(name: str) -> str:
    """FinalSelect as `name` is run; none for what is not ours."""
    endings = ("-DGL-convs", "-once")
    ending = next((end for end in endings if name.endswith(end)), "")
    return "" if name.startswith("plain-DGL") else f"FinalSelect{ending}"


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and number."""
    q1, _, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    return {"median": median(values), "q1": q1, "q3": q3, "rounds": len(values)}


def race_table(race: list[Entry]) -> Table:
    """Median times and paired ratios of those who took turns."""
    named = dict.fromkeys(other for each in race for other in info(each, "ratios"))
    listed = [provider(each) for each in race if provider(each) in named]
    others = dict.fromkeys([*listed, *named])
    header = ["", "ms", *(f"of {other}" for other in others), "turns"]
    rows = [
        [
            provider(each),
            milliseconds(each),
            *(of(each, other) for other in others),
            str(each["stats"]["rounds"]),
        ]
        for each in race
    ]
    return header, rows


def exponent(points: list[Entry]) -> dict[str, float]:
    """Of time ~ size^exponent, fitted within every round that all sizes took part in."""
    sizes = [log(info(each, "size")) for each in points]
    turns = [dict(zip(info(each, "turns"), each["stats"]["data"], strict=True)) for each in points]
    rounds = [at for at in turns[0] if all(at in other for other in turns)]
    return spread([slope(sizes, [log(turn[at]) for turn in turns]) for at in rounds])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least squares line."""
    mean_x, mean_y = fmean(x), fmean(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)


def growth_table(race: list[Entry]) -> Table:
    """Milliseconds of every provider at every size of an axis, and the exponent."""
    axis = info(race[0], "at")["axis"]
    sizes = sorted({info(each, "size") for each in race})
    header = ["", *(f"{axis} = {size:,}" for size in sizes), "exponent", "turns"]
    rows = []
    for name in dict.fromkeys(info(each, "of") for each in race):
        points = [each for each in race if info(each, "of") == name]
        times = {info(each, "size"): milliseconds(each) for each in points}
        cells = ["-", "0"]
        if len(points) > 1:
            found = exponent(points)
            cells = [around(found), str(found["rounds"])]
        rows.append([name, *(times.get(size, "-") for size in sizes), *cells])
    return header, rows


def memory_table(race: list[Entry]) -> Table:
    """Peak megabytes of every provider by number of rows or nodes, and how they grow."""
    sizes = sorted({int(n) for each in race for n in info(each, "peaks")})
    header = ["MB", *(f"{n:,}" for n in sizes), *(["exponent"] if len(sizes) > 1 else [])]
    rows = []
    for each in race:
        peaks = info(each, "peaks")
        row = [provider(each), *(f"{peaks[str(n)] / 2**20:.1f}" for n in sizes)]
        if len(sizes) > 1:
            last = [(log(n), log(max(peaks[str(n)], 1))) for n in sizes[-3:]]
            row.append(f"{slope(*zip(*last, strict=True)):.2f}")
        rows.append(row)
    return header, rows


TABLES = {
    "epoch": race_table,
    "head": race_table,
    "inference": race_table,
    "startup": race_table,
    "growth": growth_table,
    "memory": memory_table,
}


def summary(run: Run) -> str:
    """Every race of a run as a plain table."""
    parts = [run.stamp()]
    for kind, table in TABLES.items():
        for race in run.races(kind):
            parts.append(f"{race[0]['group']}\n{text_table(*table(race))}")
    return "\n\n".join(parts)


def disagreement(run: Run, again: Run, tolerance: float = 0.1) -> tuple[int, Table]:
    """(ratios that both runs have, those of them that differ by more than the tolerance)."""
    first, second = _ratios(run), _ratios(again)
    rows, both = [], [key for key in first if key in second]
    for group, name, other in both:
        a, b = first[group, name, other], second[group, name, other]
        if not abs(b / a - 1) <= tolerance:
            rows.append([group, name, other, digits(a), digits(b), f"{100 * (b / a - 1):+.0f} %"])
    return len(both), (["race", "provider", "of", "first", "second", "change"], rows)


def _ratios(run: Run) -> dict[tuple[str, str, str], float]:
    return {
        (each["group"], provider(each), other): found["median"]
        for each in run.entries
        for other, found in each["extra_info"].get("ratios", {}).items()
    }
