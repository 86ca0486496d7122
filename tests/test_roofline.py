"""Test the predicted times of the head on GPUs."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.op_cases import make_case
from benchmarks.roofline import (
    A100,
    GPUS,
    PATHS,
    V100,
    Cost,
    CostCounter,
    Size,
    fused_costs,
    head_costs,
    head_table,
    seconds,
)
from metselect_dgl.experiments.paper import EPOCH_SECONDS

SMALL = Size(N=4000, n=3200, L=2, C=5, D=16)


def test_counted_by_hand():
    """a[index] + 1 reads 2 rows of 3 floats and 2 indices and writes 2 rows, then reads and writes
    them; the view is free."""
    a, index = torch.zeros(5, 3), torch.tensor([0, 4])
    with CostCounter() as counter:
        (a[index] + 1).T.unsqueeze(0)
    assert counter.cost == Cost(bytes=16 + 24 + 24 + 24 + 24, launches=2)
    with CostCounter() as counter:
        a.new_zeros(5, 3).index_add_(0, index, torch.ones(2, 3))
    assert counter.cost == Cost(bytes=60 + 24 + 16 + 24 + 48, launches=3)


def test_seconds_by_hand():
    """1.44 GB at 80 % of 900 GB/s take 2 ms; 9.42 GFLOP at 60 % of 15.7 TFLOP/s take 1 ms."""
    assert Cost(1.44e9, 9.42e9, 0, 5).seconds(V100) == pytest.approx(2.05e-3)
    assert Cost(1.44e9, 9.42e9, 18.84e9, 0).seconds(V100) == pytest.approx(3e-3)
    assert Cost(1, 2, 3, 4) + Cost(1, 1, 1, 1) == Cost(2, 3, 4, 5)


def test_tensor_cores_help_only_where_they_are():
    cost = Cost(products=1e12)
    assert cost.seconds(V100, precision="tf32") == cost.seconds(V100)
    assert cost.seconds(A100, precision="tf32") == pytest.approx(cost.seconds(A100) / 8)


@pytest.mark.parametrize("path", PATHS)
def test_a_faster_gpu_takes_less_time(path):
    times = [seconds(path, head_costs(path, SMALL, gpu), gpu) for gpu in GPUS]
    assert times == sorted(times, reverse=True)


def test_the_fused_head_moves_least():
    """Between the paper's formula in eager torch and the fused kernels lies the reference."""
    size = replace(SMALL, N=40_000, n=32_000)
    totals = []
    for path in PATHS:
        costs = head_costs(path, size)
        totals.append(sum(cost.bytes for name, cost in costs.items() if "distances" not in name))
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_launches_of_the_fused_ops_are_those_of_the_code(depth):
    """The table of layer addresses is copied once more than a CPU shows."""
    kernels = pytest.importorskip("metselect_dgl.kernels", reason="triton is not installed")
    z = Size(N=90, n=80, L=depth, C=4, D=8)
    case = make_case(z.N, [z.D] * z.L, z.C, picked=z.n, dtype=torch.float32)
    index, layer = [case.index] * z.L, torch.zeros(z.n, dtype=torch.long)
    metric = case.layers, *case.metric().values()
    decoders = case.layers, case.weights, case.biases
    targets = layer, case.labels, index, 1.0, [True] * z.L, False
    runs = {
        "select_layer": lambda: kernels.select_layer(
            *metric, torch.ones(z.L), index, case.labels, "confidence"
        ),
        "selected_cross_entropy": lambda: kernels.selected_cross_entropy(*decoders, *targets),
        "class_distances": lambda: kernels.class_distances(*metric, index),
        "class_distances_backward": lambda: kernels.class_distances_backward(
            torch.ones(z.L, z.n, z.C), *metric, index
        ),
    }
    for name, run in runs.items():
        with mock.patch.object(kernels.tiles, "launch") as launch, CostCounter() as counter:
            run()
        launches = counter.cost.launches + launch.call_count
        assert fused_costs(z, A100)[name].launches == launches, name


def test_the_page_holds_the_predictions():
    """The fused head at the size of ogbn-arxiv takes at most 5 % of the paper's epochs."""
    page = (Path(__file__).parents[1] / "docs/appendix/roofline.md").read_text()
    assert head_table([64]).splitlines()[-1] in page
    time = seconds("fused", head_costs("fused", Size(), V100), V100)
    for epochs in EPOCH_SECONDS.values():
        assert time <= 0.05 * epochs["FinalSelect"]
