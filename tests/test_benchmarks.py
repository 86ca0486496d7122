"""Tests of the benchmarks: timing, ratios, checks of results, dataset, JSON and report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ogb_files import write_ogb

from benchmarks.comparison import Comparison, Implementation
from benchmarks.head_ops import OPS, implementations
from benchmarks.head_ops import PROVIDERS as OP_PROVIDERS
from benchmarks.inputs import Inputs, Rows
from benchmarks.interleaved_timing import MIN_ROUNDS, paired_ratio, time_interleaved
from benchmarks.models import PROVIDERS, ByReference, Epochs, FreshIndexEpochs, Size
from benchmarks.report import main, report
from benchmarks.runs import Run, digits, disagreement, exponent
from metselect_dgl import functional as MF
from metselect_dgl.data import arxiv_on_disk

ROOT = Path(__file__).parents[1]


# timing


def test_every_round_times_each_implementation_in_changing_order():
    order = []
    runs = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    times = time_interleaved(runs, rounds=3, seconds=100, self_timed=set("abc"))
    rounds = ["".join(order[at : at + 3]) for at in range(0, 12, 3)]  # the first is the warm-up
    assert all(sorted(names) == list("abc") for names in rounds) and len(set(rounds)) > 1
    assert times == {name: {0: 1.0, 1: 1.0, 2: 1.0} for name in "abc"}


def test_slow_implementations_are_left_out_of_later_rounds():
    runs = {"slow": lambda: 5.0, "fast": lambda: 0.1}
    times = time_interleaved(runs, rounds=9, seconds=12, self_timed={"slow", "fast"})
    assert list(times["slow"]) == list(range(MIN_ROUNDS)) and len(times["fast"]) == 9


def test_short_calls_are_repeated():
    calls = []
    times = time_interleaved({"short": lambda: calls.append(1)}, rounds=2, seconds=1)
    assert len(calls) > 9 and max(times["short"].values()) < 1e-3


def test_ratios_are_of_the_same_round():
    """A machine that is ten times slower in one round does not change the ratio."""
    slow = {0: 2.0, 1: 20.0, 2: 2.2}
    found = paired_ratio(slow, {0: 1.0, 1: 10.0, 3: 5.0})
    assert found == {"median": 2.0, "q1": 2.0, "q3": 2.0, "rounds": 2}
    found = paired_ratio({at: float(at) for at in range(1, 6)}, dict.fromkeys(range(9), 1.0))
    assert found == {"median": 3.0, "q1": 2.0, "q3": 4.0, "rounds": 5}


# comparisons


class FakeBenchmark:
    """The part of pytest-benchmark's fixture that a comparison uses."""

    def __init__(self) -> None:
        self.enabled, self.extra_info, self.seconds = True, {}, []

    def _make_stats(self, iterations):
        self.update = self.seconds.append
        return self


def wrong() -> None:
    raise AssertionError("0 is not 1")


def compare(**listed: Implementation) -> Comparison:
    return Comparison("test", {"n": 1}, listed, 4, 9, list(listed), iter)


def test_a_comparison_reports_times_and_ratios():
    one = Implementation(lambda: 1.0, self_timed=True)
    two = Implementation(lambda: 2.0, ("one",), self_timed=True, extra={"size": 7})
    comparison, benchmark = compare(one=one, two=two), FakeBenchmark()
    comparison.report("two", benchmark)
    assert benchmark.seconds == 4 * [2.0] and benchmark.group == "test n=1"
    assert benchmark.extra_info["ratios"]["one"]["median"] == 2.0
    assert benchmark.extra_info["size"] == 7 and benchmark.extra_info["turns"] == [0, 1, 2, 3]


def test_a_wrong_result_is_not_timed():
    ran = []
    bad = Implementation(lambda: ran.append(1), check=wrong)
    comparison = compare(good=Implementation(lambda: 1), bad=bad)
    with pytest.raises(AssertionError, match="bad is not timed") as error:
        comparison.report("bad", FakeBenchmark())
    assert "0 is not 1" in str(error.value.__cause__)
    comparison.report("good", FakeBenchmark())
    assert not ran


def test_an_error_during_timing_fails_the_whole_comparison():
    results = iter([1.0])
    bad = Implementation(lambda: next(results))
    comparison = compare(good=Implementation(int), bad=bad)
    for name in ("good", "bad"):
        with pytest.raises(AssertionError, match=f"{name} is not timed") as error:
            comparison.report(name, FakeBenchmark())
        assert isinstance(error.value.__cause__, StopIteration)


def test_a_wrong_denominator_fails_its_numerators():
    bad = Implementation(int, check=wrong)
    comparison = compare(bad=bad, good=Implementation(int, ("bad",)))
    with pytest.raises(AssertionError, match="bad is not timed"):
        comparison.report("good", FakeBenchmark())


# results of the implementations


@pytest.fixture(scope="module")
def inputs():
    return Inputs(Rows(n=600, L=2, C=5, D=8))


@pytest.mark.parametrize("op", OPS)
def test_every_provider_of_an_op_gives_its_result(op, inputs):
    listed = implementations(op, inputs)
    assert list(listed) == list(OP_PROVIDERS[op])
    for implementation in listed.values():
        implementation.check()
        implementation.run()


def test_a_wrong_op_is_detected(inputs, monkeypatch):
    def off(*given, **options):
        layer, best, score = right(*given, **options)
        return layer, best, 1.01 * score

    right = MF.select_layer
    monkeypatch.setattr(MF, "select_layer", off)
    with pytest.raises(AssertionError, match="result is off by"):
        implementations("head", inputs)["native"].check()


@pytest.mark.parametrize("name", PROVIDERS)
def test_epochs_match_the_reference(name, small):
    Epochs(PROVIDERS[name], Size(hidden=8), small).check()


@pytest.mark.parametrize("kind", ["same-index", "fresh-index", "fresh-mask"])
def test_epochs_with_a_fresh_index_match_the_reference(kind, small):
    epochs = FreshIndexEpochs(kind, Size(hidden=8), small)
    epochs.check()
    assert (epochs.index() is epochs.index()) == (kind == "same-index")


def test_a_wrong_epoch_is_detected(small):
    epochs = Epochs(PROVIDERS["MetSelect"], Size(hidden=8), small)
    with torch.no_grad():
        epochs.model.backbone.convs[0].weight[0] += 1
    with pytest.raises(AssertionError, match="is off by"):
        epochs.check()


def test_a_missing_gradient_is_detected(small):
    epochs = Epochs(PROVIDERS["MetSelect"], Size(hidden=8), small)
    epochs.model.backbone.convs[1].weight.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"no gradient to backbone\.convs\.1\.weight"):
        epochs.check()


def test_by_reference_replaces_the_ops(small, monkeypatch):
    seen = []
    monkeypatch.setattr("metselect_dgl.reference.select_layer", lambda *given: seen.append(1))
    with ByReference(), pytest.raises(TypeError):
        Epochs(PROVIDERS["MetSelect"], Size(hidden=8), small).loss()
    assert seen


# pytest benchmarks


def bench(*options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "-q", *options]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


@pytest.fixture(scope="session")
def arxiv_dir(tmp_path_factory) -> Path:
    """A data folder with ogbn-arxiv in ogb's layout: 300 nodes of its 40 classes on a circle."""
    folder = tmp_path_factory.mktemp("ogb")
    draw = torch.Generator().manual_seed(0)
    labels = [node % 40 for node in range(300)]
    means = torch.randn(40, 16, generator=draw)
    feat = means[labels] + torch.randn(300, 16, generator=draw)
    edges = [[node, (node + 1) % 300] for node in range(300)]
    parts = {"train": range(100), "valid": range(100, 200), "test": range(200, 300)}
    write_ogb(folder / "ogbn_arxiv", edges, feat.numpy(), labels, parts)
    return folder


@pytest.fixture(scope="session")
def epochs_run(arxiv_dir, tmp_path_factory) -> tuple[str, Path]:
    """Return (output, JSON file) of the epoch benchmarks on that folder; the run is also saved."""
    file = tmp_path_factory.mktemp("run") / "epoch.json"
    options = ["--benchmark-save", "before", "--benchmark-storage", str(file.parent)]
    options += ["--data-dir", str(arxiv_dir), "--benchmark-json", str(file)]
    done = bench(*"-k test_epoch --rounds 3 --threads 1".split(), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, file


def test_ogb_folder_is_found(arxiv_dir, tmp_path, monkeypatch):
    assert arxiv_on_disk(arxiv_dir)
    monkeypatch.setenv("METSELECT_DATA", str(arxiv_dir))
    assert arxiv_on_disk()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not arxiv_on_disk(tmp_path)


def test_the_epoch_table_names_the_dataset(epochs_run):
    output, _ = epochs_run
    assert "ogbn-arxiv, 300 nodes" in output and "twin" not in output
    assert "epoch backbone=gcn depth=2 hidden=64 dataset=ogbn-arxiv" in output
    assert re.search(r"^MetSelect-paper +\d\S* +\d\S+ \[\S+, \S+\]", output, re.M)


def test_the_json_has_metadata(epochs_run):
    _, file = epochs_run
    content = json.loads(file.read_text())
    machine = content["machine_info"]
    assert machine["threads"] == 1 and machine["cpu"]["brand_raw"]
    assert {"torch", "dgl", "metselect_dgl"} <= set(machine["versions"])
    assert machine["served_by"]["moments"] in ("native", "reference")
    assert content["dataset"] == {"name": "ogbn-arxiv", "real": True, "nodes": 300, "edges": 900}
    assert len(content["commit_info"]["id"]) == (40 if (ROOT / ".git").exists() else 11)
    assert "node" not in machine  # the name of the computer
    ratios = None
    for entry in content["benchmarks"]:
        if entry["extra_info"]["provider"] == "MetSelect-once":
            ratios = entry["extra_info"]["ratios"]
    assert set(ratios) == {"plain-DGL", "FinalSelect", "FinalSelect-once"}
    assert set(ratios["plain-DGL"]) == {"median", "q1", "q3", "rounds"}


def test_compare_with_a_saved_run(arxiv_dir, epochs_run):
    options = ["-k", "test_epoch and gcn and FinalSelect-once", "--rounds", "3"]
    options += ["--data-dir", str(arxiv_dir), "--benchmark-storage", str(epochs_run[1].parent)]
    done = bench(*options, "--benchmark-compare", "--benchmark-compare-fail", "median:100000%")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FinalSelect-once] (0001_before)" in done.stdout
    assert "FinalSelect-once] (NOW)" in done.stdout


def test_keep_memory_needs_the_extension():
    done = bench("--keep-memory", "--collect-only", METSELECT_BACKEND="reference")
    assert done.returncode and "--keep-memory needs" in done.stdout + done.stderr


@pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="this checkout has no .venv")
def test_steps_of_two_checkouts_are_compared():
    """The same checkout twice: every step runs, and is reported with its ratio."""
    command = [sys.executable, "benchmarks/compare_checkouts.py", ".", "."]
    command += [*"--dataset hop_chain --sessions 1 --rounds 1 -k".split(), "gcn MetSelect"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    rows = re.findall(r"^(\w+ gcn .*?)  +(\S+)  +(\S+)  ", done.stdout, re.M)
    assert len(rows) == 7 and "error" not in done.stdout, done.stdout
    for _, before, after in rows:
        assert float(before) > 0 and float(after) > 0


# python -m benchmarks.report


def test_report_of_a_run(epochs_run, tmp_path, capsys):
    _, file = epochs_run
    page = tmp_path / "page.md"
    main([str(file), "--out", str(page)])
    text = page.read_text()
    assert "| MetSelect-paper |" in text and "| 2.39 |" in text  # the paper's GCN: 1.41 / 0.59
    assert "ogbn-arxiv, 300 nodes" in text
    assert (tmp_path / "epoch.png").stat().st_size > 10_000
    assert "| MetSelect / plain-DGL |" in capsys.readouterr().out


def test_report_of_another_file(tmp_path):
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(SystemExit, match="was not written by these benchmarks"):
        main([str(file)])


def changed(run: Run, factor: float) -> Run:
    """Return the run with one of its ratios multiplied."""
    entries = json.loads(json.dumps(run.entries))
    other = next(entry for entry in entries if entry["extra_info"].get("ratios"))
    next(iter(other["extra_info"]["ratios"].values()))["median"] *= factor
    return Run(entries, run.machine, run.dataset, run.scope)


def test_differing_ratios_are_reported(epochs_run):
    run = Run.load(epochs_run[1])
    total, (_, rows) = disagreement(run, changed(run, 1.05))
    assert total > 50 and not rows
    _, (_, rows) = disagreement(run, changed(run, 1.2))
    assert [row[-1] for row in rows] == ["+20 %"]


def test_exponents():
    points = [
        {"extra_info": {"size": n, "turns": [0, 1]}, "stats": {"data": [n**2, 5 * n**2]}}
        for n in (10, 100, 1000)
    ]
    assert exponent(points)["median"] == pytest.approx(2)


DIGITS = {
    0.04321: "0.0432",
    0.5: "0.500",
    1.126: "1.13",
    99.96: "100",
    999.6: "1000",
    1e5: "100000",
}


@pytest.mark.parametrize(("value", "shown"), DIGITS.items())
def test_three_digits(value, shown):
    assert digits(value) == shown


def test_again_needs_a_run_with_the_same_settings(epochs_run, tmp_path):
    _, file = epochs_run
    other = tmp_path / "other.json"
    content = json.loads(file.read_text())
    other.write_text(json.dumps(content | {"set": "full"}))
    page = tmp_path / "page.md"
    command = [str(file), "--out", str(page), "--again", str(other)]
    with pytest.raises(SystemExit, match="no run has the set, dataset, threads"):
        main(command)
    other.write_text(json.dumps(content))
    main(command)
    assert re.search(r"epoch\.json and other\.json: (\d+) of \1 ratios agree", page.read_text())


def test_the_committed_page_is_generated_from_the_committed_runs(tmp_path):
    results, page = ROOT / "benchmarks/results", tmp_path / "RESULTS.md"
    runs = sorted({*results.glob("*.json")} - {results / "guard.json"})
    tables = report(runs, sorted(results.glob("quick-*.json")), results / "guard.json", page)
    assert page.read_text() == (ROOT / "benchmarks/RESULTS.md").read_text()
    assert len(tables) == 3
    for figure in tmp_path.glob("*.png"):
        assert (ROOT / "benchmarks" / figure.name).exists()
