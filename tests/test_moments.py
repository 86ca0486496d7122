"""moments: Eq. 2 and 3 against plain formulas, streaming, merging, and extreme scales."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.op_cases import assert_close, make_case
from metselect_dgl import functional as MF
from metselect_dgl import reference
from metselect_dgl.functional.moments import sampled_means
from metselect_dgl.reference import TILE


def pooled(h: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the within-class covariance with denominator |T| - 1, class by class in numpy."""
    scatter = sum(np.cov(h[y == c].T, bias=True) * (y == c).sum() for c in np.unique(y))
    return scatter / (len(y) - 1)


@pytest.mark.parametrize("picked", [None, 40], ids=["all", "picked"])
@pytest.mark.parametrize("n", [9, 63, 130])
def test_means_and_covariances(n, picked):
    case = make_case(n, picked=picked)
    moments = MF.moments(case.layers, case.labels, case.n_classes, index=case.index)
    y = case.labels.numpy()
    assert moments.count.tolist() == np.bincount(y, minlength=4).tolist()
    for h, mean, covariance in zip(
        case.layers, moments.means(), moments.covariances(), strict=True
    ):
        rows = case.picked(h).numpy()
        for c in np.unique(y):
            np.testing.assert_allclose(mean[c], rows[y == c].mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(covariance, pooled(rows, y), rtol=1e-9, atol=1e-9)


def test_by_hand():
    """Two classes in one dimension: means 1 and 5, squared deviations 1+1+4+4 over |T| - 1 = 3."""
    h = torch.tensor([[0.0], [2.0], [3.0], [7.0]])
    moments = MF.moments([h], torch.tensor([0, 0, 1, 1]), 2)
    assert moments.means()[0].tolist() == [[1.0], [5.0]]
    assert moments.covariances()[0].item() == pytest.approx(10 / 3)


@pytest.mark.parametrize("widths", [(3,), (64,)], ids=["D3", "D64"])
def test_float32_over_several_tiles_is_as_good_as_plain_torch(widths):
    case = make_case(3 * TILE + 77, widths, dtype=torch.float32)
    h, y = case.layers[0], case.labels
    covariance = MF.moments([h], y, 4).covariances()[0].float()
    exact = torch.from_numpy(pooled(h.double().numpy(), y.numpy()))
    means = torch.stack([h[y == c].mean(0) for c in range(4)])
    plain = (h - means[y]).T @ (h - means[y]) / (len(y) - 1)
    assert_close(covariance, exact, plain)


@pytest.mark.parametrize("mean", [1e3, 1e4], ids=["mean1e3", "mean1e4"])
def test_far_from_zero(mean):
    """The expanded formula in float32 gives negative variances here."""
    h = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)) + mean
    y = torch.arange(500) % 3
    covariance = MF.moments([h], y, 3).covariances()[0]
    np.testing.assert_allclose(covariance, pooled(h.double().numpy(), y.numpy()), atol=2e-6)


def test_stale_shift():
    """A shift ten deviations away, of an earlier step, costs float32 digits but not the sign."""
    case = make_case(400, widths=(8,), dtype=torch.float32)
    fresh = MF.moments(case.layers, case.labels, 4)
    stale = MF.moments(case.layers, case.labels, 4, shifts=[fresh.shifts[0] + 30.0])
    np.testing.assert_allclose(stale.covariances()[0], fresh.covariances()[0], atol=2e-2)
    np.testing.assert_allclose(stale.means()[0], fresh.means()[0], atol=1e-4)
    assert torch.linalg.eigvalsh(stale.covariances()[0]).min() > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.integers(1, 59), st.integers(0, 999))
def test_merge_is_moments_of_both(n, cut, seed):
    cut = min(cut, n - 1)
    case = make_case(n, widths=(3, 6), seed=seed)
    whole = MF.moments(case.layers, case.labels, 4)
    first, second = (
        MF.moments([h[rows] for h in case.layers], case.labels[rows], 4)
        for rows in (slice(cut), slice(cut, None))
    )
    merged = first.merge(second)
    seen = whole.count > 0
    assert torch.equal(merged.count, whole.count)
    for a, b in zip(merged.means(), whole.means(), strict=True):
        torch.testing.assert_close(a[seen], b[seen], rtol=1e-10, atol=1e-10)
    for a, b in zip(merged.covariances(), whole.covariances(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999))
def test_node_order_does_not_matter(seed):
    case = make_case(50, seed=seed)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
    a = MF.moments(case.layers, case.labels, 4)
    b = MF.moments([h[order] for h in case.layers], case.labels[order], 4)
    for x, y in zip(a.means() + a.covariances(), b.means() + b.covariances(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.integers(-20, 20), st.sampled_from([torch.float32, torch.float64]))
def test_scale(power, dtype):
    """The square of 1e20 overflows float32; the covariance is still right."""
    case = make_case(80, dtype=dtype)
    scale = 10.0**power
    plain = MF.moments(case.layers, case.labels, 4).covariances()
    scaled = MF.moments([h * scale for h in case.layers], case.labels, 4).covariances()
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(b / scale**2, a, rtol=1e-4, atol=1e-5 * a.abs().max().item())


def test_empty_class_and_no_gradient():
    case = make_case(30, empty_class=2)
    layers = [h.requires_grad_() for h in case.layers]
    moments = MF.moments(layers, case.labels, 4)
    assert moments.count[2] == 0
    assert all(torch.isfinite(mean).all() for mean in moments.means())
    assert not any(value.requires_grad for value in moments.sums + moments.grams)


def test_unlabelled_is_refused():
    with pytest.raises(ValueError, match="-1"):
        MF.moments([torch.randn(3, 2)], torch.tensor([0, -1, 1]), 2)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_classes_in_order(order):
    """Later classes are not in the first tile; a shift far from their mean would cost the sign."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat_interleave(3 * TILE)
    y = y if order == "sorted" else y[torch.randperm(len(y), generator=draw)]
    low_rank = torch.randn(len(y), 3, generator=draw) @ torch.randn(3, 16, generator=draw)
    h = low_rank + 100 * torch.randn(3, 16, generator=draw)[y]
    covariance = MF.moments([h], y, 3).covariances()[0]
    smallest = torch.linalg.eigvalsh(covariance)[0] / covariance.diagonal().mean()
    assert smallest > -1e-5
    assert torch.isfinite(MF.whitening(MF.moments([h], y, 3))[0]).all()


def test_near_the_end_of_float32():
    h = 1e38 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    covariance = MF.moments([h], torch.arange(50) % 2, 2).covariances()[0]
    exact = pooled(h.double().numpy(), np.arange(50) % 2)
    np.testing.assert_allclose(covariance, exact, rtol=1e-5, atol=1e-5 * exact.max())


@pytest.mark.parametrize("picked", [None, 40], ids=["all", "picked"])
def test_batch_by_batch(picked):
    """Moments accumulated over batches are those of one pass."""
    case = make_case(90, (5, 8), picked=picked)
    whole = MF.moments(case.layers, case.labels, 4, index=case.index)
    nodes = torch.arange(90) if case.index is None else case.index
    parts = MF.moments(case.layers, case.labels[:7], 4, index=nodes[:7])
    for start in range(7, len(nodes), 20):
        some = slice(start, start + 20)
        parts.add(case.layers, case.labels[some], nodes[some])
    assert torch.equal(parts.count, whole.count)
    for a, b in zip(parts.means(), whole.means(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(parts.covariances(), whole.covariances(), strict=True):
        torch.testing.assert_close(a, b)


def test_moments_of_a_linear_image():
    """Moments of W h + b without computing it, inserted among other layers."""
    case = make_case(90, (5, 8))
    weight, bias = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    direct = MF.moments([case.layers[0] @ weight.T + bias, case.layers[1]], case.labels, 4)
    image = MF.moments(case.layers[:1], case.labels, 4).mapped(weight, bias)
    joined = MF.moments(case.layers[1:], case.labels, 4).with_layer(0, image)
    for a, b in zip(joined.means(), direct.means(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(joined.covariances(), direct.covariances(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_layers_are_summed_in_the_dtype_of_the_shifts(dtype):
    case = make_case(90, (5,), dtype=torch.float32)
    half = [h.to(dtype) for h in case.layers]
    shifts = sampled_means(half, case.labels, 4, [None])
    assert shifts[0].dtype == torch.float32
    _, *ours = reference.moments(half, case.labels, [None], shifts)
    _, *same = reference.moments([h.float() for h in half], case.labels, [None], shifts)
    assert torch.equal(ours[0][0], same[0][0])
    assert torch.equal(ours[1][0], same[1][0])
