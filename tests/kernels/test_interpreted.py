"""Every Triton kernel, interpreted, against the reference in float64."""

import pytest
import torch
from torch import Tensor

from benchmarks.op_cases import Case, assert_close, make_case
from metselect_dgl import functional as MF
from metselect_dgl import kernels, reference
from metselect_dgl.backends import triton_has_float64

WIDTHS = (5, 37, 64)
T = torch.tensor([1.0, 2.0, 0.5])


def wide(value):
    if isinstance(value, list):
        return [wide(entry) for entry in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def flat(result) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in flat(part)]


def check(name: str, *inputs) -> list[Tensor]:
    """Assert that errors against the float64 reference are at most twice those of the float32
    reference, and that two calls agree bitwise."""
    kernel, plain = getattr(kernels, name), getattr(reference, name)
    ours, again = flat(kernel(*inputs)), flat(kernel(*inputs))
    torch.testing.assert_close(ours, again, rtol=0, atol=0, equal_nan=True)
    exact, rough = flat(plain(*map(wide, inputs))), flat(plain(*inputs))
    for a, b, c in zip(ours, exact, rough, strict=True):
        assert a.dtype == c.dtype
        assert_close(a, b, c)
    return ours


def joined(results) -> list[Tensor]:
    """Concatenate the outputs of several calls."""
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def check_choice(*inputs) -> None:
    check_choices([inputs])


def check_choices(calls: list[tuple]) -> None:
    """Assert that select_layer agrees with the reference except where rounding decides between
    layers. The rows of all calls are compared together, because the error of a single number may
    be 0 by chance."""
    ours, again = (joined(kernels.select_layer(*inputs) for inputs in calls) for _ in range(2))
    torch.testing.assert_close(ours, again, rtol=0, atol=0)
    exact = joined(reference.select_layer(*map(wide, inputs)) for inputs in calls)
    rough = joined(reference.select_layer(*inputs) for inputs in calls)
    same = ours[0] == exact[0]
    assert same.sum() >= (rough[0] == exact[0]).sum()
    assert torch.equal(ours[1][same], exact[1][same])
    assert_close(ours[2][same], exact[2][same], rough[2][same])


def metric(widths=WIDTHS, n_classes=4, empty_class=2, dtype=torch.float32) -> tuple:
    known = make_case(400, widths, n_classes, empty_class=empty_class, dtype=dtype).metric()
    return known["means"], known["factors"], known["valid"]


def decoders(case: Case) -> tuple:
    return case.layers, case.weights, case.biases, torch.arange(len(case.labels)) % len(case.layers)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


SIZES = {"one": (1, None), "all": (63, None), "picked-twice": (40, 130), "none": (9, 0)}


@pytest.mark.parametrize(("n", "picked"), SIZES.values(), ids=SIZES)
class TestSizes:
    """Sizes that miss the tiles; ragged widths; a class without nodes."""

    @pytest.fixture(autouse=True)
    def case(self, n, picked):
        self.case = make_case(n, WIDTHS, picked=picked, empty_class=2, dtype=torch.float32)
        self.index, self.rows = [self.case.index] * 3, len(self.case.labels)

    def test_class_distances(self):
        check("class_distances", self.case.layers, *metric(), self.index)

    def test_class_distances_backward(self):
        grad = random(3, self.rows, 4)
        grad[..., 2] = torch.nan  # of the class that is infinitely far away
        check("class_distances_backward", grad, self.case.layers, *metric(), self.index)

    @pytest.mark.parametrize("rule", ["confidence", "distance", "opposite"])
    @pytest.mark.parametrize("guided", [True, False], ids=["labels", "no-labels"])
    def test_select_layer(self, rule, guided):
        cases = [self.case]
        if self.rows == 1:
            options = {"empty_class": 2, "dtype": torch.float32}
            cases += [make_case(1, WIDTHS, seed=seed, **options) for seed in range(1, 8)]
        check_choices(
            [
                (case.layers, *metric(), T, self.index, case.labels if guided else None, rule)
                for case in cases
            ]
        )

    def test_selected_logits(self):
        check("selected_logits", *decoders(self.case), self.index)

    @pytest.mark.parametrize("deep", [0.0, 0.5])
    @pytest.mark.parametrize("keep", [True, False], ids=["logits", "no-logits"])
    def test_selected_cross_entropy(self, deep, keep):
        inputs = *decoders(self.case), self.case.labels, self.index, deep
        _, logits, _, second, *_ = check(
            "selected_cross_entropy", *inputs, [True, False, True], keep
        )
        assert second.shape == (0,), "the gradient that was not wanted"
        assert len(logits) == keep * self.rows
        check("selected_cross_entropy", *inputs, [], keep)


@pytest.mark.skipif(
    not triton_has_float64(), reason="Triton has products in float64 from 3.2 on; ops avoid them"
)
def test_float64():
    """The same kernels in float64, where rounding does not hide errors."""
    case = make_case(40, WIDTHS, picked=70, empty_class=2)
    index, known = [case.index] * 3, metric(dtype=torch.float64)
    grad = random(3, 70, 4).double()
    learn = *decoders(case), case.labels, index, 0.5, [True] * 3, True
    for name, inputs in {
        "class_distances": (case.layers, *known, index),
        "class_distances_backward": (grad, case.layers, *known, index),
        "select_layer": (case.layers, *known, T.double(), index, case.labels, "distance"),
        "selected_cross_entropy": learn,
    }.items():
        ours, exact = getattr(kernels, name)(*inputs), getattr(reference, name)(*inputs)
        torch.testing.assert_close(flat(ours), flat(exact), rtol=1e-11, atol=1e-11)


def surrounded(h: Tensor) -> Tensor:
    """Return the same numbers inside memory filled with NaN."""
    out = torch.full((len(h) + 4, 2 * h.shape[1] + 3), torch.nan)[2:-2, 1 : 1 + h.shape[1]]
    return out.copy_(h)


LAYOUTS = {
    "columns": lambda h: torch.full(h.T.shape, torch.nan).T.copy_(h),
    "surrounded": surrounded,
    "every-other": lambda h: torch.full((len(h), 2 * h.shape[1]), torch.nan)[:, ::2].copy_(h),
    "expanded": lambda h: h[:1].expand(h.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layers_of_any_layout(layout):
    case = make_case(33, WIDTHS, picked=50, dtype=torch.float32)
    case.layers = [layout(h) for h in case.layers]
    known, index = metric(), [case.index] * 3
    check("class_distances", case.layers, *known, index)
    check("class_distances_backward", random(50, 3, 4).transpose(0, 1), case.layers, *known, index)
    check_choice(case.layers, *known, T, index, case.labels, "distance")
    choice = *decoders(case), case.labels, index, 1.0, [True] * 3, True
    check("selected_cross_entropy", *choice)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_layers(dtype):
    """Half-precision features and float32 constants, against the same features in float32."""
    case = make_case(33, (8, 37), picked=50, dtype=torch.float32)
    known, index = metric((8, 37)), [case.index] * 2
    narrow = [h.to(dtype) for h in case.layers]
    full = [h.float() for h in narrow]
    rest = (
        case.weights,
        case.biases,
        torch.arange(50) % 2,
        case.labels,
        index,
        1.0,
        [True] * 2,
        True,
    )
    grad = random(2, 50, 4)
    for call in (
        lambda h: kernels.class_distances(h, *known, index),
        lambda h: kernels.class_distances_backward(grad, h, *known, index),
        lambda h: kernels.select_layer(h, *known, T[:2], index, case.labels, "distance"),
        lambda h: kernels.selected_cross_entropy(h, *rest),
    ):
        for a, b in zip(flat(call(narrow)), flat(call(full)), strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=0)
    mine, same = (
        kernels.select_layer(h, *known, T[:2], index, None, "confidence") for h in (narrow, full)
    )
    torch.testing.assert_close(mine, same, rtol=0, atol=0)


def test_layers_of_different_dtypes():
    """Layers of different dtypes under autocast: gradients have the dtype of their layer."""
    case = make_case(33, (8, 37), dtype=torch.float32)
    layers = [case.layers[0].bfloat16().requires_grad_(), case.layers[1].requires_grad_()]
    same = [layers[0].detach().float(), layers[1].detach()]
    known = case.metric()
    layer, _, score = MF.select_layer(layers, **known, labels=case.labels)
    torch.testing.assert_close(
        (layer, score), MF.select_layer(same, **known, labels=case.labels)[::2]
    )
    rest = case.weights, case.biases, layer, case.labels
    loss, _ = MF.selected_cross_entropy(layers, *rest, deep_supervision=1.0)
    torch.testing.assert_close(
        loss, MF.selected_cross_entropy(same, *rest, deep_supervision=1.0)[0]
    )
    loss.backward()
    assert [h.grad.dtype for h in layers] == [torch.bfloat16, torch.float32]
    for mixed, plain in zip(
        MF.moments(layers, case.labels, 4).grams,
        MF.moments(same, case.labels, 4).grams,
        strict=True,
    ):
        torch.testing.assert_close(mixed, plain)


def test_layers_with_different_rows():
    """The first layer has all rows and an index, the others only the picked rows."""
    case = make_case(40, WIDTHS, picked=20, dtype=torch.float32)
    layers = [case.layers[0], *(case.picked(h) for h in case.layers[1:])]
    index = [case.index, None, None]
    check("class_distances", layers, *metric(), index)
    check("class_distances_backward", random(3, 20, 4), layers, *metric(), index)
    check_choice(layers, *metric(), T, index, case.labels, "confidence")
    check(
        "selected_cross_entropy",
        layers,
        *decoders(case)[1:],
        case.labels,
        index,
        0.0,
        [True] * 3,
        True,
    )


@pytest.mark.parametrize(
    ("n", "width", "n_classes"), [(40, 3, 1024), (9, 512, 3), (40, 16, 1), (40, 37, 70)]
)
def test_wide_and_many_classes(n, width, n_classes):
    """Several blocks of features and of classes, or one of each."""
    case = make_case(n, (width,), n_classes, dtype=torch.float32)
    case.weights = [weight / width**0.5 for weight in case.weights]  # logits as of a network
    known = metric((width,), n_classes, None)
    check("class_distances", case.layers, *known, [None])
    check("class_distances_backward", random(1, n, n_classes), case.layers, *known, [None])
    for labels in (case.labels, None):
        check_choice(case.layers, *known, T[:1], [None], labels, "confidence")
    for deep in (0.0, 1.0):
        check("selected_cross_entropy", *decoders(case), case.labels, [None], deep, [True], True)


@pytest.mark.parametrize("shape", [(20, 20), (9, 20), (33, 20)], ids=str)
def test_factors_that_are_not_triangular(shape):
    """Factors with a linear map of the layer multiplied in."""
    case = make_case(40, (20,), dtype=torch.float32)
    means, _, valid = metric((20,))
    known = means, [random(*shape)], valid
    check("class_distances", case.layers, *known, [None])
    check("class_distances_backward", random(1, 40, 4), case.layers, *known, [None])
    check_choice(case.layers, *known, T[:1], [None], None, "distance")


def test_small_distances_between_large_vectors():
    """Directions of very different spread, where |z|^2 - 2 <z, m> + |m|^2 cancels."""
    case = make_case(60, (20,), dtype=torch.float64)
    case.layers[0] = case.layers[0] * torch.logspace(-3, 1, 20) + 50 * case.labels[:, None]
    known = case.metric(0.0)
    low = [[tensor.float() for tensor in known[name]] for name in ("means", "factors")]
    inputs = [case.layers[0].float()], *low, known["valid"], [None]
    check("class_distances", *inputs)
    check("class_distances_backward", random(1, 60, 4), *inputs)


def test_rows_beyond_32_bits():
    """Two rows 9 GB apart, in reserved memory that is mostly not written."""
    apart = 2_300_000_000
    try:
        memory = torch.empty(apart + 64)
    except RuntimeError:
        pytest.skip("9 GB of address space cannot be had")
    case = make_case(2, (37,), dtype=torch.float32)
    case.layers = [memory.as_strided((2, 37), (apart, 1)).copy_(case.layers[0])]
    known, index = metric((37,)), [torch.tensor([1, 0, 1])]
    near = [h.clone() for h in case.layers]
    grad = random(1, 3, 4)
    far = memory.as_strided((1, 3, 4), (1, 1, 750_000_000), 64).copy_(grad)  # classes 3 GB apart
    torch.testing.assert_close(
        kernels.class_distances_backward(far, near, *known, index),
        kernels.class_distances_backward(grad, near, *known, index),
    )
    dist2 = kernels.class_distances(case.layers, *known, index)
    plain = kernels.class_distances(near, *known, index)
    torch.testing.assert_close(dist2, plain, rtol=0, atol=0)


def test_a_collapsed_layer_is_never_selected():
    case = make_case(20, (5, 5), dtype=torch.float32)
    means, factors, valid = metric((5, 5))
    dead = [torch.zeros(5, 5), factors[1]]
    for rule in ("confidence", "distance", "opposite"):
        inputs = case.layers, means, dead, valid, T[:2], [None] * 2, None, rule
        assert (kernels.select_layer(*inputs)[0] == 1).all()
        check_choice(*inputs)
        inputs = case.layers, means, 2 * dead[:1], valid, T[:2], [None] * 2, None, rule
        assert (kernels.select_layer(*inputs)[0] == 0).all()


def test_nan_propagates():
    case = make_case(20, (3,), dtype=torch.float32)
    case.layers[0][3, 1] = torch.inf
    known = metric((3,))
    for labels in (case.labels, None):
        *_, score = kernels.select_layer(case.layers, *known, T[:1], [None], labels, "confidence")
        assert torch.equal(torch.isnan(score), torch.arange(20) == 3)


def test_a_class_without_nodes_may_have_any_mean():
    case, known = make_case(20, (5,), dtype=torch.float32), metric((5,))
    plain = kernels.select_layer(case.layers, *known, T[:1], [None], None, "confidence")
    known[0][0][2] = torch.nan
    actual = kernels.select_layer(case.layers, *known, T[:1], [None], None, "confidence")
    torch.testing.assert_close(actual, plain, rtol=0, atol=0)


def test_inputs_that_kernels_cannot_read_raise():
    case, known = make_case(20, (5,), dtype=torch.float32), metric((5,))
    numbers = torch.arange(20)
    with pytest.raises(
        ValueError, match=r"the index of layer 0 is torch.int32 of shape .20,.; pass"
    ):
        kernels.class_distances(case.layers, *known, [numbers.int()])
    with pytest.raises(ValueError, match="labels is not contiguous; pass"):
        kernels.select_layer(case.layers, *known, T[:1], [numbers[:10]], numbers[::2], "confidence")
    on_meta = torch.zeros(20, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="layer is on meta, layer 0 on cpu"):
        kernels.selected_logits(case.layers, case.weights, case.biases, on_meta, [None])


def test_a_scaled_loss_saves_small_gradients():
    """A gradient of 1e-9 underflows in float16 unless the loss is scaled."""
    case = make_case(30, (8,), dtype=torch.float32)
    weights = [1e-8 * weight for weight in case.weights]
    choice, rest = torch.zeros(30, dtype=torch.long), (case.labels, [None], 0.0, [True], False)
    grads = []
    for dtype in (torch.float16, torch.float32):
        h = case.layers[0].half().to(dtype).requires_grad_()
        op = torch.ops.metselect.selected_cross_entropy
        loss, *_ = op([h], weights, case.biases, choice, *rest)
        (2.0**16 * loss).backward()
        grads.append(h.grad)
    assert grads[1].abs().max() / 2**16 < 1e-9
    torch.testing.assert_close(grads[0], grads[1].half(), rtol=0, atol=0)


@pytest.mark.parametrize("number", [-1, 20, 2**40])
def test_numbers_out_of_range(number):
    """No memory is read or written there; the results of that row are NaN."""
    case = make_case(20, (3,), dtype=torch.float32)
    known, index, y = metric((3,)), [torch.tensor([4, number, 5])], torch.tensor([0, 1, 1])
    wrong = torch.tensor([False, True, False])
    dist2 = kernels.class_distances(case.layers, *known, index)[0, :, 0]
    assert torch.equal(dist2.isnan(), wrong)
    *_, score = kernels.select_layer(case.layers, *known, T[:1], index, y, "confidence")
    assert torch.equal(score.isnan(), wrong)
    inside, label = [torch.tensor([4, 6, 5])], torch.tensor([0, number, 1])
    *_, score = kernels.select_layer(case.layers, *known, T[:1], inside, label, "distance")
    assert torch.equal(score.isnan(), wrong)
    choice = torch.zeros(3, dtype=torch.long)
    for rows, labels in ((index, y), (inside, label)):
        decode = case.layers, case.weights, case.biases, choice, labels, rows, 0.0, [True], True
        loss, _, (to_layer,), *_ = kernels.selected_cross_entropy(*decode)
        assert loss.isnan()
        assert set(to_layer.any(1).nonzero().flatten().tolist()) <= {4, 5, 6}


def test_precision_by_name(monkeypatch):
    monkeypatch.setenv("METSELECT_PRECISION", "half")
    case = make_case(5, (3,), dtype=torch.float32)
    with pytest.raises(ValueError, match="METSELECT_PRECISION is 'half'; use ieee, tf32, tf32x3"):
        kernels.class_distances(case.layers, *metric((3,)), [None])
