"""Compare the speed of two checkouts on one machine: `python benchmarks/compare_checkouts.py BEFORE
AFTER`. Each runs in its own process with its own interpreter, .venv/bin/python.

By default one process per checkout times single steps (step_probe.py), alternating step by step:
both are measured within a second, so that noise affects both. The processes are started several
times, because the memory layout of a process can change a step by a tenth. A row shows the median
and quartiles of after / before over all rounds, and the ratio of the smallest times. A step is
reported as slower if both exceed 1.05; then the exit status is 1. Steps run in one thread by
default: threads that wait for a busy core make the times of a shared machine useless.

With --pytest the checkouts alternately run their own quick set of `pytest benchmarks` instead, and
the medians and the ratios to common denominators are compared by benchmark name.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.runs import digits, median_and_quartiles, quartiles
from metselect_dgl.experiments.tables import text_table

TOLERANCE = 1.05
PROBE = Path(__file__).with_name("step_probe.py")


def start(checkout: Path, command: list[str], **options) -> subprocess.Popen:
    """Start a command with the interpreter of a checkout, in its folder."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"DGLBACKEND": "pytorch", "PYTHONDONTWRITEBYTECODE": "1"}
    python = checkout.absolute() / ".venv/bin/python"
    return subprocess.Popen(
        [python, *command],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


class Probe:
    """A process that times steps of one checkout."""

    def __init__(self, checkout: Path, options: list[str]) -> None:
        command = ["-P", str(PROBE.absolute()), *options]
        self.process = start(checkout, command, stdin=subprocess.PIPE)
        self.steps = json.loads(self.process.stdout.readline())

    def seconds(self, step: str) -> float:
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        try:
            return float(answer)
        except ValueError:
            raise RuntimeError(answer or "the process ended") from None


def time_steps(probes: dict[str, Probe], pattern: str, rounds: int, times: dict) -> None:
    """Add the seconds of every step by side to `times`, or the reason why a step cannot run."""
    for step in probes["after"].steps:
        if pattern not in step:
            continue
        measured = times.setdefault(step, {"before": [], "after": []})
        for number in range(rounds + 1):
            for side in ("before", "after") if number % 2 else ("after", "before"):
                try:
                    seconds = probes[side].seconds(step)
                except RuntimeError as error:
                    measured["error"] = f"{side}: {error}"
                    break
                if number:  # the first round is a warm-up
                    measured[side].append(seconds)
            if "error" in measured:
                break
        print(step, measured.get("error", ""), file=sys.stderr, flush=True)


def compare_steps(args: argparse.Namespace) -> int:
    """Print a row per step; return the number of steps that became slower."""
    options = ["--dataset", args.dataset, "--threads", str(args.threads)]
    options += ["--keep-memory"] * args.keep_memory
    times: dict[str, dict] = {}
    for number in range(args.sessions):
        print(f"session {number + 1} of {args.sessions}", file=sys.stderr, flush=True)
        probes = {"before": Probe(args.before, options), "after": Probe(args.after, options)}
        time_steps(probes, args.pattern, args.rounds or 7, times)
        for probe in probes.values():
            probe.process.stdin.close()
            probe.process.wait()
    rows, slower = [], 0
    for step, measured in times.items():
        if "error" in measured:
            rows.append([step, "-", "-", "-", "-", measured["error"]])
            continue
        before, after = measured["before"], measured["after"]
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        of_minima = min(after) / min(before)
        worse = median(ratios) > TOLERANCE and of_minima > TOLERANCE
        slower += worse
        row = [step, digits(1e3 * min(before)), digits(1e3 * min(after))]
        row += [median_and_quartiles(quartiles(ratios)), digits(of_minima)]
        rows.append([*row, "slower" if worse else ""])
    header = ["step", "before, ms", "after, ms", "after / before", "of the minima", ""]
    print(text_table(header, rows))
    return slower


def run_benchmarks(checkout: Path, pattern: str) -> dict[str, dict]:
    """Run the quick set of a checkout and return its benchmarks by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = "-m pytest benchmarks --benchmark-only -q -p no:cacheprovider".split()
        process = start(checkout, [*command, "-k", pattern, "--benchmark-json", str(file)])
        output, _ = process.communicate()
        if not file.exists():
            raise SystemExit(f"no benchmark of {checkout} was run:\n{output}")
        return {entry["name"]: entry for entry in json.loads(file.read_text())["benchmarks"]}


def compare_benchmarks(args: argparse.Namespace) -> int:
    """Print the change of every median and of every ratio to a common denominator; return the
    number of benchmarks that became slower."""
    sides, runs = {"before": args.before, "after": args.after}, {"before": [], "after": []}
    for number in range(args.rounds or 3):
        for side in sorted(sides, reverse=bool(number % 2)):
            runs[side].append(run_benchmarks(sides[side], args.pattern))
    rows, slower = [], 0
    for name, entry in runs["after"][0].items():
        if not all(name in run for run in [*runs["before"], *runs["after"]]):
            continue
        before, after, change = _change(runs, name, lambda entry: entry["stats"]["median"])
        rows.append([name, "ms", digits(1e3 * before), digits(1e3 * after), digits(change)])
        changes = [change]
        for other in entry["extra_info"].get("ratios", {}):
            before, after, change = _change(runs, name, partial(_ratio, other=other))
            rows.append(["", f"/ {other}", digits(before), digits(after), digits(change)])
            changes.append(change)
        slower += min(changes) > TOLERANCE
    print(text_table(["benchmark", "", "before", "after", "after / before"], rows))
    return slower


def _change(runs: dict[str, list[dict]], name: str, value) -> tuple[float, float, float]:
    """Return the medians before and after, and the median of the paired ratios."""
    before = [value(run[name]) for run in runs["before"]]
    after = [value(run[name]) for run in runs["after"]]
    paired = [new / old for old, new in zip(before, after, strict=True)]
    return median(before), median(after), median(paired)


def _ratio(entry: dict, other: str) -> float:
    return entry["extra_info"]["ratios"].get(other, {}).get("median", float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("-k", dest="pattern", default="", help="part of a name (pytest: its -k)")
    parser.add_argument("--rounds", type=int, help="default: 7 per session, 3 of pytest")
    parser.add_argument("--pytest", action="store_true", help="run each checkout's own benchmarks")
    steps = parser.add_argument_group("of the steps")
    steps.add_argument("--sessions", type=int, default=3, help="starts of the processes")
    steps.add_argument("--dataset", default="arxiv-twin")
    steps.add_argument("--threads", type=int, default=1)
    steps.add_argument("--keep-memory", action="store_true", help="reuse freed memory")
    args = parser.parse_args()
    slower = compare_benchmarks(args) if args.pytest else compare_steps(args)
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    main()
