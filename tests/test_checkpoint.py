"""Checkpoints: whole or not at all, and a damaged or foreign one says so and runs no code."""

import contextlib
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from metselect_dgl.atomic_file import write_atomic
from metselect_dgl.config import Config
from metselect_dgl.train import checkpoint, load_checkpoint, load_run, train
from metselect_dgl.train.checkpoint import CheckpointError

STATE = {"weight": torch.arange(6.0).view(2, 3), "epoch": 3, "history": [{"loss": 0.5}]}
KEYS = set(STATE)


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "run" / "checkpoint.pt"
    checkpoint.save(STATE, path)
    return path


def test_round_trip(saved):
    loaded = checkpoint.load(saved, KEYS)
    assert torch.equal(loaded.pop("weight"), STATE["weight"])
    assert loaded == {"epoch": 3, "history": [{"loss": 0.5}]}


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none\.pt; train first"):
        checkpoint.load(tmp_path / "none.pt", KEYS)


DAMAGE = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "last-byte-lost": lambda whole: whole[:-1],
    "random-bytes": lambda whole: bytes((97 * i * i + 31 * i) % 256 for i in range(5000)),
    "text": lambda whole: b"epoch: 3\n",
    "middle-overwritten": lambda whole: whole[:100] + bytes(200) + whole[300:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file(saved, damage):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(CheckpointError, match="is damaged or not a checkpoint") as caught:
        checkpoint.load(saved, KEYS)
    message = str(caught.value)
    assert message.startswith(str(saved))
    assert message.endswith("delete it and train again")
    assert "\n" not in message


class Trap:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def in_the_archive(saved: Path, trap: Trap) -> None:
    """The whole file as torch writes it, with another pickle inside."""
    with zipfile.ZipFile(saved) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    poisoned = pickle.dumps({**{key: 0 for key in KEYS}, "epoch": trap}, protocol=2)
    with zipfile.ZipFile(saved, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, poisoned if name.endswith("data.pkl") else content)


def by_torch(saved: Path, trap: Trap) -> None:
    torch.save({**STATE, "epoch": trap}, saved)


def plain_pickle(saved: Path, trap: Trap) -> None:
    saved.write_bytes(pickle.dumps(trap, protocol=2))


@pytest.mark.parametrize("tamper", [in_the_archive, by_torch, plain_pickle])
def test_tampered_pickle_runs_no_code(saved, tmp_path, tamper):
    marker = tmp_path / "ran"
    tamper(saved, Trap(marker))
    with pytest.raises(CheckpointError, match="is damaged or not a checkpoint"):
        checkpoint.load(saved, KEYS)
    assert not marker.exists()
    with contextlib.suppress(Exception):
        torch.load(saved, weights_only=False)
    assert marker.exists(), "the trap is none"


@pytest.mark.parametrize(
    "state",
    [
        {"weight": torch.zeros(2)},
        {**STATE, "more": 1},
        {},
        [1, 2],
        torch.zeros(2),
    ],
    ids=["key-missing", "key-too-many", "empty", "list", "tensor"],
)
def test_wrong_keys(saved, state):
    torch.save(state, saved)
    with pytest.raises(CheckpointError, match="is not a checkpoint of this program"):
        checkpoint.load(saved, KEYS)


def network(width: int = 4, out: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, out))


FOREIGN = {
    "another-width": (lambda: network(width=6).state_dict(), r"size mismatch for 0.weight.*\[6, 3"),
    "another-output": (lambda: network(out=5).state_dict(), r"size mismatch for 1.weight.*\[5, 4"),
    "fewer-layers": (lambda: nn.Sequential(nn.Linear(3, 4)).state_dict(), "Missing key.*1.weight"),
    "more-layers": (
        lambda: nn.Sequential(*network(), nn.Linear(2, 2)).state_dict(),
        "Unexpected key.*2.weight",
    ),
    "a-list": (lambda: [1, 2], "of another model: .*list"),
    "no-tensors": (lambda: dict.fromkeys(network().state_dict(), 1), "of another model: .*int"),
}


@pytest.mark.parametrize(("state", "message"), FOREIGN.values(), ids=FOREIGN)
def test_weights_of_another_model(state, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load_weights(network(), state(), Path("run/checkpoint.pt"))
    assert "run/checkpoint.pt is of another model" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [state for state, _ in FOREIGN.values()], ids=FOREIGN)
def test_weights_of_another_model_change_nothing(state):
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError):
        checkpoint.load_weights(model, state(), Path("run/checkpoint.pt"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was changed"


def test_weights_of_the_same_model():
    model, other = network(), network()
    checkpoint.load_weights(model, other.state_dict(), Path("run/checkpoint.pt"))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def edited(part, **changes):
    return lambda saved: {**saved, part: {**saved[part], **changes}}


TAMPERED = {
    "config-unknown-field": edited("config", colour="red"),
    "config-unknown-selector": edited("config", selector="best"),
    "config-is-a-list": lambda saved: {**saved, "config": [1]},
    "progress-unknown-field": edited("progress", colour="red"),
    "progress-is-a-number": lambda saved: {**saved, "progress": 3},
    "optimizer-without-groups": edited("optimizer", param_groups=[]),
    "optimizer-is-empty": lambda saved: {**saved, "optimizer": {}},
    "random-too-short": lambda saved: {**saved, "random": torch.zeros(3, dtype=torch.uint8)},
}


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """The checkpoint of a finished run, and how to go on with it."""
    out = tmp_path_factory.mktemp("run")
    config = Config(selector="final", hidden=8, epochs=1)

    def go_on():
        return train(config, small, out, progress=False)

    go_on()
    return out, (out / "checkpoint.pt").read_bytes(), go_on


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_tampered_parts_of_a_run(run, tamper):
    out, whole, go_on = run
    (out / "checkpoint.pt").write_bytes(whole)
    state = load_checkpoint(out / "checkpoint.pt")
    checkpoint.save(tamper(state), out / "checkpoint.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt"):
        go_on()


def test_load_run_of_a_folder_without_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*checkpoint\.pt"):
        load_run(tmp_path)


class Killed(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def half_written(file):
    file.write(b"half a ")
    file.flush()
    raise Killed


@pytest.mark.parametrize("exists", [True, False], ids=["over-an-old-file", "new-file"])
def test_killed_while_writing(tmp_path, exists):
    path = tmp_path / "file"
    if exists:
        path.write_bytes(b"the old one")
    with pytest.raises(Killed):
        write_atomic(path, half_written)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] * exists
    assert not exists or path.read_bytes() == b"the old one"


def test_killed_while_saving_a_checkpoint(monkeypatch, saved):
    def dying_save(state, file):
        half_written(file)

    before = saved.read_bytes()
    monkeypatch.setattr(torch, "save", dying_save)
    with pytest.raises(Killed):
        checkpoint.save({"weight": torch.ones(3)}, saved)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["checkpoint.pt"]


def test_on_the_disk_before_it_takes_the_name(monkeypatch, tmp_path):
    """fsync comes first: a rename that survives a power cut must not point to an empty file."""
    path, steps = tmp_path / "file", []
    fsync, move = os.fsync, os.replace

    def watched_fsync(number):
        steps.append(("fsync", os.fstat(number).st_size, path.exists()))
        fsync(number)

    def watched_replace(source, target):
        steps.append(("replace", Path(source).parent == path.parent, Path(target)))
        move(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_atomic(path, lambda file: file.write(b"content"))
    assert steps[:2] == [("fsync", 7, False), ("replace", True, path)]
    assert path.read_bytes() == b"content"
