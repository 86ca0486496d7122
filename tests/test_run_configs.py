"""Many runs: the choice of settings, paired differences, and a log that resumes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from metselect_dgl.config import Config
from metselect_dgl.experiments import run_configs as running
from metselect_dgl.experiments import tuning
from metselect_dgl.experiments.compare import check_selectors, compare, report
from metselect_dgl.experiments.experiment import config_grid
from metselect_dgl.experiments.result_rows import accuracies
from metselect_dgl.experiments.run_configs import Execution, RunProgress

BASE = Config(dataset="tiny", hidden=8, epochs=2)


def run_configs(configs: list[Config], data_dir, log: Path, jobs: int = 1) -> list[dict]:
    """Run without a progress bar."""
    execution = Execution(str(data_dir), jobs)
    return running.run_configs(configs, log, execution, RunProgress(show=False))


def row(config: Config, val: float, test: float, **more) -> dict:
    """Return a made-up result row."""
    part = {"accuracy": test, "macro_f1": test / 2, "weighted_f1": test / 4}
    return {
        "dataset": config.dataset,
        "backbone": config.backbone,
        "selector": config.selector,
        "split": config.split,
        "seed": config.seed,
        "val_accuracy": val,
        "test_accuracy": test,
        "config": vars(config).copy(),
        "test": part,
        **more,
    }


@pytest.fixture
def fabricate(monkeypatch):
    """Replace the runs of `compare` by a function of the config; return the configs that ran. The
    dataset has 100 validation nodes per split, so that settings are compared on three."""

    def install(make):
        asked = []

        def fake(configs, log, execution, progress):
            asked.extend(config for config in configs if config not in asked)
            return [make(config) for config in configs]

        part = SimpleNamespace(val=range(100))
        data = SimpleNamespace(split=lambda number: part, n_splits=5)
        monkeypatch.setattr(tuning, "run_configs", fake)
        monkeypatch.setattr(tuning, "cached_dataset", lambda name, data_dir, seed: data)
        return asked

    return install


def test_config_grid_is_the_product():
    configs = config_grid(BASE, {"split": [0, 1], "lr": [0.1, 0.2, 0.3]})
    assert [(c.split, c.lr) for c in configs] == [
        *((0, 0.1), (0, 0.2), (0, 0.3)),
        *((1, 0.1), (1, 0.2), (1, 0.3)),
    ]
    assert {(c.dataset, c.hidden) for c in configs} == {("tiny", 8)}


def test_settings_are_chosen_by_mean_validation_accuracy(fabricate, tmp_path):
    """Self-loops are better on the three splits that are compared, and worse on test."""

    def make(config):
        val = [0.9, 0.1, 0.1, 0.9][config.split] if not config.self_loop else 0.5
        return row(config, val, 0.2 if config.self_loop else 0.9)

    fabricate(make)
    (outcome,) = compare(BASE, ["metselect"], splits=4, out=tmp_path)
    assert outcome.settings == {"self_loop": True, "weight_decay": 5e-4, "lr": 0.01}
    assert [r["split"] for r in outcome.rows] == [0, 1, 2, 3]
    assert accuracies(outcome.rows).tolist() == [20] * 4
    assert accuracies(outcome.rows, "val").mean() == pytest.approx(50)
    assert (
        "chosen on validation for metselect: self_loop True, weight_decay 0.0005, lr 0.01"
        in report([outcome])
    )


@pytest.mark.parametrize(
    ("gaps", "decay"),
    [([0.03, -0.02, 0.0], 5e-4), ([0.03, 0.02, 0.02], 0.0)],
    ids=["level-with-the-best", "behind"],
)
def test_settings_within_a_standard_error(fabricate, tmp_path, gaps, decay):
    """The stronger weight decay is chosen."""
    fabricate(lambda c: row(c, 0.5 + gaps[c.split] * (c.weight_decay == 0), 0.5))
    (outcome,) = compare(BASE, ["metselect"], splits=3, out=tmp_path)
    assert outcome.settings["weight_decay"] == decay


def test_every_selector_has_its_own_settings(fabricate, tmp_path):
    def make(config):
        liked = config.self_loop == (config.selector == "final")
        return row(config, 0.5 + 0.1 * liked, 0.5)

    fabricate(make)
    final, metselect = compare(BASE, ["final", "metselect"], splits=1, out=tmp_path)
    assert (final.settings["self_loop"], metselect.settings["self_loop"]) == (True, False)


def test_groups_are_searched_in_turn(fabricate, tmp_path):
    """The best settings of a group are kept for the next; three of five splits are compared."""
    asked = fabricate(lambda c: row(c, 0.5 + 0.1 * c.self_loop + 0.1 * (c.lr == 0.03), 0.5))
    compare(Config(dataset="tiny", seed=7), ["ndls"], splits=5, seeds=2, out=tmp_path)
    tried = [(c.self_loop, c.weight_decay, c.lr, c.eps) for c in asked if c.split == 0]
    assert tried == [
        (False, 5e-4, 0.01, 0.03),
        (True, 5e-4, 0.01, 0.03),
        (True, 0.0, 0.01, 0.03),
        (True, 5e-4, 0.03, 0.03),
        (True, 5e-4, 0.03, 0.1),
        (True, 5e-4, 0.03, 0.3),
        (True, 5e-4, 0.03, 0.03),
    ]
    assert {c.split for c in asked if c.eps == 0.3} == {0, 1, 2}
    last = [(c.split, c.seed) for c in asked if (c.lr, c.eps) == (0.03, 0.03)]
    assert set(last) == {(s, d) for s in range(5) for d in (7, 8)}


def test_splits_are_limited_by_the_dataset(fabricate, tmp_path):
    asked = fabricate(lambda config: row(config, 0.5, 0.5))
    compare(BASE, ["final"], splits=10, out=tmp_path)
    assert {config.split for config in asked} == set(range(5))


def test_the_total_counts_every_run_once(fabricate, tmp_path, monkeypatch):
    totals = []

    def progress(total):
        totals.append(total)
        return RunProgress(total, show=False)

    monkeypatch.setattr(tuning, "RunProgress", progress)
    asked = fabricate(lambda c: row(c, 0.5 + 0.1 * c.self_loop, 0.5))
    compare(Config(dataset="tiny", backbone="gin"), ["ndls", "final"], splits=5, out=tmp_path)
    assert totals == [len(asked)]


def test_a_backbone_has_settings_of_its_own(fabricate, tmp_path):
    fabricate(lambda config: row(config, 0.5 + 0.1 * bool(config.batch_norm), 0.5))
    (outcome,) = compare(Config(dataset="tiny", backbone="gin"), ["final"], splits=1, out=tmp_path)
    assert outcome.settings["batch_norm"] is True


@pytest.mark.parametrize(
    "fixed", [{"self_loop"}, {"self_loop", "weight_decay"}, {"hidden"}], ids=["one", "two", "other"]
)
def test_settings_of_the_user_leave_the_search(fabricate, tmp_path, fixed):
    asked = fabricate(lambda config: row(config, 0.5, 0.5))
    base = Config(dataset="tiny", self_loop=True, weight_decay=0.25)
    (outcome,) = compare(base, ["final"], splits=1, fixed=fixed, out=tmp_path)
    groups = {"self_loop": {False, True}, "weight_decay": {0.0, 5e-4}, "lr": {0.01, 0.03}}
    assert set(outcome.settings) == set(groups) - fixed
    for name in groups:
        tried = {getattr(base, name)} if name in fixed else groups[name]
        assert {getattr(config, name) for config in asked} == tried


TEST_ACCURACY = {"final": [0.5, 0.6, 0.7], "metselect": [0.6, 0.8, 0.7], "attn": [0.4, 0.5, 0.6]}


@pytest.fixture
def three(fabricate, tmp_path):
    """FinalSelect, MetSelect and AttnSelect on three splits."""
    layers = {
        "fixed": [0.2, 0.6, 0.5],
        "layer_share": [0.25, 0.25, 0.5],
        "oracle": 0.9,
        "lucky_oracle": 0.75,
    }

    def make(config):
        more = layers if config.selector == "metselect" else {}
        return row(config, 0.5, TEST_ACCURACY[config.selector][config.split], **more)

    fabricate(make)
    return compare(BASE, list(TEST_ACCURACY), splits=3, out=tmp_path)


def cells(text: str, name: str) -> list[str]:
    """Return the numbers of the table row that begins with `name`."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name + "  "))
    return line.strip().removeprefix(name).split()


def test_report_by_hand(three):
    """Gaps of 0.1, 0.2, 0: mean 0.1, deviation 0.1, standard error 0.1 / sqrt 3."""
    text = report(three)
    assert cells(text, "final") == "50.0 60.0 10.0 - - 30.0 15.0".split()
    assert cells(text, "metselect") == "50.0 70.0 10.0 +10.0 5.8 35.0 17.5".split()
    assert cells(text, "attn") == "50.0 50.0 10.0 -10.0 0.0 25.0 12.5".split()


def test_report_of_layers_by_hand(three):
    """(0.7 - 0.6) of the gap between best layer and oracle, 0.9 - 0.6, is a third."""
    text = report(three)
    assert cells(text, "all at layer 0 (selected for 25 %)") == ["20.0"]
    assert cells(text, "all at layer 1 (selected for 25 %)") == ["60.0"]
    assert cells(text, "all at layer 2 (selected for 50 %)") == ["50.0"]
    assert cells(text, "oracle") == ["90.0"]
    assert cells(text, "shuffled oracle") == ["75.0"]
    assert cells(text, "share of the oracle's gain realised") == ["33.3"]


def test_report_without_final(three):
    assert cells(report(three[1:]), "attn")[3:5] == ["-", "-"]


def test_report_of_one_run(fabricate, tmp_path):
    fabricate(lambda config: row(config, 0.5, 0.7 if config.selector == "attn" else 0.6))
    text = report(compare(BASE, ["final", "attn"], splits=1, out=tmp_path))
    assert cells(text, "attn") == "50.0 70.0 - +10.0 - 35.0 17.5".split()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["final", "best"], "selector is 'best'; use one of attn, final, "),
        (["final", "metselect", "final"], "named twice: final metselect final"),
    ],
    ids=["unknown", "twice"],
)
def test_wrong_selectors(names, message):
    with pytest.raises(ValueError, match=message):
        check_selectors(names)


def test_right_selectors():
    check_selectors(["final", "metselect"])


# In the order in which they are run: low splits first.
CONFIGS = config_grid(BASE, {"split": [0, 1], "selector": ["final", "metselect-paper"]})


@pytest.fixture
def counted(monkeypatch):
    """The configs that are really run."""
    ran, run_one = [], running.run_one

    def watched(config, execution):
        ran.append(config)
        return run_one(config, execution)

    monkeypatch.setattr(running, "run_one", watched)
    return ran


def timeless(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def read_lines(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_a_second_call_runs_nothing(counted, tiny_dir, tmp_path):
    results = tmp_path / "new" / "results.jsonl"
    first = run_configs(CONFIGS, tiny_dir, results)
    assert counted == CONFIGS
    assert first == read_lines(results)
    assert [Config(**row["config"]) for row in first] == CONFIGS
    assert first[0]["test_accuracy"] == first[0]["test"]["accuracy"]
    assert first[0]["val_accuracy"] == first[0]["val"]["accuracy"]
    before = results.read_bytes()
    assert run_configs(CONFIGS[::-1], tiny_dir, results) == first[::-1]
    assert counted == CONFIGS
    assert results.read_bytes() == before


@pytest.mark.parametrize("show", [True, False], ids=["bar", "no-bar"])
def test_progress_of_a_second_call(tiny_dir, tmp_path, show, capsys):
    """Logged runs count, but not as work, and no run counts twice."""
    results, progress = tmp_path / "results.jsonl", RunProgress(4, show=show)
    run_configs(CONFIGS[:1], tiny_dir, results)
    for configs, n in ((CONFIGS[:2], 2), (CONFIGS[1:3], 3), (CONFIGS, 4)):
        running.run_configs(configs, results, Execution(str(tiny_dir)), progress)
        assert (len(progress.finished), progress.from_log) == (n, 1)
    progress.close()
    assert ("4/4" in capsys.readouterr().err) == show
    assert len(read_lines(results)) == 4


def test_memory_is_kept_on_request(tiny_dir, monkeypatch):
    calls = []
    monkeypatch.setattr("metselect_dgl.ops.keep_freed_memory", lambda: calls.append(1))
    running.run_one(CONFIGS[0], Execution(str(tiny_dir)))
    assert calls == []
    running.run_one(CONFIGS[0], Execution(str(tiny_dir), keep_memory=True))
    assert calls == [1]


def test_runs_of_other_code_are_reported(monkeypatch, tiny_dir, tmp_path):
    results = tmp_path / "results.jsonl"
    run_configs(CONFIGS[:1], tiny_dir, results)
    monkeypatch.setattr(running, "code_version", lambda: "changed")
    with pytest.warns(UserWarning, match="1 runs in .*results.jsonl were made by another version"):
        run_configs(CONFIGS[:1], tiny_dir, results)


def test_only_what_is_new_is_run(counted, tiny_dir, tmp_path):
    results = tmp_path / "results.jsonl"
    run_configs(CONFIGS[1:3], tiny_dir, results)
    counted.clear()
    rows = run_configs(CONFIGS, tiny_dir, results)
    assert counted == [CONFIGS[0], CONFIGS[3]]
    assert [Config(**row["config"]) for row in rows] == CONFIGS
    assert len(read_lines(results)) == 4


@pytest.mark.parametrize("lost", [1, 40, "all but one"], ids=str)
def test_half_a_line_is_cut_and_only_that_run_redone(counted, tiny_dir, tmp_path, lost):
    """1 is the newline alone: the line is complete, but cannot be known to be."""
    results = tmp_path / "results.jsonl"
    first = run_configs(CONFIGS, tiny_dir, results)
    counted.clear()
    whole = results.read_bytes()
    last = len(whole.splitlines()[-1])
    results.write_bytes(whole[: -(last if lost == "all but one" else lost)])
    again = run_configs(CONFIGS, tiny_dir, results)
    assert counted == CONFIGS[3:]
    assert timeless(again) == timeless(first)
    assert timeless(read_lines(results)) == timeless(first)


def test_what_was_finished_before_an_error_is_kept(monkeypatch, tiny_dir, tmp_path):
    results, run_one, on_the_disk = tmp_path / "results.jsonl", running.run_one, []

    def failing(config, execution):
        on_the_disk.append(len(read_lines(results)))
        if config == CONFIGS[2]:
            raise KeyboardInterrupt
        return run_one(config, execution)

    with monkeypatch.context() as patch:
        patch.setattr(running, "run_one", failing)
        with pytest.raises(KeyboardInterrupt):
            run_configs(CONFIGS, tiny_dir, results)
    assert on_the_disk == [0, 1, 2]  # written at once: a process may be killed
    assert [Config(**row["config"]) for row in read_lines(results)] == CONFIGS[:2]


def test_two_processes_give_the_rows_of_one(tiny_dir, tmp_path):
    one = run_configs(CONFIGS, str(tiny_dir), tmp_path / "one.jsonl")
    two = run_configs(CONFIGS, str(tiny_dir), tmp_path / "two.jsonl", jobs=2)
    assert timeless(two) == timeless(one)
    assert len(read_lines(tmp_path / "two.jsonl")) == 4


def test_the_seed_draws_a_synthetic_dataset_anew(monkeypatch):
    drawn = []

    def load(name, data_dir, seed):
        drawn.append(seed)
        raise ValueError("enough")

    monkeypatch.setattr(running, "load_dataset", load)
    running.cached_dataset.cache_clear()
    for config in config_grid(Config(), {"seed": [3, 4]}):
        with pytest.raises(ValueError, match="enough"):
            running.run_one(config, Execution())
    assert drawn == [3, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2 is damaged"),
        ("3", "line 2 is not a result"),
        ("{}", "line 2 is not a run"),
    ],
)
def test_damaged_lines_are_named(tiny_dir, tmp_path, line, message):
    results = tmp_path / "results.jsonl"
    run_configs(CONFIGS[:1], tiny_dir, results)
    results.write_text(results.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"results.jsonl, {message}.*remove the line or the file"):
        run_configs(CONFIGS[:1], tiny_dir, results)
