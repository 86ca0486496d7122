"""The benchmarks themselves: turns, ratios, checks, the dataset, the JSON and the page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ogb_files import write_ogb

from benchmarks.inputs import Inputs, Rows
from benchmarks.models import PROVIDERS, ByReference, Epochs, Size
from benchmarks.ops import OPS, contestants
from benchmarks.ops import PROVIDERS as OF_OPS
from benchmarks.race import Contestant, Race
from benchmarks.timing import LEAST, paired_ratio, take_turns
from metselect_dgl import functional as MF
from metselect_dgl.cli import main
from metselect_dgl.data import arxiv_on_disk
from metselect_dgl.experiments.bench import Run, digits, disagreement, exponent
from metselect_dgl.experiments.bench_report import report

ROOT = Path(__file__).parents[1]


# turns


def test_everybody_takes_a_turn_each_round_in_changing_order():
    order = []
    runs = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    turns = take_turns(runs, rounds=3, seconds=100, clocks=set("abc"))
    rounds = ["".join(order[at : at + 3]) for at in range(0, 12, 3)]  # the first does not count
    assert all(sorted(each) == list("abc") for each in rounds) and len(set(rounds)) > 1
    assert turns == {name: {0: 1.0, 1: 1.0, 2: 1.0} for name in "abc"}


def test_the_slow_sit_out_after_their_share():
    runs = {"slow": lambda: 5.0, "fast": lambda: 0.1}
    turns = take_turns(runs, rounds=9, seconds=12, clocks={"slow", "fast"})
    assert list(turns["slow"]) == list(range(LEAST)) and len(turns["fast"]) == 9


def test_what_is_short_is_repeated():
    calls = []
    turns = take_turns({"short": lambda: calls.append(1)}, rounds=2, seconds=1)
    assert len(calls) > 9 and max(turns["short"].values()) < 1e-3


def test_ratios_are_of_the_same_round():
    """A machine that is ten times slower in one round does not change them."""
    slow = {0: 2.0, 1: 20.0, 2: 2.2}
    found = paired_ratio(slow, {0: 1.0, 1: 10.0, 3: 5.0})
    assert found == {"median": 2.0, "q1": 2.0, "q3": 2.0, "rounds": 2}
    found = paired_ratio({at: float(at) for at in range(1, 6)}, dict.fromkeys(range(9), 1.0))
    assert found == {"median": 3.0, "q1": 2.0, "q3": 4.0, "rounds": 5}


# races


class FakeBenchmark:
    """What a race needs of pytest-benchmark's fixture."""

    def __init__(self) -> None:
        self.enabled, self.extra_info, self.seconds = True, {}, []

    def _make_stats(self, iterations):
        self.update = self.seconds.append
        return self


def wrong() -> None:
    raise AssertionError("0 is not 1")


def race_of(**contestants: Contestant) -> Race:
    return Race("test", {"n": 1}, contestants, 4, 9, list(contestants), iter)


def test_a_race_reports_turns_and_ratios():
    one = Contestant(lambda: 1.0, own_clock=True)
    two = Contestant(lambda: 2.0, ("one",), own_clock=True, facts={"size": 7})
    race, benchmark = race_of(one=one, two=two), FakeBenchmark()
    race.report("two", benchmark)
    assert benchmark.seconds == 4 * [2.0] and benchmark.group == "test n=1"
    assert benchmark.extra_info["ratios"]["one"]["median"] == 2.0
    assert benchmark.extra_info["size"] == 7 and benchmark.extra_info["turns"] == [0, 1, 2, 3]


def test_a_wrong_result_is_not_timed():
    ran = []
    bad = Contestant(lambda: ran.append(1), check=wrong)
    race = race_of(good=Contestant(lambda: 1), bad=bad)
    with pytest.raises(AssertionError, match="bad is not timed") as error:
        race.report("bad", FakeBenchmark())
    assert "0 is not 1" in str(error.value.__cause__)
    race.report("good", FakeBenchmark())
    assert not ran


def test_an_error_while_it_is_timed_fails_the_whole_race():
    turns = iter([1.0])
    race = race_of(good=Contestant(int), bad=Contestant(lambda: next(turns)))
    for name in ("good", "bad"):
        with pytest.raises(AssertionError, match=f"{name} is not timed") as error:
            race.report(name, FakeBenchmark())
        assert isinstance(error.value.__cause__, StopIteration)


def test_who_is_measured_against_a_wrong_result_fails_too():
    race = race_of(bad=Contestant(int, check=wrong), good=Contestant(int, ("bad",)))
    with pytest.raises(AssertionError, match="bad is not timed"):
        race.report("good", FakeBenchmark())


# what is timed is right


@pytest.fixture(scope="module")
def inputs():
    return Inputs(Rows(n=600, L=2, C=5, D=8))


@pytest.mark.parametrize("op", OPS)
def test_every_provider_of_an_op_gives_its_result(op, inputs):
    listed = contestants(op, inputs)
    assert list(listed) == list(OF_OPS[op])
    for contestant in listed.values():
        contestant.check()
        contestant.run()


def test_an_op_that_errs_is_seen(inputs, monkeypatch):
    def off(*given, **options):
        layer, best, score = right(*given, **options)
        return layer, best, 1.01 * score

    right = MF.select_layer
    monkeypatch.setattr(MF, "select_layer", off)
    with pytest.raises(AssertionError, match="result is off by"):
        contestants("head", inputs)["native"].check()


@pytest.mark.parametrize("name", PROVIDERS)
def test_epochs_are_those_of_the_reference(name, small):
    Epochs(PROVIDERS[name], Size(hidden=8), small).check()


def test_an_epoch_that_errs_is_seen(small):
    epochs = Epochs(PROVIDERS["MetSelect"], Size(hidden=8), small)
    with torch.no_grad():
        epochs.model.backbone.convs[0].weight[0] += 1
    with pytest.raises(AssertionError, match="is off by"):
        epochs.check()


def test_a_gradient_that_is_lost_is_seen(small, monkeypatch):
    epochs = Epochs(PROVIDERS["MetSelect"], Size(hidden=8), small)
    epochs.model.backbone.convs[1].weight.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"no gradient to backbone\.convs\.1\.weight"):
        epochs.check()


def test_by_reference_serves_our_ops(small, monkeypatch):
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
    """(what was printed, JSON) of the per-epoch table on that folder, which is also saved."""
    file = tmp_path_factory.mktemp("run") / "epoch.json"
    options = ["--benchmark-save", "before", "--benchmark-storage", str(file.parent)]
    options += ["--data-dir", str(arxiv_dir), "--benchmark-json", str(file)]
    done = bench(*"-k epoch --rounds 3 --threads 1".split(), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, file


def test_the_folder_of_ogb_is_found(arxiv_dir, tmp_path, monkeypatch):
    assert arxiv_on_disk(arxiv_dir)
    monkeypatch.setenv("METSELECT_DATA", str(arxiv_dir))
    assert arxiv_on_disk()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not arxiv_on_disk(tmp_path)


def test_the_per_epoch_table_is_of_that_folder(epochs_run):
    said, _ = epochs_run
    assert "ogbn-arxiv, 300 nodes" in said and "twin" not in said
    assert "epoch backbone=gcn depth=2 hidden=64 dataset=ogbn-arxiv" in said
    assert re.search(r"^MetSelect-paper +\d\S* +\d\S+ \[\S+, \S+\]", said, re.M)


def test_the_json_is_stamped(epochs_run):
    _, file = epochs_run
    said = json.loads(file.read_text())
    machine = said["machine_info"]
    assert machine["threads"] == 1 and machine["cpu"]["brand_raw"]
    assert {"torch", "dgl", "metselect_dgl"} <= set(machine["versions"])
    assert machine["served_by"]["moments"] in ("native", "reference")
    assert said["dataset"] == {"name": "ogbn-arxiv", "real": True, "nodes": 300, "edges": 900}
    assert len(said["commit_info"]["id"]) == (40 if (ROOT / ".git").exists() else 11)
    assert "node" not in machine  # the name of the computer
    named = {each["extra_info"]["provider"]: each["extra_info"] for each in said["benchmarks"]}
    ratios = named["MetSelect-once"]["ratios"]
    assert set(ratios) == {"plain-DGL", "FinalSelect", "FinalSelect-once"}
    assert set(ratios["plain-DGL"]) == {"median", "q1", "q3", "rounds"}


def test_compare_with_a_saved_run(arxiv_dir, epochs_run):
    options = ["-k", "epoch and gcn and FinalSelect-once", "--rounds", "3"]
    options += ["--data-dir", str(arxiv_dir), "--benchmark-storage", str(epochs_run[1].parent)]
    done = bench(*options, "--benchmark-compare", "--benchmark-compare-fail", "median:100000%")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FinalSelect-once] (0001_before)" in done.stdout
    assert "FinalSelect-once] (NOW)" in done.stdout


def test_keep_memory_needs_the_extension():
    done = bench("--keep-memory", "--collect-only", METSELECT_BACKEND="reference")
    assert done.returncode and "--keep-memory needs" in done.stdout + done.stderr


# metselect bench report


def test_report_of_a_run(epochs_run, tmp_path, capsys):
    _, file = epochs_run
    page = tmp_path / "page.md"
    assert main(["bench", "report", str(file), "--out", str(page)]) == 0
    text = page.read_text()
    assert "| MetSelect-paper |" in text and "| 2.39 |" in text  # the paper's GCN: 1.41 / 0.59
    assert "ogbn-arxiv, 300 nodes" in text
    assert (tmp_path / "epoch.png").stat().st_size > 10_000
    assert "| MetSelect / plain-DGL |" in capsys.readouterr().out


def test_report_of_what_is_no_run(tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert main(["bench", "report", str(file)]) == 1
    assert "is not of our benchmarks" in capsys.readouterr().err


def changed(run: Run, factor: float) -> Run:
    """With one of its ratios multiplied."""
    entries = json.loads(json.dumps(run.entries))
    other = next(each for each in entries if each["extra_info"].get("ratios"))
    next(iter(other["extra_info"]["ratios"].values()))["median"] *= factor
    return Run(entries, run.machine, run.dataset, run.scope)


def test_runs_that_disagree_are_told(epochs_run):
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


def test_again_needs_a_run_of_the_same_kind(epochs_run, tmp_path, capsys):
    _, file = epochs_run
    other = tmp_path / "other.json"
    said = json.loads(file.read_text())
    other.write_text(json.dumps(said | {"set": "full"}))
    page = tmp_path / "page.md"
    command = ["bench", "report", str(file), "--out", str(page), "--again"]
    assert main([*command, str(other)]) == 1
    assert "no run is of the same set" in capsys.readouterr().err
    other.write_text(json.dumps(said))
    assert main([*command, str(other)]) == 0
    assert re.search(r"epoch\.json and other\.json: (\d+) of \1 ratios agree", page.read_text())


def test_the_committed_page_is_that_of_the_committed_runs(tmp_path):
    results, page = ROOT / "benchmarks/results", tmp_path / "RESULTS.md"
    runs = sorted({*results.glob("*.json")} - {results / "guard.json"})
    said = report(runs, sorted(results.glob("quick-*.json")), results / "guard.json", page)
    assert page.read_text() == (ROOT / "benchmarks/RESULTS.md").read_text()
    assert said in (ROOT / "README.md").read_text()
    for picture in tmp_path.glob("*.png"):
        assert (ROOT / "benchmarks" / picture.name).exists()
