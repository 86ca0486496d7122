"""Cases that once gave a wrong result without an error: now right, or refused with a sentence."""

import copy
import gc
import threading
import warnings
import weakref

import dgl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from metselect_dgl.nn import (
    GAT,
    GCN,
    GIN,
    DegreeSampler,
    FinalSelect,
    MetSelect,
    MetSelectHead,
)

BACKBONES = {"gcn": GCN, "gat": GAT, "gin": GIN}


def make(backbone=GCN, **options):
    torch.manual_seed(0)
    return MetSelect(backbone(32, 16, self_loop=True), 5, **options)


# Values that are kept must not outlive what they were derived from.


def through_numpy(tensor):
    tensor.numpy()[:] = np.random.default_rng(1).permutation(tensor.numpy())


def through_data(tensor):
    tensor.data.copy_(tensor.data.flip(0))


def reallocated(tensor):
    tensor.set_(tensor.flip(0))


CHANGES = {"numpy": through_numpy, "data": through_data, "set_": reallocated}


@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES)
@pytest.mark.parametrize("what", ["feat", "labels", "index"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_in_place_are_seen(small, backbone, what, change):
    given = {"feat": small.feat.clone(), "labels": small.labels.clone()}
    given["index"] = small.split(0).train.clone()
    model = make(backbone)
    model(small.graph, **given)
    change(given[what])
    fresh = make(backbone)(small.graph, **given)
    again = model(small.graph, **given)
    torch.testing.assert_close(again.loss, fresh.loss)
    assert torch.equal(again.layer, fresh.layer)


def test_an_edited_graph_is_seen(small):
    graph, train = small.graph.clone(), small.split(0).train
    model = make()
    model(graph, small.feat, small.labels, train)
    graph.add_edges(torch.arange(100), torch.arange(100, 200))
    fresh = make()(graph, small.feat, small.labels, train)
    torch.testing.assert_close(model(graph, small.feat, small.labels, train).loss, fresh.loss)


def test_a_sampler_of_another_graph_is_refused(small):
    sampler = DegreeSampler([-1], small.graph)
    edited = small.graph.clone()
    edited.add_edges(torch.arange(100), torch.arange(100, 200))
    with pytest.raises(ValueError, match="made for another graph"):
        sampler.sample_blocks(edited, torch.arange(5))
    sampler.sample_blocks(small.graph, torch.arange(5))


# Modules of the user are called, not only read.


def doubled(module, inputs, output):
    return 2 * output


class LoRA(nn.Linear):
    """A linear map with an added term."""

    def forward(self, h):
        return super().forward(h) + h.sum(1, keepdim=True)


def with_hook(linear):
    linear.register_forward_hook(doubled)
    return linear


def replaced(linear):
    new = LoRA(linear.in_features, linear.out_features)
    new.load_state_dict(linear.state_dict())
    return new


def sequential(linear):
    return nn.Sequential(linear, nn.Tanh())


MODULES = {
    "hook": with_hook,
    "spectral-norm": parametrizations.spectral_norm,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "subclass": replaced,
    "sequential": sequential,
}


def dense(model, graph, feat) -> list[torch.Tensor]:
    """Return the logits of every layer by calling the modules."""
    layers = model.backbone(graph, feat)
    return [decoder(h) for decoder, h in zip(model.head.decoders, layers, strict=True)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("change", MODULES.values(), ids=MODULES)
def test_changed_decoders_are_called(small, change, training):
    model = make()
    train = small.split(0).train
    for depth in range(3):
        model.head.decoders[depth] = change(model.head.decoders[depth])
    model(small.graph, small.feat, small.labels, train)
    model.train(training)
    with torch.no_grad():
        out = model(small.graph, small.feat, small.labels, train)
        model.eval()
        logits = torch.stack(dense(model, small.graph, small.feat))[:, train]
    expected = logits[out.layer, torch.arange(len(train))]
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", MODULES.values(), ids=MODULES)
def test_a_changed_input_is_called(small, change):
    model = make()
    model.backbone.input = change(model.backbone.input)
    first = model.backbone.input(small.feat)
    layers = model.backbone(small.graph, small.feat)
    torch.testing.assert_close(layers[0], first)
    train = small.split(0).train
    model(small.graph, small.feat, small.labels, train)
    head = copy.deepcopy(make().head)
    head.load_state_dict(model.head.state_dict())
    head.train()
    out = model(small.graph, small.feat, small.labels, train)
    expected = head(model.backbone(small.graph, small.feat), labels=small.labels, index=train)
    torch.testing.assert_close(out.loss, expected.loss)


def test_backward_hooks_on_convolutions_run(small):
    for backbone in BACKBONES.values():
        model, seen = make(backbone), []
        conv = model.backbone.convs[0]
        conv.register_full_backward_hook(lambda *args, seen=seen: seen.append(1))
        model(small.graph, small.feat, small.labels).loss.backward()
        assert seen, backbone.__name__


def test_changed_options_of_convolutions_are_honoured(small):
    model = make()
    before = model.backbone(small.graph, small.feat)[1]
    model.backbone.convs[0]._activation = torch.sin
    after = model.backbone(small.graph, small.feat)[1]
    assert not torch.allclose(before, after)
    model = make()
    model.backbone.convs[0]._norm = "right"
    assert not torch.allclose(before, model.backbone(small.graph, small.feat)[1])
    attention = make(GAT).train()
    attention.backbone.convs[0].attn_drop.p = 0.9
    torch.manual_seed(1)
    first = attention.backbone(small.graph, small.feat)[1]
    assert not torch.allclose(first, attention.backbone(small.graph, small.feat)[1])


@pytest.mark.parametrize("engine", ["auto", "dgl"])
@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES)
def test_double_backward_is_refused_or_right(small, backbone, engine):
    torch.manual_seed(0)
    model = MetSelect(backbone(32, 16, self_loop=True, engine=engine), 5)
    feat = small.feat.clone().requires_grad_()
    loss = model(small.graph, feat, small.labels).loss
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(loss, feat, create_graph=True)


# State


@pytest.mark.parametrize("moments", ["ema", "epoch"])
def test_state_dict_has_what_was_gathered(small, moments):
    model, train = make(moments=moments), small.split(0).train
    model(small.graph, small.feat, small.labels, train[:60])
    model(small.graph, small.feat, small.labels, train[60:])
    other = make(moments=moments)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        each(small.graph, small.feat, small.labels, train[:30])
        each.renew_moments()
    for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_plain_model_does_not_use_a_loaded_gate(small):
    fitted, split = make(select="gate"), small.split(0)
    fitted(small.graph, small.feat, small.labels, split.train)
    fitted.calibrate(small.graph, small.feat, small.labels, split.train, split.val)
    plain = make(select="plain")
    plain.load_state_dict(fitted.state_dict(), strict=False)
    expected = make(select="plain")
    expected.load_state_dict(plain.state_dict())
    out, right = (m.predict(small.graph, small.feat) for m in (plain, expected))
    assert torch.equal(out.layer, right.layer)
    assert (plain.head.comparer.temperature == 1).all()


def test_activation_checkpointing_counts_moments_once(small):
    train = small.split(0).train
    plain, checked = make(moments="epoch"), make(moments="epoch")
    plain(small.graph, small.feat, small.labels, train).loss.backward()
    out = checkpoint(
        lambda feat: checked(small.graph, feat, small.labels, train).loss,
        small.feat.clone().requires_grad_(),
        use_reentrant=False,
    )
    out.backward()
    plain.renew_moments()
    checked.renew_moments()
    assert torch.equal(plain.head.prototypes.count, checked.head.prototypes.count)


def test_more_classes_than_an_int16_has(small):
    head = MetSelectHead([4, 4], 40_000, select="gate")
    layers = [torch.randn(50, 4), torch.randn(50, 4)]
    labels = torch.arange(39_950, 40_000)
    head(layers, labels=labels)
    with torch.no_grad():
        head.comparer.gate.fill_(0.1)
        out = head.eval()(layers)
    assert out.logits.argmax(1).max() > 2**15


def test_autocast_works_whatever_the_number_of_nodes():
    """Products under bf16 autocast; the metric in float32."""
    for n in (20, 300, 3000):
        graph = dgl.rand_graph(n, 4 * n)
        feat, labels = torch.randn(n, 32), torch.arange(n) % 5
        model = make()
        expected = model(graph, feat, labels)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(graph, feat, labels)
            out.loss.backward()
        torch.testing.assert_close(out.loss, expected.loss, rtol=0.1, atol=0.1)


# Threads and memory


def test_predict_in_threads_leaves_the_mode(small):
    model = make()
    model(small.graph, small.feat, small.labels)
    expected = model.predict(small.graph, small.feat).logits
    results, errors = [], []

    def work():
        try:
            for _ in range(20):
                results.append(model.predict(small.graph, small.feat).logits)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(each, expected) for each in results)


def test_a_deleted_model_frees_its_graph(small):
    """At once, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        graph, feat = small.graph.clone(), small.feat.clone()
        model = make()
        model(graph, feat, small.labels).loss.backward()
        refs = [weakref.ref(graph), weakref.ref(feat), weakref.ref(model)]
        del model, graph, feat
        assert [ref() for ref in refs] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES)
@pytest.mark.parametrize("self_loop", [True, False])
def test_a_model_does_not_keep_its_inputs_alive(small, backbone, self_loop):
    graph, feat = dgl.add_self_loop(small.graph), small.feat.clone()
    torch.manual_seed(0)
    model = MetSelect(backbone(32, 16, self_loop=self_loop), 5)
    model(graph, feat, small.labels).loss.backward()
    model.predict(graph, feat)
    refs = [weakref.ref(graph), weakref.ref(feat)]
    del graph, feat
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    for prepared in model.backbone.prepared.graphs:
        assert not prepared.of_graph and not prepared.of_features


# Errors that name the value


WRONG = {
    "sparse": (lambda d: make()(d.graph, d.feat.to_sparse()), TypeError, "sparse"),
    "no-graph": (lambda d: make()(None, d.feat), TypeError, "graph is NoneType"),
    "swapped": (lambda d: make()(d.feat, d.graph), TypeError, "graph is Tensor"),
    "no-blocks": (lambda d: make()([], d.feat), ValueError, "0 blocks for 2 layers"),
    "hidden-0": (lambda d: GCN(8, 0), ValueError, "hidden is 0"),
    "hidden-text": (lambda d: GCN(8, "16"), TypeError, "hidden is '16'"),
    "dropout-nan": (lambda d: GCN(8, 16, dropout=float("nan")), ValueError, "dropout is nan"),
    "deep-nan": (lambda d: make(deep_supervision=float("nan")), ValueError, "is nan"),
    "alpha-nan": (lambda d: make(alpha=float("nan")), ValueError, "alpha is nan"),
    "complex": (
        lambda d: make()(d.graph, d.feat, d.labels.to(torch.complex64)),
        TypeError,
        "labels are torch.complex64",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_value(small, call, error, message):
    with pytest.raises(error, match=message):
        call(small)


def test_bipartite_graphs_are_refused():
    graph = dgl.heterograph({("a", "to", "b"): ([0, 1], [1, 2])})
    with pytest.raises(ValueError, match="one type of nodes"):
        make()(graph, torch.randn(3, 32))


def test_hidden_of_numpy_is_a_number(small):
    model = MetSelect(GCN(32, np.int64(16), self_loop=True), 5)
    assert torch.isfinite(model(small.graph, small.feat, small.labels).loss)


@pytest.mark.parametrize("select", ["plain", "temperature"])
@pytest.mark.parametrize("rule", ["confidence", "distance", "opposite"])
def test_ties_select_the_lowest_layer_everywhere(small, rule, select):
    """Layers that are equal, in every way to select among them."""

    class Same(nn.Module):
        layer_feats = (32, 32, 32)

        def forward(self, graph, feat):
            return [feat, feat, feat]

        def first_layer(self, feat):
            return feat

        def layer_on_block(self, depth, block, h):
            return h[: block.num_dst_nodes()]

    model = MetSelect(Same(), 5, rule=rule, select=select)
    model(small.graph, small.feat, small.labels)
    model.eval()
    with torch.no_grad():
        outs = [model(small.graph, small.feat), model.predict(small.graph, small.feat)]
        outs.append(model(small.graph, small.feat, index=torch.arange(300)))
        outs.append(model.predict(small.graph, small.feat, batch_size=37))
    for out in outs:
        assert (out.layer == 0).all()


def test_a_large_offset_is_reported():
    """float32 holds whole numbers at 1e7; the means of such a layer would be rounded to them."""
    labels = torch.arange(400) % 4
    layers = [torch.randn(400, 8) + 3 * torch.eye(4, 8)[labels] for _ in range(2)]
    layers[1] += 1e7
    with pytest.warns(UserWarning, match=r"layer 1 has means up to 1e\+07 .* torch.float32 cannot"):
        MetSelectHead([8, 8], 4)(layers, labels=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MetSelectHead([8, 8], 4).double()([h.double() for h in layers], labels=labels)


def test_final_select_is_as_strict(small):
    model = FinalSelect(GCN(32, 16, self_loop=True), 5)
    model.head.decoder.register_forward_hook(doubled)
    out = model(small.graph, small.feat)
    expected = model.head.decoder(model.backbone(small.graph, small.feat)[-1])
    torch.testing.assert_close(out.logits, expected)
