"""torch.compile of a head gives the results of eager mode, in training and in evaluation.

The checks of inputs break the graph; the pieces between them must still agree.
"""

import shutil

import pytest
import torch

from benchmarks.op_cases import make_case
from metselect_dgl.nn import MetSelectHead
from metselect_dgl.ops import registry

CASE = make_case(300, (5, 8), dtype=torch.float32)
INDEX = torch.arange(0, 300, 2)


def steps(loss: str, modes: list[str], wrap) -> list:
    """Return loss, logits, layer, score and gradients of a gradient step in each mode."""
    torch.manual_seed(0)
    head = MetSelectHead([5, 8], 4, loss=loss)
    head.estimate(*head.check(CASE.layers, CASE.labels, None)[:2])
    call, results = wrap(head), []
    for mode in modes:
        head.train(mode == "train")
        layers = [h.clone().requires_grad_() for h in CASE.layers]
        out = call(layers, labels=CASE.labels, index=INDEX)
        leaves = [leaf for leaf in (*layers, *head.parameters()) if leaf.requires_grad]
        grads = torch.autograd.grad(out.loss, leaves)
        results.append((out.loss, out.logits, out.layer, out.score, *grads))
        with torch.no_grad():
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf -= 0.1 * grad
    return results


# inductor compiles every piece with the C++ compiler, which takes a minute for a training step.
COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.mark.skipif(
    not registry.TORCH_2_4, reason="before torch 2.4 the operators have no fakes to trace with"
)
@pytest.mark.parametrize(
    ("backend", "loss", "modes"),
    [
        pytest.param("aot_eager", "ce", ["train", "train", "eval"], id="aot_eager"),
        pytest.param("aot_eager", "posterior", ["train", "eval"], id="aot_eager-metric"),
        pytest.param("inductor", "ce", ["eval"], id="inductor", marks=COMPILER),
    ],
)
def test_head(backend, loss, modes):
    torch._dynamo.reset()
    compiled = steps(loss, modes, lambda head: torch.compile(head, backend=backend))
    torch.testing.assert_close(compiled, steps(loss, modes, lambda head: head))
