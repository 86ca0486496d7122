"""A model of what mini-batch training and exact inference cost on k machines, and its check.

    python -m benchmarks.scaling docs/scaling/measured.jsonl

reads the lines that examples/big_graph.py printed, sets the model's memory beside the measured one,
takes from the largest run the seconds of a batch and of an edge, and predicts ogbn-papers100M.
Times are of one CPU like the measured one in every machine; memory is of a machine, bytes on the
wire are what a machine receives. Nothing of it was run on several machines.
"""

import json
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from metselect_dgl.experiments.tables import markdown

FLOAT = 4
BASE = 0.55e9  # a process that has loaded torch and dgl and trains on a small graph, as measured
SWEEP = 65536  # nodes that exact inference makes together


@dataclass(frozen=True)
class Task:
    """A graph, a GNN of `convs` convolutions and the way it is trained."""

    nodes: int
    edges: int
    feats: int
    classes: int
    labelled: int  # training and validation nodes
    train: int
    hidden: int = 64
    convs: int = 2
    batch_size: int = 1000
    fanout: int = 10
    id_bytes: int = 8  # of node numbers

    @property
    def degree(self) -> float:
        return self.edges / self.nodes

    def graph_bytes(self) -> float:
        """As DGL holds it: pairs, and in-neighbours with the numbers of their edges."""
        return self.edges * 4 * self.id_bytes + self.nodes * self.id_bytes

    def node_bytes(self) -> dict[str, float]:
        """Of a node: what training and exact inference keep, whatever the depth."""
        return {
            "features": self.feats * FLOAT,
            "two layers": min(2, self.convs - 1) * self.hidden * FLOAT,
            "logits": self.classes * FLOAT,
            "labels, masks, degrees, choice": 8 + 3 + 2 * FLOAT + 8 + FLOAT + 1 + 8,
        }

    def calibration_bytes(self) -> float:
        """The rows of every layer at the labelled nodes, twice while they are cut."""
        return 2 * self.labelled * (self.convs + 1) * self.hidden * FLOAT

    def sweep_bytes(self) -> float:
        """The neighbours of a batch of exact inference, all of them different, three times: as
        read, normalised, and multiplied or summed."""
        rows = min(self.nodes, SWEEP * self.degree)
        return 3 * rows * max(self.feats, self.hidden) * FLOAT

    def memory(self, machines: int = 1) -> float:
        """The peak of a machine."""
        kept = self.graph_bytes() + self.nodes * sum(self.node_bytes().values())
        return BASE + self.sweep_bytes() + (kept + self.calibration_bytes()) / machines

    def batch_rows(self) -> float:
        """Nodes whose features a batch reads, at most."""
        grow, rows = min(self.fanout, self.degree), self.batch_size
        return min(self.nodes, rows * sum(grow**hop for hop in range(self.convs + 1)))

    def parameters(self) -> int:
        widths = [self.feats, *[self.hidden] * self.convs]
        convs = sum(a * b + b for a, b in pairwise(widths))
        layers = self.convs + 1
        return self.feats * self.hidden + convs + layers * (self.hidden + 1) * self.classes

    def moments_bytes(self) -> int:
        """The one float64 all-reduce of an epoch."""
        layers = self.convs + 1
        return 8 * (self.classes + layers * self.hidden * (self.classes + self.hidden) + 1)

    def wire(self, machines: int, remote: float) -> dict[str, float]:
        """Bytes that a machine receives, if a share `remote` of neighbours is elsewhere."""
        steps = self.train / self.batch_size / machines
        ring = 2 * (machines - 1) / machines
        return {
            "features, an epoch": steps * self.batch_rows() * remote * self.feats * FLOAT,
            "gradients, an epoch": steps * ring * self.parameters() * FLOAT,
            "moments, an epoch": ring * self.moments_bytes(),
            "layers, exact inference": self.edges
            / machines
            * remote
            * FLOAT
            * (self.feats + (self.convs - 1) * self.hidden),
        }


PAPERS = Task(
    nodes=111_059_956,
    edges=3_231_371_744,
    feats=128,
    classes=172,
    labelled=1_207_179 + 125_265,
    train=1_207_179,
)


def of_run(run: dict) -> Task:
    """The task of examples/big_graph.py."""
    return Task(
        nodes=run["nodes"],
        edges=run["edges"],
        feats=run["feats"],
        classes=run["classes"],
        labelled=round(0.15 * run["nodes"]),
        train=round(0.1 * run["nodes"]),
        hidden=run["hidden"],
        batch_size=run["batch_size"],
        fanout=run["fanout"],
        id_bytes=4,
    )


def measured(runs: list[dict]) -> str:
    """Every run beside the model."""
    header = ["nodes", "edges", "batch, ms", "inference, s", "ns an edge", "peak, GB", "model, GB"]
    rows = [
        [
            f"{run['nodes']:,}",
            f"{run['edges']:,}",
            f"{1000 * run['batch_seconds']:.0f}",
            f"{run['infer_seconds']:.1f}",
            f"{1e9 * edge_seconds(run):.0f}",
            f"{run['peak_gb']:.2f}",
            f"{of_run(run).memory() / 1e9:.2f}",
        ]
        for run in runs
    ]
    return markdown((header, rows))


def edge_seconds(run: dict) -> float:
    """Of an edge in one convolution of exact inference."""
    return run["infer_seconds"] / (2 * run["edges"])


def predicted(task: Task, run: dict, machines: list[int], remote: float) -> str:
    """The task on k machines, with the times of the run."""
    header = ["", *(f"{k} machine{'s' if k > 1 else ''}" for k in machines)]
    share = {k: remote if k > 1 else 0.0 for k in machines}
    time = {k: task.train / task.batch_size / k * run["batch_seconds"] for k in machines}
    wide = (task.feats + (task.convs - 1) * task.hidden) / (run["feats"] + run["hidden"])
    sweep = {k: task.convs * task.edges / k * edge_seconds(run) * wide for k in machines}
    rows = [
        ["memory of a machine, GB", *(f"{task.memory(k) / 1e9:.0f}" for k in machines)],
        ["epoch, minutes of computing", *(f"{time[k] / 60:.1f}" for k in machines)],
        ["exact inference, minutes", *(f"{sweep[k] / 60:.1f}" for k in machines)],
    ]
    wires = {k: task.wire(k, share[k]) for k in machines}
    for name in wires[machines[0]]:
        cells = (f"{wires[k][name] / 1e9:.3g}" if k > 1 else "0" for k in machines)
        rows.append([f"received by a machine: {name}, GB", *cells])
    return markdown((header, rows))


def main(path: str) -> None:
    runs = [json.loads(line) for line in Path(path).read_text().splitlines()]
    largest = max(runs, key=lambda run: run["nodes"])
    print(measured(runs))
    for remote in (0.2, 1.0):
        print(f"\nneighbours elsewhere: {100 * remote:.0f} %\n")
        print(predicted(PAPERS, largest, [1, 2, 4, 8, 16], remote))
    wider = replace(PAPERS, hidden=256)
    print(f"\nhidden 256: {wider.memory(8) / 1e9:.0f} GB on each of 8 machines")


if __name__ == "__main__":
    main(*sys.argv[1:])
