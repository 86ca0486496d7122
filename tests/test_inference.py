"""Exact inference in batches: equal to the whole graph, little memory, early exit."""

import copy
import dataclasses

import pytest
import torch

from metselect_dgl.data import hop_chain
from metselect_dgl.nn import (
    GAT,
    GCN,
    GIN,
    AttnSelect,
    FinalSelect,
    MetSelect,
    layer_source,
)
from metselect_dgl.nn.source import BATCH, BatchedSource

MODELS = {
    "default": (MetSelect, {}),
    "temperature": (MetSelect, {"select": "temperature"}),
    "gate": (MetSelect, {"select": "gate"}),
    "plain": (MetSelect, {"select": "plain"}),
    "distance-rule": (MetSelect, {"rule": "distance"}),
    "posterior": (MetSelect, {"loss": "posterior"}),
    "distance-loss": (MetSelect, {"loss": "distance"}),
    "projected": (MetSelect, {"metric_dim": 4}),
    "max": (MetSelect, {"rule": "opposite"}),
    "final": (FinalSelect, {}),
}


@pytest.fixture(scope="module")
def small():
    """In double: what differs then is a mistake."""
    data = hop_chain(n_nodes=300)
    return dataclasses.replace(data, feat=data.feat.double())


def trained(data, kind=GCN, model=MetSelect, layers=2, **options):
    torch.manual_seed(0)
    more = {} if kind is GIN else {"allow_zero_in_degree": True}
    model = model(kind(32, 16, num_layers=layers, **more), 5, **options).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    part = data.split(0)
    for _ in range(20):
        optimizer.zero_grad()
        model(data.graph, data.feat, data.labels, part.train).loss.backward()
        optimizer.step()
    return model


def calibrated(data, *args, **options):
    model, part = trained(data, *args, **options), data.split(0)
    model.calibrate(data.graph, data.feat, data.labels, part.train, part.val)
    return model.eval()


def same(found, expected, score=1e-7):
    assert torch.equal(found.layer, expected.layer)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.score, expected.score, rtol=score, atol=score)


@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=MODELS)
def test_equal_to_the_whole_graph(small, model, options):
    model = calibrated(small, GCN, model, **options)
    with torch.no_grad():
        expected = model(small.graph, small.feat)
    same(predict(model, small.graph, small.feat, batch_size=70), expected)


SIZES = [(kind, size) for kind in (GCN, GAT, GIN) for size in (299, 300, 10**6)]


@pytest.mark.parametrize(("kind", "batch_size"), [(GCN, 1), *SIZES])
def test_equal_for_every_backbone_and_batch_size(small, kind, batch_size):
    model = calibrated(small, kind)
    same(
        model.predict(small.graph, small.feat, batch_size=batch_size),
        model(small.graph, small.feat),
    )


def test_a_deep_network_with_its_gate(small, monkeypatch):
    monkeypatch.setattr("metselect_dgl.nn.calibration._PAIRED_LAYERS", 4)
    model = calibrated(small, layers=6)
    assert model.head.comparer.gate.shape == (7, 5) and model.head.comparer.gate.any()
    same(predict(model, small.graph, small.feat, batch_size=64), model(small.graph, small.feat))


def test_self_loops_and_batch_norm(small):
    torch.manual_seed(0)
    backbone = GIN(32, 16, batch_norm=True, self_loop=True, learn_eps=True)
    model = MetSelect(backbone, 5).double()
    part = small.split(0)
    model(small.graph, small.feat, small.labels, part.train).loss.backward()
    model.calibrate(small.graph, small.feat, small.labels, part.train, part.val)
    expected = model.eval()(small.graph, small.feat)
    found = predict(model, small.graph, small.feat, batch_size=100)
    same(found, expected)
    assert found.edges == (small.graph.num_edges() + 300) * 2 * 3 - loops(small) * 6


def predict(model, graph, feat, batch_size=BATCH, **options):
    """In batches, whatever their size."""
    return model.predict(graph, feat, batch_size=batch_size, **options)


def loops(data) -> int:
    source, target = data.graph.edges()
    return (source == target).sum().item()


def test_a_class_without_training_node_and_a_dead_layer(small):
    model, part = trained(small), small.split(0)
    train = part.train[small.labels[part.train] != 2]
    with torch.no_grad():
        model.backbone.convs[1].weight.zero_()
        model.backbone.convs[1].bias.fill_(-1)
    with pytest.warns(UserWarning, match="class 2"):
        model.calibrate(small.graph, small.feat, small.labels, train, part.val)
    expected = model.eval()(small.graph, small.feat)
    found = predict(model, small.graph, small.feat)
    same(found, expected)
    assert (found.layer < 2).all() and found.logits[:, 2].isneginf().all()


def test_calibration_in_batches_is_calibration(small):
    one, part = trained(small), small.split(0)
    two = copy.deepcopy(one)
    given = small.graph, small.feat, small.labels, part.train, part.val
    expected, found = one.calibrate(*given), two.calibrate(*given, batch_size=64)
    same(found, expected, score=1e-5)  # the gate's fit ends when a step is below 1e-6
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_calibration_takes_what_calibrate_takes(small):
    """Masks, a node in both parts, nodes without a label; and no validation nodes at all."""
    part = small.split(0)
    labels = small.labels.clone()
    labels[part.val[:7]] = -1
    mask = torch.zeros(300, dtype=torch.bool)
    mask[part.train] = True
    for train, val in ((mask, part.val), (torch.cat([part.train, part.val]), part.val)):
        one = trained(small)
        two = copy.deepcopy(one)
        expected = one.calibrate(small.graph, small.feat, labels, train, val)
        found = two.calibrate(small.graph, small.feat, labels, train, val, batch_size=BATCH)
        same(found, expected, score=1e-5)
        assert len(found.index) == len(part.val) - 7
    assert two.calibrate(small.graph, small.feat, labels, part.train, batch_size=99) is None


def test_a_calibration_that_fails_changes_nothing(small):
    model, part = trained(small, select="gate"), small.split(0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="needs 10 validation nodes"):
        model.calibrate(
            small.graph, small.feat, small.labels, part.test[:50], part.val[:5], batch_size=BATCH
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_convolution_that_counts_inside_a_batch_is_refused(small):
    model = calibrated(small)
    handle = model.backbone.convs[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="counts degrees inside a batch"):
        predict(model, small.graph, small.feat)
    handle.remove()
    predict(model, small.graph, small.feat)


def test_degrees_are_those_of_the_graph_not_of_its_data(small):
    model = calibrated(small)
    graph = small.graph.local_var()
    graph.ndata["in_degree"] = graph.ndata["out_degree"] = torch.ones(300)
    same(predict(model, graph, small.feat), model(small.graph, small.feat))


def test_rows_of_layers_are_in_the_order_asked_for(small):
    model, index = trained(small).eval(), torch.tensor([7, 250, 3, 7])
    expected = model.backbone(small.graph, small.feat)
    for rows, layer in zip(
        layer_source(model.backbone, small.graph, small.feat, 99).stack(index).rows(),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(rows, layer[index])


def test_two_layers_are_in_memory_whatever_the_depth(small, monkeypatch):
    """Counted where they are made and let go of."""
    alive, most = set(), []

    class Counted:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(id(self))
            most.append(len(alive))

        def __setitem__(self, at, value):
            self.tensor[at] = value

        def __getitem__(self, at):
            return self.tensor[at]

        def __del__(self):
            alive.discard(id(self))

    store = BatchedSource.store
    monkeypatch.setattr(BatchedSource, "store", lambda *args: Counted(store(*args)))
    predict(calibrated(small, layers=7, select="temperature"), small.graph, small.feat)
    assert len(most) == 6 and max(most) == 2


@pytest.mark.parametrize("select", ["temperature", "gate"])
def test_early_exit_is_a_dial(small, select):
    model, part = calibrated(small, select=select), small.split(0)
    right = lambda out: (out.logits.argmax(1) == small.labels)[part.test].float().mean()  # noqa: E731
    exact = predict(model, small.graph, small.feat)
    found = [predict(model, small.graph, small.feat, exit_at=p) for p in (1e-9, 0.6, 0.9, 1.0)]
    edges = [each.edges for each in found]
    assert edges == sorted(edges) and edges[0] == 0 and edges[-1] == exact.edges
    assert edges[1] < edges[2] < edges[3]
    assert (found[0].layer == 0).all()
    same(found[-1], exact)
    assert right(found[2]) > right(found[0])


def test_nodes_that_stay_open_are_exact(small):
    """An exit changes nothing for the others: all that they need is still made."""
    model = calibrated(small, select="temperature", layers=3)
    exact = predict(model, small.graph, small.feat)
    some = predict(model, small.graph, small.feat, exit_at=0.7)
    first = predict(model, small.graph, small.feat, exit_at=1e-9)
    open_ = first.score.sigmoid() < 0.7
    late = open_ & (some.layer == 3)
    assert late.any()
    torch.testing.assert_close(some.logits[late], exact.logits[late], rtol=1e-4, atol=1e-4)


def test_bad_calls(small):
    model = calibrated(small)
    graph, feat = small.graph, small.feat
    with pytest.raises(ValueError, match="exit_at is 2"):
        predict(model, graph, feat, exit_at=2)
    with pytest.raises(ValueError, match="batch_size is 0"):
        predict(model, graph, feat, batch_size=0)
    with pytest.raises(ValueError, match="299 rows for 300 nodes"):
        predict(model, graph, feat[:-1])
    with pytest.raises(ValueError, match="rule='confidence'"):
        predict(calibrated(small, rule="distance"), graph, feat, exit_at=0.5)
    with pytest.raises(ValueError, match="needs all layers"):
        predict(trained(small, model=AttnSelect), graph, feat)
    bad = feat.clone()
    bad[17, 3] = torch.nan
    with pytest.raises(ValueError, match="layer 0 of node 17"):
        predict(model, graph, bad)
    with pytest.raises(RuntimeError, match="no class moments yet"):
        predict(MetSelect(GCN(32, 16, allow_zero_in_degree=True), 5).double(), graph, feat)


def test_the_mode_of_the_model_stays(small):
    model = trained(small).train()
    predict(model, small.graph, small.feat)
    assert model.training and model.backbone.training
