"""The model of docs/scaling.md: against counted tensors, against the measured runs, by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import measure_hosts
from benchmarks.scaling import PAPERS, Task, measured, of_run, predicted
from metselect_dgl.config import Config
from metselect_dgl.nn import GCN, LayerStack, MetSelect

ROOT = Path(__file__).parents[1]
RUNS = [
    json.loads(line) for line in (ROOT / "docs/scaling/measured.jsonl").read_text().splitlines()
]
SMALL = Task(nodes=100, edges=1000, feats=8, classes=3, labelled=30, train=20, hidden=16)


def test_parameters_and_moments_are_those_of_the_model():
    model = MetSelect(GCN(8, 16), 3, moments="epoch")
    biases = 16  # of layer 0, which the model leaves out
    assert SMALL.parameters() + biases == sum(p.numel() for p in model.parameters())
    layers = [torch.randn(30, 16) for _ in range(3)]
    model.head.gather(LayerStack.of(layers), torch.arange(30) % 3)
    sent = []
    model.renew_moments(sent.append)
    assert sent[0].dtype == torch.float64
    assert SMALL.moments_bytes() == 8 * sent[0].numel()


@pytest.mark.parametrize("run", RUNS, ids=[str(run["nodes"]) for run in RUNS])
def test_the_memory_of_the_measured_runs(run):
    """Within a fifth."""
    assert of_run(run).memory() / 1e9 == pytest.approx(run["peak_gb"], rel=1 / 5)


def test_machines_share_what_is_kept():
    one, four = PAPERS.memory(1), PAPERS.memory(4)
    assert one / 5 < four < one / 3
    deeper = replace(PAPERS, convs=20)
    added = deeper.memory() - PAPERS.memory() - deeper.calibration_bytes()
    assert added < PAPERS.nodes * 2 * PAPERS.hidden * 4  # one layer more, not eighteen


def test_wire_by_hand():
    """20 nodes in batches of 10 by 2 machines: one step each."""
    task = replace(SMALL, batch_size=10, fanout=2)
    wire = task.wire(2, 0.5)
    assert wire["features, an epoch"] == 10 * (1 + 2 + 4) * 0.5 * 8 * 4
    assert wire["gradients, an epoch"] == task.parameters() * 4
    assert wire["layers, exact inference"] == 1000 / 2 * 0.5 * 4 * (8 + 16)
    assert wire["moments, an epoch"] == task.moments_bytes()


def test_the_page_quotes_the_model():
    page = (ROOT / "docs/scaling.md").read_text()
    largest = max(RUNS, key=lambda run: run["nodes"])
    assert measured(RUNS) in page
    for remote in (0.2, 1.0):
        assert predicted(PAPERS, largest, [1, 2, 4, 8, 16], remote) in page
    assert Config().hidden == PAPERS.hidden


def test_the_page_quotes_the_measured_hosts():
    lines = (ROOT / "docs/scaling/hosts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["hosts"] for row in rows] == [1, 2, 3]
    assert measure_hosts.table(rows) in (ROOT / "docs/scaling.md").read_text()
    for row in rows[1:]:  # within a factor of two
        wire = Task(**row["task"]).wire(row["hosts"], row["remote"])
        epoch = sum(wire[name] for name in wire if name.endswith("an epoch"))
        assert epoch / 2 < row["epoch_bytes"] < 2 * epoch
