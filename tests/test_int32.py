"""int32 labels and node numbers give the results of int64, with and without the extension."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.op_cases import make_case
from metselect_dgl import functional as MF
from metselect_dgl import ops
from metselect_dgl.nn import MetSelectHead

CASE = make_case(700, (5, 37), picked=600, dtype=torch.float32)
METRIC = CASE.metric()
LAYER = torch.arange(600) % 2


def leaves() -> list[torch.Tensor]:
    return [h.clone().requires_grad_() for h in CASE.layers]


def moments(labels, index, layer):
    result = MF.moments(CASE.layers, labels, 4, index=index)
    fourth = MF.fourth_moments(CASE.layers, labels, METRIC["means"], index)
    return result.count, *result.shifts, *result.sums, *result.grams, fourth


def select_layer(labels, index, layer):
    asked = MF.select_layer(CASE.layers, **METRIC, index=index, labels=labels)
    return *asked, *MF.select_layer(CASE.layers, **METRIC, index=index)


def distances(labels, index, layer):
    layers = leaves()
    dist2 = MF.class_distances(layers, **METRIC, index=index)
    logits = MF.metric_logits(CASE.layers, **METRIC, index=index)
    return dist2, logits, *torch.autograd.grad(dist2.sum(), layers)


def selected_logits(labels, index, layer):
    layers = leaves()
    logits = MF.selected_logits(layers, CASE.weights, CASE.biases, layer, index=index)
    return logits, *torch.autograd.grad(logits.square().sum(), layers)


def selected_cross_entropy(labels, index, layer):
    layers = leaves()
    loss, logits = MF.selected_cross_entropy(
        layers, CASE.weights, CASE.biases, layer, labels, index=index, deep_supervision=0.5
    )
    return loss, logits, *torch.autograd.grad(loss, layers)


@pytest.mark.parametrize("narrow", ["labels", "index", "layer"])
@pytest.mark.parametrize(
    "function", [moments, select_layer, distances, selected_logits, selected_cross_entropy]
)
def test_functional(function, narrow):
    wide = {"labels": CASE.labels, "index": CASE.index, "layer": LAYER}
    expected = function(**wide)
    actual = function(**wide | {narrow: wide[narrow].int()})
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def head_results(labels, index, loss) -> dict:
    torch.manual_seed(0)
    head = MetSelectHead([5, 37], 4, loss=loss)
    layers = leaves()
    trained = head(layers, labels=labels, index=index)
    trained.loss.backward()
    grads = [leaf.grad for leaf in (*layers, *head.parameters()) if leaf.requires_grad]
    head.eval().estimate(*head.check(CASE.layers, labels, index)[:2])
    calibrated = head.calibrate(CASE.layers, labels, index)
    asked = head(CASE.layers, labels=labels, index=index)
    answers = [
        (selection.logits, selection.layer, selection.score, selection.index)
        for selection in (trained, calibrated, asked)
    ]
    return {"answers": answers, "losses": (trained.loss, asked.loss), "grads": grads}


@pytest.mark.parametrize("loss", MetSelectHead.LOSSES)
def test_head(loss):
    labels, index = torch.arange(700) % 4, CASE.index.unique()
    expected = head_results(labels, index, loss)
    actual = head_results(labels.int(), index.int(), loss)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.skipif(not ops.NATIVE, reason="the tests above ran on the reference")
def test_on_the_reference():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"METSELECT_BACKEND": "reference"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
