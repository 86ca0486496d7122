"""Test files that are written whole or not at all, and folders with one writer."""

import errno
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from metselect_dgl.atomic_file import only_writer, write_atomic
from metselect_dgl.cli import main
from metselect_dgl.train import checkpoint

HOLD = """
import sys, time
from metselect_dgl.atomic_file import only_writer
with only_writer(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """The temporary name is not predictable, and a file that has it is not opened."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".result.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "result", lambda file: file.write(b"new"))
    assert victim.read_text() == "precious"


def test_two_writers_do_not_mix(tmp_path):
    def nested(file):
        file.write(b"outer")
        write_atomic(tmp_path / "result", lambda inner: inner.write(b"inner"))

    write_atomic(tmp_path / "result", nested)
    assert (tmp_path / "result").read_bytes() == b"outer"
    assert os.listdir(tmp_path) == ["result"]


def test_a_full_disk_is_named(tmp_path):
    def fill(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"result cannot be written: the disk is full"):
        write_atomic(tmp_path / "result", fill)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_write_are_removed(tmp_path):
    (tmp_path / f".metrics.json.{'a' * 16}.tmp").write_text("half")
    (tmp_path / ".notes.tmp").write_text("not ours")
    with only_writer(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [".notes.tmp"]


def test_a_folder_has_one_writer_until_it_ends(tmp_path):
    """Also one that is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RuntimeError, match="another process writes to"), only_writer(tmp_path):
            pass
        holder.kill()
    with only_writer(tmp_path):
        pass


@pytest.fixture
def saved(tmp_path) -> Path:
    state = {"weights": torch.arange(1000.0), "epoch": 3, "history": [{"loss": 0.5}]}
    checkpoint.save(state, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_every_flipped_bit_is_noticed(saved):
    content = saved.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        flipped = bytearray(content)
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        saved.write_bytes(flipped)
        with pytest.raises(checkpoint.CheckpointError, match="delete it and train again"):
            checkpoint.load(saved, {"weights", "epoch", "history"})
    saved.write_bytes(content)
    assert checkpoint.load(saved, {"weights", "epoch", "history"})["epoch"] == 3


def test_a_checkpoint_without_checksum_is_read(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "old.pt")
    assert checkpoint.load(tmp_path / "old.pt", {"epoch"}) == {"epoch": 3}


TRAIN = ["train", "--epochs", "2", "--hidden", "4"]


def test_overwrite_removes_the_old_results_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--out", "run"]) == 0
    old = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    assert {"metrics.json", "predictions.npz", "layers.png", "config.yaml"} < set(old)
    monkeypatch.setattr("metselect_dgl.train.run.run_loop", interrupted)
    assert main([*TRAIN, "--out", "run", "--lr", "0.1", "--overwrite"]) == 130
    assert os.listdir("run") == []


def interrupted(*args, **options):
    raise KeyboardInterrupt


def test_a_second_training_in_one_folder_is_refused(tmp_path, capsys):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert main([*TRAIN, "--out", str(tmp_path)]) == 1
        holder.kill()
    assert "another process writes to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil"])
def test_default_folders_are_below_runs(tmp_path, monkeypatch, name):
    """A dataset in another folder is read; its results stay below runs/."""
    from metselect_dgl.data import hop_chain, save_npz

    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    path = tmp_path / "data" / f"{name.lstrip('/')}.npz"
    save_npz(hop_chain(200), path)
    name = str(path.with_suffix("")) if name.startswith("/") else name
    monkeypatch.chdir(tmp_path / "work")
    assert main([*TRAIN, "--dataset", name, "--data-dir", str(tmp_path / "data")]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.resolve().parent == tmp_path / "work" / "runs"
    assert (folder / "metrics.json").exists()


def wait_for_end(pids: list[int], seconds: float = 20) -> list[int]:
    """Return the processes that still exist after a while."""
    end = time.monotonic() + seconds
    while pids and time.monotonic() < end:
        pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        time.sleep(0.1)
    return pids


def children(pid: int) -> list[int]:
    """Return all processes below a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("signal", ["TERM", "KILL", "INT"])
def test_workers_end_with_their_parent(tmp_path, signal):
    command = [sys.executable, "-m", "metselect_dgl", "compare", "--out", tmp_path, "--jobs", "2"]
    command += ["--epochs", "100000", "--patience", "100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as parent:
        end = time.monotonic() + 60
        while len(workers := children(parent.pid)) < 3 and time.monotonic() < end:
            time.sleep(0.2)  # two workers and the tracker of multiprocessing
        assert len(workers) >= 3
        time.sleep(3)
        subprocess.run(["kill", f"-{signal}", str(parent.pid)], check=True)
        _, error = parent.communicate(timeout=30)
    assert wait_for_end(workers) == []
    assert b"Traceback" not in error


WRONG_FLAGS = {
    "seed": (["--seed", "99999999999999999999"], "seed is 9+; it must be at least 0 and below"),
    "fanout": (["--fanout", "3"], "fanout is a setting of mini-batches; add a --batch-size"),
    "out": (["--out", "file"], "file is no folder; choose another --out"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_wrong_flags_leave_no_folder(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main([*TRAIN, *flags]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert os.listdir() == ["file"]
