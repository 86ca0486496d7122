"""The fused convolutions against DGL's own, propagate_once, and one layer after the other."""

import copy
import weakref

import dgl
import pytest
import torch

from benchmarks.op_cases import make_case
from metselect_dgl import functional as MF
from metselect_dgl import ops
from metselect_dgl.nn import GAT, GCN, GIN, FinalSelect, MetSelect, layer_source
from metselect_dgl.nn.source import GraphSource

FUSED = {
    "gat": (GAT, {}),
    "gat-2": (GAT, {"heads": 2}),
    "gcn": (GCN, {"propagate_once": False}),
    "gcn-once": (GCN, {"propagate_once": True}),
    "gin": (GIN, {"propagate_once": False}),
    "gin-once": (GIN, {"propagate_once": True}),
    "gin-eps": (GIN, {"learn_eps": True, "propagate_once": False}),
    "gin-eps-once": (GIN, {"learn_eps": True, "propagate_once": True}),
    "gin-norm": (GIN, {"batch_norm": True, "propagate_once": True}),
}
every_conv = pytest.mark.parametrize(("backbone", "options"), FUSED.values(), ids=FUSED.keys())


def twins(backbone, options, selector=MetSelect, **more):
    """The same model on DGL's convolutions and on ours, float64."""
    torch.manual_seed(0)
    widths = [16, 24, 16]  # the first convolution narrows, the second widens
    size = {"self_loop": True, "num_layers": 2, **more}
    plain = {k: v for k, v in options.items() if k != "propagate_once"}
    ours = selector(backbone(32, widths, engine="fused", **size, **options), 5).double()
    dgls = selector(backbone(32, widths, engine="dgl", **size, **plain), 5).double()
    for conv in ours.backbone.convs:
        if isinstance(conv, dgl.nn.GINConv):
            torch.nn.init.constant_(conv.eps, 0.3)
    dgls.load_state_dict(ours.state_dict())
    return dgls, ours


@every_conv
@pytest.mark.parametrize("selector", [MetSelect, FinalSelect], ids=["metselect", "final"])
def test_training_is_dgls(small, backbone, options, selector):
    """Loss, logits, choices, and the gradient of every parameter."""
    feat, train = small.feat.double(), small.split(0).train
    outputs, grads = [], []
    for model in twins(backbone, options, selector):
        out = model(small.graph, feat, small.labels, train)
        used = [
            p
            for name, p in model.named_parameters()
            if selector is MetSelect or "input" not in name
        ]
        grads.append(torch.autograd.grad(3 * out.loss, used))
        outputs.append(out)
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    torch.testing.assert_close(outputs[0].score, outputs[1].score)
    assert torch.equal(outputs[0].layer, outputs[1].layer)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@every_conv
@pytest.mark.parametrize("num_layers", [1, 3])
def test_evaluation_is_dgls(small, backbone, options, num_layers):
    feat, part = small.feat.double(), small.split(0)
    more = {"num_layers": num_layers}
    torch.manual_seed(0)
    plain = {k: v for k, v in options.items() if k != "propagate_once"}
    ours = MetSelect(backbone(32, 16, engine="fused", **more, **options, self_loop=True), 5)
    dgls = MetSelect(backbone(32, 16, engine="dgl", **more, **plain, self_loop=True), 5)
    dgls.load_state_dict(ours.state_dict())
    outputs = []
    for model in (ours.double(), dgls.double()):
        model.calibrate(small.graph, feat, small.labels, part.train, part.val)
        model.eval()
        outputs.append(model(small.graph, feat, index=part.test))
        with torch.no_grad():
            outputs.append(model(small.graph, feat))
    assert torch.equal(outputs[0].layer, outputs[2].layer)
    assert torch.equal(outputs[1].layer, outputs[3].layer)
    torch.testing.assert_close(outputs[0].logits, outputs[2].logits)
    torch.testing.assert_close(outputs[1].logits, outputs[3].logits)
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits[part.test])


INDICES = {
    "permutation": lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(0)),
    "drawn": lambda n: torch.randint(n, (n,), generator=torch.Generator().manual_seed(0)),
    "strided": lambda n: torch.arange(n)[::2],
    "twice": lambda n: torch.arange(30).repeat(2),
    "int32": lambda n: torch.arange(20, dtype=torch.int32),
}


@every_conv
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_any_index(small, backbone, options, index):
    """Rows in any order, some of them more than once, as many as the graph has."""
    feat, index = small.feat.double(), index(300)
    results = []
    for model in twins(backbone, options):
        loss = model(small.graph, feat, small.labels, index).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    for selector in (FinalSelect, MetSelect):
        _, ours = twins(backbone, options, selector)
        ours.calibrate(small.graph, feat, small.labels, small.split(0).train)
        ours.eval()
        whole, some = ours(small.graph, feat), ours(small.graph, feat, index=index)
        torch.testing.assert_close(some.logits, whole.logits[index])


def other_norm(i, o):
    return dgl.nn.GraphConv(i, o, norm="right")


OTHERS = {
    "norm": (GCN, other_norm),
    "no-bias": (GCN, lambda i, o: dgl.nn.GraphConv(i, o, bias=False)),
    "residual": (GAT, lambda i, o: dgl.nn.GATConv(i, o // 4, 4, residual=True)),
    "mean": (GIN, lambda i, o: dgl.nn.GINConv(torch.nn.Linear(i, o), "mean")),
}


@pytest.mark.parametrize(("backbone", "make"), OTHERS.values(), ids=OTHERS.keys())
def test_a_subclass_with_other_convolutions_keeps_them(small, backbone, make):
    class Mine(backbone):
        def make_conv(self, in_feats, out_feats):
            return make(in_feats, out_feats)

    graph = dgl.add_self_loop(small.graph)
    model = Mine(32, 16)
    h = small.feat
    for conv, layer in zip(model.convs, model(graph, small.feat)[1:], strict=True):
        h = torch.relu(conv(graph, h).flatten(1))
        torch.testing.assert_close(layer, h)
    with pytest.raises(ValueError, match="engine='fused' is not for Mine"):
        Mine(32, 16, engine="fused")


@pytest.mark.parametrize("depth", [0, 1])
def test_hooks_are_called(small, depth):
    model, calls = GCN(32, 16, self_loop=True, propagate_once=True), []
    model.convs[depth].register_forward_hook(lambda *_: calls.append(1))
    model(small.graph, small.feat)
    assert calls == [1]


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        (GCN, {"propagate_once": True}),
        (GCN, {"hidden": 500, "propagate_once": False}),
        (GAT, {}),
        (GIN, {"propagate_once": True}),
        (GIN, {"learn_eps": True, "propagate_once": False}),
        (GIN, {"batch_norm": True, "propagate_once": False}),
    ],
    ids=["gcn", "gcn-wide", "gat", "gin", "gin-eps", "gin-norm"],
)
def test_features_that_are_mostly_0(small, backbone, options, num_layers):
    """They are multiplied sparsely, with the same result and gradients."""
    torch.manual_seed(0)
    feat = torch.zeros(300, 400, dtype=torch.float64)
    feat[torch.arange(300), torch.randint(400, (300,))] = torch.rand(300, dtype=torch.float64)
    train, results = small.split(0).train, []
    options = {"hidden": 16, "num_layers": num_layers} | options
    ours = MetSelect(backbone(400, **options), 5).double()
    slow = options | {"engine": "dgl", "propagate_once": False}
    dgls = MetSelect(backbone(400, **slow), 5).double()
    dgls.load_state_dict(ours.state_dict())
    graph = dgl.add_self_loop(small.graph)
    first = layer_source(ours.backbone, graph, feat).stack(train).layers[0]
    assert (first.features.sparse() is not None) == ops.compiled("neighbour_sum", feat.device)
    for model in (ours, dgls):
        loss = model(graph, feat, small.labels, train).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backbone", [GCN, GAT, GIN], ids=["gcn", "gat", "gin"])
def test_backward_twice(small, backbone):
    """What is kept for a second pass is not what the first one gave away."""
    model = MetSelect(backbone(32, 16, self_loop=True), 5).double()
    out = model(small.graph, small.feat.double(), small.labels, small.split(0).train)
    grads = []
    for _ in range(3):
        out.loss.backward(retain_graph=True)
        grads.append([p.grad.clone() for p in model.parameters()])
    for once, thrice in zip(grads[0], grads[2], strict=True):
        torch.testing.assert_close(3 * once, thrice)


def test_second_derivatives_are_refused(small):
    model = MetSelect(GCN(32, 16, self_loop=True), 5)
    out = model(small.graph, small.feat, small.labels, small.split(0).train)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(out.loss, list(model.parameters()), create_graph=True)


def test_a_graph_of_coordinates_alone(small):
    graph = dgl.add_self_loop(small.graph).formats("coo")
    model = GCN(32, 16, engine="fused")
    plain = GCN(32, 16, engine="dgl")
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(graph, small.feat), plain(graph, small.feat))


def test_a_bare_block(small):
    block = dgl.to_block(dgl.in_subgraph(small.graph, torch.arange(10)), torch.arange(10))
    model = MetSelect(GCN(32, 16, num_layers=1, allow_zero_in_degree=True), 5)
    feat = small.feat[block.srcdata[dgl.NID]]
    assert model(block, feat, small.labels[:10]).logits.shape == (10, 5)
    with torch.no_grad():
        assert model.eval()(block, feat).logits.shape == (10, 5)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_not_finite_are_told(small, name):
    """Also of layer 0, which is not stored, and nothing of it enters the moments."""
    part = small.split(0)
    model = MetSelect(GCN(5, 8, self_loop=True), 5)
    feat = small.feat[:, :5].contiguous()
    model(small.graph, feat, small.labels, part.train)
    before = [buffer.clone() for buffer in model.head.buffers()]
    with torch.no_grad():
        getattr(model.backbone.input, name).view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=f"layer 0 of node {part.train[0]} is not finite"):
        model(small.graph, feat, small.labels, part.train)
    model.eval()
    with pytest.raises(ValueError, match="layer 0 of node 0 is not finite"):
        model(small.graph, feat)
    with pytest.raises(ValueError, match=f"layer 0 of node {part.test[0]} is not finite"):
        model(small.graph, feat, index=part.test)
    with torch.no_grad(), pytest.raises(ValueError, match="layer 0 of node 0 is not finite"):
        model(small.graph, feat)
    for old, new in zip(before, model.head.buffers(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("backbone", [GCN, GAT, GIN], ids=["gcn", "gat", "gin"])
def test_a_backbone_lets_go_of_its_layers(small, backbone):
    model = backbone(32, 16, num_layers=4, self_loop=True)
    layers, sweep = [], layer_source(model, small.graph, small.feat).sweep()
    for expected in model(small.graph, small.feat):
        with torch.no_grad():
            _, batches = next(sweep)
            ((_, h),) = batches
        torch.testing.assert_close(h, expected)
        layers.append(weakref.ref(h))
        del h
        alive = sum(each() is not None for each in layers)
        assert alive <= 1, "only what the next layer is made of"


def test_dropout_is_not_streamed_away(small):
    model = MetSelect(GCN(32, 16, self_loop=True, dropout=0.5), 5)
    model(small.graph, small.feat, small.labels, small.split(0).train)
    with torch.no_grad():
        first, second = (model(small.graph, small.feat).logits for _ in range(2))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("backbone", [GCN, GIN], ids=["gcn", "gin"])
def test_many_rows_leave_layer_0_unstored(small, backbone):
    """More than 16 nodes a feature: moments and decoder of layer 0 are worked out on X."""
    feat, train = small.feat.double()[:, :5].contiguous(), small.split(0).train
    assert len(train) >= 16 * feat.shape[1]
    torch.manual_seed(0)
    model = MetSelect(backbone(5, 8, self_loop=True), 5).double()
    first = layer_source(model.backbone, small.graph, feat).stack(train).layers[0]
    assert first.worth_mapping
    stored = copy.deepcopy(model)
    stored.head.keeps_maps = False  # the same parameters, through a stored layer
    outputs = [each(small.graph, feat, small.labels, train) for each in (model, stored)]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    assert torch.equal(outputs[0].layer, outputs[1].layer)
    torch.testing.assert_close(outputs[0].score, outputs[1].score)
    mine, theirs = (
        torch.autograd.grad(each.loss, [*m.head.parameters(), *m.backbone.parameters()])
        for each, m in zip(outputs, (model, stored), strict=True)
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(model.head.buffers(), stored.head.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backbone", [GCN, GIN], ids=["gcn", "gin"])
class TestPropagateOnce:
    def test_once(self, small, backbone, monkeypatch):
        model = backbone(32, 8, propagate_once=True, self_loop=True)
        calls, propagate = [], model.convolution.propagate
        model.convolution.propagate = lambda *of: calls.append(1) or propagate(*of)
        first = model(small.graph, small.feat)
        again = model.eval()(small.graph, small.feat)
        assert len(calls) == 1
        torch.testing.assert_close(first, again, rtol=0, atol=0)

    @pytest.mark.parametrize("what", ["graph", "edited", "feat", "in-place"])
    def test_follows_graph_and_features(self, small, backbone, what):
        graph, feat = copy.deepcopy(small.graph), small.feat.clone()
        model = backbone(32, 8, propagate_once=True, self_loop=True)
        before = model(graph, feat)[-1]
        if what == "graph":
            graph = dgl.reverse(graph)
        elif what == "edited":
            graph.add_edges([0, 1], [2, 3])
        elif what == "feat":
            feat = feat + 1
        else:
            feat += 1
        after = model(graph, feat)[-1]
        assert not torch.allclose(before, after)
        fresh = backbone(32, 8, self_loop=True, engine="dgl")
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(after, fresh(graph, feat)[-1])

    def test_dropout_is_drawn_anew(self, small, backbone):
        model = backbone(32, 8, propagate_once=True, self_loop=True, dropout=0.5)
        first, second = (model(small.graph, small.feat)[1] for _ in range(2))
        assert not torch.allclose(first, second)

    def test_features_that_learn(self, small, backbone):
        """Their gradient goes through the aggregation, which is therefore done."""
        feat = small.feat.clone().requires_grad_()
        backbone(32, 8, propagate_once=True, self_loop=True)(small.graph, feat)[1].sum().backward()
        assert feat.grad.any()


def test_options_that_a_backbone_does_not_have():
    with pytest.raises(ValueError, match="propagate_once is not for GAT"):
        GAT(4, 8, propagate_once=True)
    with pytest.raises(ValueError, match="engine is 'cuda'; use one of auto, dgl, fused"):
        GCN(4, 8, engine="cuda")


def test_state_is_graphconvs(small):
    """A model of one engine loads into the other, and the keys are those of DGL."""
    keys = set(GCN(4, 8, engine="fused", propagate_once=True).state_dict())
    assert keys == set(GCN(4, 8, engine="dgl").state_dict())
    assert {"convs.0.weight", "convs.0.bias"} <= keys


@pytest.mark.parametrize("rule", MF.RULES)
def test_one_layer_after_the_other(rule):
    """Streaming gives what all layers together give, and lets go of each."""
    case = make_case(130, (5, 37, 8), empty_class=1)
    known = case.metric()
    known["factors"][1] *= 0  # collapsed: never selected
    t = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    alive = []

    def one_by_one():
        for h in case.layers:
            assert sum(alive) == 0, "an earlier layer is still held"
            mine = h.clone()
            alive.append(1)
            weakref.finalize(mine, alive.clear)
            yield mine
            del mine

    streamed = MF.select_and_decode(
        one_by_one(), **known, weights=case.weights, biases=case.biases, temperature=t, rule=rule
    )
    layer, _, score = MF.select_layer(case.layers, **known, temperature=t, rule=rule)
    logits = MF.selected_logits(case.layers, case.weights, case.biases, layer)
    assert torch.equal(streamed[1], layer)
    torch.testing.assert_close(streamed[0], logits)
    torch.testing.assert_close(streamed[2], score)


def test_a_stream_that_ends_early():
    case = make_case(20, (3, 4))
    decoders = {"weights": case.weights, "biases": case.biases}
    with pytest.raises(ValueError, match="got 1 layers for the means of 2"):
        MF.select_and_decode(case.layers[:1], **case.metric(), **decoders)


def test_the_model_streams(small, monkeypatch):
    """With nothing but answers asked for, evaluation goes layer by layer."""
    part = small.split(0)
    model = MetSelect(GCN(32, 16, self_loop=True), 5, select="temperature")
    model.calibrate(small.graph, small.feat, small.labels, part.train, part.val)
    model.eval()
    whole = model(small.graph, small.feat)
    with torch.no_grad():
        monkeypatch.setattr(GraphSource, "stack", None)
        streamed = model(small.graph, small.feat)
    assert torch.equal(whole.layer, streamed.layer)
    torch.testing.assert_close(whole.logits, streamed.logits)
    torch.testing.assert_close(whole.score, streamed.score)


def test_the_gate_sees_nodes_in_parts(small, monkeypatch):
    part = small.split(0)
    model = MetSelect(GCN(32, 16, self_loop=True), 5, select="gate")
    model.calibrate(small.graph, small.feat, small.labels, part.train, part.val)
    whole = model.eval()(small.graph, small.feat)
    monkeypatch.setattr("metselect_dgl.nn.source.TILE", 7)
    parts = model(small.graph, small.feat)
    assert torch.equal(whole.layer, parts.layer)
    torch.testing.assert_close(whole.score, parts.score)
