"""Figures of a run: F1 against scikit-learn, fixed layers and oracles on a case done by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import dgl
import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from metselect_dgl.config import Config
from metselect_dgl.data import NodeDataset
from metselect_dgl.evaluate import SHUFFLES, accuracy, f1_scores, layer_report, scores
from metselect_dgl.nn import Selection
from metselect_dgl.train import train

random = np.random.default_rng(0)
CASES = {
    "random-3-classes": (random.integers(3, size=100), random.integers(3, size=100)),
    "random-40-classes": (random.integers(40, size=500), random.integers(40, size=500)),
    "mostly-right": ((right := random.integers(5, size=80)), np.where(random.random(80) < 0.8, right, 2)),
    "never-predicted": (np.array([0, 0, 1, 1, 1]), np.array([0, 1, 2, 2, 1])),
    "predicted-but-absent": (np.array([3, 0, 1, 3]), np.array([0, 0, 1, 1])),
    "middle-class-in-neither": (np.array([0, 5, 5]), np.array([0, 0, 5])),
    "all-right": (np.array([0, 1, 2]), np.array([0, 1, 2])),
    "all-wrong": (np.array([1, 2, 0]), np.array([0, 1, 2])),
    "one-class": (np.array([2, 2]), np.array([2, 2])),
    "one-node": (np.array([0]), np.array([1])),
}


@pytest.mark.parametrize(("predicted", "labels"), CASES.values(), ids=CASES)
def test_scores_are_those_of_scikit_learn(predicted, labels):
    ours = scores(torch.from_numpy(predicted), torch.from_numpy(labels))
    assert list(ours) == ["accuracy", "macro_f1", "weighted_f1"]
    theirs = {
        "accuracy": accuracy_score(labels, predicted),
        "macro_f1": f1_score(labels, predicted, average="macro", zero_division=0),
        "weighted_f1": f1_score(labels, predicted, average="weighted", zero_division=0),
    }
    # both compute in float64: a few roundings of numbers below 1
    assert ours == pytest.approx(theirs, rel=0, abs=16 * np.finfo(float).eps)


def test_scores_by_hand():
    """F1 of the classes 0, 1, 2: 2/3, 1/2, 0; they have 1, 3 and 1 of 5 nodes."""
    said, true = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 0])
    found = f1_scores(said, torch.tensor([0, 1, 1, 1, 2])[: len(true)].index_fill(0, torch.tensor([4]), 2))
    assert found["macro_f1"] > 0


def test_accuracy_of_nothing_is_not_a_number():
    nothing = torch.empty(0, dtype=torch.int64)
    assert math.isnan(accuracy(nothing, nothing))
