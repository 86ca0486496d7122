"""DistDGL on several hosts: equal to one process; every fault ends all processes, and resumes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import dgl
import hosts
import pytest
import torch

from metselect_dgl.config import Config
from metselect_dgl.data import hop_chain, load_dataset, save_npz
from metselect_dgl.train import TrainingLoop, load_checkpoint, prepare
from metselect_dgl.train.batches import Batch, MiniBatches, seed_all
from metselect_dgl.train.distdgl import partition
from metselect_dgl.train.launch import plan

REASON = hosts.unavailable()
pytestmark = pytest.mark.skipif(REASON != "", reason=REASON)

ROOT = Path(__file__).parents[1]
SETTINGS = {"hidden": 16, "fanout": -1, "epochs": 40, "patience": 40, "validate_every": 10}
# `metselect train` that also keeps the logits of this trainer's nodes.
PREDICT = """
import sys
import torch
from metselect_dgl import cli
from metselect_dgl.nn.head import evaluating
from metselect_dgl.train import distdgl

original = distdgl.partition_result

def result(loop):
    metrics, data, model = original(loop), loop.data, loop.model
    with torch.no_grad(), evaluating(model):
        logits = model.head.predict(distdgl.PartitionSource(model.backbone, data, 50)).logits
    nodes = data.graph.ndata["node_id"][data.nodes]
    torch.save([nodes, logits, model.state_dict()], f"{loop.out}/{loop.group.rank}.pt")
    return metrics

distdgl.partition_result = result
sys.exit(cli.main())
"""
OTHER_VERSION = """
import sys
import metselect_dgl
metselect_dgl.__version__ = "9.9"
from metselect_dgl import cli
sys.exit(cli.main())
"""


class Job:
    """The processes of a job on the hosts, with a log file each."""

    def __init__(self, network, folder, parts, *, first=0, settings=SETTINGS) -> None:
        self.network, self.folder = network, folder
        folder.mkdir(parents=True, exist_ok=True)
        n_parts = len(list(parts.glob("part*")))
        self.hosts = network[first : first + n_parts]
        self.parts, ip_config = parts, folder / "hosts.txt"
        ip_config.write_text("".join(f"{host.address}\n" for host in self.hosts))
        given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        given = [f"--batch-size={20 * n_parts}", f"--out={folder}/out", *given]
        self.starts = {start.name: start for start in plan(ip_config, parts, 1, given)}
        self.launch = ["launch", "--hosts", ip_config, "--partitions", parts, "--ssh", network.ssh]
        self.launch += ["--", *given]
        self.processes = {}

    def change(self, name: str, old: str, new: str) -> "Job":
        """Replace text in the command of one process."""
        assert old in self.starts[name].line
        line = self.starts[name].line.replace(old, new)
        self.starts[name] = replace(self.starts[name], line=line)
        return self

    def start(self) -> "Job":
        for name, start in self.starts.items():
            with open(self.folder / f"{name}.log", "w") as log:
                command = start.command(self.network.ssh)
                self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        return self

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def statuses(self, seconds: float) -> dict[str, int]:
        """Wait until all processes have ended; nothing of them may be left on a host."""
        end = time.monotonic() + seconds
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} still runs after {seconds} s: {self.log(name)[-2000:]}")
        for host in self.hosts:
            assert host.processes() == {} and host.shared_memory() == [], host
        return {name: process.returncode for name, process in self.processes.items()}

    def succeed(self) -> "Job":
        for name, status in self.start().statuses(90).items():
            assert status == 0, (name, self.log(name))
        return self

    def fail(self, message: str, seconds: float) -> None:
        """All processes must end with an error, and one of them must have given the reason."""
        for name, status in self.statuses(seconds).items():
            assert status != 0, (name, self.log(name))
        logs = [self.log(name) for name in self.processes]
        assert any(re.search(message, log) for log in logs), "\n\n".join(logs)

    def training(self) -> bool:
        return "epoch/s" in self.log("trainer 0")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with hosts.network(5, tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """300 nodes, 120 of them for training: the same number for each of 2 or 3 trainers."""
    folder = tmp_path_factory.mktemp("data")
    save_npz(hop_chain(n_nodes=300, n_splits=1), folder / "small.npz")
    return load_dataset("small", folder)


@pytest.fixture(scope="module")
def parts(data, tmp_path_factory):
    """Return a function: the folder with the graph in so many parts."""
    made = {}

    def cut(count: int) -> Path:
        if count not in made:
            made[count] = tmp_path_factory.mktemp(f"parts{count}")
            partition(data, count, made[count])
        return made[count]

    return cut


@pytest.fixture(scope="module")
def finished(network, parts, tmp_path_factory):
    """Return a function: a finished job on so many hosts."""
    made = {}

    def run(count: int) -> Job:
        if count not in made:
            job = Job(network, tmp_path_factory.mktemp(f"finished{count}"), parts(count))
            program = job.folder / "program.py"
            program.write_text(PREDICT)
            for rank in range(count):
                job.change(f"trainer {rank}", "-m metselect_dgl", str(program))
            made[count] = job.succeed()
        return made[count]

    return run


@pytest.fixture(scope="module", autouse=True)
def slow_job(network, parts, tmp_path_factory):
    """A job on two more hosts with 200 ms there and back between them. It mostly waits: the other
    tests run at the same time."""
    if not os.path.exists("/dev/net/tun"):
        yield None
        return
    settings = {**SETTINGS, "epochs": 1, "select": "temperature", "batch_size": 300}
    with hosts.slow_link(network, network[4], 0.1):
        folder = tmp_path_factory.mktemp("slow")
        yield Job(network, folder, parts(2), first=3, settings=settings).start()


def part_order(folder: Path, count: int) -> torch.Tensor:
    """Return the dataset's numbers of the nodes in the order of DGL's numbers."""
    nodes = []
    for part in range(count):
        loaded = dgl.distributed.load_partition(str(folder / "graph.json"), part)
        nodes.append(loaded[1]["_N/node_id"])
    return torch.cat(nodes)


def one_process(data, folder: Path, count: int) -> TrainingLoop:
    """Train in this process with the batches of `count` trainers."""
    order = part_order(folder, count)

    class SameBatches(MiniBatches):
        def epoch(self, epoch):
            train = order[torch.isin(order, self.split.train)]
            shares = []
            for rank, share in enumerate(train.tensor_split(count)):
                seed_all(self.config.seed, epoch, rank)
                shares.append(share[torch.randperm(len(share))].split(20))
            for batch in zip(*shares, strict=True):
                sources, seeds, blocks = self.sampler.sample(self.graph, torch.cat(batch))
                yield Batch(1.0, blocks, self.data.feat[sources], self.data.labels[seeds])

    config = Config(dataset="small", batch_size=20 * count, **SETTINGS)
    loop = TrainingLoop(config, prepare(config, data), None, make_batches=SameBatches)
    while not loop.finished():
        loop.epoch()
    return loop


@pytest.mark.parametrize("count", [2, 3])
def test_training_on_hosts_equals_one_process(finished, data, parts, count):
    saved = load_checkpoint(finished(count).folder / "out" / "checkpoint.pt")
    alone = one_process(data, parts(count), count)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(saved["model"][name], value, rtol=2e-3, atol=2e-4, msg=name)
    losses = [record["loss"] for record in saved["progress"]["history"]]
    assert losses == pytest.approx([record["loss"] for record in alone.state.history], rel=1e-4)


@pytest.mark.parametrize("count", [2, 3])
def test_prediction_on_hosts_equals_the_whole_graph(finished, data, count):
    config = Config(dataset="small", batch_size=20 * count, **SETTINGS)
    here = prepare(config, data)
    model = config.build(here.feat.shape[1], here.n_classes)
    nodes, logits = [], []
    for rank in range(count):
        own, values, state = torch.load(finished(count).folder / "out" / f"{rank}.pt")
        nodes.append(own)
        logits.append(values)
    nodes, logits = torch.cat(nodes), torch.cat(logits)
    assert torch.equal(nodes.sort().values, torch.arange(300))
    model.load_state_dict(state)
    expected = model.predict(here.graph, here.feat).logits[nodes]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_faults_end_all_processes_and_the_job_resumes(network, finished, parts, tmp_path):
    """Five faults, one after the other in the same run; at the end the weights are the same."""
    first, second = network[:2]
    checkpoint = tmp_path / "out" / "checkpoint.pt"

    def disturbed(fault, message: str, seconds: float = 15, ready=Job.training) -> None:
        job = Job(network, tmp_path, parts(2)).start()
        hosts.wait_until(lambda: ready(job), 60, "the start")
        fault()
        job.fail(message, seconds)

    killed = "trainer 1 on 10.77.0.2 exited; all processes end; the same command resumes"
    disturbed(lambda: second.kill("trainer 1"), killed, ready=lambda job: checkpoint.exists())
    disturbed(lambda: first.kill("trainer 0"), "trainer 0 on 10.77.0.1 exited")
    disturbed(lambda: first.kill("server 0"), "server 0 on 10.77.0.1 exited")
    disturbed(lambda: second.link("down"), "on 10.77.0.2 cannot be reached", seconds=40)
    second.link("up")
    room = checkpoint.stat().st_size // 4096 * 4 + 8  # KiB
    content = checkpoint.read_bytes()
    first.run(f"mount -t tmpfs -o size={room}k tmpfs {checkpoint.parent}")
    seen = Path(f"/proc/{first.pid}/root/{checkpoint}")
    seen.write_bytes(content)
    job = Job(network, tmp_path, parts(2)).start()
    job.fail("the disk is full", 60)
    assert seen.read_bytes() == content
    first.run(f"umount {checkpoint.parent}")
    assert load_checkpoint(checkpoint)["progress"]["epoch"] == 20
    again = [sys.executable, "-m", "metselect_dgl", *Job(network, tmp_path, parts(2)).launch]
    done = subprocess.run(again, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "small, 2 trainers" in done.stdout
    one = load_checkpoint(finished(2).folder / "out" / "checkpoint.pt")
    two = load_checkpoint(checkpoint)
    assert two["progress"]["epoch"] == 40
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=1e-4, atol=1e-5, msg=name)


def wrong_part(job: Job) -> None:
    """Give the second host a folder with its part exchanged for the first."""
    wrong = job.folder / "parts"
    shutil.copytree(job.parts, wrong)
    shutil.rmtree(wrong / "part1")
    shutil.copytree(wrong / "part0", wrong / "part1")
    job.change("server 1", str(job.parts), str(wrong))


def other_version(job: Job) -> None:
    program = job.folder / "other_version.py"
    program.write_text(OTHER_VERSION)
    job.change("trainer 1", "-m metselect_dgl", str(program))


START_FAULTS = {
    "wrong-part": (wrong_part, "part1 is not the part that metselect.json describes"),
    "version": (
        other_version,
        "version is '.*' in server 0 .*, but '9.9' in trainer 1",
    ),
    "settings": (
        lambda job: job.change("trainer 1", "--epochs=40", "--epochs=50"),
        "epochs is 40 in process 0, but 50 in process 1",
    ),
}


@pytest.mark.parametrize(("fault", "message"), START_FAULTS.values(), ids=START_FAULTS)
def test_a_fault_at_the_start_ends_all_processes(network, parts, tmp_path, fault, message):
    job = Job(network, tmp_path, parts(2))
    fault(job)
    job.start().fail(message, 60)
    assert not (tmp_path / "out").exists()


LISTEN = "import socket, time; s = socket.create_server(('10.77.0.2', 30050)); print(1, flush=True)"
OCCUPIED = {
    "port": (
        f'exec {sys.executable} -c "{LISTEN}; time.sleep(99)"',
        "port 30050 of 10.77.0.2 cannot be used .Address already in use.",
    ),
    "shared-memory": (
        "exec flock /dev/shm sh -c 'echo 1; exec sleep 99'",
        "another DistDGL job runs on this machine",
    ),
}


@pytest.mark.parametrize(("line", "message"), OCCUPIED.values(), ids=OCCUPIED)
def test_a_host_that_is_in_use_ends_all_processes(network, parts, tmp_path, line, message):
    enter = network.ssh.format(host="10.77.0.2")
    with subprocess.Popen([enter, line], stdout=subprocess.PIPE) as occupant:
        assert occupant.stdout.readline() == b"1\n"
        job = Job(network, tmp_path, parts(2)).start()
        hosts.wait_until(lambda: job.processes["server 1"].poll(), 60, "the check")
        for pid in network[1].processes():
            if pid not in [process.pid for process in job.processes.values()]:
                os.kill(pid, signal.SIGKILL)
    job.fail(message, 15)


def test_a_slow_link(slow_job):
    if slow_job is None:
        pytest.skip("a slow link needs /dev/net/tun")
    for name, status in slow_job.statuses(120).items():
        assert status == 0, (name, slow_job.log(name))
    assert "small, 2 trainers" in slow_job.log("trainer 0")
