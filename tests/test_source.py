"""Sources of layers: any module, in batches; and inputs that are recognised by their content."""

import copy

import dgl
import numpy as np
import pytest
import torch
from torch import nn

from metselect_dgl.functional.graph import fingerprint
from metselect_dgl.nn import GAT, GCN, GIN, FinalSelect, MetSelect


class Mean(nn.Module):
    """A backbone of one's own: the mean of the neighbours, on a graph and on a block."""

    layer_feats = (8, 8, 8)

    def __init__(self):
        super().__init__()
        self.lines = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 8)])

    def forward(self, graph, feat):
        layers = [self.first_layer(feat)]
        h = feat
        for depth in (1, 2):
            h = self.layer_on_block(depth, graph, h)
            layers.append(h)
        return layers

    def first_layer(self, feat):
        return self.lines[0](feat)

    def layer_on_block(self, depth, block, h):
        own = h[: block.num_dst_nodes()]
        degree = block.in_degrees().clamp(min=1).to(h).unsqueeze(1)
        return torch.relu(self.lines[depth](own + dgl.ops.copy_u_sum(block, h) / degree))


class Whole(nn.Module):
    """A backbone that does not know blocks."""

    layer_feats = (32, 32)

    def forward(self, graph, feat):
        return [feat, dgl.ops.copy_u_sum(graph, feat)]


def trained(model, data):
    part = data.split(0)
    model(data.graph, data.feat, data.labels, part.train).loss.backward()
    return model


@pytest.mark.parametrize("selector", [MetSelect, FinalSelect], ids=["metselect", "final"])
def test_a_backbone_of_ones_own_in_batches(small, selector):
    torch.manual_seed(0)
    one, part = trained(selector(Mean(), 5), small), small.split(0)
    two = copy.deepcopy(one)
    given = small.graph, small.feat, small.labels, part.train, part.val
    expected, found = one.calibrate(*given), two.calibrate(*given, batch_size=70)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    whole = one.predict(small.graph, small.feat)
    batched = one.predict(small.graph, small.feat, batch_size=70)
    assert torch.equal(whole.layer, batched.layer)
    torch.testing.assert_close(whole.logits, batched.logits, rtol=1e-4, atol=1e-4)


def test_a_backbone_without_blocks_is_told_what_it_lacks(small):
    model = MetSelect(Whole(), 5)
    model.calibrate(small.graph, small.feat, small.labels, small.split(0).train)
    model.predict(small.graph, small.feat)
    with pytest.raises(TypeError, match=r"Whole cannot .* in batches.*first_layer.*layer_on_block"):
        model.predict(small.graph, small.feat, batch_size=10)


def test_rows_of_one_node_type():
    """300 papers in a graph that also has 100 authors."""
    torch.manual_seed(0)
    edges = torch.randint(100, (900,)), torch.randint(300, (900,))
    graph = dgl.heterograph({("author", "writes", "paper"): edges})

    class Papers(nn.Module):
        layer_feats = (6, 4)

        def forward(self, graph, feat):
            return [feat["paper"], dgl.ops.copy_u_sum(graph["writes"], feat["author"])]

    feat = {"paper": torch.randn(300, 6), "author": torch.randn(100, 4)}
    labels, train = torch.arange(300) % 3, torch.arange(150)
    model = MetSelect(Papers(), 3)
    model(graph, feat, labels, train).loss.backward()
    assert len(model.calibrate(graph, feat, labels, train, torch.arange(150, 300)).layer) == 150
    assert model.predict(graph, feat).logits.shape == (300, 3)


def test_rows_that_are_graphs():
    """A batch of 20 graphs, each pooled to a row."""
    graphs = dgl.batch([dgl.rand_graph(10, 30) for _ in range(20)])

    class Pooled(nn.Module):
        layer_feats = (5, 5)

        def forward(self, graph, feat):
            h = dgl.ops.copy_u_sum(graph, feat)
            return [dgl.ops.segment_reduce(graph.batch_num_nodes(), x) for x in (feat, h)]

    model, feat, labels = MetSelect(Pooled(), 2), torch.randn(200, 5), torch.arange(20) % 2
    model(graphs, feat, labels).loss.backward()
    assert model.predict(graphs, feat).layer.shape == (20,)


CHANGES = {
    "in-place": lambda x: x.add_(1),
    "data": lambda x: x.data.add_(1),
    "numpy": lambda x: np.add(x.numpy(), 1, out=x.numpy()),
    "one-entry": lambda x: x.data.__setitem__((17, 3), 9.0),
    "two-rows-swapped": lambda x: x.data.copy_(x[[1, 0, *range(2, 300)]].clone()),
    "two-columns-swapped": lambda x: x.data.copy_(x[:, [1, 0, *range(2, 32)]].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("backbone", [GCN, GAT, GIN], ids=["gcn", "gat", "gin"])
def test_changed_features_are_seen(small, backbone, change):
    """However they are changed: everything is that of a model that never saw the old ones."""
    feat, train = small.feat.clone(), small.split(0).train
    torch.manual_seed(0)
    model = MetSelect(backbone(32, 8, self_loop=True), 5)
    model(small.graph, feat, small.labels, train)
    fresh = copy.deepcopy(model)
    change(feat)
    found = model(small.graph, feat, small.labels, train)
    expected = fresh(small.graph, feat.clone(), small.labels, train)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.layer, expected.layer)


@pytest.mark.parametrize("what", ["labels", "index"])
@pytest.mark.parametrize("how", ["data", "numpy"])
def test_changed_labels_and_index_are_seen(small, what, how):
    """Also of a layer 0 that is not stored, whose moments are kept."""
    feat = small.feat[:, :5].contiguous()
    given = {"labels": small.labels.clone(), "index": small.split(0).train.clone()}
    torch.manual_seed(0)
    model = MetSelect(GCN(5, 8, self_loop=True), 5)
    model(small.graph, feat, **given)
    fresh, changed = copy.deepcopy(model), given[what]
    rolled = changed.roll(1)
    if how == "data":
        changed.data.copy_(rolled)
    else:
        changed.numpy()[:] = rolled.numpy()
    found = model(small.graph, feat, **given)
    expected = fresh(small.graph, feat, **{k: v.clone() for k, v in given.items()})
    assert torch.equal(found.loss, expected.loss)
    for a, b in zip(model.head.buffers(), fresh.head.buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_fresh_index_of_the_same_content_prepares_nothing(small):
    model, mask = MetSelect(GCN(32, 8, self_loop=True), 5), small.train_masks[0]
    for _ in range(4):
        model(small.graph, small.feat, small.labels, mask.nonzero().flatten())
        model(small.graph, small.feat.clone(), small.labels.clone(), mask.clone())
    (prepared,) = model.backbone.prepared.graphs
    assert len(prepared.indices) == 1
    kept = copy.copy(prepared.of_features)
    model(small.graph, small.feat, small.labels, mask.clone())
    assert all(value is kept[key] for key, value in prepared.of_features.items())


def test_few_indices_are_kept(small):
    model = MetSelect(GCN(32, 8, self_loop=True), 5)
    for start in range(20):
        model(small.graph, small.feat, small.labels, torch.arange(start, 200))
    (prepared,) = model.backbone.prepared.graphs
    assert len(prepared.indices) == 4
    assert len(prepared.of_graph) + len(prepared.of_features) < 20
    model.backbone.prepared.clear()
    assert model.backbone.prepared.graphs == []


@pytest.mark.parametrize("shape", [(7, 5), (64, 8), (1, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_bit_counts(shape, dtype):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=dtype)
    before = fingerprint(matrix)
    assert fingerprint(matrix.clone()) == before
    for row in range(shape[0]):
        for column in range(shape[1]):
            other = matrix.clone()
            other[row, column] = torch.nextafter(other[row, column], torch.tensor(9.0, dtype=dtype))
            assert fingerprint(other) != before


CHANGES = {
    "negated": lambda x: -x,
    "row-negated": lambda x: torch.cat([-x[:1], x[1:]]),
    "column-negated": lambda x: torch.cat([x[:, :1], -x[:, 1:2], x[:, 2:]], 1),
    "rows-swapped": lambda x: torch.cat([x[1:2], x[:1], x[2:]]),
    "columns-swapped": lambda x: x.flip(1),
    "rolled": lambda x: x.roll(1),
    "doubled": lambda x: 2 * x,
}


@pytest.mark.parametrize("width", [2, 7, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_many_bits_are_seen(change, dtype, width):
    matrix = torch.randn(40, width, dtype=dtype)
    assert fingerprint(change(matrix)) != fingerprint(matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fingerprints_of_similar_features_differ(dtype):
    """Two signs changed, or a 1 of a binary row moved: no two have the same fingerprint."""
    ones, signs = torch.zeros(20, 8, dtype=dtype), torch.randn(20, 8, dtype=dtype)
    seen = {fingerprint(ones), fingerprint(signs)}
    for first in range(160):
        for second in range(first):
            changed, moved = signs.clone(), ones.clone()
            changed.view(-1)[[first, second]] *= -1
            moved.view(-1)[[first, second]] = 1
            seen |= {fingerprint(changed), fingerprint(moved)}
    assert len(seen) == 2 + 160 * 159


def test_checkpoints_of_the_former_layout_load(small):
    """Temperatures and gate used to be buffers of the head itself."""
    part = small.split(0)
    model = MetSelect(GCN(32, 8, self_loop=True), 5)
    model.calibrate(small.graph, small.feat, small.labels, part.train, part.val)
    former = {k.replace("head.comparer.", "head."): v for k, v in model.state_dict().items()}
    assert "head.gate" in former
    loaded = MetSelect(GCN(32, 8, self_loop=True), 5)
    loaded.load_state_dict(former)
    same = loaded.predict(small.graph, small.feat), model.predict(small.graph, small.feat)
    assert torch.equal(same[0].layer, same[1].layer)
    assert torch.equal(same[0].logits, same[1].logits)
