"""The emulation of tf32 rounds right, and its bound holds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import tf32
from benchmarks.op_cases import make_case
from benchmarks.tf32 import PRODUCT_ERROR, LayerLogits, certified, product, scores, to_tf32
from metselect_dgl import functional as MF

STEP = 2.0**-10  # of tf32 at 1
ROUNDED = {  # value: (truncated, to nearest)
    1.0: (1.0, 1.0),
    1 + STEP / 2 - 2**-23: (1.0, 1.0),
    1 + STEP / 2: (1.0, 1 + STEP),  # the tie goes away from 0
    1 + STEP - 2**-23: (1.0, 1 + STEP),
    -(1 + STEP / 2): (-1.0, -(1 + STEP)),
    -(1 + STEP * 0.75): (-1.0, -(1 + STEP)),
    2 - 2**-23: (2 - STEP, 2.0),  # the carry reaches the exponent
    0.0: (0.0, 0.0),
    3.140625: (3.140625, 3.140625),  # 11.001001 in binary: nothing to round
    1 / 3: (0.333251953125, 0.333251953125),  # 0x3eaaaaab -> 0x3eaaa000
    0.1: (0.0999755859375, 0.0999755859375),  # 0x3dcccccd -> 0x3dccc000
    0.3: (0.2998046875, 0.300048828125),  # 0x3e99999a -> 0x3e998000, 0x3e99a000
    math.inf: (math.inf, math.inf),
    -math.inf: (-math.inf, -math.inf),
}


@pytest.mark.parametrize(("value", "rounded"), ROUNDED.items(), ids=map(str, ROUNDED))
def test_rounded_by_hand(value, rounded):
    x = torch.tensor([value])
    assert to_tf32(x, "truncate").item() == rounded[0]
    assert to_tf32(x, "nearest").item() == rounded[1]


def test_nan_stays_and_any_layout_will_do():
    x = torch.tensor([[math.nan, 0.3], [0.3, 0.1]])
    assert to_tf32(x, "nearest")[0, 0].isnan()
    assert torch.equal(to_tf32(x.T)[1:], to_tf32(x).T[1:])


def test_ten_bits_are_left():
    """All that is left has at most 11 significant bits, and rounding again changes nothing."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for rounding, unit in (("truncate", tf32.TRUNCATED), ("nearest", tf32.NEAREST)):
        kept = to_tf32(x, rounding)
        mantissa, _ = torch.frexp(kept)
        assert torch.equal(mantissa * 2**11, (mantissa * 2**11).round())
        assert torch.equal(to_tf32(kept, rounding), kept)
        error = ((kept - x).double() / x).abs().max()
        assert 0.9 * unit < error <= unit
    assert (to_tf32(x).abs() <= x.abs()).all()


def test_three_products_by_hand():
    """x = 1 + 2^-12 loses its end in tf32; its two parts have it, and their product but for the
    square of the small one."""
    x = torch.tensor([[1 + 2.0**-12]])
    assert product(x, x, "tf32").item() == 1
    assert product(x, x, "tf32x3").item() == 1 + 2.0**-11
    assert product(x, x, "fp32").item() == 1 + 2.0**-11


@pytest.mark.parametrize("precision", PRODUCT_ERROR)
def test_error_of_one_product(precision):
    """It is within what the bound takes it to be, and not far below."""
    x, y = (torch.rand(400, 1, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = x.double() @ y.double().T
    error = ((product(x, y, precision) - exact) / exact).abs().max()
    rounding = 2.0**-22  # of products and sums in float32
    assert 0.25 * PRODUCT_ERROR[precision] < error <= PRODUCT_ERROR[precision] + rounding


NUMBERS = st.floats(2.0**-40, 2.0**40, width=32) | st.floats(0.5, 2, width=32)
SIGNED = st.tuples(NUMBERS, st.sampled_from([-1.0, 1.0])).map(math.prod) | st.just(0.0)


@st.composite
def layer_logits(draw) -> LayerLogits:
    """Any numbers: the bound knows nothing of where they come from."""
    n, n_classes, width = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 9))

    def numbers(*shape):
        count = math.prod(shape)
        return torch.tensor(draw(st.lists(SIGNED, min_size=count, max_size=count))).view(shape)

    t = torch.tensor(draw(st.floats(0.25, 8, width=32)))
    return LayerLogits(numbers(n, width), numbers(n_classes, width), numbers(n_classes), t)


def assert_within_bound(layer: LayerLogits, labels: torch.Tensor | None = None) -> None:
    exact = scores([layer.double()], "fp32", labels)
    for precision in PRODUCT_ERROR:
        off = (scores([layer], precision, labels).double() - exact).abs().squeeze(0)
        assert (off <= layer.bound(precision)).all(), (precision, off, layer.bound(precision))


@settings(max_examples=100, deadline=None)
@given(layer_logits())
def test_bound_holds_for_any_numbers(layer):
    assert_within_bound(layer)
    assert_within_bound(layer, torch.zeros(len(layer.x), dtype=torch.long))


def worst_case(width: int, n_classes: int = 3) -> LayerLogits:
    """Every operand loses nearly all that truncation can take, with one sign for the first class
    and the other for the second: their errors add up."""
    lossy = 1 + STEP - 2.0**-23
    slope = torch.full((n_classes, width), lossy)
    slope[1:] *= -1
    return LayerLogits(torch.full((1, width), lossy), slope, torch.zeros(n_classes), torch.ones(()))


@pytest.mark.parametrize("width", [1, 16, 64, 256])
def test_bound_is_nearly_reached(width):
    layer = worst_case(width)
    assert_within_bound(layer)
    exact = scores([layer.double()], "fp32", None)
    off = (scores([layer], "tf32", None) - exact).abs().item()
    assert 0.9 * layer.bound("tf32").item() < off


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6], ids=["round", "flat", "collinear"])
def test_bound_holds_for_distances(spread):
    """Of a metric made of data, well and badly conditioned, and far from the origin."""
    case = make_case(300, (37,), 4, dtype=torch.float32)
    case.layers[0][:, 20:] = case.layers[0][:, :17] + spread * case.layers[0][:, 20:]
    case.layers[0] += 100
    layer = LayerLogits.of(*first_layer(case), torch.ones(()))
    assert_within_bound(layer)
    assert_within_bound(layer, case.labels)


def first_layer(case) -> tuple:
    metric = case.metric()
    return case.layers[0], metric["means"][0], metric["factors"][0], metric["valid"]


def test_logits_are_those_of_the_package():
    case = make_case(80, (9,), 4, empty_class=2)
    h, mean, factor, valid = first_layer(case)
    t = torch.tensor(1.7, dtype=torch.float64)
    found = LayerLogits.of(h, mean, factor, valid, t).logits("fp32")
    metric = {"valid": valid, "temperature": t.unsqueeze(0)}
    expected = MF.metric_logits([h], [mean], [factor], **metric)[0][:, valid]
    torch.testing.assert_close(found, expected)
    _, _, score = MF.select_layer([h], [mean], [factor], **metric)
    own = scores([LayerLogits.of(h, mean, factor, valid, t)], "fp32", None)
    torch.testing.assert_close(own[0], score)


def close_layers(seed: int) -> list[LayerLogits]:
    """Two layers, from node to node less alike: the first nodes cannot be certain."""
    case = make_case(400, (24,), 4, dtype=torch.float32, seed=seed)
    h, *rest = first_layer(case)
    noise = torch.randn(h.shape, generator=torch.Generator().manual_seed(seed))
    other, t = h + torch.logspace(-3, 1, len(h)).unsqueeze(1) * noise, torch.ones(())
    return [LayerLogits.of(each, *rest, t) for each in (h, other)]


@pytest.mark.parametrize("seed", range(5))
def test_certain_nodes_keep_their_layer(seed):
    layers = close_layers(seed)
    plain = scores(layers, "fp32", None)
    for precision in PRODUCT_ERROR:
        sure = certified(layers, plain, precision)
        changed = scores(layers, precision, None).argmax(0) != plain.argmax(0)
        assert not (sure & changed).any(), precision
        assert sure.any(), precision
    sure = certified(layers, plain, "tf32")
    assert not sure.all()
    assert (certified(layers, plain, "tf32x3") | ~sure).all()


def test_there_are_nodes_that_change():
    """Else the test above would say nothing."""
    changed = 0
    for seed in range(5):
        layers = close_layers(seed)
        plain, found = (scores(layers, precision, None) for precision in ("fp32", "tf32"))
        changed += (plain.argmax(0) != found.argmax(0)).sum().item()
    assert changed > 0


def test_collinear_features_are_the_bad_case():
    """tf32 errs there by more than a tenth in the log-odds, tf32x3 and fp32 do not."""
    largest = dict.fromkeys(PRODUCT_ERROR)
    for precision, row in zip(largest, tf32.bad_rows(), strict=True):
        largest[precision] = float(row.split()[-2])
    assert min(largest["tf32"], largest["tf32 nearest"]) > 0.1
    assert max(largest["tf32x3"], largest["fp32"]) < 1e-3


def test_study_runs(monkeypatch, capsys):
    """On data that every checkout has; the model that is left is the one that was trained."""
    monkeypatch.setattr("sys.argv", ["tf32", "hop_chain", "--epochs", "8"])
    tf32.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "hop_chain" in line]
    assert len(rows) == 2 * len(PRODUCT_ERROR)
    by_name = {row[1] + row[2] * (row[2] == "nearest"): row for row in rows[:4]}
    layer_changes, certain = (
        {name: float(row[at]) for name, row in by_name.items()} for at in (-6, -5)
    )
    assert layer_changes["fp32"] == 0
    for name in by_name:
        assert layer_changes[name] <= 100 - certain[name] + 0.1, name
    assert certain["tf32"] <= certain["tf32nearest"] <= certain["tf32x3"]
