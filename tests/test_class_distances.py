"""class_distances: against scipy, invariances, and the gradient."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import mahalanobis

from benchmarks.op_cases import assert_close, gradients, make_case
from metselect_dgl import functional as MF


@pytest.mark.parametrize("picked", [None, 20], ids=["all", "picked"])
def test_scipy(picked):
    case = make_case(63, picked=picked)
    metric = case.metric(0.1)
    dist2 = MF.class_distances(case.layers, **metric, index=case.index)
    for depth, h in enumerate(case.layers):
        factor, mean = metric["factors"][depth].numpy(), metric["means"][depth].numpy()
        inverse = factor.T @ factor
        for i, row in enumerate(case.picked(h)[:10].numpy()):
            expected = [mahalanobis(row, mean[c], inverse) ** 2 for c in range(4)]
            np.testing.assert_allclose(dist2[depth, i], expected, rtol=1e-9)


@pytest.mark.parametrize("widths", [(5,), (37, 64), (64, 5, 37)], ids=str)
@pytest.mark.parametrize("n", [1, 63, 130])
def test_float32_is_as_good_as_plain_torch(n, widths):
    case = make_case(130, widths)
    metric = case.metric()
    exact = MF.class_distances([h[:n] for h in case.layers], **metric)
    low = [[value.float() for value in metric[name]] for name in ("means", "factors")]
    layers = [h[:n].float() for h in case.layers]
    actual = MF.class_distances(layers, *low)
    plain = torch.stack(
        [
            ((h[:, None] - mean) @ factor.T).square().sum(-1)
            for h, mean, factor in zip(layers, *low, strict=True)
        ]
    )
    assert_close(actual, exact, plain)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9999))
def test_affine_invariance(seed):
    """h -> W h + b with an invertible W does not change distances, so the paper's transform has no
    effect."""
    case = make_case(80, widths=(6,), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 6, generator=draw, dtype=torch.float64) + 3 * torch.eye(6)
    covariance = MF.moments(case.layers, case.labels, 4).covariances()[0]
    assume(torch.linalg.cond(w) < 1e3 and torch.linalg.cond(covariance) < 1e6)
    plain = MF.class_distances(case.layers, **case.metric(0.0))
    case.layers = [case.layers[0] @ w.T + 5]
    moved = MF.class_distances(case.layers, **case.metric(0.0))
    torch.testing.assert_close(moved, plain, rtol=1e-6, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(-20, 20))
def test_scale(power):
    case = make_case(60, dtype=torch.float32)
    plain = MF.class_distances(case.layers, **case.metric())
    case.layers = [h * 10.0**power for h in case.layers]
    torch.testing.assert_close(
        MF.class_distances(case.layers, **case.metric()), plain, rtol=1e-3, atol=1e-3
    )


def test_order_of_nodes():
    case = make_case(60)
    metric, order = case.metric(), torch.randperm(60)
    a = MF.class_distances(case.layers, **metric)[:, order]
    b = MF.class_distances([h[order] for h in case.layers], **metric)
    torch.testing.assert_close(a, b)


def test_missing_class_is_infinitely_far():
    case = make_case(60, empty_class=1)
    dist2 = MF.class_distances(case.layers, **case.metric())
    assert torch.isinf(dist2[..., 1]).all()
    assert torch.isfinite(dist2[..., [0, 2, 3]]).all()


@pytest.mark.parametrize("picked", [None, 5], ids=["all", "picked-twice"])
@pytest.mark.parametrize("empty_class", [None, 1], ids=["full", "empty-class"])
def test_gradcheck(picked, empty_class):
    case = make_case(6, widths=(3, 5), picked=picked, empty_class=empty_class)
    metric = {**make_case(60, widths=(3, 5), empty_class=empty_class).metric()}

    def finite(*layers):
        return MF.class_distances(layers, **metric, index=case.index)[..., metric["valid"]]

    assert torch.autograd.gradcheck(finite, [h.requires_grad_() for h in case.layers])


def test_gradient_is_that_of_autograd_through_the_formula():
    case = make_case(63)
    metric = case.metric()
    del metric["valid"]

    def formula(*layers):
        triples = zip(layers, metric["means"], metric["factors"], strict=True)
        return torch.stack([((h[:, None] - m) @ r.T).square().sum(-1) for h, m, r in triples])

    ours = gradients(lambda *layers: MF.class_distances(layers, **metric), case.layers)
    for a, b in zip(ours, gradients(formula, case.layers), strict=True):
        torch.testing.assert_close(a, b)


def test_strided_layers_and_no_nodes():
    case = make_case(60, widths=(6,))
    metric = case.metric()
    strided = torch.empty(6, 60, dtype=torch.float64).T.copy_(case.layers[0])
    torch.testing.assert_close(
        MF.class_distances([strided], **metric), MF.class_distances(case.layers, **metric)
    )
    none = torch.zeros(0, dtype=torch.long)
    assert MF.class_distances(case.layers, **metric, index=none).shape == (1, 0, 4)
