"""Figures of a run: F1 against scikit-learn, fixed layers and oracles on a case done by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score

from metselect_dgl.config import Config
from metselect_dgl.data import NodeDataset
from metselect_dgl.nn import Selection
from metselect_dgl.train import prepare, train
from metselect_dgl.train.evaluate import SHUFFLES, accuracy, layer_report, scores

draw = np.random.default_rng(0)
CASES = {
    # predictions, labels
    "random-3-classes": (draw.integers(3, size=100), draw.integers(3, size=100)),
    "random-40-classes": (draw.integers(40, size=500), draw.integers(40, size=500)),
    "mostly-right": (np.arange(80) % 5, np.where(np.arange(80) % 7, np.arange(80) % 5, 2)),
    "class-never-predicted": (np.array([0, 0, 1, 1, 1]), np.array([0, 1, 2, 2, 1])),
    "class-absent": (np.array([3, 0, 1, 3]), np.array([0, 0, 1, 1])),
    "class-in-neither": (np.array([0, 5, 5]), np.array([0, 0, 5])),
    "all-right": (np.array([0, 1, 2]), np.array([0, 1, 2])),
    "all-wrong": (np.array([1, 2, 0]), np.array([0, 1, 2])),
    "one-class": (np.array([2, 2]), np.array([2, 2])),
    "one-node": (np.array([0]), np.array([1])),
}


@pytest.mark.parametrize(("predicted", "labels"), CASES.values(), ids=CASES)
def test_scores_are_those_of_scikit_learn(predicted, labels):
    ours = scores(torch.from_numpy(predicted), torch.from_numpy(labels))
    theirs = {
        "accuracy": accuracy_score(labels, predicted),
        "macro_f1": f1_score(labels, predicted, average="macro", zero_division=0),
        "weighted_f1": f1_score(labels, predicted, average="weighted", zero_division=0),
    }
    # both are sums of float64 numbers below 1, in another order
    assert ours == pytest.approx(theirs, rel=0, abs=16 * np.finfo(float).eps)


def test_scores_by_hand():
    """F1 of the classes 0, 1, 2: 2/3, 1/2, 2/3; they have 1, 3 and 1 of the nodes."""
    found = scores(torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 2]))
    by_hand = {"accuracy": 3 / 5, "macro_f1": 11 / 18, "weighted_f1": 17 / 30}
    assert found == pytest.approx(by_hand, rel=0, abs=4 * np.finfo(float).eps)


def test_accuracy_of_nothing_is_not_a_number():
    nothing = torch.empty(0, dtype=torch.int64)
    assert math.isnan(accuracy(nothing, nothing))


def dataset(labels, types=None) -> NodeDataset:
    """Nodes without edges, all of them for test."""
    n_nodes = len(labels)
    none = torch.zeros(1, n_nodes, dtype=torch.bool)
    return NodeDataset(
        "by hand",
        dgl.graph(([], []), num_nodes=n_nodes),
        torch.zeros(n_nodes, 1),
        torch.as_tensor(labels),
        4,
        *(none, none, ~none),
        node_type=None if types is None else torch.as_tensor(types),
    )


def model_that_answers(answers):
    """A model whose layers' decoders give `answers` [L, N]."""
    logits = None if answers is None else F.one_hot(torch.as_tensor(answers), 4).double()
    head = SimpleNamespace(
        n_choices=3,
        layer_logits=lambda index: None if logits is None else logits[:, index],  # rows by number
    )
    return SimpleNamespace(head=head)


def choice(predicted, layer=None) -> Selection:
    layer = torch.zeros(len(predicted), dtype=torch.int64) if layer is None else layer
    logits = F.one_hot(torch.as_tensor(predicted), 4).double()
    return Selection(logits, torch.as_tensor(layer), torch.zeros(len(predicted)))


# The first two nodes are not asked about; below, "node" counts the other eight.
LABELS = [3, 3, 0, 0, 1, 1, 2, 2, 3, 3]
ANSWERS = [
    [3, 3, 1, 1, 1, 1, 1, 1, 1, 1],  # right on nodes 2, 3
    [0, 0, 1, 2, 1, 1, 2, 2, 3, 0],  # right on nodes 2 to 6
    [3, 3, 0, 0, 0, 0, 0, 0, 0, 0],  # right on nodes 0, 1
]
CHOSEN = [3, 3, 0, 1, 1, 1, 2, 2, 3, 0]  # right on all nodes but 1 and 7
LAYER = [0, 0, 2, 0, 1, 1, 1, 1, 1, 2]
TYPES = [0, 0, 0, 0, 0, 0, 1, 1, 2, 2]
ASKED = torch.tensor([9, 2, 3, 4, 5, 6, 7, 8])


def test_report_by_hand():
    report = layer_report(
        model_that_answers(ANSWERS), choice(CHOSEN, LAYER), dataset(LABELS, TYPES), ASKED, ASKED
    )
    assert report == {
        "layer_share": [1 / 8, 5 / 8, 2 / 8],
        "layer_share_by_type": [[1 / 4, 2 / 4, 1 / 4], [0, 1, 0], [0, 1 / 2, 1 / 2]],
        "fixed": [2 / 8, 5 / 8, 2 / 8],
        "oracle": 7 / 8,
        # the other layers give every node the same answer: shuffling changes nothing
        "lucky_oracle": 7 / 8,
        "realised": (6 / 8 - 5 / 8) / (7 / 8 - 5 / 8),
    }


def test_report_of_a_type_that_no_asked_node_has():
    """Type 1 keeps its row, so that the third row still is type 2."""
    types = [1, 1, 0, 0, 0, 0, 2, 2, 2, 2]
    report = layer_report(
        model_that_answers(ANSWERS), choice(CHOSEN, LAYER), dataset(LABELS, types), ASKED, ASKED
    )
    assert report["layer_share_by_type"] == [[1 / 4, 2 / 4, 1 / 4], [0, 0, 0], [0, 3 / 4, 1 / 4]]


def test_report_without_types():
    report = layer_report(
        model_that_answers(ANSWERS), choice(CHOSEN, LAYER), dataset(LABELS), ASKED, ASKED
    )
    assert "layer_share_by_type" not in report


def test_report_without_decoders():
    report = layer_report(
        model_that_answers(None), choice(CHOSEN, LAYER), dataset(LABELS), ASKED, ASKED
    )
    assert report == {"layer_share": [1 / 8, 5 / 8, 2 / 8]}


@pytest.mark.parametrize(
    ("answers", "chosen", "realised"),
    [
        ([[0, 1, 2, 0], [3, 3, 3, 3], [3, 3, 3, 3]], [0, 1, 2, 3], 1.0),
        ([[0, 1, 2, 0], [3, 3, 3, 3], [3, 3, 3, 3]], [0, 0, 0, 0], -2.0),
        ([[0, 1, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0]], [0, 1, 2, 0], None),
    ],
    ids=["all-of-it", "worse-than-the-best-layer", "nothing-to-gain"],
)
def test_realised(answers, chosen, realised):
    report = layer_report(
        model_that_answers(answers),
        choice(chosen),
        dataset([0, 1, 2, 3]),
        torch.arange(4),
        torch.arange(4),
    )
    assert report["realised"] == realised


def test_lucky_oracle_is_what_chance_gives():
    """The second layer knows exactly what the first does not; shuffled, it guesses.

    Over all orders of its answers, a node that the first layer gets wrong is right with the
    frequency of its class among them; the mean of the shuffles is within 4 standard errors.
    """
    n = 4000
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (n,), generator=random)
    known = torch.rand(n, generator=random) < 0.6
    first = torch.where(known, labels, (labels + 1) % 4)
    second = torch.where(known, (labels + 2) % 4, labels)
    frequency = torch.bincount(second, minlength=4).double() / n
    guess = frequency[labels[~known]]
    expected = known.double().mean() + guess.sum() / n
    error = (guess * (1 - guess)).sum().sqrt() / n / math.sqrt(SHUFFLES)
    model = model_that_answers(torch.stack([first, second]))
    report = layer_report(model, choice(first), dataset(labels), torch.arange(n), torch.arange(n))
    assert report["oracle"] == 1
    assert abs(report["lucky_oracle"] - expected) < 4 * error
    again = layer_report(model, choice(first), dataset(labels), torch.arange(n), torch.arange(n))
    assert again["lucky_oracle"] == report["lucky_oracle"]


MODELS = {
    "attn": {"selector": "attn"},
    "jknet-metselect": {"selector": "jknet-metselect"},
    "metselect": {},
    "metselect-gate": {"select": "gate"},
    "metselect-max": {"selector": "metselect-max"},
    "metselect-paper": {"selector": "metselect-paper"},
    "metselect-posterior": {"loss": "posterior"},
    "metselect-distance": {"loss": "distance"},
    "ndls": {"selector": "ndls", "eps": 0.3},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_the_choice_is_one_of_the_fixed_answers(small, changes):
    """A node's prediction is what its chosen layer says, so no choice can beat the oracle."""
    config = Config(hidden=16, epochs=4, **changes)
    run = train(config, small, progress=False)
    assert run.metrics["oracle"] >= max(*run.metrics["fixed"], run.metrics["test"]["accuracy"])
    data = prepare(config, small)
    with torch.no_grad():
        layers = run.model.backbone(data.graph, data.feat)
        answers = run.model.head.layer_logits(layers).argmax(-1)  # [L, N]
    of_chosen = answers.gather(0, run.selection.layer.unsqueeze(0)).squeeze(0)
    assert torch.equal(of_chosen, run.selection.logits.argmax(1))


def test_a_fixed_layer_never_answers_a_class_without_training_node(small):
    """Nearly untrained decoders would often say 4, as the model as a whole never does."""
    data = replace(small, train_masks=small.train_masks & (small.labels != 4))
    config = Config(hidden=16, epochs=1, lr=1e-6)
    with pytest.warns(UserWarning, match="class 4 has no labelled node"):
        run = train(config, data, progress=False)
    assert 4 not in run.selection.logits.argmax(1)
    seen, test = prepare(config, data), data.split(0).test
    with torch.no_grad():
        logits = run.model.head.layer_logits(run.model.backbone(seen.graph, seen.feat), test)
    right = logits[..., :4].argmax(-1) == data.labels[test]  # [L, n]
    assert run.metrics["fixed"] == right.double().mean(1).tolist()
