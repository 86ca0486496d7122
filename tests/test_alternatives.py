"""The paper's alternatives: same interface, each choosing as its definition says."""

import copy
import pickle

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler

from metselect_dgl.nn import (
    GCN,
    AttentionHead,
    AttnSelect,
    FinalSelect,
    JKNet,
    JKNetMetSelect,
    MetSelect,
    NDLSelect,
)
from metselect_dgl.nn.ndls import local_hops

MODELS = {
    "final": FinalSelect,
    "attn": AttnSelect,
    "ndls": NDLSelect,
    "jknet-max": lambda *a: JKNet(*a, mode="max"),
    "jknet-cat": lambda *a: JKNet(*a, mode="cat"),
    "jknet-lstm": lambda *a: JKNet(*a, mode="lstm"),
    "jknet-metselect": JKNetMetSelect,
    "metselect": MetSelect,
    "metselect-max": lambda *a: MetSelect(*a, rule="opposite"),
    "metselect-paper": MetSelect.paper,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_same_interface(make, small, dtype):
    split, feat = small.split(0), small.feat.to(dtype)
    model = make(GCN(32, 16, self_loop=True), 5).to(dtype)
    out = model(small.graph, feat, labels=small.labels, index=split.train)
    out.loss.backward()
    assert out.logits.shape == (len(split.train), 5)
    selection = model.calibrate(small.graph, feat, small.labels, split.train, split.val)
    assert selection.logits.shape == (len(split.val), 5)
    model.eval()
    everywhere = model(small.graph, feat)
    assert everywhere.logits.shape == (300, 5)
    assert everywhere.layer.shape == everywhere.score.shape == (300,)
    assert everywhere.layer.max() < model.head.n_choices
    some = model(small.graph, feat, index=split.test)
    torch.testing.assert_close(some.logits, everywhere.logits[split.test])
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin(small.graph, feat).logits, everywhere.logits)
    model.reset_parameters()


@every_model
def test_on_blocks(make, small):
    model = make(GCN(32, 16, self_loop=True), 5)
    if isinstance(model, NDLSelect):
        with pytest.raises(RuntimeError, match="precompute"):
            model([dgl.to_block(small.graph)] * 2, small.feat)
        model.precompute(small.graph, small.feat)
    loader = DataLoader(small.graph, small.split(0).train, NeighborSampler([3, 3]), batch_size=120)
    for inputs, seeds, blocks in loader:
        out = model(blocks, small.feat[inputs], labels=small.labels[seeds])
        out.loss.backward()
        assert out.layer.shape == (len(seeds),)


def test_final_is_the_last_layer(small):
    model = FinalSelect(GCN(32, 16, self_loop=True), 5)
    out = model(small.graph, small.feat, small.labels, small.split(0).train)
    logits = model.head.decoder(model.backbone(small.graph, small.feat)[-1])[small.split(0).train]
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(
        out.loss, F.cross_entropy(logits, small.labels[small.split(0).train])
    )
    assert out.layer.eq(2).all()


def test_ndls_hops_by_dense_matrices(small):
    """P = (D + I)^-1 (A + I), pi = (deg + 1) / (2m + n), X row-normalised."""
    data = dgl.to_simple(dgl.to_bidirected(dgl.remove_self_loop(small.graph)))
    a = data.adj_tensors("csr")
    dense = np.zeros((300, 300))
    for i in range(300):
        dense[i, a[1][a[0][i] : a[0][i + 1]].numpy()] = 1
    with_loops = dense + np.eye(300)
    p = with_loops / with_loops.sum(1, keepdims=True)
    x = small.feat.double().numpy()
    x = x / np.abs(x).sum(1, keepdims=True)
    pi = with_loops.sum(1) / (dense.sum() + 300)
    found = local_hops(data, small.feat.double(), eps=0.05, depth=4).numpy()
    power, expected = np.eye(300), np.full(300, 4)
    for k in range(4):
        near = np.linalg.norm(power @ x - pi @ x, axis=1) < 0.05
        expected = np.where((expected == 4) & near, k, expected)
        power = p @ power
    assert np.array_equal(found, expected)
    assert len(set(expected.tolist())) > 1  # the case tells depths apart


def test_ndls_follows_graph_and_features(small):
    model = NDLSelect(GCN(32, 16, self_loop=True), 5, eps=0.12)
    first = model(small.graph, small.feat).layer
    assert torch.equal(first, local_hops(small.graph, small.feat, eps=0.12, depth=2))
    feat = small.feat.clone()
    feat[:, 5:] = 0
    assert not torch.equal(model(small.graph, feat).layer, first)
    feat.copy_(small.feat)
    assert torch.equal(model(small.graph, feat).layer, first)  # changed in place


def test_attention_learns_its_choice():
    """A hard gather alone would give the LSTM no gradient at all."""
    head = AttentionHead((6, 6, 6), 3)
    layers = [torch.randn(40, 6) for _ in range(3)]
    out = head(layers, labels=torch.arange(40) % 3)
    out.loss.backward()
    for name, parameter in head.jump.named_parameters():
        if name != "att.bias":  # the same for every layer: softmax does not see it
            assert parameter.grad.any(), name
    hard = head.layer_logits(layers)[out.layer, torch.arange(40)]
    torch.testing.assert_close(out.logits, hard)


def test_jknet_merges_as_dgl_does(small):
    for mode in ("max", "cat", "lstm"):
        model = JKNet(GCN(32, 16, self_loop=True), 5, mode=mode).eval()
        layers = model.backbone(small.graph, small.feat)
        expected = model.head.decoder(model.head.jump(layers))
        torch.testing.assert_close(model(small.graph, small.feat).logits, expected)
    with pytest.raises(ValueError, match="one width"):
        JKNet(GCN(32, [8, 16, 16], self_loop=True), 5, mode="max")
    JKNet(GCN(32, [8, 16, 16], self_loop=True), 5, mode="cat")(small.graph, small.feat)


def test_jknet_metselect_chooses_among_three_views(small):
    model = JKNetMetSelect(GCN(32, 16, num_layers=4, self_loop=True), 5)
    train = small.split(0).train
    model(small.graph, small.feat, small.labels, train)
    selection = model.eval()(small.graph, small.feat)
    assert model.head.n_choices == 3
    assert selection.layer.max() <= 2
    views = model.head.merged(model.backbone(small.graph, small.feat))
    torch.testing.assert_close(selection.logits, model.head.head(views).logits)


def test_inference_mode(small):
    """Tensors made there have no version, and may not be kept for a later backward."""
    model = NDLSelect(GCN(32, 16, self_loop=True), 5, eps=0.12)
    with torch.inference_mode():
        there = model(small.graph, small.feat.clone()).layer
        model(small.graph, small.feat)
    out = model(small.graph, small.feat, small.labels)
    out.loss.backward()
    assert torch.equal(out.layer, there)
