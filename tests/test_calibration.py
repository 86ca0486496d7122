"""Temperatures and the gate: against a search, scikit-learn, and a case made for each."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression

from metselect_dgl.nn import MetSelectHead
from metselect_dgl.nn.calibration import (
    cross_fit_gate,
    fit_gate,
    fit_temperature,
    gate_features,
    gate_score,
    gate_width,
)


@pytest.mark.parametrize("scale", [0.03, 1.0, 30.0])
def test_temperature_minimises_the_loss(scale):
    torch.manual_seed(0)
    labels = torch.randint(4, (200,))
    logits = scale * (F.one_hot(labels, 4) + torch.randn(3, 200, 4)).double()
    found = fit_temperature(logits, labels)
    for layer, t in zip(logits, found, strict=True):
        best = minimize_scalar(
            lambda u, layer=layer: F.cross_entropy(layer / np.exp(u), labels).item(),
            bounds=(-4.6, 4.6),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert t.log().item() == pytest.approx(best.x, abs=1e-4)


def test_temperature_bounds_and_masked_classes():
    labels = torch.tensor([0, 1, 0, 1, 2])
    sure = 5.0 * F.one_hot(labels, 3).double()
    assert 0.01 <= fit_temperature(sure[None], labels).item() < 0.2  # always right: loss 0
    wrong = 5.0 * F.one_hot((labels + 1) % 3, 3).double()
    assert fit_temperature(wrong[None], labels).item() == pytest.approx(
        100, rel=1e-4
    )  # always wrong
    masked = torch.randn(1, 5, 3, dtype=torch.float64)
    masked[..., 2] = -torch.inf  # the node of class 2 is left out
    expected = fit_temperature(masked[:, :4, :2], labels[:4])
    assert fit_temperature(masked, labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert fit_temperature(masked[:, 4:], labels[4:]).tolist() == [1.0]


def test_gate_is_ridge_logistic_regression():
    torch.manual_seed(0)
    features = torch.randn(2, 150, 4).double() * torch.tensor([1.0, 5.0, 0.1, 1.0])
    right = torch.rand(2, 150) < (features[..., 0] - 0.2 * features[..., 1]).sigmoid()
    gate = fit_gate(features, right)
    for f, r, weights in zip(features.numpy(), right.numpy(), gate.numpy(), strict=True):
        standard = (f - f.mean(0)) / f.std(0)
        model = LogisticRegression(C=1.0, tol=1e-10).fit(standard, r)
        np.testing.assert_allclose(weights[:-1] * f.std(0), model.coef_[0], atol=1e-3)
        expected = model.decision_function(standard)
        np.testing.assert_allclose(f @ weights[:-1] + weights[-1], expected, atol=2e-3)


def test_gate_of_constant_features_and_of_a_perfect_layer():
    features = torch.ones(1, 20, 3)
    gate = fit_gate(features, torch.ones(1, 20, dtype=torch.bool))
    assert torch.isfinite(gate).all()
    assert gate_score(features, gate).gt(3).all()


def test_of_a_deep_network_the_gate_sees_the_layer_itself_and_the_mean(monkeypatch):
    torch.manual_seed(0)
    metric, decoder = torch.randn(2, 5, 9, 3).unbind()
    answer = torch.randint(3, (5, 9))
    pairs = gate_features(metric, decoder, answer).unflatten(-1, (2, 5))  # [5, 9, 2, 5]
    monkeypatch.setattr("metselect_dgl.nn.calibration._PAIRED_LAYERS", 4)
    features = gate_features(metric, decoder, answer)
    assert features.shape == (5, 9, gate_width(5)) == (5, 9, 4)
    torch.testing.assert_close(features[..., :2], pairs.diagonal(dim1=0, dim2=3).permute(2, 0, 1))
    torch.testing.assert_close(features[..., 2:], pairs.mean(-1))


def test_a_deep_network_is_gated_too(monkeypatch):
    monkeypatch.setattr("metselect_dgl.nn.calibration._PAIRED_LAYERS", 2)
    torch.manual_seed(0)
    head = MetSelectHead([6] * 4, 3)
    labels = torch.arange(120) % 3
    layers = [torch.randn(120, 6) + k * F.one_hot(labels, 6) for k in range(4)]
    head(layers, labels=labels, index=torch.arange(60))
    head.calibrate(layers, labels, torch.arange(60, 120))
    assert head.comparer.gate.shape == (4, 5) and head.comparer.gate.any()
    selection, explained = head.eval()(layers), head.explain(layers, torch.tensor([7]))
    assert explained["gated"] and explained["score"].argmax() == selection.layer[7]


def test_gate_features_by_hand():
    """Two layers, one node, two classes: log-odds are differences of logits."""
    metric = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
    decoder = torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]])
    features = gate_features(metric, decoder, torch.tensor([[0], [1]]))
    torch.testing.assert_close(features[:, 0], torch.tensor([[1.0, -2, 4, -8], [-1, 2, -4, 8]]))


def test_cross_fit_does_not_see_the_own_label():
    """A feature that is noise: judged by seen labels it looks useful, held out it does not."""
    torch.manual_seed(0)
    features, right = torch.randn(1, 40, 30).double(), torch.rand(1, 40) < 0.5
    hits = lambda score: ((score > 0) == right).double().mean()  # noqa: E731
    assert hits(gate_score(features, fit_gate(features, right))) > 0.85
    gate, held_out = cross_fit_gate(features, right)
    torch.testing.assert_close(gate, fit_gate(features, right))
    assert hits(held_out) < 0.7
    moved = right.clone()
    moved[0, 7] = ~moved[0, 7]
    changed = (cross_fit_gate(features, moved)[1] - held_out).abs() > 1e-9
    same_fold = torch.arange(40) % 5 == 7 % 5
    assert not changed[0, same_fold].any()
    assert changed[0, ~same_fold].all()


def overconfident(n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Layer 0 is very sure and often wrong; layer 1 is modest and mostly right."""
    y = torch.arange(n) % 2
    sign = (2.0 * y - 1).unsqueeze(1)
    flip = torch.where(torch.rand(n, 1) < 0.35, -1.0, 1.0)
    return [8 * sign * flip + torch.randn(n, 1), 3 * sign + 1.5 * torch.randn(n, 1)], y


def head_on(select: str, train: tuple, **options) -> MetSelectHead:
    head = MetSelectHead((1, 1), 2, select=select, shrinkage=0.0, **options)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        head(train[0], labels=train[1]).loss.backward()
        optimizer.step()
    return head.eval()


@pytest.mark.parametrize("select", ["temperature", "gate", "auto"])
def test_calibration_repairs_overconfidence(select):
    """Moments of clean training nodes, validation nodes of which layer 0 gets a third wrong."""
    torch.manual_seed(0)
    y = torch.arange(200) % 2
    sign = (2.0 * y - 1).unsqueeze(1)
    clean = [8 * sign + torch.randn(200, 1), 3 * sign + 1.5 * torch.randn(200, 1)]
    head = head_on(select, (clean, y))
    (layers, labels), (test, truth) = overconfident(300), overconfident(300)
    before = (head(test).logits.argmax(1) == truth).double().mean()
    selection = head.calibrate(layers, labels)
    after = head(test)
    accuracy = (after.logits.argmax(1) == truth).double().mean()
    assert before < 0.75
    assert accuracy > 0.93
    assert (after.layer == 1).double().mean() > 0.5
    held_out = (selection.logits.argmax(1) == labels).double().mean()
    assert held_out.item() == pytest.approx(accuracy.item(), abs=0.05)


def test_plain_is_not_calibrated():
    torch.manual_seed(0)
    layers, y = overconfident(100)
    head = head_on("plain", (layers, y))
    head.calibrate(layers, y)
    assert head.comparer.temperature.eq(1).all()
    assert not head.sees_all_layers


@pytest.mark.parametrize(("nodes", "gated"), [(39, False), (40, True)])
def test_auto_takes_the_gate_where_nodes_are_enough(nodes, gated):
    """Two layers: a gate has 5 weights for each, so 40 nodes are wanted."""
    torch.manual_seed(0)
    layers, y = overconfident(100)
    head = head_on("auto", (layers, y))
    head.calibrate(layers, y, torch.arange(nodes))
    assert head.comparer.gate.any() == gated
    forced = head_on("gate", (layers, y))
    forced.calibrate(layers, y, torch.arange(nodes))
    assert forced.comparer.gate.any()


def test_one_validation_node():
    torch.manual_seed(0)
    layers, y = overconfident(50)
    head = head_on("auto", (layers, y))
    selection = head.calibrate(layers, y, torch.tensor([3]))
    assert selection.logits.shape == (1, 2)
    assert torch.isfinite(head(layers).score).all()
    with pytest.raises(ValueError, match="10 validation nodes or more, got 1"):
        head_on("gate", (layers, y)).calibrate(layers, y, torch.tensor([3]))


@pytest.mark.parametrize("rule", ["distance", "opposite"])
def test_no_gate_under_another_rule(rule):
    """MetSelect-max must stay the opposite choice."""
    torch.manual_seed(0)
    layers, y = overconfident(100)
    head = head_on("auto", (layers, y), rule=rule)
    head.calibrate(layers, y)
    assert not head.sees_all_layers


def test_gate_never_selects_a_collapsed_layer():
    torch.manual_seed(0)
    layers, y = overconfident(100)
    layers.insert(1, torch.full((100, 1), 2.0))
    head = MetSelectHead((1, 1, 1), 2, select="gate")
    head(layers, labels=y)
    head.eval()
    selection = head.calibrate(layers, y)
    assert not (selection.layer == 1).any()
    assert head.comparer.gate.any()
    assert not (head(layers).layer == 1).any()


def test_many_nodes_are_sampled():
    """The temperature of 30,000 nodes is that of a part of them, and near that of all."""
    draw = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(1, 30_000, 4, generator=draw, dtype=torch.float64)
    labels = (logits[0] / 3).softmax(-1).multinomial(1, generator=draw).squeeze(1)
    found = fit_temperature(logits, labels)
    torch.testing.assert_close(found, fit_temperature(logits[:, ::7], labels[::7]))
    assert abs(found.item() - 3) < 0.3


def test_the_gate_of_many_nodes_is_that_of_a_part():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(1, 25_000, 2, generator=draw, dtype=torch.float64)
    right = torch.rand(1, 25_000, generator=draw) < features[..., 0].sigmoid()
    gate, held_out = cross_fit_gate(features, right)
    torch.testing.assert_close(gate, fit_gate(features[:, ::6], right[:, ::6]))
    assert held_out.shape == (1, 25_000)
    assert (gate[0, 0] - 1).abs() < 0.1
    torch.testing.assert_close(held_out, features[..., 0], atol=0.6, rtol=0)
