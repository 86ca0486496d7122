"""Stored runs of `pytest benchmarks`: loading, tables, and agreement of two runs.

Everything is computed from the JSON that pytest-benchmark wrote."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from pathlib import Path
from statistics import fmean, median, quantiles

from metselect_dgl.experiments.tables import Table, text_table

Entry = dict  # one benchmark in pytest-benchmark's JSON
LIMITS = ("bare-products", "bare-Cholesky")  # part of an op's work, without its result


@dataclass
class Run:
    """One session of `pytest benchmarks`."""

    entries: list[Entry]
    machine: dict
    dataset: dict | None
    scope: str
    commit: str = ""
    date: str = ""

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Load a file written by --benchmark-json."""
        try:
            content = json.loads(Path(path).read_text())
            commit = content["commit_info"]["id"][:10]
            if content["commit_info"]["dirty"]:
                commit += " with changes"
            content["benchmarks"][0]["stats"]["data"]  # --benchmark-save omits it
            return cls(
                content["benchmarks"],
                content["machine_info"],
                content["dataset"],
                content["set"],
                commit,
                content["datetime"][:10],
            )
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} was not written by these benchmarks ({type(error).__name__}: {error}); "
                "create it with `pytest benchmarks --benchmark-json FILE`"
            ) from error

    @property
    def keeps_memory(self) -> bool:
        """Whether freed memory was reused instead of returned to the operating system."""
        return self.machine["keep_memory"]

    def comparisons(self, kind: str) -> list[list[Entry]]:
        """Return the entries of this kind, grouped into those that were timed together."""
        entries = [entry for entry in self.entries if entry["extra_info"].get("kind") == kind]
        return [list(group) for _, group in groupby(entries, lambda entry: entry["group"])]

    def comparison(self, kind: str, **parameters) -> list[Entry]:
        """Return the comparison with these parameters, or an empty list if it was not run."""
        for entries in self.comparisons(kind):
            if parameters.items() <= info(entries[0], "at").items():
                return entries
        return []

    def data(self) -> str:
        """Return name and size of the dataset, and whether it is synthetic."""
        if self.dataset is None:
            return "no dataset"
        name = self.dataset["name"]
        if name == "arxiv-twin":
            name += " (synthetic, with the sizes of ogbn-arxiv)"
        return f"{name}, {self.dataset['nodes']:,} nodes, {self.dataset['edges']:,} edges"

    def environment(self) -> str:
        """Return machine, versions, backends and dataset in one sentence."""
        versions = ", ".join(f"{name} {v}" for name, v in self.machine["versions"].items())
        cpu, threads = self.machine["cpu"], self.machine["threads"]
        name, cores = cpu.get("brand_raw", "unknown CPU"), cpu.get("count", "?")
        backends = " and ".join(sorted(set(self.machine["served_by"].values())))
        memory = "reused" if self.keeps_memory else "returned to the operating system"
        return (
            f"{name}, {cores} cores, {threads} threads; {versions}; backend {backends}; "
            f"{self.data()}; freed memory {memory}"
        )


def info(entry: Entry, key: str):
    """Return a value that these benchmarks added to an entry."""
    return entry["extra_info"][key]


def provider(entry: Entry) -> str:
    """Return the name of the implementation that was timed."""
    return info(entry, "provider")


def digits(value: float) -> str:
    """Format with three significant digits, or all digits before the point."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"


def milliseconds(entry: Entry) -> str:
    """Return the median time."""
    return digits(1e3 * entry["stats"]["median"])


def ratio(entry: Entry | None, other: str) -> str:
    """Return median and quartiles of the paired ratios to another provider."""
    if entry is None:
        return "-"
    if other in info(entry, "ratios"):
        return median_and_quartiles(info(entry, "ratios")[other])
    return "1" if provider(entry) == other else "-"


def median_and_quartiles(found: dict[str, float]) -> str:
    return f"{digits(found['median'])} [{digits(found['q1'])}, {digits(found['q3'])}]"


def same_setting(name: str) -> str:
    """Return FinalSelect in the setting of `name`; empty for models that are not this package's."""
    if name.startswith("plain-DGL"):
        return ""
    for suffix in ("-DGL-convs", "-once"):
        if name.endswith(suffix):
            return f"FinalSelect{suffix}"
    return "FinalSelect"


def quartiles(values: list[float]) -> dict[str, float]:
    """Return median, quartiles and number of values."""
    q1, _, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    return {"median": median(values), "q1": q1, "q3": q3, "rounds": len(values)}


def comparison_table(entries: list[Entry]) -> Table:
    """Return median times and paired ratios of the implementations of one comparison."""
    denominators = {}
    for entry in entries:
        denominators |= info(entry, "ratios")
    listed = [provider(entry) for entry in entries if provider(entry) in denominators]
    others = dict.fromkeys([*listed, *denominators])
    header = ["", "ms", *(f"/ {other}" for other in others), "rounds"]
    rows = []
    for entry in entries:
        ratios = [ratio(entry, other) for other in others]
        rows.append([provider(entry), milliseconds(entry), *ratios, str(entry["stats"]["rounds"])])
    return header, rows


def exponent(points: list[Entry]) -> dict[str, float]:
    """Fit time ~ size^exponent within every round that measured all sizes."""
    sizes = [log(info(entry, "size")) for entry in points]
    times = [
        dict(zip(info(entry, "turns"), entry["stats"]["data"], strict=True)) for entry in points
    ]
    slopes = []
    for number in times[0]:
        if all(number in other for other in times):
            slopes.append(slope(sizes, [log(each[number]) for each in times]))
    return quartiles(slopes)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line."""
    mean_x, mean_y = fmean(x), fmean(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def by_provider(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of a growth comparison by provider, each in the order of size."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: info(entry, "size")):
        groups.setdefault(info(entry, "of"), []).append(entry)
    return {name: groups[name] for name in dict.fromkeys(info(entry, "of") for entry in entries)}


def growth_table(entries: list[Entry]) -> Table:
    """Return milliseconds of every provider at every size of an axis, and the exponent."""
    axis = info(entries[0], "at")["axis"]
    sizes = sorted({info(entry, "size") for entry in entries})
    header = ["", *(f"{axis} = {size:,}" for size in sizes), "exponent", "rounds"]
    rows = []
    for name, points in by_provider(entries).items():
        times = {info(entry, "size"): milliseconds(entry) for entry in points}
        cells = ["-", "0"]
        if len(points) > 1:
            fitted = exponent(points)
            cells = [median_and_quartiles(fitted), str(fitted["rounds"])]
        rows.append([name, *(times.get(size, "-") for size in sizes), *cells])
    return header, rows


def memory_table(entries: list[Entry]) -> Table:
    """Return peak megabytes of every provider by number of rows or nodes, and the exponent."""
    sizes = sorted({int(size) for entry in entries for size in info(entry, "peaks")})
    header = ["MB", *(f"{size:,}" for size in sizes)]
    if len(sizes) > 1:
        header.append("exponent")
    rows = []
    for entry in entries:
        peaks = [info(entry, "peaks")[str(size)] for size in sizes]
        row = [provider(entry), *(f"{peak / 2**20:.1f}" for peak in peaks)]
        if len(sizes) > 1:
            largest = [log(size) for size in sizes[-3:]]
            row.append(f"{slope(largest, [log(max(peak, 1)) for peak in peaks[-3:]]):.2f}")
        rows.append(row)
    return header, rows


TABLES = {
    "epoch": comparison_table,
    "fresh-index": comparison_table,
    "head": comparison_table,
    "inference": comparison_table,
    "startup": comparison_table,
    "growth": growth_table,
    "memory": memory_table,
}


def summary(run: Run) -> str:
    """Return every comparison of a run as a plain-text table."""
    parts = [run.environment()]
    for kind, table in TABLES.items():
        for entries in run.comparisons(kind):
            parts.append(f"{entries[0]['group']}\n{text_table(*table(entries))}")
    return "\n\n".join(parts)


def disagreement(first: Run, second: Run, tolerance: float = 0.1) -> tuple[int, Table]:
    """Return the number of ratios that both runs have, and a table of those that differ by more
    than the tolerance."""
    ratios, again = median_ratios(first), median_ratios(second)
    common, rows = 0, []
    for key, before in ratios.items():
        if key not in again:
            continue
        common += 1
        change = again[key] / before - 1
        if not abs(change) <= tolerance:
            rows.append([*key, digits(before), digits(again[key]), f"{100 * change:+.0f} %"])
    return common, (["comparison", "provider", "relative to", "first", "second", "change"], rows)


def median_ratios(run: Run) -> dict[tuple[str, str, str], float]:
    """Return the median ratios by (comparison, provider, denominator)."""
    ratios = {}
    for entry in run.entries:
        for other, found in entry["extra_info"].get("ratios", {}).items():
            ratios[entry["group"], provider(entry), other] = found["median"]
    return ratios
