"""Every DGL gives the same numbers: those of dgl 1.1.3 are in dgl_numbers.json.

Inputs and weights are computed without random numbers. To write the file again:
python tests/test_dgl_versions.py
"""

import json
from pathlib import Path

import dgl
import pytest
import torch

from metselect_dgl.nn import GAT, GCN, GIN, DegreeSampler, MetSelect, sampling_graph

NUMBERS = Path(__file__).with_name("dgl_numbers.json")
BACKBONES = {"gcn": GCN, "gat": GAT, "gin": GIN}
NODES, CLASSES = 60, 3


def waves(*shape: int, step: float = 0.7) -> torch.Tensor:
    """Return numbers between -1 and 1 that follow from their positions."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(step * count * (1 + count / 50)).view(shape).float()


def graph() -> dgl.DGLGraph:
    nodes = torch.arange(NODES)
    ends = [torch.stack([nodes, (nodes * factor + shift) % NODES]) for factor, shift in STEPS]
    source, target = torch.cat(ends, dim=1)
    return dgl.graph((source, target), num_nodes=NODES)


STEPS = [(1, 1), (7, 3), (11, 5), (2, 9)]


def numbers(name: str) -> dict[str, list]:
    """Return results of a backbone with MetSelect on a graph, in batches and on blocks."""
    model = MetSelect(BACKBONES[name](8, 8, num_layers=2, self_loop=True), CLASSES)
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_(0.5 * waves(*value.shape, step=0.7 + 0.1 * number))
    data, feat, labels = graph(), waves(NODES, 8), torch.arange(NODES) * 7 % CLASSES
    loss = model(data, feat, labels=labels, index=torch.arange(40)).loss
    loss.backward()
    whole, batched = model.predict(data, feat), model.predict(data, feat, batch_size=16)
    sampler = DegreeSampler([-1, -1], sampling_graph(model.backbone, data))
    nodes = torch.arange(5, 20)
    sources, _, blocks = sampler.sample_blocks(sampling_graph(model.backbone, data), nodes)
    model.eval()
    on_blocks = model(blocks, feat[sources])
    return {
        "loss": [loss.item()],
        "gradient": [value.grad.double().sum().item() for value in model.backbone.parameters()],
        "logits": whole.logits[:6].flatten().tolist(),
        "score": whole.score[:20].tolist(),
        "layer": whole.layer.tolist(),
        "batches": batched.logits[:6].flatten().tolist(),
        "batches-layer": batched.layer.tolist(),
        "blocks": on_blocks.logits.flatten().tolist(),
        "blocks-layer": on_blocks.layer.tolist(),
        "block-edges": [block.num_edges() for block in blocks],
    }


@pytest.mark.parametrize("name", BACKBONES)
def test_numbers_are_those_of_every_dgl(name):
    expected, found = json.loads(NUMBERS.read_text())[name], numbers(name)
    assert found.keys() == expected.keys()
    for what, values in expected.items():
        if "layer" in what or what == "block-edges":
            assert found[what] == values, what
        else:
            assert found[what] == pytest.approx(values, rel=1e-4, abs=1e-5), what


if __name__ == "__main__":
    rows = [f"{json.dumps(name)}: {json.dumps(numbers(name))}" for name in BACKBONES]
    NUMBERS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
