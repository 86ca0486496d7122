"""selected_logits and selected_cross_entropy: against a loop over nodes, and their gradients."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.op_cases import make_case
from metselect_dgl import functional as MF


def setup(n=21, widths=(3, 5, 4), picked=None, layer=None):
    case = make_case(n, widths, picked=picked)
    rows = len(case.labels)
    layer = torch.arange(rows) % len(widths) if layer is None else torch.full((rows,), layer)
    return case, layer


def by_node(case, layer, layers, weights, biases):
    """Return the logits, one node at a time."""
    index = range(len(layer)) if case.index is None else case.index.tolist()
    pairs = zip(index, layer.tolist(), strict=True)
    return torch.stack([weights[l] @ layers[l][i] + biases[l] for i, l in pairs])


def objective(case, layers, weights, biases, logits, deep):
    loss = F.cross_entropy(logits, case.labels)
    per_layer = [
        F.cross_entropy(case.picked(h) @ w.T + b, case.labels)
        for h, w, b in zip(layers, weights, biases, strict=True)
    ]
    return loss + deep * sum(per_layer) / len(per_layer)


@pytest.mark.parametrize("deep", [0.0, 0.7])
@pytest.mark.parametrize("picked", [None, 13], ids=["all", "picked"])
def test_loss_logits_and_gradients(picked, deep):
    case, layer = setup(picked=picked)
    sizes = len(case.layers)
    inputs = [*case.layers, *case.weights, *case.biases]

    def ours(*x):
        parts = x[:sizes], x[sizes : 2 * sizes], x[2 * sizes :]
        return MF.selected_cross_entropy(
            *parts, layer, case.labels, index=case.index, deep_supervision=deep
        )

    def plain(*x):
        parts = x[:sizes], x[sizes : 2 * sizes], x[2 * sizes :]
        logits = by_node(case, layer, *parts)
        return objective(case, *parts, logits, deep), logits

    actual, expected = [], []
    for function, out in ((ours, actual), (plain, expected)):
        leaves = [value.clone().requires_grad_() for value in inputs]
        loss, logits = function(*leaves)
        weight = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        out += [loss, logits, *torch.autograd.grad(3 * loss + (weight * logits).sum(), leaves)]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("picked", [None, 5], ids=["all", "picked-twice"])
@pytest.mark.parametrize("deep", [0.0, 1.0])
def test_gradcheck(deep, picked):
    case, layer = setup(6, (3, 2), picked)
    inputs = [v.requires_grad_() for v in [*case.layers, *case.weights, *case.biases]]

    def both(*x):
        return MF.selected_cross_entropy(
            x[:2], x[2:4], x[4:], layer, case.labels, index=case.index, deep_supervision=deep
        )

    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradcheck(
        lambda *x: MF.selected_logits(x[:2], x[2:4], x[4:], layer, index=case.index), inputs
    )


def test_unselected_decoders_get_a_zero_gradient():
    """A gradient of None would stop a distributed run."""
    case, layer = setup(layer=1)
    leaves = [w.clone().requires_grad_() for w in case.weights]
    MF.selected_cross_entropy(case.layers, leaves, case.biases, layer, case.labels)[0].backward()
    assert leaves[0].grad is not None
    assert not leaves[0].grad.any()
    assert leaves[1].grad.any()


def test_no_nodes():
    case, _ = setup()
    none = torch.zeros(0, dtype=torch.long)
    logits = MF.selected_logits(case.layers, case.weights, case.biases, none, index=none)
    assert logits.shape == (0, 4)
