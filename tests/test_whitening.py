"""whitening: shrinkage against scikit-learn, and data on which a plain Cholesky fails."""

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf, oas

from benchmarks.op_cases import make_case
from metselect_dgl import functional as MF


def centred(case):
    """Return the moments and the rows minus their class means, the input for scikit-learn."""
    moments = MF.moments(case.layers, case.labels, case.n_classes)
    pairs = zip(case.layers, moments.means(), strict=True)
    return moments, [(h - mean[case.labels]).numpy() for h, mean in pairs]


def shrunk(covariance: np.ndarray, rho: float) -> np.ndarray:
    width = len(covariance)
    return (1 - rho) * covariance + rho * np.trace(covariance) / width * np.eye(width)


@pytest.mark.parametrize("n", [12, 63, 400], ids=["fewer-than-D", "about-D", "many"])
@pytest.mark.parametrize("kind", ["oas", "ledoit_wolf"])
def test_shrinkage_is_scikit_learns(kind, n):
    case = make_case(n)
    moments, rows = centred(case)
    fourth = MF.fourth_moments(case.layers, case.labels, moments.means())
    factors = MF.whitening(moments, kind, fourth=fourth)
    for factor, residual in zip(factors, rows, strict=True):
        estimate, _ = (ledoit_wolf if kind == "ledoit_wolf" else oas)(
            residual, assume_centered=True
        )
        estimate = estimate * n / (n - 1)  # scikit-learn divides by n
        inverse = (factor.T @ factor).numpy()
        np.testing.assert_allclose(inverse @ estimate, np.eye(len(factor)), atol=1e-9)
        assert torch.equal(factor, factor.tril())


@pytest.mark.parametrize("rho", [0, 0.1, 1.0])
def test_number(rho):
    case = make_case(100)
    moments, _ = centred(case)
    for factor, covariance in zip(MF.whitening(moments, rho), moments.covariances(), strict=True):
        product = (factor.T @ factor).numpy() @ shrunk(covariance.numpy(), rho)
        np.testing.assert_allclose(product, np.eye(len(factor)), atol=1e-8)


def test_by_hand():
    """Variance 4 in one dimension: R = 1/2."""
    h = torch.tensor([[-2.0], [2.0], [0.0], [-2.0], [2.0]])
    factor = MF.whitening(MF.moments([h], torch.zeros(5, dtype=torch.long), 1), 0.0)[0]
    assert factor.item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("shrinkage", ["oas", 0.0])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("kind", ["collinear", "dead", "fewer-nodes-than-dimensions"])
def test_degenerate_layers_stay_finite(kind, scale, shrinkage):
    case = make_case(20 if kind.startswith("fewer") else 200, widths=(32,), dtype=torch.float32)
    h = case.layers[0].clone()
    if kind == "collinear":
        h[:, 1::2] = 2 * h[:, ::2]
    if kind == "dead":
        h[:, 3:9] = 0
    h = h * scale
    moments = MF.moments([h], case.labels, 4)
    factor = MF.whitening(moments, shrinkage)[0].float()
    dist2 = MF.class_distances([h], [moments.means()[0].float()], [factor])
    own = dist2[0, torch.arange(len(h)), case.labels]
    assert torch.isfinite(dist2).all()
    assert own.mean() <= 1.01 * 32  # the mean of d2 over the training nodes is at most D
    assert own.mean() > 1


def test_scale_does_not_change_the_selection():
    """An absolute lower bound of the eigenvalues would change it."""
    case = make_case(60, dtype=torch.float32)
    plain = MF.select_layer(case.layers, **case.metric())
    case.layers[1] = case.layers[1] * 1e-6
    assert torch.equal(MF.select_layer(case.layers, **case.metric())[0], plain[0])


def test_collapsed_layer_is_zero():
    constant = torch.full((30, 4), 7.3)
    noise = constant * (1 + 1e-8 * torch.randn(30, 4))  # all rounding
    y = torch.arange(30) % 3
    for factor in MF.whitening(MF.moments([constant, noise], y, 3)):
        assert not factor.any()


def test_one_node_a_class():
    """The covariance is 0: distances are relative to the spread of the means."""
    h = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    moments = MF.moments([h], torch.arange(3), 3)
    factor = MF.whitening(moments)[0]
    dist2 = MF.class_distances([h.double()], moments.means(), [factor])[0]
    assert torch.isfinite(dist2).all()
    assert dist2.argmin(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [-0.1, 1.5, "lasso", "auto", True, None])
def test_unknown_shrinkage(value):
    moments, _ = centred(make_case(30))
    with pytest.raises(ValueError, match="shrinkage"):
        MF.whitening(moments, value)


def test_ledoit_wolf_needs_fourth_moments():
    moments, _ = centred(make_case(30))
    with pytest.raises(ValueError, match="fourth"):
        MF.whitening(moments, "ledoit_wolf")


@pytest.mark.parametrize("width", [2, 3, 5])
def test_rank_one_without_shrinkage(width):
    """The error of float32 sums is larger than one rounding unit of the variance."""
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        h = torch.randn(4000, 1, generator=draw) @ torch.randn(1, width, generator=draw)
        factor = MF.whitening(MF.moments([h], torch.arange(4000) % 2, 2), 0.0)[0]
        assert torch.isfinite(factor).all()


def test_floor_is_a_layers_own():
    case = make_case(60, (2, 512), dtype=torch.float32)
    case.layers[0][:, 1] = case.layers[0][:, 0]
    both = MF.whitening(MF.moments(case.layers, case.labels, 4), 0.0)
    alone = MF.whitening(MF.moments(case.layers[:1], case.labels, 4), 0.0)
    torch.testing.assert_close(both[0], alone[0])


def test_one_large_constant_column_does_not_hide_the_others():
    case = make_case(90, (8,), dtype=torch.float32)
    h = 0.01 * case.layers[0]
    h[:, 7] = 1e5
    assert MF.whitening(MF.moments([h], case.labels, 4))[0].any()
