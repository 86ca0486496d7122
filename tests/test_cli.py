"""The command line: commands, flags, and errors of one line."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib import image

from metselect_dgl import __version__, cli, nn
from metselect_dgl import train as training
from metselect_dgl.config import SELECTORS, Config
from metselect_dgl.data import hop_chain, load_dataset, save_npz
from metselect_dgl.experiments import compare as comparing
from metselect_dgl.experiments import demo as showing
from metselect_dgl.experiments.explain import explanation_table
from metselect_dgl.experiments.run_configs import Execution
from metselect_dgl.train.checkpoint import CheckpointError

COMMANDS = [
    "train",
    "partition",
    "launch",
    "compare",
    "reproduce",
    "explain",
    "demo",
    "build",
    "doctor",
]
FAST = "--dataset tiny --hidden 16 --epochs 3".split()


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Every test works in an empty folder, with the data folder not set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("METSELECT_DATA", raising=False)
    monkeypatch.delenv("METSELECT_TRACEBACK", raising=False)


@pytest.fixture
def run(capsys):
    """Run a command line and return its output."""

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return run


@pytest.fixture
def fail(capsys):
    """Run a command line that must fail and return its one line on stderr."""

    def fail(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert status == 1
        assert out == ""
        assert re.fullmatch(r"metselect: .+\n", err), err
        return err

    return fail


def numbers(line: str) -> list[str]:
    return re.findall(r"(?<=\s)[-+]?\d+\.\d+", line)


def lines_with(text: str, start: str) -> str:
    """Return the one line with this start."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(start))
    return line


def test_train_prints_its_metrics_and_names_its_folder(run, tiny_dir, tmp_path):
    out = run("train", *FAST, "--data-dir", tiny_dir, "--split", 1, "--seed", 5)
    folder = tmp_path / "runs" / "tiny-gcn-metselect-split1-seed5"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["config"]["split"], metrics["config"]["seed"]) == (1, 5)
    for part in ("train", "val", "test"):
        printed = [f"{100 * value:.1f}" for value in metrics[part].values()]
        assert numbers(lines_with(out, f"{part} ")) == printed
    assert "NodeDataset(tiny: 200 nodes" in out
    assert f"best epoch {metrics['best_epoch']} of 3; results in runs/{folder.name}" in out


def test_train_reads_the_environment(run, tiny_dir, monkeypatch):
    monkeypatch.setenv("METSELECT_DATA", str(tiny_dir))
    assert "200 nodes" in run("train", *FAST, "--selector", "final")


def test_train_again_and_overwrite(run, fail, tiny_dir, tmp_path):
    command = ["train", *FAST, "--selector", "final", "--data-dir", tiny_dir, "--out", "here"]
    first = run(*command)
    seconds = json.loads((tmp_path / "here" / "metrics.json").read_text())["seconds"]
    assert run(*command) == first
    again = json.loads((tmp_path / "here" / "metrics.json").read_text())
    assert again["seconds"] == seconds
    error = fail(*command, "--lr", "0.5")
    assert "lr 0.01 -> 0.5" in error
    assert "--overwrite" in error
    run(*command, "--lr", "0.5", "--overwrite")
    assert Config.load(tmp_path / "here" / "config.yaml").lr == 0.5


@pytest.fixture
def given(monkeypatch, capsys):
    """Return the Config of a `train` command line without training."""

    def given(*flags):
        caught = []

        def catch(config, data, out, *, group, keep_memory, overwrite):
            caught.append(config)
            raise RuntimeError("caught")

        monkeypatch.setattr(training, "train", catch)
        assert cli.main(["train", *flags]) == 1
        assert capsys.readouterr().err == "metselect: caught\n"
        return caught[0]

    return given


FLAGS = {
    "": {},
    "--no-self-loop": {"self_loop": False},
    "--self-loop": {"self_loop": True},
    "--no-row-normalize": {"row_normalize": False},
    "--shrinkage 0.1": {"shrinkage": 0.1},
    "--shrinkage 1": {"shrinkage": 1.0},
    "--shrinkage oas": {"shrinkage": "oas"},
    "--backbone gin --learn-eps --no-batch-norm": {
        "backbone": "gin",
        "learn_eps": True,
        "batch_norm": False,
    },
    "--backbone gat --heads 8": {"backbone": "gat", "heads": 8},
    "--selector ndls --eps 0.3": {"selector": "ndls", "eps": 0.3},
    "--rule distance --loss posterior --select plain --metric-dim 8 --deep-supervision 0": {
        "rule": "distance",
        "loss": "posterior",
        "select": "plain",
        "metric_dim": 8,
        "deep_supervision": 0.0,
    },
    "--lr 1e-3 --weight-decay 0 --epochs 7 --patience 2 --num-layers 4 --hidden 32 --dropout .5": {
        "lr": 1e-3,
        "weight_decay": 0.0,
        "epochs": 7,
        "patience": 2,
        "num_layers": 4,
        "hidden": 32,
        "dropout": 0.5,
    },
    "--dataset csbm --split 2 --seed 9 --device cuda": {
        "dataset": "csbm",
        "split": 2,
        "seed": 9,
        "device": "cuda",
    },
}


@pytest.mark.parametrize(("flags", "settings"), FLAGS.items(), ids=[key or "none" for key in FLAGS])
def test_flags_reach_the_config(given, flags, settings):
    config = given(*flags.split())
    assert config == Config(**settings)
    for name, value in settings.items():
        assert type(getattr(config, name)) is type(value)


def test_compare(run, tiny_dir, tmp_path):
    flags = ["--data-dir", tiny_dir, "--jobs", 1, "--no-self-loop", "--lr", 0.01]
    command = ["compare", *FAST, *flags]
    out = run(*command, "--selectors", "final", "metselect-paper", "--splits", 5)
    assert "2 splits, 1 seed(s), gcn" in out  # it has no more
    folder = tmp_path / "runs" / "compare-tiny-gcn"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert (folder / "report.txt").read_text() in out
    assert len(rows) == 2 * 2 * 2  # selectors, weight decays, splits
    assert not any(row["config"]["self_loop"] for row in rows)
    chosen = re.search(r"chosen on validation for metselect-paper: weight_decay (\S+)\n", out)[1]
    mine = [
        row
        for row in rows
        if row["selector"] == "metselect-paper" and row["config"]["weight_decay"] == float(chosen)
    ]
    mean = np.mean([row["test_accuracy"] for row in mine])
    assert numbers(lines_with(out, "metselect-paper"))[1] == f"{100 * mean:.1f}"
    assert lines_with(out, "oracle")
    assert run(*command, "--selectors", "final", "metselect-paper", "--splits", 5) == out


def test_compare_fixes_the_flags_that_are_given(monkeypatch, fail, tiny_dir):
    seen = {}

    def catch(base, selectors, **options):
        seen.update(options, base=base, selectors=selectors)
        raise RuntimeError("caught")

    monkeypatch.setattr(comparing, "compare", catch)
    flags = ["--selectors", "final", "--no-self-loop", "--splits", 2, "--seeds", 3, "--jobs", 4]
    cli.main(["compare", *map(str, flags), "--dataset", "tiny", "--data-dir", str(tiny_dir)])
    assert seen["base"] == Config(dataset="tiny")
    assert seen["fixed"] == {"dataset", "self_loop"}
    assert seen["selectors"] == ["final"]
    assert (seen["splits"], seen["seeds"]) == (2, 3)
    assert seen["execution"] == Execution(str(tiny_dir), jobs=4, keep_memory=True)


@pytest.fixture(scope="module")
def trained(tiny_dir, tmp_path_factory):
    """A run of MetSelect on a .npz dataset."""
    out = tmp_path_factory.mktemp("run") / "tiny"
    data = load_dataset("tiny", tiny_dir)
    config = Config(dataset="tiny", hidden=16, epochs=5, select="temperature")
    training.train(config, data, out, progress=False)
    return out


@pytest.mark.parametrize("node", [0, 17, 199])
def test_explain(run, tiny_dir, trained, node):
    out = trained
    text = run("explain", node, "--run", out, "--data-dir", tiny_dir)
    saved = np.load(out / "predictions.npz")
    layer = saved["layer"][node]
    predicted = f"predicted {saved['prediction'][node]} at layer {layer}"
    assert re.match(
        rf"node {node} of tiny, type \d: true class {saved['label'][node]}, {predicted}\n", text
    )
    rows = [line for line in text.splitlines() if re.match(r"[* ] layer \d ", line)]
    assert [row[:9] for row in rows] == [
        f"{'*' if depth == layer else ' '} layer {depth}" for depth in range(3)
    ]
    for row in rows:
        posterior = [int(share) for share in re.findall(r"\((\d+)\)", row)]
        assert len(posterior) == 5
        assert abs(sum(posterior) - 100) <= 2  # five numbers, each rounded by at most a half
    scores = [float(row.split()[-2]) for row in rows]
    assert scores.index(max(scores)) == layer
    assert scores[layer] == pytest.approx(saved["score"][node], abs=0.005)  # two digits
    figure = out / f"explain_{node}.png"
    assert f"figure: {figure}" in text
    assert image.imread(figure).shape[0] > 100


def test_explain_takes_the_newest_run(run, fail, tiny_dir, trained):
    assert "there is no run below runs/" in fail("explain", 3)
    for seed in (1, 2):
        run("train", *FAST, "--data-dir", tiny_dir, "--seed", seed)
    assert "split0-seed2/explain_3.png" in run("explain", 3, "--data-dir", tiny_dir)


def test_explain_of_an_unlabelled_node(run, tmp_path):
    data = hop_chain(n_nodes=200, n_splits=1)
    outside = int(data.test_masks[0].nonzero()[0])
    labels = data.labels.index_fill(0, torch.tensor([outside]), -1)
    save_npz(dataclasses.replace(data, labels=labels), tmp_path / "partly.npz")
    run("train", *FAST, "--dataset", "partly", "--data-dir", tmp_path)
    text = run("explain", outside, "--data-dir", tmp_path)
    assert "true class unknown, predicted" in text


@pytest.mark.parametrize("selector", ["jknet-metselect", "metselect-max", "metselect-paper"])
def test_explain_the_other_metselects(run, tiny_dir, selector):
    run("train", *FAST, "--selector", selector, "--data-dir", tiny_dir)
    text = run("explain", 5, "--data-dir", tiny_dir)
    chosen = re.search(r"at layer (\d)", text)[1]
    assert lines_with(text, f"* layer {chosen} ")
    rows = [line for line in text.splitlines() if re.match(r"[* ] layer \d ", line)]
    scores = [float(row.split()[-2]) for row in rows]
    assert scores.index(max(scores)) == int(chosen)


def test_explain_of_many_classes_shows_the_nearest_and_the_true_one():
    n_classes = 20
    dist2 = torch.arange(float(n_classes)).expand(2, n_classes)
    explanation = {"gated": False, "dist2": dist2, "posterior": (-dist2 / 2).softmax(-1)}
    for name in ("temperature", "log_odds", "score", "decoder"):
        explanation[name] = torch.ones(2)
    header = explanation_table(explanation, layer=0, label=19).splitlines()[0]
    assert re.findall(r"class (\d+)", header) == [*map(str, range(8)), "19"]


def test_demo(monkeypatch, run, tmp_path):
    """The demo on a smaller dataset for fewer epochs: its tables show its metrics."""
    small = hop_chain(n_nodes=300, seed=4)
    monkeypatch.setattr(showing, "load_dataset", lambda name, seed: small)
    monkeypatch.setattr(showing, "Config", lambda **given: Config(**given | {"epochs": 20}))
    text = run("demo", "--out", "shown", "--seed", 4)
    metrics, final = (
        json.loads((tmp_path / "shown" / f"{selector}-seed4" / "metrics.json").read_text())
        for selector in ("metselect", "final")
    )
    assert metrics["config"]["seed"] == final["config"]["seed"] == 4
    expected = {
        "GCN + FinalSelect": final["test"]["accuracy"],
        "GCN + MetSelect": metrics["test"]["accuracy"],
        "oracle": metrics["oracle"],
        "shuffled oracle": metrics["lucky_oracle"],
        **{f"the same model, all nodes at layer {i}": x for i, x in enumerate(metrics["fixed"])},
    }
    for name, value in expected.items():
        assert numbers(lines_with(text, name)) == [f"{100 * value:.1f}"]
    for kind, shares in enumerate(metrics["layer_share_by_type"]):
        printed = numbers(lines_with(text, f"type {kind}:"))
        assert printed == [f"{100 * share:.1f}" for share in shares]
    assert numbers(lines_with(text, "all ")) == [f"{100 * s:.1f}" for s in metrics["layer_share"]]
    assert "figure: shown/metselect-seed4/layers.png" in text
    assert (tmp_path / "shown" / "metselect-seed4" / "layers.png").exists()
    assert run("demo", "--out", "shown", "--seed", 4) == text


def test_doctor(run, tiny_dir):
    text = run("doctor", "--data-dir", tiny_dir)
    assert lines_with(text, "torch ").split()[1] == "ok"
    assert lines_with(text, "data ") == f"data       ok   {tiny_dir}: tiny"


def test_doctor_status(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["doctor"]) == 1
    assert "torch      bad" in capsys.readouterr().out


def test_commands():
    text = cli._parser().format_help()
    assert re.findall(r"^    (\w+) ", text, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", ["", *COMMANDS], ids=["metselect", *COMMANDS])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"] if command else ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: metselect {command}".rstrip())
    absent = {"train": set(), "compare": {"selector", "split"}}.get(command)
    for field in dataclasses.fields(Config) if absent is not None else ():
        flag = "--" + field.name.replace("_", "-")
        assert bool(re.search(rf"^  {flag}[ ,]", text, re.MULTILINE)) == (field.name not in absent)


ERRORS = {
    "train --dataset corra": "dataset 'corra' is unknown (did you mean cora?)",
    "train --backbone gnn": "backbone is 'gnn'; use one of gat, gcn, gin",
    "train --selector best": "selector is 'best'; use one of attn, final",
    "train --epochs 0": "epochs is 0; it must be at least 1",
    "train --split 10": "split 10 of hop_chain: it has splits 0 to 9",
    "train --rule largest": "rule is 'largest'; use one of confidence",
    "train --shrinkage 2": "shrinkage is 2.0; a number must be between 0 and 1",
    "train --shrinkage lots": "shrinkage is 'lots'; use 'oas'",
    "train --backbone gat --heads 7": "64 features does not divide by 7 heads",
    "train --dropout 2": "dropout",
    "train --heads 4": "heads is not a setting of gcn or metselect; leave it out",
    "train --selector final --loss ce": "loss is not a setting of gcn or final; leave it out",
    "compare --batch-norm": "batch_norm is not a setting of gcn or final or metselect",
    "train --data-dir nowhere --dataset mine": "data folder 'nowhere' does not exist",
    "train --device cuda": "torch sees no GPU; use --device cpu",
    "compare --selectors final best": "selector is 'best'; use one of attn, final",
    "compare --selectors final final": "a selector is named twice: final final",
    "compare --dataset corra": "dataset 'corra' is unknown",
    "explain 0": "there is no run below runs/; train one first",
    "explain 0 --run nowhere": "there is no checkpoint nowhere/checkpoint.pt; train first",
}


@pytest.mark.parametrize(("line", "message"), ERRORS.items(), ids=ERRORS)
def test_expected_errors(monkeypatch, capsys, tmp_path, line, message):
    """One line on stderr and status 1; a progress bar may precede it, nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(line.split()) == 1
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("metselect: ")
    assert message in last
    assert "Traceback" not in err
    assert not list(tmp_path.glob("**/checkpoint.pt"))


@pytest.mark.parametrize("node", [200, -1], ids=["after-the-last", "negative"])
def test_explain_a_node_out_of_range(fail, tiny_dir, trained, node):
    error = fail("explain", node, "--run", trained, "--data-dir", tiny_dir)
    assert f"node {node}: tiny has nodes 0 to 199" in error


def test_explain_without_the_data(fail, trained):
    assert "dataset 'tiny' is unknown" in fail("explain", 0, "--run", trained)


def test_explain_a_run_without_distances(run, fail, tiny_dir):
    run("train", *FAST, "--selector", "final", "--out", "plain", "--data-dir", tiny_dir)
    error = fail("explain", 0, "--run", "plain", "--data-dir", tiny_dir)
    assert "plain is a run of 'final', which measures no distances" in error


def test_explain_a_damaged_run(fail, tiny_dir, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "checkpoint.pt").write_bytes(b"not a checkpoint")
    error = fail("explain", 0, "--run", "bad", "--data-dir", tiny_dir)
    assert "bad/checkpoint.pt is damaged or not a checkpoint" in error


def test_a_node_without_in_edges_is_an_expected_error(run, capsys, tmp_path):
    """It is an error class of DGL's own."""
    data = hop_chain(n_nodes=200, n_splits=1)
    data.graph.remove_edges((data.graph.edges()[1] == 7).nonzero().squeeze(1))
    save_npz(data, tmp_path / "lonely.npz")
    command = ["train", *FAST, "--dataset", "lonely", "--data-dir", str(tmp_path)]
    assert cli.main([*command, "--no-allow-zero-in-degree"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert re.search(r"^metselect: .*0-in-degree", err, re.MULTILINE)
    run(*command)  # accepted by default


def test_traceback_on_request(monkeypatch, tmp_path):
    monkeypatch.setenv("METSELECT_TRACEBACK", "1")
    with pytest.raises(CheckpointError):
        cli.main(["explain", "0", "--run", "nowhere"])


def test_interrupt(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupt)
    assert cli.main(["train"]) == 130
    assert "the same command resumes from the last checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        *("", "fly", "train --colour red", "train --lr fast", "explain"),
        "compare --split 3 --dataset corra",  # not short for --splits
        "compare --selector final --dataset corra",
    ],
)
def test_wrong_usage(capsys, line):
    with pytest.raises(SystemExit) as stopped:
        cli.main(line.split())
    assert stopped.value.code == 2
    assert "usage: metselect" in capsys.readouterr().err


def test_version_as_a_module():
    command = [sys.executable, "-m", "metselect_dgl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{__version__}\n"


def test_status_and_stderr_of_the_process():
    command = [sys.executable, "-m", "metselect_dgl", "explain", "0", "--run", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("metselect: there is no checkpoint nowhere")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(shrinkage="oas", select="gate", metric_dim=8, self_loop=True),
        Config(shrinkage=0.1, lr=1e-5, weight_decay=1e-10, deep_supervision=1 / 3, eps=0.3),
        Config(dataset="null", backbone="gin", learn_eps=False, batch_norm=True, device="cuda:1"),
        Config(dataset="0123", split=3, seed=12345678901),
    ],
    ids=["default", "names", "numbers", "booleans", "strange-names"],
)
def test_config_survives_yaml(tmp_path, config):
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    loaded = Config.load(tmp_path / "config.yaml")
    assert loaded == config
    assert [type(value) for value in vars(loaded).values()] == [
        type(value) for value in vars(config).values()
    ]


@pytest.mark.parametrize(
    ("text", "seen"),
    [("colour: red\nlr: 0.1\n", "colour"), ("just words", "just words"), ("- 1\n- 2\n", "1, 2")],
    ids=["unknown-key", "text", "list"],
)
def test_config_of_another_file(tmp_path, text, seen):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a config of a run")) as caught:
        Config.load(path)
    assert seen in str(caught.value)


def test_the_former_name_of_a_shrinkage_still_loads():
    assert Config(shrinkage="auto") == Config(shrinkage="oas")


def test_model_defaults_are_those_of_the_api():
    """Except for nodes without in-edges, which the public datasets have."""
    defaults = {}
    for backbone in (nn.Backbone, nn.GCN, nn.GAT, nn.GIN):
        for name, parameter in inspect.signature(backbone).parameters.items():
            defaults[name] = parameter.default
    for name in ("num_layers", "dropout", "self_loop", "engine"):
        assert getattr(Config(), name) == defaults[name]
    assert Config().allow_zero_in_degree is not defaults["allow_zero_in_degree"]
    for name in ("propagate_once", "heads", "learn_eps", "batch_norm"):
        assert getattr(Config(), name) is None


def test_differences_of_configs():
    other = Config(lr=0.02, shrinkage=0.1)
    assert Config().differences(other) == "shrinkage None -> 0.1, lr 0.01 -> 0.02"
    assert Config().differences(Config()) == ""


@pytest.mark.parametrize("name", SELECTORS)
def test_a_setting_that_is_not_given_is_left_to_the_selector(name):
    plain = Config(selector=name).build(4, 3)
    assert plain.head.n_classes == 3
    if "metselect" in name:
        select, weight = ("plain", 0.0) if name == "metselect-paper" else ("auto", 1.0)
        assert f"select='{select}', deep_supervision={weight}" in repr(plain.head)
        own = Config(selector=name, select="temperature", deep_supervision=0.5).build(4, 3)
        assert "select='temperature', deep_supervision=0.5" in repr(own.head)


@pytest.mark.parametrize(("flag", "kept"), [([], True), (["--no-keep-memory"], False)])
def test_freed_memory_is_kept_by_default(flag, kept, tiny_dir, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("metselect_dgl.ops.keep_freed_memory", lambda: calls.append(1))
    command = f"train --dataset tiny --hidden 8 --epochs 1 --data-dir {tiny_dir} --out {tmp_path}"
    assert cli.main([*flag, *command.split()]) == 0
    assert bool(calls) == kept
