"""select_layer and metric_logits: worked examples, LDA posteriors, rules, ties, collapse."""

import math

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from metselect_dgl import functional as MF
from metselect_dgl.testing import make_case

# One dimension, unit variance, class means 0 and 2; a node at 0.5 (layer 0) and at 0.1 (layer 1).
HAND = {
    "layers": [torch.tensor([[0.5]]), torch.tensor([[0.1]])],
    "means": 2 * [torch.tensor([[0.0], [2.0]])],
    "factors": 2 * [torch.eye(1)],
}


@pytest.mark.parametrize(
    ("options", "layer", "score"),
    [
        # log-odds of class 0 = (d2_1 - d2_0) / 2 = (2.25 - .25) / 2 and (3.61 - .01) / 2
        ({}, 1, 1.8),
        ({"labels": torch.tensor([0])}, 1, 1.8),
        ({"labels": torch.tensor([1])}, 0, -1.0),
        ({"temperature": torch.tensor([1.0, 3.6])}, 0, 1.0),
        ({"rule": "distance"}, 1, -0.01),
        ({"rule": "distance", "labels": torch.tensor([1])}, 0, -2.25),
        ({"rule": "opposite"}, 0, 1.0),
        ({"rule": "opposite", "labels": torch.tensor([1])}, 1, -1.8),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_by_hand(options, layer, score):
    selected, answer, actual = MF.select_layer(**HAND, **options)
    assert selected.item() == layer
    assert answer.item() == 0
    assert actual.item() == pytest.approx(score, abs=1e-6)


def test_posterior_is_that_of_lda():
    """With equal class sizes LDA's posterior is the softmax of -d2/2 up to the covariance's dof."""
    case = make_case(80, widths=(6,))
    case.labels = torch.arange(80) % 4
    lda = LinearDiscriminantAnalysis(solver="lsqr", priors=[0.25] * 4)
    h, y = case.layers[0].numpy(), case.labels.numpy()
    lda.fit(h, y)
    metric = case.metric(0.0)
    logits = MF.metric_logits(case.layers, **metric, temperature=torch.tensor([79 / 80]).double())
    np.testing.assert_allclose(logits[0].softmax(-1), lda.predict_proba(h), atol=1e-9)


def test_linear_logits_are_the_distances():
    case = make_case(63, empty_class=2)
    metric, t = case.metric(), torch.tensor([0.7, 2.0]).double()
    dist2 = MF.class_distances(case.layers, **metric)
    expected = (-dist2 / (2 * t[:, None, None])).log_softmax(-1)
    actual = MF.metric_logits(case.layers, **metric, temperature=t).log_softmax(-1)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("phase", ["training", "inference"])
@pytest.mark.parametrize("picked", [None, 30], ids=["all", "picked"])
@pytest.mark.parametrize("rule", ["confidence", "distance", "opposite"])
def test_rules_from_the_distances(rule, picked, phase):
    case = make_case(63, (5, 37, 8), picked=picked, empty_class=3)
    metric, t = case.metric(), torch.tensor([1.0, 2.0, 0.5]).double()
    labels = case.labels if phase == "training" else None
    layer, answer, score = MF.select_layer(
        case.layers, **metric, temperature=t, index=case.index, labels=labels, rule=rule
    )
    dist2 = MF.class_distances(case.layers, **metric, index=case.index)
    logits = -dist2 / (2 * t[:, None, None])
    nodes = torch.arange(len(case.labels))
    asked = dist2.argmin(-1) if labels is None else labels.expand(3, -1)
    pick = lambda values: values.gather(-1, asked.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    if rule == "distance":
        expected = pick(dist2).argmin(0)
    else:
        others = logits.scatter(-1, asked.unsqueeze(-1), -torch.inf).logsumexp(-1)
        odds = pick(logits) - others
        expected = odds.argmax(0) if rule == "confidence" else odds.argmin(0)
        torch.testing.assert_close(score, odds[layer, nodes], rtol=1e-6, atol=1e-6)
    assert torch.equal(layer, expected)
    assert torch.equal(answer, dist2[layer, nodes].argmin(-1))


def test_log_odds_do_not_saturate():
    """float32 probabilities are 1.0 in both layers; the log-odds still differ."""
    logits = torch.tensor([[0.0, -40.0, -50.0], [0.0, -60.0, -55.0]])
    assert (logits.softmax(-1)[:, 0] == 1).all()
    odds = MF.log_odds(logits)
    assert odds[:, 0].tolist() == pytest.approx(
        [40 - math.log1p(math.exp(-10)), 55 - math.log1p(math.exp(-5))], rel=1e-6
    )
    small = MF.log_odds(torch.tensor([0.3, 0.1, -0.2]).double())
    p = torch.tensor([0.3, 0.1, -0.2]).double().softmax(0)
    torch.testing.assert_close(small, (p / (1 - p)).log())


@pytest.mark.parametrize(
    "labels", [None, torch.zeros(50, dtype=torch.long)], ids=["infer", "train"]
)
@pytest.mark.parametrize("rule", MF.RULES)
def test_collapsed_layer_is_never_selected(rule, labels):
    """All means equal and K = 0: every distance is 0, which a plain argmin would select."""
    case = make_case(50, widths=(4, 4, 4))
    case.layers[1] = torch.full_like(case.layers[1], 3.0)
    layer, _, score = MF.select_layer(case.layers, **case.metric(), labels=labels, rule=rule)
    assert not (layer == 1).any()
    assert torch.isfinite(score).all()


def test_only_collapsed_layers():
    layers = [torch.ones(9, 2), torch.ones(9, 2)]
    moments = MF.moments(layers, torch.arange(9) % 3, 3)
    means = [mean.float() for mean in moments.means()]
    factors = [factor.float() for factor in MF.whitening(moments)]
    layer, _, score = MF.select_layer(layers, means, factors)
    assert layer.eq(0).all()
    assert score.tolist() == pytest.approx([-math.log(2)] * 9)


def test_equal_layers_go_to_the_shallower():
    case = make_case(50, widths=(4,))
    case.layers = [case.layers[0], case.layers[0].clone()]
    assert MF.select_layer(case.layers, **case.metric())[0].eq(0).all()


def test_missing_class_is_never_the_answer():
    case = make_case(200, empty_class=1)
    _, answer, score = MF.select_layer(case.layers, **case.metric())
    assert not (answer == 1).any()
    assert torch.isfinite(score).all()


def test_far_outlier_keeps_its_digits():
    """The difference between classes is below the rounding of float32 distances of 1e10."""
    case = make_case(300, widths=(8,), dtype=torch.float32)
    metric = case.metric()
    far = [case.layers[0][:5] * 1e5]
    low = MF.metric_logits(far, **metric).double().log_softmax(-1)
    double = {name: [v.double() for v in metric[name]] for name in ("means", "factors")}
    high = MF.metric_logits([far[0].double()], **double).log_softmax(-1)
    torch.testing.assert_close(low, high, rtol=1e-5, atol=1e-2)


def test_unknown_rule_and_no_nodes():
    case = make_case(20)
    with pytest.raises(ValueError, match="nearest"):
        MF.select_layer(case.layers, **case.metric(), rule="nearest")
    none = MF.select_layer(case.layers, **case.metric(), index=torch.zeros(0, dtype=torch.long))
    assert [len(part) for part in none] == [0, 0, 0]
