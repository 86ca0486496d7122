"""Measure what DistDGL sends between hosts, beside the model of benchmarks/scaling.py.

    python -m benchmarks.measure_hosts docs/scaling/hosts.jsonl

trains on 1, 2 and 3 hosts, which are network namespaces of this machine (root and iproute2), writes
a line per number of hosts and prints the table of docs/scaling.md. Bytes are those that the
interface of the first host received: features, sampled edges, gradients and moments of an epoch,
and the layers of exact inference, with all headers.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import dgl
import torch

from benchmarks.scaling import Task
from metselect_dgl.config import Config
from metselect_dgl.data import NodeDataset, hop_chain
from metselect_dgl.experiments.tables import markdown

BATCH, EPOCHS, FANOUT = 100, 3, 10
RECEIVED = Path("/sys/class/net/eth0/statistics/rx_bytes")
_EPOCH = ("features, an epoch", "gradients, an epoch", "moments, an epoch")


def trainer(folder: str, ip_config: str) -> None:
    """Run one trainer; the first one prints the bytes and seconds."""
    from metselect_dgl.nn.head import evaluating
    from metselect_dgl.train import TrainingLoop
    from metselect_dgl.train.distdgl import PartitionBatches, PartitionSource, connect
    from metselect_dgl.train.distributed import process_group

    data, others = connect(Path(folder), ip_config)
    with process_group() as group:
        size = BATCH * group.size
        config = Config(batch_size=size, fanout=FANOUT, select="temperature")
        loop = TrainingLoop(config, data, None, group, PartitionBatches)
        loop.step()  # and the pass for the first moments
        source = PartitionSource(loop.model.backbone, data, BATCH)
        marks = [mark(data.graph)]
        for _ in range(EPOCHS):
            loop.step()
        marks.append(mark(data.graph))
        with torch.no_grad(), evaluating(loop.model):
            loop.model.head.predict(source)
        marks.append(mark(data.graph))
        if group.rank == 0:
            names, figures = ("epoch", "inference"), {"hosts": group.size}
            for name, scale, before, after in zip(
                names, (EPOCHS, 1), marks, marks[1:], strict=False
            ):
                figures[f"{name}_bytes"] = (after[0] - before[0]) / scale
                figures[f"{name}_seconds"] = (after[1] - before[1]) / scale
            print(json.dumps(figures), flush=True)
        others.leave()
        dgl.distributed.exit_client()


def mark(graph: dgl.distributed.DistGraph) -> tuple[int, float]:
    """Return bytes received by this host and the time, at a moment when no trainer works."""
    graph.barrier()
    now = int(RECEIVED.read_text()), time.perf_counter()
    graph.barrier()
    return now


def remote_share(data: NodeDataset, folder: Path, parts: int) -> float:
    """Return the share of edges whose ends are on different hosts."""
    part = torch.empty(data.graph.num_nodes(), dtype=torch.long)
    for number in range(parts):
        _, features, *_ = dgl.distributed.load_partition(str(folder / "graph.json"), number)
        part[features["_N/node_id"]] = number
    source, target = data.graph.edges()
    return (part[source] != part[target]).double().mean().item()


def measure(data: NodeDataset, count: int, folder: Path) -> dict:
    """Return bytes and seconds on so many hosts, and the share of remote edges."""
    from metselect_dgl.train.distdgl import partition
    from metselect_dgl.train.launch import plan
    from tests.hosts import network

    parts = folder / "parts"
    partition(data, count, parts)
    with network(count, folder) as hosts:
        ip_config = folder / "hosts.txt"
        ip_config.write_text("".join(f"{host.address}\n" for host in hosts))
        processes = []
        for start in plan(ip_config, parts, 1, []):
            if start.name.startswith("trainer"):
                before, _ = start.line.split("-m metselect_dgl")
                line = f"{before}-m benchmarks.measure_hosts trainer {parts} {ip_config}"
                start = replace(start, line=line)
            command = start.command(hosts.ssh)
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    lines = [line for text in outputs for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[0]) | {"remote": remote_share(data, parts, count)}


def task_of(data: NodeDataset) -> Task:
    split = data.split(0)
    return Task(
        nodes=data.graph.num_nodes(),
        edges=data.graph.num_edges(),
        feats=data.feat.shape[1],
        classes=data.n_classes,
        labelled=len(split.train) + len(split.val),
        train=len(split.train),
        batch_size=BATCH,
        fanout=FANOUT,
    )


def table(rows: list[dict]) -> str:
    """Return the measured rows beside the model."""
    header = ["hosts", "remote edges", "epoch, s", "epoch, MB", "model, MB"]
    header += ["inference, s", "inference, MB", "model, MB"]
    body = []
    for row in rows:
        wire = Task(**row["task"]).wire(row["hosts"], row["remote"])
        cells = [str(row["hosts"]), f"{100 * row['remote']:.0f} %", f"{row['epoch_seconds']:.1f}"]
        cells.append(f"{row['epoch_bytes'] / 1e6:.2f}")
        cells.append(f"{sum(wire[name] for name in _EPOCH) / 1e6:.2f}")
        cells += [f"{row['inference_seconds']:.1f}", f"{row['inference_bytes'] / 1e6:.2f}"]
        body.append([*cells, f"{wire['layers, exact inference'] / 1e6:.2f}"])
    return markdown((header, body))


def main(path: str, nodes: str = "20000") -> None:
    data, rows = hop_chain(n_nodes=int(nodes), n_splits=1), []
    for count in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(data, count, Path(folder))
        rows.append(row | {"task": vars(task_of(data))})
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        trainer(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
