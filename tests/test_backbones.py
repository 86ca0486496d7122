"""Backbones: the layer stack is DGL's own convolutions, on graphs and on blocks."""

import copy
import pickle

import dgl
import pytest
import torch
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler

from metselect_dgl.nn import GAT, GCN, GIN

BACKBONES = {"gcn": GCN, "gat": GAT, "gin": GIN}
every_backbone = pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES.keys())


@pytest.fixture
def graph():
    """40 nodes with in-edges and out-edges each, some of them doubled, one a self-loop."""
    torch.manual_seed(0)
    ring = torch.arange(40)
    source = torch.cat([ring, torch.randint(40, (80,)), torch.tensor([7])])
    target = torch.cat([(ring + 1) % 40, torch.randint(40, (80,)), torch.tensor([7])])
    return dgl.graph((source, target))


@every_backbone
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_stack(backbone, graph, dtype):
    feat = torch.randn(40, 6, dtype=dtype)
    model = backbone(6, 8, num_layers=3).to(dtype)
    layers = model(graph, feat)
    assert [tuple(h.shape) for h in layers] == 4 * [(40, 8)]
    assert {h.dtype for h in layers} == {dtype}
    torch.testing.assert_close(layers[0], model.input(feat))
    h = feat  # the first convolution reads X, not h_0
    for conv, layer in zip(model.convs, layers[1:], strict=True):
        h = torch.relu(conv(graph, h).flatten(1))
        torch.testing.assert_close(layer, h)


@every_backbone
def test_every_parameter_learns(backbone, graph):
    """An in-place ReLU on a view of GATConv's output drops gradients silently."""
    layers = backbone(6, 8, num_layers=2)(graph, torch.randn(40, 6))
    model = backbone(6, 8, num_layers=2)
    loss = sum(h.square().sum() for h in model(graph, torch.randn(40, 6)))
    loss.backward()
    assert len(layers) == 3
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@every_backbone
def test_ragged_widths(backbone, graph):
    layers = backbone(6, [4, 8, 12], num_layers=2)(graph, torch.randn(40, 6))
    assert [h.shape[1] for h in layers] == [4, 8, 12]


@every_backbone
def test_self_loops_leave_the_graph_alone(backbone, graph):
    graph.ndata["mine"] = torch.arange(40)
    graph.edata["mine"] = torch.arange(graph.num_edges())
    feat = torch.randn(40, 6)
    model = backbone(6, 8, self_loop=True)
    layers = model(graph, feat)
    assert graph.num_edges() == 121
    assert set(graph.ndata) == set(graph.edata) == {"mine"}
    looped = dgl.add_self_loop(dgl.remove_self_loop(graph))
    plain = backbone(6, 8)
    plain.load_state_dict(model.state_dict())
    for a, b in zip(layers, plain(looped, feat), strict=True):
        torch.testing.assert_close(a, b)


def test_self_loops_follow_the_graph():
    """The looped copy is kept, and made anew when the graph is edited or another one comes."""
    graph = dgl.graph(([0, 1, 2], [1, 2, 3]))
    feat, model = torch.randn(4, 3), GCN(3, 5, self_loop=True)
    first = model(graph, feat)[-1]
    graph.add_edges([0, 0], [2, 3])
    second = model(graph, feat)[-1]
    assert not torch.allclose(first, second)
    fresh = GCN(3, 5, self_loop=True)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(graph, feat)[-1], second)
    small = dgl.graph(([0], [1]))
    assert model(small, feat[:2])[-1].shape == (2, 5)


@pytest.mark.parametrize("self_loop", [False, True], ids=["plain", "self-loops"])
@pytest.mark.parametrize("backbone", [GAT, GIN], ids=["gat", "gin"])
def test_blocks_with_all_neighbours_are_the_graph(backbone, graph, self_loop):
    graph = dgl.to_simple(dgl.remove_self_loop(graph))
    feat, model = torch.randn(40, 6), backbone(6, 8, num_layers=2, self_loop=self_loop)
    whole = model(graph, feat)
    loader = DataLoader(
        graph, torch.tensor([3, 30, 11]), MultiLayerFullNeighborSampler(2), batch_size=3
    )
    for inputs, seeds, blocks in loader:
        for a, b in zip(model(blocks, feat[inputs]), whole, strict=True):
            torch.testing.assert_close(a, b[seeds])


def test_gcn_on_blocks_is_graphconv_on_blocks(graph):
    feat, model = torch.randn(40, 6), GCN(6, 8, num_layers=2)
    sampler = MultiLayerFullNeighborSampler(2)
    for inputs, seeds, blocks in DataLoader(graph, torch.arange(5), sampler, batch_size=5):
        layers = model(blocks, feat[inputs])
        h = torch.relu(model.convs[0](blocks[0], feat[inputs]))
        torch.testing.assert_close(layers[1], h[: len(seeds)])
        torch.testing.assert_close(layers[2], torch.relu(model.convs[1](blocks[1], h)))
        torch.testing.assert_close(layers[0], model.input(feat[seeds]))


def test_options_reach_dgl(graph):
    gat = GAT(6, 8, heads=2)
    assert gat.convs[0].fc.out_features == 8
    assert gat(graph, torch.randn(40, 6))[1].shape == (40, 8)
    gin = GIN(6, 8, learn_eps=True, batch_norm=True)
    assert isinstance(gin.convs[0].eps, torch.nn.Parameter)
    assert any(isinstance(module, torch.nn.BatchNorm1d) for module in gin.modules())
    assert not isinstance(GIN(6, 8).convs[0].eps, torch.nn.Parameter)


def test_dropout_only_in_training(graph):
    model, feat = GCN(6, 8, dropout=0.5), torch.randn(40, 6)
    assert not torch.equal(model(graph, feat)[-1], model(graph, feat)[-1])
    model.eval()
    assert torch.equal(model(graph, feat)[-1], model(graph, feat)[-1])


@every_backbone
def test_copies_and_pickles(backbone, graph):
    feat, model = torch.randn(40, 6), backbone(6, 8, self_loop=True)
    expected = model(graph, feat)[-1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(graph, feat)[-1], expected)
    model.reset_parameters()
    assert not torch.allclose(model(graph, feat)[-1], expected)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: GCN(6, 8, num_layers=0), "num_layers is 0"),
        (lambda: GCN(6, [8, 8], num_layers=2), "2 widths for 3 layers"),
        (lambda: GAT(6, 10, heads=4), "10 features does not divide by 4 heads"),
        (lambda: GAT(6, 8, heads=0), "heads is 0"),
    ],
    ids=["depth", "widths", "heads", "no-heads"],
)
def test_bad_options(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_reset_draws_the_eps_of_gin():
    model = GIN(6, 8, learn_eps=True)
    torch.nn.init.constant_(model.convs[0].eps, 5.0)
    model.reset_parameters()
    assert model.convs[0].eps.item() == 0
