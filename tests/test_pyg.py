"""MetSelect on PyG models. Nothing here needs DGL; test_pyg_equals_dgl.py compares with it."""

import pytest
import torch
from torch import nn

from metselect_dgl.nn import MetSelectHead
from metselect_dgl.pyg import AllLayers, MetSelect

pyg_nn = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

N, WIDTH, CLASSES = 240, 12, 3
GNNS = [pyg_nn.GCN, pyg_nn.GAT, pyg_nn.GIN, pyg_nn.GraphSAGE]


@pytest.fixture
def data():
    """Features that show the class, and a random undirected graph of edges inside classes."""
    torch.manual_seed(0)
    y = torch.arange(N) % CLASSES
    x = torch.randn(N, WIDTH) + 2 * nn.functional.one_hot(y, WIDTH)
    source = torch.randint(N, (4 * N,))
    target = (source + CLASSES * torch.randint(N, (4 * N,))) % N
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    nodes = torch.randperm(N)
    return x, edge_index, y, nodes[:120], nodes[120:180], nodes[180:]


@pytest.mark.parametrize("gnn", GNNS)
def test_layers_of_pyg_models(data, gnn):
    """Layer by layer, as the model's own convolutions compute them."""
    x, edge_index, *_ = data
    backbone = AllLayers(gnn, WIDTH, 8, num_layers=3, norm="batch_norm", dropout=0.5).eval()
    layers = backbone(x, edge_index)
    assert [h.shape[1] for h in layers] == backbone.layer_feats == [8, 8, 8, 8]
    torch.testing.assert_close(layers[0], backbone.input(x))
    h = x
    for depth, (conv, norm) in enumerate(zip(backbone.gnn.convs, backbone.gnn.norms, strict=True)):
        h = norm(conv(h, edge_index)).relu()
        torch.testing.assert_close(layers[depth + 1], h)


@pytest.mark.parametrize("gnn", GNNS)
def test_train_calibrate_predict(data, gnn):
    x, edge_index, y, train, val, test = data
    model = MetSelect(AllLayers(gnn, WIDTH, 16, num_layers=2, dropout=0.2), CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        out = model(x, edge_index, labels=y, index=train)
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.calibrate(x, edge_index, y, train, val)
    assert (model.head.comparer.temperature != 1).all()
    assert model.training
    out = model.predict(x, edge_index)
    assert out.logits.shape == (N, CLASSES)
    assert (out.logits[test].argmax(1) == y[test]).float().mean() > 0.8


class OwnModel(nn.Module):
    """A model of the user that returns its layers, of different widths."""

    layer_feats = (WIDTH, 8, 5)

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([pyg_nn.SAGEConv(WIDTH, 8), pyg_nn.SAGEConv(8, 5)])

    def forward(self, x, edge_index):
        layers = [x]
        for conv in self.convs:
            layers.append(conv(layers[-1], edge_index).relu())
        return layers


def test_own_model_gives_what_the_head_gives_on_its_layers(data):
    x, edge_index, y, train, val, _ = data
    model = MetSelect(OwnModel(), CLASSES)
    head = MetSelectHead(OwnModel.layer_feats, CLASSES)
    head.load_state_dict(model.head.state_dict())
    layers = model.backbone(x, edge_index)
    expected = head(layers, labels=y, index=train)
    out = model(x, edge_index, labels=y, index=train)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.logits, expected.logits)
    head.calibrate(layers, y, val)
    model.calibrate(x, edge_index, y, train, val)
    expected, out = head.eval()(layers), model.predict(x, edge_index)
    assert torch.equal(out.layer, expected.layer)
    assert len(out.layer.unique()) > 1
    torch.testing.assert_close(out.logits, expected.logits)


def test_arguments_by_name(data):
    x, edge_index, y, train, *_ = data
    model = MetSelect.paper(AllLayers(pyg_nn.GCN, WIDTH, 8, num_layers=2), CLASSES)
    model(x=x, edge_index=edge_index, labels=y, index=train).loss.backward()
    assert model.predict(x=x, edge_index=edge_index).layer.shape == (N,)


def test_seeds_of_a_subgraph(data):
    """As NeighborLoader orders them: the seeds are the first rows."""
    x, edge_index, y, *_ = data
    model = MetSelect(AllLayers(pyg_nn.GCN, WIDTH, 8, num_layers=2), CLASSES)
    seeds = torch.arange(60)
    out = model(x, edge_index, labels=y, index=seeds)
    assert len(out.layer) == 60
    assert torch.equal(out.index, seeds)


def test_reset_parameters(data):
    x, edge_index, y, train, *_ = data
    model = MetSelect(AllLayers(pyg_nn.GCN, WIDTH, 8, num_layers=2), CLASSES)
    model(x, edge_index, labels=y, index=train)
    before = [parameter.clone() for parameter in model.backbone.gnn.convs[0].lin.parameters()]
    model.reset_parameters()
    after = model.backbone.gnn.convs[0].lin.parameters()
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    with pytest.raises(RuntimeError):
        model.predict(x, edge_index)


def test_layers_of_other_widths(data):
    x, edge_index, *_ = data
    backbone = AllLayers(pyg_nn.GCN, WIDTH, 8, num_layers=2)
    backbone.layer_feats = [8, 8]
    with pytest.raises(ValueError, match="got 3 layers, the head was made for 2"):
        MetSelect(backbone, CLASSES)(x, edge_index)


def test_features_that_are_not_finite(data):
    x, edge_index, y, train, *_ = data
    x[7, 0] = torch.nan
    with pytest.raises(ValueError, match="is not finite"):
        MetSelect(AllLayers(pyg_nn.GCN, WIDTH, 8, num_layers=2), CLASSES)(
            x, edge_index, labels=y, index=train
        )
