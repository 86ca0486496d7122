"""The paper's numbers, the studies, their rows, and the results page."""

import json
import shutil
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from metselect_dgl import cli
from metselect_dgl.config import Config
from metselect_dgl.data import load_dataset
from metselect_dgl.experiments import paper, reproduce, run_configs
from metselect_dgl.experiments.experiment import Experiment
from metselect_dgl.experiments.reproduce import write_page
from metselect_dgl.experiments.result_rows import (
    accuracies,
    add_rows,
    delta_max,
    format_difference,
    paired_difference,
    read_rows,
    rows_by_model,
)
from metselect_dgl.experiments.run_configs import Execution
from metselect_dgl.experiments.studies import FULL, QUICK, STUDIES, ReproduceSettings, Study
from metselect_dgl.experiments.tables import markdown

ROOT = Path(__file__).parents[1]


def paper_means(table: dict) -> dict:
    return {name: {d: figure.mean for d, figure in row.items()} for name, row in table.items()}


@pytest.mark.parametrize(
    ("table", "printed"),
    [
        *((paper.ACCURACY[b], paper.DELTA_MAX[b]) for b in paper.ACCURACY),
        (paper.SELF_LOOPS, paper.SELF_LOOPS_DELTA_MAX),
    ],
    ids=[*paper.ACCURACY, "self-loops"],
)
def test_printed_delta_max_follows_from_the_printed_numbers(table, printed):
    """Check the copied means (to a tenth) and the definition of the column."""
    assert delta_max(paper_means(table)) == pytest.approx(printed, abs=0.0151)


def test_one_printed_delta_max_does_not_follow():
    """For JKNet-MetSelect the paper prints 0.9; its own row gives 2.0, behind JKNet-Cat."""
    computed = delta_max(paper_means(paper.AGGREGATION))
    wrong = {
        name
        for name, value in paper.AGGREGATION_DELTA_MAX.items()
        if abs(value - computed[name]) > 0.06
    }
    assert wrong == {"jknet-metselect"}
    assert computed["jknet-metselect"] == pytest.approx(2.0)


@pytest.mark.parametrize("study", ["accuracy", "self-loops", "aggregation"])
def test_a_table_treats_its_models_alike(study):
    """One recipe and one search for all; options of a backbone or selector are added."""
    experiments = STUDIES[study].experiments(FULL)
    assert experiments
    common = {"weight_decay", "lr"}
    for experiment in experiments:
        base = experiment.base
        assert (base.epochs, base.patience, base.validate_every) == (200, 50, 5)
        assert base.self_loop == (study == "self-loops")
        more = {"ndls": {"eps"}}.get(base.selector, set())
        more = more | ({"batch_norm"} if base.backbone == "gin" else set())
        assert set(experiment.searched()) == common | more
        assert experiment.splits == 10


def test_one_recipe_for_all_commands():
    """`train`, `compare` and `reproduce` start from the same settings."""
    assert FULL.recipe == Config()


def test_table_2_is_complete():
    keys = set()
    for experiment in STUDIES["accuracy"].experiments(FULL):
        base = experiment.base
        keys.add((base.dataset, base.backbone, base.selector))
    selectors = {*paper.ACCURACY["gcn"], "metselect-paper"}
    assert keys == {(d, b, s) for d in paper.DATASETS for b in paper.ACCURACY for s in selectors}


@pytest.mark.parametrize("study", ["depth", "attack"])
def test_a_figure_uses_the_same_settings_for_all(study):
    varied = {"dataset", "num_layers", "selector", "loss"}
    experiments = STUDIES[study].experiments(FULL)
    settings = [
        {key: value for key, value in vars(experiment.base).items() if key not in varied}
        for experiment in experiments
    ]
    assert all(other == settings[0] for other in settings)
    assert not any(experiment.search for experiment in experiments)


@pytest.fixture(scope="module")
def folder(tiny_dir, tmp_path_factory):
    """A data folder with a tiny graph under the paper's names."""
    folder = tmp_path_factory.mktemp("paper")
    for name in ("cora", "texas"):
        shutil.copy(tiny_dir / "tiny.npz", folder / f"{name}.npz")
    tiny = dict(np.load(tiny_dir / "tiny.npz"))
    np.savez(folder / "mettack_cora.npz", edges_mettack_05=tiny["edges"][5:], **tiny)
    return str(folder)


TINY = ReproduceSettings(
    datasets=("cora", "texas"),
    backbones=("gcn", "gin"),
    selectors=("final", "metselect"),
    splits=2,
    recipe=replace(FULL.recipe, epochs=4, hidden=8, validate_every=2),
)
TINY_STUDIES = [
    STUDIES["accuracy"],
    STUDIES["self-loops"],
    STUDIES["aggregation"],
    replace(STUDIES["depth"], depths=(2, 3), splits=1),
    replace(STUDIES["attack"], rates=(0, 5), seeds=2),
    replace(STUDIES["fresh-attack"], rates=(0, 5), seeds=2),
]


def stored(folder: Path, study: str) -> list[dict]:
    """Return the stored rows of a study."""
    return read_rows(STUDIES[study].path(folder))


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    """The output folder of all studies but `time`, run on the tiny graphs."""
    out = tmp_path_factory.mktemp("out")
    assert reproduce.reproduce(TINY_STUDIES, TINY, out, Execution(folder)) == []
    return out


def test_rows_of_a_study(ran):
    rows = stored(ran, "accuracy")
    assert len(rows) == 2 * 2 * 2 * 2
    keys = [(x["dataset"], x["backbone"], x["selector"], x["split"], x["seed"]) for x in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        assert 0 <= row["val_accuracy"] <= 1
        assert 0 <= row["test_accuracy"] <= 1
        assert {"weight_decay", "lr", "epochs", "hidden"} <= set(row["settings"])
        assert ("batch_norm" in row["settings"]) == (row["backbone"] == "gin")
        assert ("fixed" in row) == (row["selector"] == "metselect")


def test_a_model_has_the_same_settings_on_all_splits(ran):
    for runs in rows_by_model(stored(ran, "accuracy")).values():
        assert len({json.dumps(row["settings"], sort_keys=True) for row in runs}) == 1
        assert [row["split"] for row in runs] == [0, 1]


def test_a_second_call_runs_nothing(ran, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in ran.rglob("*.jsonl")}
    assert len(before) == len(TINY_STUDIES) + 1  # and the log
    monkeypatch.setattr(run_configs, "run_one", None)  # a call would fail
    reproduce.reproduce(TINY_STUDIES, TINY, ran, Execution(folder))
    assert {path.name: path.read_bytes() for path in ran.rglob("*.jsonl")} == before


def test_a_narrower_call_keeps_the_other_rows(ran, folder, tmp_path):
    out = shutil.copytree(ran, tmp_path / "out")
    before = stored(out, "accuracy")
    narrow = replace(TINY, datasets=["texas"], backbones=["gcn"])
    studies = [TINY_STUDIES[0], TINY_STUDIES[3]]  # accuracy and depth
    reproduce.reproduce(studies, narrow, out, Execution(folder))
    key = lambda row: json.dumps(row, sort_keys=True)  # noqa: E731
    assert sorted(map(key, stored(out, "accuracy"))) == sorted(map(key, before))
    assert stored(out, "depth") == stored(ran, "depth")


def test_studies_of_gcn_need_gcn():
    narrow = replace(FULL, backbones=["gin"])
    for study in ("self-loops", "aggregation", "depth", "attack"):
        assert STUDIES[study].experiments(narrow) == []


@dataclass(frozen=True)
class OneModel(Study):
    """A study of one model, for the test below."""

    def experiments(self, settings):
        return [
            Experiment(replace(settings.recipe, dataset=d), splits=1) for d in settings.datasets
        ]

    def findings(self, rows):
        return [f"{len(rows)} rows"]

    def section(self, results):
        return ["## One model", f"rows in {results.link}"]


def test_a_study_is_added_in_one_place(monkeypatch, folder, tmp_path, capsys):
    """An entry in STUDIES reaches the command line, the runs and the page."""
    monkeypatch.setitem(STUDIES, "one-model", OneModel("one-model", "a study of one model"))
    monkeypatch.setattr(cli, "FULL", TINY)
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    assert "one-model" in capsys.readouterr().out
    flags = ["--out", str(tmp_path), "--data-dir", folder, "--jobs", "1"]
    assert cli.main(["reproduce", "one-model", *flags]) == 0
    assert "one-model: a study of one model" in capsys.readouterr().out
    assert len(stored(tmp_path, "one-model")) == 2
    page = (tmp_path / "results.md").read_text()
    assert "- 2 rows" in page
    assert "## One model\n\nrows in ." in page
    assert "| `metselect reproduce one-model` | 2 |" in page


def test_a_wrong_data_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        reproduce.reproduce(TINY_STUDIES, TINY, tmp_path, Execution(str(tmp_path / "nowhere")))


def test_fresh_attack_is_on_poisoned_graphs(ran):
    rows = stored(ran, "fresh-attack")
    assert {row["dataset"] for row in rows} == {"mettack_cora", "mettack_cora_05"}
    assert len(rows) == 2 * 4 * 2
    clean, poisoned = (
        load_dataset(f"mettack_cora{rate}", ran / "poisoned").graph for rate in ("", "_05")
    )
    assert poisoned.num_edges() != clean.num_edges()
    runs = read_rows(ran / "log" / "runs.jsonl")
    data = {run["dataset"]: run["data"] for run in runs if "mettack" in run["dataset"]}
    assert data["mettack_cora"] != data["mettack_cora_05"]


def test_missing_datasets_are_left_out(folder, tmp_path, monkeypatch):
    def no_download(name, data_dir, seed=0):
        raise RuntimeError(f"{name} cannot be loaded")

    monkeypatch.setattr(reproduce, "load_dataset", no_download)
    messages = reproduce.reproduce(TINY_STUDIES, TINY, tmp_path, Execution(folder))
    assert messages == [f"{name} cannot be loaded" for name in ("cora", "texas", "mettack_cora")]
    assert stored(tmp_path, "accuracy") == stored(tmp_path, "fresh-attack") == []


def test_epoch_time(folder, tmp_path, monkeypatch):
    study = replace(STUDIES["time"], large="texas")
    settings = replace(TINY, datasets=("cora",), backbones=("gcn",))
    study.run(settings, tmp_path, Execution(folder))
    rows = stored(tmp_path, "time")
    assert [row["dataset"] for row in rows] == 4 * ["cora"] + 4 * ["texas"]
    assert [row["rounds"] for row in rows] == 4 * [15] + 4 * [5]
    final, *others = rows[:4]
    assert final["ratio"] == 1
    assert final["quartiles"] == [1, 1]
    for row in others:
        low, high = row["quartiles"]
        assert low <= row["ratio"] <= high
        assert row["seconds"] > 0
    monkeypatch.setattr("metselect_dgl.train.TrainingLoop", None)  # a call would fail
    study.run(settings, tmp_path, Execution(folder))


def result_row(
    selector: str, split: int, test: float, backbone="gcn", dataset="texas", **more
) -> dict:
    """Return a made-up result row."""
    return {
        "backbone": backbone,
        "selector": selector,
        "dataset": dataset,
        "split": split,
        "seed": 0,
        "test_accuracy": test,
        "train_accuracy": test,
        "settings": {},
        **more,
    }


LAYERS = {
    "fixed": [0.5, 0.6, 0.4],
    "oracle": 0.9,
    "lucky_oracle": 0.7,
    "layer_share": [0.25, 0.5, 0.25],
}
TEXAS = [
    *(result_row("final", split, test) for split, test in enumerate([0.5, 0.6, 0.7])),
    *(result_row("metselect", split, test, **LAYERS) for split, test in enumerate([0.6, 0.8, 0.7])),
]


def test_paired_by_hand():
    """Gaps of 10, 20, 0 points: mean 10, deviation 10."""
    assert format_difference(TEXAS[5:2:-1], TEXAS[:3]) == "+10.0 (5.8)"  # in any order
    assert format_difference(TEXAS[3:4], TEXAS[:3]) == "+10.0"  # split 0 alone
    groups = rows_by_model(TEXAS[::-1])
    ours, final = groups["gcn", "metselect", "texas"], groups["gcn", "final", "texas"]
    difference, error = paired_difference(ours, final)
    assert difference == pytest.approx(10)
    assert error == pytest.approx(10 / 3**0.5)
    assert accuracies(final) == pytest.approx([50, 60, 70])


def written(tmp_path, **studies) -> str:
    """Store rows by study and return the page."""
    for name, rows in studies.items():
        add_rows(rows, STUDIES[name.replace("_", "-")].path(tmp_path))
    write_page(tmp_path, tmp_path / "page.md")
    return (tmp_path / "page.md").read_text()


def row(page: str, title: str) -> list[str]:
    """Return the cells of the first table row with this title."""
    (first, *_) = (line for line in page.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in first.strip("|").split("|")][1:]


def test_table_2_by_hand(tmp_path):
    page = written(tmp_path, accuracy=TEXAS)
    final, ours = row(page, "FinalSelect"), row(page, "**MetSelect** (our default)")
    texas = paper.DATASETS.index("texas")
    assert final[texas] == "60.0 ±10.0<br>*67.03* *±7.62*"
    assert ours[texas] == "70.0 ±10.0<br>+10.0 (5.8)<br>*64.05* *±7.86*"
    assert ours[0] == "not run<br>*84.23* *±1.53*"
    assert "| GCN, MetSelect |" not in page  # that is a row of the README's table
    assert final[-1] == "10.00<br>*2.77*"
    assert ours[-1] == "0.00<br>*0.97*"


def headline_table(rows: list[dict]) -> str:
    """Return the README's table: FinalSelect, MetSelect, their difference and the paper's."""
    groups = rows_by_model(rows)
    run = {dataset for _, _, dataset in groups}
    columns = [dataset for dataset in paper.DATASETS if dataset in run]
    table = []
    for backbone, printed in paper.ACCURACY.items():
        name = backbone.upper()
        final_cells = [f"{name}, FinalSelect"]
        cells = [f"{name}, MetSelect"]
        differences = ["difference (standard error)"]
        printed_cells = [f"paper, {name} + MetSelect"]
        for dataset in columns:
            final = groups.get((backbone, "final", dataset))
            ours = groups.get((backbone, "metselect", dataset))
            if not final or not ours:
                break
            final_cells.append(f"{accuracies(final).mean():.1f}")
            cells.append(f"{accuracies(ours).mean():.1f}")
            differences.append(format_difference(ours, final))
            printed_cells.append(f"{printed['metselect'][dataset].mean:.1f}")
        else:
            table += [final_cells, cells, differences, printed_cells]
    return markdown((["%", *columns], table))


def test_headline_by_hand():
    assert headline_table(TEXAS).splitlines()[2:] == [
        "| GCN, FinalSelect | 60.0 |",
        "| GCN, MetSelect | 70.0 |",
        "| difference (standard error) | +10.0 (5.8) |",
        "| paper, GCN + MetSelect | 64.0 |",
    ]


def test_gain_of_the_selection_by_hand(tmp_path):
    """(70 - 60) of the gap between the best layer, 60, and the oracle, 90, is a third."""
    page = written(tmp_path, accuracy=TEXAS)
    for title, value in (
        ("all at layer 0", "50.0"),
        ("all at layer 1", "60.0"),
        ("**selected per node**", "70.0"),
        ("oracle", "90.0"),
        ("shuffled oracle", "70.0"),
        ("share of the oracle's gain realised", "33.3"),
    ):
        assert row(page, title) == [value]
    assert (tmp_path / "layers.png").stat().st_size > 1000


def test_time_by_hand(tmp_path):
    """Mean of the small sets' ratios; the paper's 0.43 s over 0.15 s is 2.87."""
    rows = [
        {"backbone": "gcn", "dataset": name, "selector": "metselect", "ratio": ratio}
        for name, ratio in (("texas", 1.5), ("cora", 2.5), ("arxiv-twin", 1.25))
    ]
    page = written(tmp_path, time=rows)
    assert row(page, "GCN, small") == ["not run", "2.00<br>*2.87*", "not run"]
    assert row(page, "GCN, arxiv-twin")[1] == "1.25<br>*2.39*"


def figure_row(loss: str | None, split: int, test: float, dataset: str, **settings) -> dict:
    given = {"loss": loss, **settings} if loss else settings
    selector = "metselect" if loss else "final"
    return result_row(selector, split, test, "gcn", dataset) | {"settings": given}


def test_figures_by_hand(tmp_path):
    depth = [
        figure_row(loss, split, value + split / 10, "cora", **layers)
        for loss, values in ((None, (0.8, 0.2)), ("posterior", (0.7, 0.75)))
        for value, layers in zip(values, ({}, {"num_layers": 64}), strict=True)
        for split in (0, 1)
    ]
    attack = [
        figure_row(loss, 0, value, name)
        for loss, values in ((None, (0.8, 0.5)), ("ce", (0.79, 0.7)))
        for name, value in zip(("mettack_cora", "mettack_cora_20"), values, strict=True)
    ]
    page = written(tmp_path, depth=depth, attack=attack)
    assert row(page, "GCN") == ["85.0 ±7.1", "25.0 ±7.1"]
    assert row(page, "GCN + MetSelect, posterior") == ["75.0 ±7.1", "80.0 ±7.1"]
    assert row(page, "GCN + MetSelect, ce") == ["79.0", "70.0"]
    assert "cora, GCN: best 85.0 at depth 2; points lost: 60.0 at 64." in page
    assert "posterior: best 80.0 at depth 64; points lost: 0.0 at 64." in page
    assert "ce against the plain GCN: -1.0 at 0 %, +20.0 at 20 %." in page
    for name in ("depth", "attack"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_findings_by_hand():
    """Texas: 70 against the paper's 64.05; above FinalSelect by less than two standard errors."""

    def findings(rows: list[dict]) -> str:
        return "\n".join(STUDIES["accuracy"].findings(rows))

    text = findings(TEXAS)
    assert "in 1 of 1 cells of Table 2; the mean difference is +6.0 points" in text
    assert "0.00 GCN (paper 0.97)" in text
    assert "above in 0 cells, level in 1, below in 0." in text
    worse = [result_row("metselect", k, 0.4 + k / 10, **LAYERS) for k in range(3)]
    text = findings(TEXAS[:3] + worse)
    assert "in 0 of 1 cells of Table 2 (not: GCN on texas (-14.0))" in text
    assert "below in 1: GCN on texas (-10.0, standard error 0.0)." in text
    single = findings([TEXAS[0], TEXAS[3]])
    assert "Against FinalSelect" not in single  # a single run has no standard error


def test_nothing_run_gives_a_page(tmp_path):
    assert "Findings" not in written(tmp_path)


def test_page_without_metselect(tmp_path):
    page = written(tmp_path, accuracy=TEXAS[:3])
    assert "all at layer" not in page
    assert not (tmp_path / "layers.png").exists()


def test_command(folder, tmp_path, monkeypatch, capsys):
    """The command writes the page; `--report` writes it again without runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "QUICK", TINY)
    command = ["reproduce", "accuracy", "--quick", "--jobs", "1", "--data-dir", folder]
    assert cli.main([*command, "--datasets", "texas", "--backbones", "gcn"]) == 0
    out = capsys.readouterr().out
    assert "accuracy: Table 2" in out
    assert "cells of Table 2" in out
    page = Path("runs/reproduce-quick/results.md")
    assert out.splitlines()[-1] == str(page)
    assert "![layers](layers.png)" in page.read_text()
    assert cli.main(["reproduce", "--report", "--quick", "--page", "there/page.md"]) == 0
    assert "![layers](../runs/reproduce-quick/layers.png)" in Path("there/page.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["accuracies"], "'accuracies' is not one of the studies: accuracy, time, "),
        (["--datasets", "karate"], "'karate' is not one of the datasets: cora, "),
        (["--backbones", "mlp"], "'mlp' is not one of the backbones: gcn, "),
        (["--selectors", "best"], "'best' is not one of the selectors: final, "),
    ],
)
def test_unknown_names(arguments, message, capsys):
    assert cli.main(["reproduce", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_name_given_twice_counts_once():
    settings = FULL.narrowed(datasets=["texas", "texas"], backbones=None)
    assert settings.datasets == ("texas",)
    assert settings.backbones == FULL.backbones


def test_quick_is_a_part_of_the_whole():
    for name in ("datasets", "backbones", "selectors"):
        assert set(getattr(QUICK, name)) <= set(getattr(FULL, name))
    for study, name in (("depth", "depths"), ("attack", "rates"), ("fresh-attack", "rates")):
        quick = getattr(STUDIES[study].quick(), name)
        assert set(quick) < set(getattr(STUDIES[study], name))


@pytest.mark.skipif(
    not (ROOT / "docs" / "results" / "accuracy.jsonl").exists(), reason="no results are committed"
)
def test_the_committed_page_is_made_of_the_committed_rows(tmp_path):
    folder = shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    write_page(folder, tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()
    gcn_rows = "\n".join(headline_table(stored(folder, "accuracy")).splitlines()[:6])
    assert gcn_rows in (ROOT / "README.md").read_text()


def test_committed_rows_are_complete():
    """Eight datasets, three backbones, all selectors and ten splits, each once."""
    rows = stored(ROOT / "docs" / "results", "accuracy")
    if not rows:
        pytest.skip("no results are committed")
    datasets = set(paper.DATASETS) - {"pubmed", "ogbn-arxiv"}
    keys = [(x["dataset"], x["backbone"], x["selector"], x["split"]) for x in rows]
    assert len(keys) == len(set(keys))
    assert set(keys) ^ set(product(datasets, FULL.backbones, FULL.selectors, range(10))) == set()
    assert np.isfinite([x["val_accuracy"] for x in rows]).all()
