"""The model of the costs on a GPU agrees with what the code does, op by op."""

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import costs, roofline
from benchmarks.baselines import paper_formula, plain_loss
from benchmarks.costs import HEAD, Cost, Size
from benchmarks.roofline import GPUS, Model, head_seconds
from metselect_dgl import functional as MF
from metselect_dgl import reference
from metselect_dgl.experiments.paper import EPOCH_SECONDS
from metselect_dgl.testing import make_case

ROWS_OF_TABLE = {"index": 0, "gather": 0}  # reads some rows of a table
FREE = {"new_empty", "empty_like", "promote_types"}
MAKES = {"new_zeros", "new_full", "zeros_like", "ones_like"}  # reads no numbers
INTO_TABLE = {  # changes some rows of it; autograd, when nobody looks on, also puts in place
    "index_add_": 3,
    "index_put_": 2,
    "index_put": 2,
}


class Traffic(TorchDispatchMode):
    """Bytes and kernels under the assumptions of the model: inputs once, results once, views free,
    and the smaller of rows and table where rows are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op.__name__.split(".")[0]
        read, written = _tensors((args, kwargs)), _tensors(out)
        if name in FREE or (not name.endswith("_") and _aliases(read, written)):
            return out
        if name in MAKES:
            read = []
        self.kernels += 1
        self.bytes += _size(read) + _size(written)
        if name in ROWS_OF_TABLE:
            table = args[ROWS_OF_TABLE[name]]
            self.bytes -= max(0, _size([table]) - _size(written))
        if name in INTO_TABLE:
            table, rows = args[0], args[INTO_TABLE[name]]
            self.bytes -= 2 * max(0, _size([table]) - _size([rows]))
        return out


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _aliases(read, written) -> bool:
    """Whether nothing new was made."""
    before = {each.untyped_storage().data_ptr() for each in read if each.numel()}
    return bool(written) and all(
        each.untyped_storage().data_ptr() in before for each in written if each.numel()
    )


def _size(tensors) -> int:
    """An expanded tensor, or one that is read twice, counts once."""
    unique = {(t.untyped_storage().data_ptr(), t.storage_offset()): t for t in tensors}
    return sum(
        t.element_size() * math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
        for t in unique.values()
    )


SIZES = {
    "wide": Size(N=1500, n=1000, L=3, C=6, D=48, tile=250),
    "classes": Size(N=1200, n=1000, L=2, C=30, D=16, tile=1000),
    "deep": Size(N=900, n=800, L=6, C=4, D=20, tile=400),
}


def jobs(z: Size) -> dict:
    """What the model describes, ready to run: (the code, its cost) by name."""
    case = make_case(z.N, [z.D] * z.L, z.C, picked=z.n, dtype=torch.float32)
    index, ones = [case.index] * z.L, torch.ones(z.L)
    metric = case.layers, *case.metric().values()
    decoders = case.layers, case.weights, case.biases
    layer = torch.arange(z.n) % z.L
    shifts = [torch.zeros(z.C, z.D)] * z.L
    rows = [h[case.index] for h in case.layers]
    leaves = [[each.clone().requires_grad_() for each in part] for part in decoders]
    truth, wanted = case.labels, [True] * z.L
    eager_scores = costs.eager_moments, costs.eager_whitening, costs.eager_select_layer
    return {
        "moments": (
            lambda: reference.moments(case.layers, truth, index, shifts),
            costs.reference_moments,
        ),
        "select_layer": (
            lambda: reference.select_layer(*metric, ones, index, truth, "confidence"),
            costs.reference_select_layer,
        ),
        "selected_cross_entropy": (
            lambda: reference.selected_cross_entropy(
                *decoders, layer, truth, index, 1.0, wanted, False
            ),
            costs.reference_loss,
        ),
        "class_distances": (
            lambda: reference.class_distances(*metric, index),
            costs.reference_class_distances,
        ),
        "class_distances_backward": (
            lambda: reference.class_distances_backward(torch.ones(z.L, z.n, z.C), *metric, index),
            costs.reference_class_distances_backward,
        ),
        "eager scores": (
            lambda: paper_formula(rows, truth, z.C, torch.full((z.L,), 0.1)),
            lambda **size: sum((op(**size) for op in eager_scores), Cost()),
        ),
        "eager loss": (
            lambda: plain_loss(*leaves, layer, truth, case.index).backward(),
            costs.eager_loss,
        ),
    }


@pytest.mark.parametrize("name", jobs(Size(N=2, n=2, L=1, C=2, D=1)))
@pytest.mark.parametrize("z", SIZES.values(), ids=SIZES)
def test_costs_are_those_of_the_code(z, name, monkeypatch):
    """Products exactly, traffic within 5 %, and so the number of kernels but for factorisations,
    which the model takes apart."""
    monkeypatch.setattr(reference, "TILE", z.tile)
    run, op = jobs(z)[name]
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        run()
    cost = op(**z.letters())
    steps = z.L * (z.D / 8 - 1) if name == "eager scores" else 0
    assert cost.matmul == flops.get_total_flops()
    assert cost.bytes == pytest.approx(traffic.bytes, rel=0.05)
    assert cost.launches - steps == pytest.approx(traffic.kernels, rel=0.05)


@pytest.mark.parametrize("depth", [1, 4])
def test_small_ops_are_as_many_as_in_the_code(depth):
    z = Size(N=2000, n=1500, L=depth, C=4, D=24)
    case = make_case(z.N, [z.D] * z.L, z.C, picked=z.n, dtype=torch.float32)
    with Traffic() as before:
        moments = MF.moments(case.layers, case.labels, z.C, index=case.index)
    with Traffic() as after:
        moments.means()
        MF.whitening(moments)
    with Traffic() as inside:
        reference.whitening(moments.grams, torch.zeros(depth), 1e-7)
    factors = 2 * z.L * (z.D / 8 - 1)
    assert before.kernels - 1 == costs.checks_and_shifts(**z.letters()).launches
    found = after.kernels - 1 + inside.kernels
    assert costs.whitening(**z.letters()).launches - factors == pytest.approx(found, rel=0.05)


def test_counted_by_hand():
    """a[index] + 1: 2 rows of 3 floats and 2 numbers read, 2 rows written; then read and written;
    the view is free."""
    a, index = torch.zeros(5, 3), torch.tensor([0, 4])
    with Traffic() as traffic:
        (a[index] + 1).T.unsqueeze(0)
    assert (traffic.bytes, traffic.kernels) == (16 + 24 + 24 + 24 + 24, 2)
    with Traffic() as traffic:
        a.new_zeros(5, 3).index_add_(0, index, torch.ones(2, 3))
    assert (traffic.bytes, traffic.kernels) == (60 + 24 + 16 + 24 + 48, 3)


def test_seconds_by_hand():
    """1.44 GB at 80 % of 900 GB/s are 2 ms; 9.42 GFLOP at 60 % of 15.7 TFLOP/s 1 ms."""
    v100, model = GPUS["V100"], Model()
    assert model.seconds(Cost(1.44e9, 9.42e9, 0, 5), v100) == pytest.approx(2.05e-3)
    assert model.seconds(Cost(1.44e9, 9.42e9, 18.84e9, 0), v100) == pytest.approx(3e-3)
    assert Cost(1, 2, 3, 4) + Cost(1, 1, 1, 1) == Cost(2, 3, 4, 5)


SLOW = Model(bandwidth_share=0.4, fused_rate_share=0.15, launch=20e-6)


@pytest.mark.parametrize(
    ("width", "model"), [(64, Model()), (128, Model()), (256, Model()), (64, SLOW), (128, SLOW)]
)
def test_the_head_is_within_5_percent_of_the_papers_epoch(width, model):
    """Up to 128 features also at half of the assumed bandwidth and rate, and twice the latency."""
    head = head_seconds("fused", Size(D=width), GPUS["V100"], model)
    for backbone, epochs in EPOCH_SECONDS.items():
        assert head <= 0.05 * epochs["FinalSelect"], backbone


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("letter", ["N", "n", "L", "C", "D"])
@pytest.mark.parametrize("path", HEAD)
def test_more_costs_more(path, letter, gpu):
    size = Size()
    more = replace(size, **{letter: 2 * getattr(size, letter)})
    assert head_seconds(path, more, gpu) > head_seconds(path, size, gpu)


@pytest.mark.parametrize("path", HEAD)
def test_a_better_gpu_is_not_slower(path):
    v100, a100, h100 = (head_seconds(path, Size(), gpu) for gpu in GPUS.values())
    assert v100 > a100 > h100


def test_fused_moves_less_and_multiplies_no_more_than_it_pads():
    size = Size().letters()
    for name, op in HEAD["fused"].items():
        mine, plain = op(**size), HEAD["reference"][name](**size)
        assert mine.bytes <= plain.bytes
        assert mine.matmul <= plain.matmul * size["P"] / size["C"]
        assert mine.launches <= plain.launches


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_launches_of_the_fused_ops_are_those_of_the_code(depth):
    """The table of the layers is copied once more than is seen on a CPU."""
    kernels = pytest.importorskip("metselect_dgl.kernels", reason="triton is not installed")
    z = Size(N=90, n=80, L=depth, C=4, D=8)
    case = make_case(z.N, [z.D] * z.L, z.C, picked=z.n, dtype=torch.float32)
    index, choice = [case.index] * z.L, torch.zeros(z.n, dtype=torch.long)
    metric = case.layers, *case.metric().values()
    wanted, grad = [True] * z.L, torch.ones(z.L, z.n, z.C)
    learn = case.weights, case.biases, choice, case.labels, index, 1.0, wanted, False
    ones = torch.ones(z.L)
    for run, op in (
        (
            lambda: kernels.select_layer(*metric, ones, index, case.labels, "confidence"),
            costs.fused_select_layer,
        ),
        (lambda: kernels.selected_cross_entropy(case.layers, *learn), costs.fused_loss),
        (lambda: kernels.class_distances(*metric, index), costs.fused_class_distances),
        (
            lambda: kernels.class_distances_backward(grad, *metric, index),
            costs.fused_class_distances_backward,
        ),
    ):
        with mock.patch.object(kernels.tiles, "launch") as launched, Traffic() as traffic:
            run()
        assert op(**z.letters()).launches == traffic.kernels + launched.call_count, op.__name__


def test_tensor_cores_help_only_where_they_are():
    cost, fast = Cost(matmul=1e12), Model(precision="tf32")
    assert fast.seconds(cost, GPUS["V100"]) == Model().seconds(cost, GPUS["V100"])
    assert fast.seconds(cost, GPUS["A100"]) == pytest.approx(
        Model().seconds(cost, GPUS["A100"]) / 8
    )


def test_every_figure_says_where_it_is_from(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "sys.argv", ["roofline", "--width", "32", "--plot", str(tmp_path / "r.png")]
    )
    roofline.main()
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith((*HEAD, "epoch"))]
    rows = [line for line in rows if any(map(str.isdigit, line))]
    assert len(rows) == 4 + 1 + 2 * (6 + 2 + 1) + 1 + 3
    for row in rows:
        assert row.endswith("paper, measured" if row.startswith("epoch") else "predicted"), row
    assert roofline.__doc__ in out
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_formulas_are_printed_with_the_letters():
    text = roofline.formulas()
    assert "L*(44*D*(C + D) + n*(27*C*s + 5*D*s + 104))" in text
    for path, ops in HEAD.items():
        for name in ops:
            assert f"{path} {name}\n" in text


def test_the_page_says_what_the_model_says():
    page = (Path(__file__).parents[1] / "docs" / "appendix" / "roofline.md").read_text()
    assert roofline.__doc__[roofline.__doc__.index("- An op") :].strip() in page
    for path in HEAD:
        sizes = [(Size(D=width), gpu) for width in (64, 128, 256) for gpu in GPUS.values()]
        cells = [f"{1e3 * head_seconds(path, *each):.1f}" for each in sizes]
        assert f"| {path} | {' | '.join(cells)} |" in page
        share = 100 * head_seconds(path, *sizes[0]) / EPOCH_SECONDS["GCN"]["FinalSelect"]
        assert f"| {path} (predicted) | {share:.2f} %" in page
