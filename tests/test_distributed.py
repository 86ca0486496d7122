"""Several processes by torchrun: equal to one process; a worker that exits ends the job."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from metselect_dgl.config import Config
from metselect_dgl.train import distributed, train
from metselect_dgl.train.loop import load_checkpoint

FLAGS = "train --dataset tiny --backbone gcn --hidden 16 --batch-size 25 --fanout -1".split()


def command(tiny_dir, out, *more, processes=1):
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    start = [sys.executable, *(start if processes > 1 else []), "-m", "metselect_dgl"]
    return [*start, *FLAGS, "--data-dir", str(tiny_dir), "--out", str(out), *map(str, more)]


def state(out):
    return load_checkpoint(out / "checkpoint.pt")


def close(one, two):
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=2e-3, atol=2e-4, msg=name)
    losses = [[record["loss"] for record in each["progress"]["history"]] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("more", [[], ["--selector", "final"]], ids=["metselect", "final"])
def test_two_processes_are_one(tiny_dir, tmp_path, more):
    """80 training nodes in batches of 25: the last has 5, so that the two get 3 and 2."""
    for processes in (1, 2):
        out = tmp_path / str(processes)
        given = command(tiny_dir, out, "--epochs", 4, *more, processes=processes)
        done = subprocess.run(given, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("best epoch") == 1
    close(state(tmp_path / "1"), state(tmp_path / "2"))


def test_a_worker_that_exits_ends_the_job_and_the_checkpoint_resumes(tiny_dir, tmp_path):
    straight, out = tmp_path / "straight", tmp_path / "out"
    epochs = ["--epochs", 60, "--patience", 60]
    subprocess.run(
        command(tiny_dir, straight, *epochs, processes=2), check=True, capture_output=True
    )
    log = tmp_path / "log"
    with open(log, "w") as file:
        job = subprocess.Popen(
            command(tiny_dir, out, *epochs, processes=2),
            stdout=file,
            stderr=file,
        )
        wait_for(lambda: (out / "checkpoint.pt").exists(), job)
        os.kill(child_of(job.pid, rank=1), signal.SIGKILL)
        assert job.wait(timeout=120) != 0
    output = log.read_text()
    assert "another of the 2 processes exited; run the same command again" in output
    assert not (out / "metrics.json").exists()
    assert 20 <= state(out)["progress"]["epoch"] < 60
    subprocess.run(
        command(tiny_dir, out, *epochs, processes=2), check=True, capture_output=True, timeout=240
    )
    one, two = state(straight), state(out)
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())


def test_a_run_that_diverges_ends_for_all(tiny_dir, tmp_path):
    given = command(tiny_dir, tmp_path, "--lr", 1e30, "--epochs", 9, processes=2)
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "is not finite" in done.stderr


def wait_for(what, job, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert job.poll() is None and time.monotonic() < end, "the job ended or hangs"
        time.sleep(0.02)


def child_of(parent: int, rank: int) -> int:
    """The process of that rank below torchrun."""
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat") as file:
                its_parent = int(file.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{entry}/environ", "rb") as file:
                mine = file.read().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if its_parent == parent and f"RANK={rank}".encode() in mine:
            return int(entry)
    raise AssertionError(f"no process of rank {rank}")


def test_several_processes_need_batches(tiny_dir, tmp_path):
    given = command(tiny_dir, tmp_path, processes=2)
    at = given.index("--batch-size")
    del given[at : at + 4]  # and --fanout
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode != 0
    assert "2 processes train in mini-batches; give a --batch-size" in done.stderr


UNEQUAL = {
    "seed": ("--seed", 1, "seed is 0 in process 0, but 1 in process 1"),
    "lr": ("--lr", 0.02, "lr is 0.01 in process 0, but 0.02 in process 1"),
    "epochs": ("--epochs", 5, "epochs is 4 in process 0, but 5 in process 1"),
    "patience": ("--patience", 3, "patience is 50 in process 0, but 3 in process 1"),
    "dataset": ("--dataset", "hop_chain", "dataset is 'tiny' in process 0, but 'hop_chain'"),
}


@pytest.mark.parametrize(("flag", "value", "message"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_settings_are_named_and_all_exit(tiny_dir, tmp_path, flag, value, message):
    for rank, output in enumerate(by_hand(tiny_dir, tmp_path, {1: [flag, value]})):
        assert message in output, (rank, output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_never_starts_is_an_error(tiny_dir, tmp_path, rank):
    (output,) = by_hand(tiny_dir, tmp_path, {rank: ["--join-timeout", 3]}, ranks=[rank])
    assert f"process {1 - rank} of 2 did not join" in output
    assert "within 3 s (--join-timeout)" in output


def test_a_process_says_that_it_waits(capsys, monkeypatch):
    monkeypatch.setattr(distributed, "NOTICE_SECONDS", 0.05)
    with distributed.notice("process 0 is waiting"):
        time.sleep(0.3)
    with distributed.notice("nobody waits"):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == "metselect: process 0 is waiting\n"


def test_batch_norm_is_refused_in_several_processes(small):
    config = Config(backbone="gin", batch_norm=True, batch_size=10)
    with pytest.raises(ValueError, match="normalise its part of a batch alone"):
        train(config, small, progress=False, group=distributed.ProcessGroup(0, 2))


def by_hand(tiny_dir, out, more, ranks=(0, 1)) -> list[str]:
    """Start some of two processes, each with flags of its own; return their output once all have
    exited with an error."""
    given = command(tiny_dir, out, "--epochs", 4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    jobs = []
    for rank in ranks:
        jobs.append(
            subprocess.Popen(
                [*given, *map(str, more.get(rank, []))],
                env=os.environ | group | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [1] * len(jobs)
    return outputs


def test_more_processes_than_nodes(small):
    with pytest.raises(ValueError, match="1000 processes for 120 training nodes"):
        train(Config(batch_size=10), small, progress=False, group=distributed.ProcessGroup(0, 1000))
