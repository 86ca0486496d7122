"""PyG's GCNConv and DGL's GraphConv with the same weights give the same model."""

from functools import partial

import pytest
import torch

from metselect_dgl import nn as dgl_nn
from metselect_dgl import pyg
from metselect_dgl.data import contextual_sbm, load_dataset

pyg_nn = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")


@pytest.fixture(params=["csbm", "cora"])
def data(request):
    """Undirected graphs: of directed edges PyG counts in-degrees only, DGL both."""
    if request.param == "csbm":
        return contextual_sbm(n_nodes=300)
    return load_dataset("cora", request.getfixturevalue("data_dir"))


def same_parameters(of_dgl: dgl_nn.MetSelect, of_pyg: pyg.MetSelect) -> list[tuple]:
    """Return pairs of the parameters with the same meaning, and whether one is transposed."""
    pairs = []
    for conv, pyg_conv in zip(of_dgl.backbone.convs, of_pyg.backbone.gnn.convs, strict=True):
        pairs.append((conv.weight, pyg_conv.lin.weight, True))
        pairs.append((conv.bias, pyg_conv.bias, False))
    for name in ("backbone.input", "head"):
        of_both = (model.get_submodule(name).parameters() for model in (of_dgl, of_pyg))
        pairs += [(*pair, False) for pair in zip(*of_both, strict=True)]
    return pairs


@torch.no_grad()
def copy_parameters(of_dgl: dgl_nn.MetSelect, of_pyg: pyg.MetSelect) -> None:
    for parameter, copy, transposed in same_parameters(of_dgl, of_pyg):
        copy.copy_(parameter.T if transposed else parameter)


CASES = {"loops-fused": (True, "fused"), "no-loops-dgl": (False, "dgl")}
# In float32 a ReLU at 0 may be on in one model and off in the other, with another gradient.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


@pytest.mark.parametrize(("self_loop", "engine"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), TOLERANCES.items(), ids=[str(dtype) for dtype in TOLERANCES]
)
def test_pyg_equals_dgl(data, self_loop, engine, dtype, tolerance):
    """Loss, logits, gradients and selections in training; then calibration and prediction."""
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    graph, x, labels, split = data.graph, data.feat.to(dtype), data.labels, data.split(0)
    edge_index, width = torch.stack(graph.edges()), x.shape[1]
    torch.manual_seed(0)
    options = {"self_loop": self_loop, "allow_zero_in_degree": True, "engine": engine}
    backbone = dgl_nn.GCN(width, 64, num_layers=2, **options)
    of_dgl = dgl_nn.MetSelect(backbone, data.n_classes).to(dtype)
    backbone = pyg.AllLayers(pyg_nn.GCN, width, 64, num_layers=2, add_self_loops=self_loop)
    of_pyg = pyg.MetSelect(backbone, data.n_classes).to(dtype)
    optimizer = torch.optim.Adam(of_dgl.parameters(), lr=0.01)
    for _ in range(10):
        copy_parameters(of_dgl, of_pyg)
        optimizer.zero_grad()
        of_pyg.zero_grad()
        expected = of_dgl(graph, x, labels=labels, index=split.train)
        out = of_pyg(x, edge_index, labels=labels, index=split.train)
        assert torch.equal(out.layer, expected.layer)
        close(out.logits, expected.logits)
        close(out.loss, expected.loss)
        expected.loss.backward()
        out.loss.backward()
        if dtype == torch.float64:
            for parameter, copy, transposed in same_parameters(of_dgl, of_pyg):
                close(copy.grad, parameter.grad.T if transposed else parameter.grad)
        optimizer.step()
    copy_parameters(of_dgl, of_pyg)
    expected = of_dgl.calibrate(graph, x, labels, split.train, split.val)
    out = of_pyg.calibrate(x, edge_index, labels, split.train, split.val)
    assert torch.equal(out.layer, expected.layer)
    expected, out = of_dgl.predict(graph, x), of_pyg.predict(x, edge_index)
    assert len(out.layer.unique()) > 1
    assert torch.equal(out.layer, expected.layer)
    close(out.logits, expected.logits)
