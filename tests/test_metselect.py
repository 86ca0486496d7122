"""MetSelect: the head over a list of layers, and the model over graphs and blocks."""

import copy
import pickle

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler

from benchmarks.op_cases import make_case
from metselect_dgl import functional as MF
from metselect_dgl.nn import (
    GAT,
    GCN,
    GIN,
    FinalSelect,
    JKNetMetSelect,
    MetSelect,
    MetSelectHead,
)


def trained_head(n_classes=4, widths=(5, 37), **options):
    """A head that has seen a training batch, its case, and the output."""
    case = make_case(63, widths, n_classes, dtype=torch.float32)
    torch.manual_seed(0)
    head = MetSelectHead(widths, n_classes, **options)
    return head, case, head(case.layers, labels=case.labels)


def test_training_follows_the_functions():
    head, case, out = trained_head(deep_supervision=0.3)
    metric = head.prototypes.metric()
    expected = case.metric()
    for name in ("means", "factors"):
        for a, b in zip(metric[name], expected[name], strict=True):
            torch.testing.assert_close(a, b)
    layer, _, score = MF.select_layer(case.layers, **metric, labels=case.labels)
    assert torch.equal(out.layer, layer)
    assert torch.equal(out.score, score)
    nodes = torch.arange(63)
    every = head.layer_logits(case.layers)
    torch.testing.assert_close(out.logits, every[layer, nodes])
    deep = torch.stack([F.cross_entropy(logits, case.labels) for logits in every]).mean()
    expected = F.cross_entropy(every[layer, nodes], case.labels) + 0.3 * deep
    torch.testing.assert_close(out.loss, expected)


def test_evaluation_ignores_labels_and_keeps_the_moments():
    head, case, _ = trained_head()
    head.eval()
    before = copy.deepcopy(head.state_dict())
    plain = head(case.layers, index=torch.arange(20))
    wrong = (case.labels + 1) % 4
    judged = head(case.layers, labels=wrong, index=torch.arange(20))
    assert torch.equal(plain.layer, judged.layer)
    assert torch.equal(plain.logits, judged.logits)
    torch.testing.assert_close(judged.loss, F.cross_entropy(plain.logits, wrong[:20]))
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("rule", MF.RULES)
def test_rules(rule):
    head, case, _ = trained_head(rule=rule)
    head.eval()
    expected = MF.select_layer(case.layers, **head.prototypes.metric(), rule=rule)
    assert torch.equal(head(case.layers).layer, expected[0])


def test_metselect_max_is_the_opposite():
    model = MetSelect(GCN(3, 4, self_loop=True), 2, rule="opposite")
    assert model.head.rule == "opposite"


def hinge(dist2, layer, labels, alpha=1.0):
    """Eq. 7, node by node."""
    total = 0.0
    for i, (l, y) in enumerate(zip(layer.tolist(), labels.tolist(), strict=True)):
        others = [dist2[k, i, c] for k in range(len(dist2)) for c in range(4) if c != y]
        total += max(0.0, alpha + dist2[l, i, y] + torch.logsumexp(-torch.stack(others), 0))
    return total / len(labels)


def test_distance_loss_is_eq_7():
    head, case, out = trained_head(loss="distance", deep_supervision=0.0)
    dist2 = MF.class_distances(case.layers, **head.prototypes.metric())
    torch.testing.assert_close(out.loss, hinge(dist2, out.layer, case.labels))
    nodes = torch.arange(63)
    torch.testing.assert_close(out.logits, -dist2[out.layer, nodes] / 2)


def test_posterior_loss():
    head, case, out = trained_head(loss="posterior", deep_supervision=0.5)
    dist2 = MF.class_distances(case.layers, **head.prototypes.metric())
    log_p = (-dist2 / 2).log_softmax(-1)
    nodes = torch.arange(63)
    expected = -log_p[out.layer, nodes, case.labels].mean()
    deep = -log_p[:, nodes, case.labels].mean()
    torch.testing.assert_close(out.loss, expected + 0.5 * deep)


@pytest.mark.parametrize("loss", ["distance", "posterior"])
def test_metric_losses_stay_finite_on_extremes(loss):
    head = MetSelectHead((4,), 3, loss=loss)
    for scale in (1e-20, 1e20):
        h = (torch.randn(30, 4) * scale).requires_grad_()
        out = head([h], labels=torch.arange(30) % 3)
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert torch.isfinite(h.grad).all()


@pytest.mark.parametrize("loss", ["ce", "distance", "posterior"])
def test_what_learns(loss):
    """Every layer gets a gradient, every trained parameter one that is not None."""
    widths = (5, 6)
    head = MetSelectHead(widths, 4, loss=loss, metric_dim=3)
    case = make_case(63, widths, dtype=torch.float32)
    layers = [h.requires_grad_() for h in case.layers]
    head(layers, labels=case.labels).loss.backward()
    assert all(h.grad is not None and h.grad.any() for h in layers)
    for name, parameter in head.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert head.projections[0].weight.requires_grad == (loss != "ce")
    assert head.decoders[0].weight.requires_grad == (loss == "ce")


def test_metric_dim_measures_in_the_projection():
    head, case, _ = trained_head(metric_dim=3)
    assert [tuple(mean.shape) for mean in head.prototypes.means] == 2 * [(4, 3)]
    projected = [h @ line.weight.T for h, line in zip(case.layers, head.projections, strict=True)]
    expected = MF.select_layer(projected, **head.prototypes.metric())
    assert torch.equal(head.eval()(case.layers).layer, expected[0])


def test_shrinkage_options():
    factors = []
    for shrinkage in ("oas", "ledoit_wolf", 0.5):
        head, _, _ = trained_head(shrinkage=shrinkage)
        factors.append(head.prototypes.factors[1])
    default, _, _ = trained_head()
    assert torch.equal(factors[0], default.prototypes.factors[1])
    assert not torch.allclose(factors[0], factors[1])
    assert not torch.allclose(factors[0], factors[2])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rule": "nearest"}, "rule is 'nearest'"),
        ({"loss": "mse"}, "loss is 'mse'"),
        ({"select": "vote"}, "select is 'vote'"),
        ({"select": "gate", "loss": "posterior"}, "needs loss='ce'"),
        ({"select": "gate", "rule": "opposite"}, "rule='confidence'"),
    ],
    ids=str,
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        MetSelectHead((4,), 2, **options)


def test_buffers_travel():
    """state_dict, deepcopy, pickle and .to() carry moments, temperatures and gate."""
    head, case, _ = trained_head(select="gate")
    head.eval()
    head.calibrate(case.layers, case.labels)
    expected = head(case.layers)
    loaded = MetSelectHead((5, 37), 4, select="gate").eval()
    loaded.load_state_dict(head.state_dict())
    for twin in (loaded, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        selection = twin(case.layers)
        assert torch.equal(selection.logits, expected.logits)
        assert torch.equal(selection.layer, expected.layer)
    double = copy.deepcopy(head).double()
    selection = double([h.double() for h in case.layers])
    assert selection.logits.dtype == torch.float64
    torch.testing.assert_close(selection.score, expected.score.double(), rtol=1e-4, atol=1e-3)


def test_reset_forgets():
    head, case, _ = trained_head(select="gate")
    head.calibrate(case.layers, case.labels)
    weight = head.decoders[0].weight.clone()
    head.reset_parameters()
    assert not torch.equal(head.decoders[0].weight, weight)
    assert head.comparer.temperature.eq(1).all()
    assert not head.comparer.gate.any()
    with pytest.raises(RuntimeError, match="no class moments"):
        head.eval()(case.layers)


def test_paper_setting():
    model = MetSelect.paper(GCN(3, 4, self_loop=True), 2)
    assert model.head.deep_supervision == 0
    assert "select='plain'" in repr(model.head)
    assert model.head.comparer.fit(None, None, None) is None
    assert MetSelect.paper(GCN(3, 4, self_loop=True), 2, loss="distance").head.loss == "distance"


def test_repr_tells_the_options():
    text = repr(MetSelect(GCN(3, 4, self_loop=True), 2, rule="distance"))
    for part in ("self_loop=True", "rule='distance'", "n_classes=2", "shrinkage='oas'"):
        assert part in text


class TestModel:
    """`MetSelect(backbone, n_classes)(graph, feat, labels=..., index=...)`."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
    @pytest.mark.parametrize("backbone", [GCN, GAT, GIN], ids=["gcn", "gat", "gin"])
    def test_on_a_graph(self, small, backbone, dtype):
        feat, train = small.feat.to(dtype), small.split(0).train
        model = MetSelect(backbone(32, 16, num_layers=2, self_loop=True), 5).to(dtype)
        out = model(small.graph, feat, labels=small.labels, index=train)
        out.loss.backward()
        assert out.logits.shape == (len(train), 5)
        assert out.loss.dtype == out.logits.dtype == dtype
        assert all(parameter.grad is not None for parameter in model.parameters())
        everywhere = model.eval()(small.graph, feat)
        assert everywhere.logits.shape == (300, 5)
        assert everywhere.layer.shape == everywhere.score.shape == (300,)
        assert set(everywhere.layer.tolist()) <= {0, 1, 2}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
    @pytest.mark.parametrize("backbone", [GCN, GAT, GIN], ids=["gcn", "gat", "gin"])
    def test_on_blocks(self, small, backbone, dtype):
        model = MetSelect(backbone(32, 16, num_layers=2, self_loop=True), 5).to(dtype)
        sampler, feat = NeighborSampler([4, 4]), small.feat.to(dtype)
        loader = DataLoader(small.graph, small.split(0).train, sampler, batch_size=64)
        for inputs, seeds, blocks in loader:
            out = model(blocks, feat[inputs], labels=small.labels[seeds])
            out.loss.backward()
            assert out.logits.shape == (len(seeds), 5)
        half = model(blocks, feat[inputs], labels=small.labels[seeds], index=torch.arange(40))
        assert half.logits.shape == (40, 5)
        assert model.eval()(blocks, feat[inputs]).layer.shape == (len(seeds),)

    def test_gradients_are_those_of_eager_torch(self, small):
        """The same objective written out with autograd alone, for every parameter."""
        train, labels = small.split(0).train, small.labels
        model = MetSelect(GAT(32, 16, self_loop=True), 5).double()
        feat = small.feat.double()
        out = model(small.graph, feat, labels=labels, index=train)
        ours = torch.autograd.grad(out.loss, list(model.parameters()))
        logits = model.head.layer_logits(model.backbone(small.graph, feat), train)
        nodes, y = torch.arange(len(train)), labels[train]
        selected = F.cross_entropy(logits[out.layer, nodes], y)
        deep = torch.stack([F.cross_entropy(each, y) for each in logits]).mean()
        eager = torch.autograd.grad(selected + deep, list(model.parameters()))
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b)

    def test_labels_of_other_nodes_do_not_matter(self, small):
        train = small.split(0).train
        model = MetSelect(GCN(32, 16, self_loop=True), 5)
        loss = model(small.graph, small.feat, small.labels, train).loss
        hidden = small.labels.clone()
        hidden[small.split(0).test] = -1
        torch.testing.assert_close(model(small.graph, small.feat, hidden, train).loss, loss)

    def test_mask_is_an_index(self, small):
        model = MetSelect(GCN(32, 16, self_loop=True), 5)
        by_mask = model(small.graph, small.feat, small.labels, small.train_masks[0])
        by_index = model(small.graph, small.feat, small.labels, small.split(0).train)
        assert torch.equal(by_mask.logits, by_index.logits)

    def test_any_module_that_returns_layers(self, small):
        class Two(torch.nn.Module):
            layer_feats = (32, 7)

            def __init__(self):
                super().__init__()
                self.line = torch.nn.Linear(32, 7)

            def forward(self, graph, feat):
                return [feat, self.line(feat)]

        model = MetSelect(Two(), 5)
        model(small.graph, small.feat, small.labels, small.split(0).train).loss.backward()
        assert model.backbone.line.weight.grad.any()

    def test_calibrate_uses_the_present_weights(self, small):
        split = small.split(0)
        model = MetSelect(GCN(32, 16, self_loop=True), 5)
        model(small.graph, small.feat, small.labels, split.train)
        with torch.no_grad():
            model.backbone.input.weight.mul_(3)
        selection = model.calibrate(small.graph, small.feat, small.labels, split.train, split.val)
        assert model.training
        assert selection.logits.shape == (len(split.val), 5)
        layers = model.backbone(small.graph, small.feat)
        moments = MF.moments(layers, small.labels[split.train], 5, index=split.train)
        torch.testing.assert_close(model.head.prototypes.mean_0, moments.means()[0].float())
        assert not model.head.comparer.temperature.eq(1).all()

    def test_graph_is_left_untouched(self, small):
        before = set(small.graph.ndata), set(small.graph.edata), small.graph.num_edges()
        model = MetSelect(GAT(32, 16, self_loop=True), 5)
        model(small.graph, small.feat, small.labels, small.split(0).train)
        assert before == (set(small.graph.ndata), set(small.graph.edata), small.graph.num_edges())

    def test_no_nodes(self):
        head, case, _ = trained_head()
        out = head.eval()([h[:0] for h in case.layers])
        assert out.logits.shape == (0, 4)

    def test_empty_graph(self):
        model = MetSelect(GCN(32, 16, allow_zero_in_degree=True), 5)
        graph = dgl.graph(([], []), num_nodes=12)
        model(graph, torch.randn(12, 32), torch.arange(12) % 5).loss.backward()
        assert model.eval()(graph, torch.randn(12, 32)).logits.shape == (12, 5)

    @pytest.mark.parametrize("model", [MetSelect, FinalSelect, JKNetMetSelect])
    def test_without_logits(self, small, model):
        """The same loss, no logits; outside and in evaluation they are there."""
        torch.manual_seed(0)
        model = model(GCN(32, 8, num_layers=2, self_loop=True), 5)
        inputs = small.graph, small.feat, small.labels, small.split(0).train
        with_logits = model(*inputs)
        out = model(*inputs, logits=False)
        assert model.eval()(*inputs, logits=False).logits is not None
        assert out.logits is None
        torch.testing.assert_close(out.loss, with_logits.loss)
        assert model.train()(*inputs).logits.shape == with_logits.logits.shape

    def test_score_needs_logits_or_a_choice(self, small):
        model = FinalSelect(GCN(32, 8, num_layers=1, self_loop=True), 5)
        out = model(small.graph, small.feat, small.labels, small.split(0).train, logits=False)
        with pytest.raises(RuntimeError, match="no logits were kept"):
            _ = out.score

    @pytest.mark.parametrize("loss", ["ce", "distance", "posterior"])
    def test_two_forwards_before_one_backward(self, small, loss):
        """The second call renews the moments that the first one's gradient still needs."""
        train = small.split(0).train
        model = MetSelect(GCN(32, 16, self_loop=True), 5, loss=loss)
        parts = [model(small.graph, small.feat, small.labels, half) for half in train.split(60)]
        model.calibrate(small.graph, small.feat, small.labels, train, small.split(0).val)
        sum(part.loss for part in parts).backward()
        assert model.backbone.input.weight.grad.any()

    @pytest.mark.parametrize("loss", ["ce", "distance", "posterior"])
    def test_evaluation_loss_with_an_unknown_class(self, small, loss):
        """Nodes of a class that cannot be predicted do not make it infinite."""
        model = MetSelect(GCN(32, 16, self_loop=True), 5, loss=loss)
        known = small.labels[small.split(0).train] != 4
        with pytest.warns(UserWarning, match="class 4"):
            model(small.graph, small.feat, small.labels, small.split(0).train[known])
        assert torch.isfinite(model.eval()(small.graph, small.feat, small.labels).loss)

    def test_calibrate_restores_every_mode(self, small):
        model = MetSelect(GIN(32, 16, batch_norm=True), 5)
        frozen = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)).eval()
        model.calibrate(small.graph, small.feat, small.labels, small.split(0).train)
        assert model.training
        assert not frozen.training

    @pytest.mark.parametrize("rule", MF.RULES)
    def test_explanation_agrees_with_the_choice(self, rule):
        """Also where a layer is collapsed."""
        head, case, _ = trained_head(widths=(5, 6, 7), rule=rule)
        layers = [torch.full_like(case.layers[0], 2.0), *case.layers[1:]]
        head(layers, labels=case.labels)
        head.eval()
        for node in range(20):
            index = torch.tensor([node])
            chosen = head(layers, index=index).layer.item()
            assert head.explain(layers, index)["score"].argmax().item() == chosen
