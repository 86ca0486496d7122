"""torch.ops.metselect: every operator passes torch's own checks and compiles."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.op_cases import compressed_edges, make_case
from metselect_dgl import functional as MF
from metselect_dgl import ops
from metselect_dgl.ops import registry

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def arguments(name: str, picked: int | None) -> tuple:
    case = make_case(20, (3, 5), picked=picked)
    metric = tuple(case.metric().values())
    layer = torch.arange(len(case.labels)) % 2
    layers = [h.requires_grad_(not name.endswith("backward")) for h in case.layers]
    plain = [h.detach() for h in case.layers]
    moments = MF.moments(plain, case.labels, 4, index=case.index)
    logits = torch.randn(len(layer), 4, dtype=torch.float64)
    decoders = (layers, case.weights, case.biases, layer)
    one = torch.ones(2, dtype=torch.float64)
    index = [case.index] * 2
    edges = compressed_edges(torch.arange(30) % 5, torch.arange(30) % 7, 5, 8)
    feat, source, target = (
        torch.randn(size, dtype=torch.float64, requires_grad=not name.endswith("backward"))
        for size in ((5, 2, 3), (5, 2), (8, 2))
    )
    loops = torch.arange(21), torch.arange(20, dtype=torch.int32)  # self-loops
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out = torch.randn(20, 4, dtype=torch.float64)
    return {
        "moments": (plain, case.labels, index, moments.shifts),
        "whitening": (moments.covariances(), 0.1 * one, 1e-6),
        "class_distances": (layers, *metric, index),
        "class_distances_backward": (logits.expand(2, -1, -1), plain, *metric, index),
        "metric_logits": (plain, *metric, one, index),
        "select_layer": (plain, *metric, one, index, case.labels, "confidence"),
        "selected_logits": (*decoders, index),
        "selected_logits_backward": (logits, plain, case.weights, layer, index),
        "selected_cross_entropy": (*decoders, case.labels, index, 1.0, [True, True], True),
        "neighbour_sum": (*loops, *loops, *(4 * [None]), plain[0], plain[1][:, :3]),
        "linear_relu": (layers[0], weight, case.biases[0]),
        "linear_relu_backward": (out, plain[0], weight.detach(), out, True),
        "fingerprint": (torch.arange(12, dtype=torch.int32).view(4, 3),),
        "attention_sum": (*edges, feat, source, target, 0.2),
        "attention_sum_backward": (
            torch.randn(8, 2, 3, dtype=torch.float64),
            *edges,
            feat,
            source,
            target,
            torch.rand(30, 2, dtype=torch.float64),
            0.2,
        ),
    }[name]


from_2_4 = pytest.mark.skipif(
    not registry.TORCH_2_4, reason="torch has fakes and opcheck from 2.4 on"
)


@from_2_4
def test_opcheck_without_logits():
    *inputs, _ = arguments("selected_cross_entropy", 9)
    operator = torch.ops.metselect.selected_cross_entropy.default
    result = torch.library.opcheck(operator, (*inputs, False), test_utils=CHECKS)
    assert set(result.values()) == {"SUCCESS"}


@from_2_4
@pytest.mark.parametrize("picked", [None, 9], ids=["all", "picked"])
@pytest.mark.parametrize("name", ops.OPS)
def test_opcheck(name, picked):
    operator = getattr(torch.ops.metselect, name).default
    result = torch.library.opcheck(operator, arguments(name, picked), test_utils=CHECKS)
    assert set(result.values()) == {"SUCCESS"}


@from_2_4
def test_graph_capture():
    """The whole selection traces into one graph without a break."""
    case = make_case(20, (3, 5))
    metric = case.metric()

    def head(a, b):
        layer, _, _ = MF.select_layer([a, b], **metric)
        return MF.selected_logits([a, b], case.weights, case.biases, layer)

    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*case.layers), head(*case.layers))


@pytest.mark.parametrize(("supported", "called"), [(True, "kernel"), (False, "reference")])
def test_float64_without_products_in_it_is_left_to_the_reference(monkeypatch, supported, called):
    monkeypatch.setattr(ops.backends, "triton_has_float64", lambda: supported)
    monkeypatch.setattr(ops.reference, "moments", lambda *inputs: "reference")
    kernels = SimpleNamespace(moments=lambda *inputs: "kernel")
    monkeypatch.setattr(ops, "import_module", lambda name: kernels)
    run = ops._triton_kernel("moments")
    assert run([torch.ones(2, 2)], [torch.ones(2, dtype=torch.float64)]) == called
    assert run([torch.ones(2, 2)], [torch.ones(2)]) == "kernel"
