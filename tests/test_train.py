"""Training: what a run leaves behind, when it stops, and that it resumes bit for bit."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import image

from metselect_dgl import train as training
from metselect_dgl.config import BACKBONES, SELECTORS, Config
from metselect_dgl.data import hop_chain, load_dataset
from metselect_dgl.train import load_checkpoint, load_run, train
from metselect_dgl.train import loop as looping
from metselect_dgl.train.checkpoint import CheckpointError

FILES = [
    "checkpoint.pt",
    "config.yaml",
    "history.json",
    "layers.png",
    "metrics.json",
    "predictions.npz",
]


def settings(**changes) -> Config:
    """Return the settings of a short run: narrow layers, few epochs, all of them validated."""
    return Config(**{"hidden": 16, "epochs": 4, "validate_every": 1, **changes})


def quiet(config, data, out=None, **options):
    return train(config, data, out, progress=False, **options)


def assert_same_bits(left, right, where="it"):
    """Equal structure, types and values; tensors to the last bit."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert left.numpy().tobytes() == right.numpy().tobytes(), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same_bits(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_same_bits(*pair, f"{where}[{i}]")
    else:
        assert left == right, where


def timeless(parts: dict) -> dict:
    """A checkpoint or metrics without what the clock says."""
    inner = {key: timeless(value) for key, value in parts.items() if isinstance(value, dict)}
    return {key: inner.get(key, value) for key, value in parts.items() if key != "seconds"}


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """A run of six epochs: (folder, config, what train returned)."""
    out = tmp_path_factory.mktemp("run")
    config = settings(epochs=6, split=1, dropout=0.2, shrinkage=0.1)
    return out, config, quiet(config, small, out)


def test_a_run_leaves_its_files_and_no_others(finished):
    assert sorted(path.name for path in finished[0].iterdir()) == FILES


def test_config_yaml_is_the_settings(finished):
    out, config, _ = finished
    assert Config.load(out / "config.yaml") == config


def test_metrics_json_is_what_train_returned(finished):
    out, config, run = finished
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics == run.metrics
    assert Config(**metrics["config"]) == run.config == config
    assert metrics["epochs"] == 6
    assert metrics["seconds"] > 0


def test_predictions_agree_with_metrics_and_split(finished, small):
    out, config, run = finished
    metrics, saved = run.metrics, np.load(out / "predictions.npz")
    assert sorted(saved) == ["label", "layer", "prediction", "score"]
    np.testing.assert_array_equal(saved["label"], small.labels)
    right = saved["prediction"] == saved["label"]
    split = small.split(config.split)  # the next test checks the validation accuracy
    assert right[split.train].mean() == metrics["train"]["accuracy"]
    assert right[split.test].mean() == metrics["test"]["accuracy"]
    test = small.test_masks[config.split].numpy()
    share = np.bincount(saved["layer"][test], minlength=3) / test.sum()
    assert share.tolist() == metrics["layer_share"]
    for kind, reported in enumerate(metrics["layer_share_by_type"]):
        chosen = saved["layer"][test & (small.node_type == kind).numpy()]
        assert (np.bincount(chosen, minlength=3) / len(chosen)).tolist() == reported


def test_history_agrees_with_metrics(finished):
    out, _, run = finished
    history = json.loads((out / "history.json").read_text())
    assert [record["epoch"] for record in history] == list(range(6))
    best = history[run.metrics["best_epoch"]]
    assert best["val_accuracy"] == run.metrics["val"]["accuracy"]
    assert best["val_accuracy"] == max(record["val_accuracy"] for record in history)


@pytest.mark.parametrize("epoch", [1, 5], ids=["before-a-look", "after"])
def test_training_that_diverges(small, monkeypatch, epoch):
    """The best model stays; without any it is an error."""
    config = Config(epochs=9, validate_every=3, hidden=8)
    loop = training.TrainingLoop(config, training.prepare(config, small), None)
    step = loop.step

    def explode():
        if loop.state.epoch == epoch:
            with torch.no_grad():
                next(loop.model.backbone.convs[0].parameters()).fill_(torch.inf)
        return step()

    monkeypatch.setattr(loop, "step", explode)
    with (
        pytest.raises(ValueError, match="not finite")
        if epoch == 1
        else pytest.warns(UserWarning, match="training diverged in epoch 5: layer 1 of node")
    ):
        while not loop.finished():
            loop.epoch()
    if epoch == 5:
        metrics = loop.result().metrics
        assert (metrics["diverged"], metrics["epochs"], metrics["best_epoch"]) == (True, 6, 2)
        assert 0 < metrics["test"]["accuracy"] < 1


@pytest.mark.parametrize("every", [3, 50], ids=["sometimes", "more-than-patience"])
def test_validation_every_so_many_epochs(small, every):
    """And after the last epoch; patience waits for the first look."""
    config = Config(epochs=8, patience=2, validate_every=every, hidden=8)
    loop = training.TrainingLoop(config, training.prepare(config, small), None)
    looks = []
    while not loop.finished():
        looks.append("val_accuracy" in loop.epoch())
    due = [(epoch + 1) % every == 0 or epoch == 7 for epoch in range(8)]
    assert looks == due[: len(looks)]
    assert loop.state.best_epoch >= 2
    assert loop.result().metrics["best_epoch"] == loop.state.best_epoch


def test_checkpoint_holds_the_last_epoch(finished):
    out, config, run = finished
    saved = load_checkpoint(out / "checkpoint.pt")
    assert Config(**saved["config"]) == config
    assert saved["progress"]["epoch"] == 6
    assert saved["progress"]["best_epoch"] == run.metrics["best_epoch"]
    assert saved["progress"]["history"] == json.loads((out / "history.json").read_text())


def test_picture_shows_something(finished):
    pixels = image.imread(finished[0] / "layers.png")
    assert pixels.shape[0] > 100
    assert pixels.shape[1] > 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10


def test_load_run_gives_the_model_of_the_predictions(monkeypatch, tiny_dir, tmp_path):
    accuracies = iter([0.1, 0.3, 0.2])  # the best epoch is not the last
    monkeypatch.setattr(looping, "accuracy", lambda *_: next(accuracies))
    config = settings(dataset="tiny", epochs=3)
    run = quiet(config, load_dataset("tiny", tiny_dir), tmp_path)
    loaded, model, data = load_run(tmp_path, tiny_dir)
    assert loaded == config
    assert not model.training
    with torch.no_grad():
        again = model(data.graph, data.feat)
    for name in ("logits", "layer", "score"):
        assert_same_bits(getattr(again, name), getattr(run.selection, name), name)


@pytest.mark.parametrize(
    ("row_normalize", "negative", "normalised"),
    [
        (None, False, True),
        (None, True, False),
        (True, True, True),
        (False, False, False),
    ],
    ids=["default", "default-negative", "asked-for", "refused"],
)
def test_features_as_the_model_sees_them(small, row_normalize, negative, normalised):
    data = small if negative else replace(small, feat=small.feat.abs())
    seen = training.prepare(settings(row_normalize=row_normalize), data)
    total = data.feat.abs().sum(1, keepdim=True)
    assert torch.equal(seen.feat, data.feat / total if normalised else data.feat)


@pytest.mark.parametrize("folder", [False, True], ids=["nowhere", "in-a-folder"])
def test_same_seed_same_bits(small, tmp_path, folder):
    config = settings(dropout=0.5, seed=3)
    first = quiet(config, small)
    torch.manual_seed(99)  # what happened before a run must not matter
    second = quiet(config, small, tmp_path if folder else None, checkpoint_every=1)
    assert timeless(first.metrics) == timeless(second.metrics)
    assert_same_bits(dict(first.model.state_dict()), dict(second.model.state_dict()))
    assert_same_bits(first.selection.logits, second.selection.logits)


def test_another_seed_another_result(small):
    first, second = (quiet(settings(seed=seed), small) for seed in (3, 4))
    weights = [run.model.backbone.input.weight for run in (first, second)]
    assert not torch.equal(*weights)
    assert not torch.equal(first.selection.logits, second.selection.logits)


SCRIPTS = {
    # (validation accuracies, losses), patience: epochs run, best epoch
    "higher-accuracy": ([0.5, 0.7, 0.6], [1.0, 2.0, 0.1], 9, 3, 1),
    "ties-by-loss": ([0.5, 0.7, 0.7, 0.7, 0.6], [1.0, 0.9, 0.8, 0.85, 0.1], 9, 5, 2),
    "equal-keeps-the-first": ([0.7, 0.7, 0.7], [0.5, 0.5, 0.5], 9, 3, 0),
    "patience-2": ([0.5, 0.7, 0.6, 0.6, 0.9, 0.9], 6 * [1.0], 2, 4, 1),
    "patience-3-sees-it": ([0.5, 0.7, 0.6, 0.6, 0.9, 0.8], 6 * [1.0], 3, 6, 4),
    "patience-1": ([0.5, 0.4, 0.9], 3 * [1.0], 1, 2, 0),
    "a-lower-loss-is-progress": ([0.5, 0.5, 0.5, 0.5], [1.0, 0.9, 0.8, 0.7], 1, 4, 3),
    "zero-accuracy": ([0.0, 0.0], [2.0, 1.0], 9, 2, 1),
}


@pytest.mark.parametrize(
    ("accuracies", "losses", "patience", "epochs", "best"), SCRIPTS.values(), ids=SCRIPTS
)
def test_best_epoch_and_early_stop(monkeypatch, small, accuracies, losses, patience, epochs, best):
    """Validation follows a script; the model of the best epoch is the one that is kept."""
    states, next_accuracy, next_loss = [], iter(accuracies), iter(losses)
    epoch = training.TrainingLoop.epoch

    def watched(loop):
        record = epoch(loop)
        states.append({key: value.clone() for key, value in loop.model.state_dict().items()})
        return record

    monkeypatch.setattr(training.TrainingLoop, "epoch", watched)
    monkeypatch.setattr(looping, "accuracy", lambda *_: next(next_accuracy))
    monkeypatch.setattr(looping, "finite_loss", lambda *_: next(next_loss))
    config = settings(selector="final", epochs=len(accuracies), patience=patience)
    run = quiet(config, small)
    assert (run.metrics["epochs"], run.metrics["best_epoch"]) == (epochs, best)
    assert_same_bits(dict(run.model.state_dict()), states[best])


def test_a_model_that_cannot_move_stops_after_patience(small):
    run = quiet(settings(lr=0.0, weight_decay=0.0, epochs=50, patience=3), small)
    assert (run.metrics["epochs"], run.metrics["best_epoch"]) == (4, 0)


class Stop(Exception):
    """Stands for whatever ends a process."""


def run_until(monkeypatch, stop: int, *arguments, **options):
    """Train, but die at the start of epoch `stop`."""
    epoch = training.TrainingLoop.epoch

    def mortal(loop):
        if loop.state.epoch == stop:
            raise Stop
        return epoch(loop)

    with monkeypatch.context() as patch:
        patch.setattr(training.TrainingLoop, "epoch", mortal)
        with pytest.raises(Stop):
            quiet(*arguments, **options)


@pytest.mark.parametrize(
    ("selector", "stop", "saved"),
    [("metselect", 6, 6), ("metselect", 8, 6), ("attn", 4, 3), ("ndls", 7, 6), ("final", 2, None)],
    ids=["at-a-checkpoint", "after-a-checkpoint", "attn", "ndls", "before-any-checkpoint"],
)
def test_resume_is_bit_identical(monkeypatch, small, tmp_path, selector, stop, saved):
    config = settings(selector=selector, epochs=10, dropout=0.5)
    whole = quiet(config, small, tmp_path / "whole", checkpoint_every=3)
    path = tmp_path / "parts" / "checkpoint.pt"
    run_until(monkeypatch, stop, config, small, path.parent, checkpoint_every=3)
    assert path.exists() == (saved is not None)
    if saved is not None:
        assert load_checkpoint(path)["progress"]["epoch"] == saved
    torch.manual_seed(99)
    parts = quiet(config, small, path.parent, checkpoint_every=3)
    expected = load_checkpoint(tmp_path / "whole" / "checkpoint.pt")
    assert_same_bits(timeless(load_checkpoint(path)), timeless(expected))
    assert timeless(parts.metrics) == timeless(whole.metrics)
    assert_same_bits(parts.selection.logits, whole.selection.logits)


def test_dropout_makes_the_random_state_matter(monkeypatch, small, tmp_path):
    """The test above would not notice a lost random state if this one failed."""
    config = settings(epochs=6, dropout=0.5)
    whole = quiet(config, small)
    run_until(monkeypatch, 3, config, small, tmp_path, checkpoint_every=3)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    parts = quiet(config, small, tmp_path)
    assert not torch.equal(parts.selection.logits, whole.selection.logits)


def test_a_finished_run_is_not_trained_again(monkeypatch, small, tmp_path):
    first = quiet(settings(), small, tmp_path)
    (tmp_path / "metrics.json").unlink()
    monkeypatch.setattr(training.TrainingLoop, "epoch", None)
    second = quiet(settings(), small, tmp_path)
    assert second.metrics == first.metrics
    assert json.loads((tmp_path / "metrics.json").read_text()) == first.metrics


def command(tiny_dir, out):
    options = "--dataset tiny --dropout 0.5 --hidden 16 --epochs 100 --select temperature"
    return [
        *(sys.executable, "-m", "metselect_dgl", "train", *options.split()),
        *("--data-dir", str(tiny_dir), "--out", str(out)),
    ]


def test_killed_and_resumed_in_new_processes(tiny_dir, tmp_path):
    """SIGKILL after the first checkpoint, then the same command: as if nothing had happened."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with (
        subprocess.Popen(command(tiny_dir, killed), **pipes) as victim,
        subprocess.Popen(command(tiny_dir, whole), **pipes) as other,
    ):
        deadline = time.monotonic() + 60
        while not (killed / "checkpoint.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        victim.send_signal(signal.SIGKILL)
    assert (victim.returncode, other.returncode) == (-signal.SIGKILL, 0)
    assert 20 <= load_checkpoint(killed / "checkpoint.pt")["progress"]["epoch"] < 100
    assert not (killed / "metrics.json").exists()

    subprocess.run(command(tiny_dir, killed), check=True, **pipes)
    saved = [load_checkpoint(folder / "checkpoint.pt") for folder in (killed, whole)]
    assert saved[0]["progress"]["epoch"] == 100
    assert_same_bits(*map(timeless, saved))
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (killed, whole)]
    assert timeless(metrics[0]) == timeless(metrics[1])


def test_other_settings_in_the_same_folder(small, tmp_path):
    quiet(settings(), small, tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        quiet(settings(lr=0.02, selector="final"), small, tmp_path)
    message = str(caught.value)
    assert "(selector metselect -> final, lr 0.01 -> 0.02)" in message
    assert str(tmp_path) in message
    assert "--overwrite" in message
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_other_data_in_the_same_folder(small, tmp_path):
    quiet(settings(), small, tmp_path)
    with pytest.raises(CheckpointError, match="other data"):
        quiet(settings(), hop_chain(n_nodes=300, n_feats=20), tmp_path)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_device_without_gpu(monkeypatch, small, tmp_path, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device is '{device}'.*no GPU.*--device cpu"):
        quiet(settings(device=device), small, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("self_loop", [False, True], ids=["no-loop", "self-loop"])
@pytest.mark.parametrize(
    ("backbone", "selector"),
    [("gcn", name) for name in SELECTORS]
    + [(name, "metselect") for name in BACKBONES if name != "gcn"],
    ids=lambda name: name,
)
def test_every_combination_trains(small, backbone, selector, self_loop):
    config = settings(
        backbone=backbone, selector=selector, self_loop=self_loop, epochs=3, weight_decay=0.0
    )
    torch.manual_seed(config.seed)
    fresh = dict(config.build(small.feat.shape[1], small.n_classes).named_parameters())
    loop = training.TrainingLoop(config, training.prepare(config, small), None)
    records = [loop.epoch() for _ in range(3)]
    assert all(np.isfinite([r["loss"], r["val_loss"]]).all() for r in records)
    assert records[-1]["loss"] < records[0]["loss"]
    trained = {n: p for n, p in loop.model.named_parameters() if p.requires_grad and p.dim() > 1}
    without = {name for name, value in trained.items() if value.grad is None}
    assert without == ({"backbone.input.weight"} if selector == "final" else set())
    still = {name for name, value in trained.items() if torch.equal(value, fresh[name])}
    unchosen = {name for name in trained if name.startswith(("backbone.input", "head.decoders"))}
    assert still - without <= (unchosen if selector in ("attn", "ndls") else set())
    run = loop.result()
    assert run.selection.logits.shape == (300, 5)
    assert torch.isfinite(run.selection.logits).all()
    assert set(run.selection.layer.tolist()) <= {0, 1, 2}
    assert all(0 <= value <= 1 for value in run.metrics["test"].values())
    assert sum(run.metrics["layer_share"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rule", "loudest"),
    [
        ("confidence", lambda what: what["log_odds"].argmax()),
        ("opposite", lambda what: what["log_odds"].argmin()),
        ("distance", lambda what: what["dist2"].amin(-1).argmin()),
    ],
    ids=["confidence", "opposite", "distance"],
)
def test_a_trained_model_chooses_by_its_rule(small, rule, loudest):
    """A gate, if the default finds one, is for confidence; it must not undo the other rules."""
    config = settings(rule=rule, select="temperature" if rule == "confidence" else None)
    run, data = quiet(config, small), training.prepare(config, small)
    with torch.no_grad():
        layers = run.model.backbone(data.graph, data.feat)
    every = [run.model.head.explain(layers, torch.tensor([node])) for node in range(0, 300, 10)]
    assert run.selection.layer[::10].tolist() == [loudest(what).item() for what in every]


@pytest.mark.parametrize("selector", ["final", "metselect"])
def test_unlabelled_nodes_do_not_count(small, selector):
    """A node of label -1 counts as little as one that is in no part of the split."""
    hidden = torch.arange(300) % 3 == 0
    bare = replace(small, labels=small.labels.masked_fill(hidden, -1))
    parts = ("train_masks", "val_masks", "test_masks")
    absent = replace(small, **{part: getattr(small, part) & ~hidden for part in parts})
    config = settings(selector=selector)
    first, second = quiet(config, bare), quiet(config, absent)
    assert timeless(first.metrics) == timeless(second.metrics)
    assert_same_bits(first.selection.logits, second.selection.logits)
    assert first.metrics["test"] != quiet(config, small).metrics["test"]


@pytest.mark.parametrize("selector", ["final", "metselect"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_no_labelled_node_to_learn_or_choose_by(small, selector, part):
    index = small.split(0)._asdict()[part]
    bare = replace(small, labels=small.labels.index_fill(0, index, -1))
    with pytest.raises(ValueError, match="no labelled node"):
        quiet(settings(selector=selector), bare)
