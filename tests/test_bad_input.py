"""Bad input: a clear error that names the value and the way out, and nothing changed inside."""

import copy
import warnings

import dgl
import pytest
import torch
from dgl import DGLError

from metselect_dgl import functional as MF
from metselect_dgl.nn import GAT, GCN, GIN, FinalSelect, JKNet, MetSelect, MetSelectHead


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MetSelect(GCN(32, 16, self_loop=True), 5)


def spoil(tensor: torch.Tensor, value: float, node: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[node, 0] = value
    return tensor


BAD = {
    "rows": (lambda d: {"feat": d.feat[:-1]}, ValueError, "299 rows for 300 nodes"),
    "width": (lambda d: {"feat": d.feat[:, :7]}, ValueError, r"\(300, 7\), expected \[300, 32\]"),
    "integer": (lambda d: {"feat": d.feat.long()}, TypeError, "torch.int64.*feat.float"),
    "numpy": (lambda d: {"feat": d.feat.numpy()}, TypeError, "ndarray"),
    "half": (lambda d: {"feat": d.feat.half()}, TypeError, "torch.float16.*CPU"),
    "bfloat16": (lambda d: {"feat": d.feat.bfloat16()}, TypeError, "torch.bfloat16.*CPU"),
    "double": (lambda d: {"feat": d.feat.double()}, TypeError, "torch.float64.*torch.float32"),
    "device": (lambda d: {"feat": d.feat.to("meta")}, ValueError, "on meta, the model on cpu"),
    "label-device": (
        lambda d: {"labels": torch.full((300,), -1).to("meta")},
        ValueError,
        "labels are on meta, the model on cpu",
    ),
    "nan": (lambda d: {"feat": spoil(d.feat, torch.nan, 17)}, ValueError, "layer 0 of node 17 "),
    "inf": (lambda d: {"feat": spoil(d.feat, torch.inf, 4)}, ValueError, "layer 0 of node 4 "),
    "label-high": (
        lambda d: {"labels": d.labels.where(torch.arange(300) != 9, 5)},
        ValueError,
        "label 5 of node 9 .* 5 .0 to 4.",
    ),
    "label-low": (
        lambda d: {"labels": d.labels.where(torch.arange(300) != 9, -2)},
        ValueError,
        "label -2 of node 9",
    ),
    "label-float": (lambda d: {"labels": d.labels.float()}, TypeError, "torch.float32"),
    "label-bool": (lambda d: {"labels": d.labels > 2}, TypeError, "torch.bool"),
    "one-hot": (
        lambda d: {"labels": torch.nn.functional.one_hot(d.labels, 5)},
        TypeError,
        r"\(300, 5\).*argmax",
    ),
    "label-count": (lambda d: {"labels": d.labels[:20]}, ValueError, "20 labels for 300 nodes"),
    "empty": (lambda d: {"index": torch.zeros(0, dtype=torch.long)}, ValueError, "index is empty"),
    "empty-mask": (
        lambda d: {"index": torch.zeros(300, dtype=torch.bool)},
        ValueError,
        "index is empty",
    ),
    "ignored": (
        lambda d: {"labels": torch.full((300,), -1), "index": torch.arange(30)},
        ValueError,
        "all 30 labels are -1",
    ),
    "ten-masks": (lambda d: {"index": d.train_masks.T}, ValueError, r"\(300, 10\).*mask\[:, 0\]"),
    "mask-length": (lambda d: {"index": d.train_masks[0, :50]}, ValueError, "50 entries for 300"),
    "mask-int64": (
        lambda d: {"index": d.train_masks[0].long()},
        ValueError,
        r"300 entries of 0 and 1 for 300 nodes; pass index.bool\(\)",
    ),
    "mask-uint8": (lambda d: {"index": d.train_masks[0].byte()}, ValueError, "pass index.bool"),
    "index-high": (lambda d: {"index": torch.tensor([0, 300])}, ValueError, "node 300.*300 nodes"),
    "index-low": (lambda d: {"index": torch.tensor([-1])}, ValueError, "node -1"),
    "index-float": (lambda d: {"index": torch.tensor([1.0])}, TypeError, "torch.float32"),
    "blocks": (lambda d: {"graph": [d.graph]}, ValueError, "1 blocks for 2 layers"),
}


@pytest.mark.parametrize(("change", "error", "match"), BAD.values(), ids=BAD.keys())
def test_error_and_untouched_state(model, small, change, error, match):
    good = {
        "graph": small.graph,
        "feat": small.feat,
        "labels": small.labels,
        "index": small.split(0).train,
    }
    model(**good)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=match):
        model(**{**good, **change(small)})
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("make", [FinalSelect, JKNet], ids=["final", "jknet"])
def test_the_alternatives_are_checked_too(make, small):
    model = make(GCN(32, 16, self_loop=True), 5)
    with pytest.raises(ValueError, match="label 5 of node 9"):
        model(small.graph, small.feat, small.labels.where(torch.arange(300) != 9, 5))
    with pytest.raises(ValueError, match="layer 0 of node 3 "):
        model(small.graph, spoil(small.feat, torch.nan, 3))


def test_large_but_finite_is_not_an_error():
    """Their sum overflows, they do not."""
    head = MetSelectHead((2,), 2)
    h = torch.full((8, 2), 3e38) * torch.tensor([[1.0], [0.5]]).repeat(4, 1)
    head([h], labels=torch.arange(8) % 2)


@pytest.mark.parametrize("backbone", [GCN, GAT], ids=["gcn", "gat"])
def test_node_without_in_edges(backbone):
    graph = dgl.graph(([0, 1], [1, 2]))
    labels = torch.tensor([0, 1, 0])
    with pytest.raises(DGLError, match="0-in-degree"):
        MetSelect(backbone(3, 4), 2)(graph, torch.randn(3, 3), labels)
    model = MetSelect(backbone(3, 4, allow_zero_in_degree=True), 2)
    assert torch.isfinite(model(graph, torch.randn(3, 3), labels).loss)


def test_column_of_labels_is_squeezed(model, small):
    train = small.split(0).train
    flat = model(small.graph, small.feat, small.labels, train)
    column = model(small.graph, small.feat, small.labels.unsqueeze(1), train)
    assert torch.equal(flat.logits, column.logits)
    narrow = model(small.graph, small.feat, small.labels.int(), train)
    assert torch.equal(flat.logits, narrow.logits)


def test_unlabelled_nodes_are_ignored(model, small):
    train = small.split(0).train
    labels = small.labels.clone()
    labels[train[:30]] = -1
    out = model(small.graph, small.feat, labels, train)
    expected = model(small.graph, small.feat, small.labels, train[30:])
    assert torch.equal(out.index, train[30:])
    assert torch.equal(out.loss, expected.loss)
    assert model.head.prototypes.count.sum() == len(train) - 30


def test_class_without_training_node(small):
    """Warned of once, never predicted, everything else finite."""
    model = MetSelect(GCN(32, 16, self_loop=True), 6)
    with pytest.warns(UserWarning, match="class 5 has no labelled node") as caught:
        out = model(small.graph, small.feat, small.labels, small.split(0).train)
        model(small.graph, small.feat, small.labels, small.split(0).train)
    assert len(caught) == 1
    assert torch.isfinite(out.loss)
    with torch.no_grad():
        for decoder in model.head.decoders:
            decoder.bias[5] = 1e6
    logits = model.eval()(small.graph, small.feat).logits
    assert not (logits.argmax(1) == 5).any()
    assert torch.isfinite(logits[:, :5]).all()


def test_predict_before_moments(model, small):
    with pytest.raises(RuntimeError, match=r"no class moments yet.*calibrate"):
        model.eval()(small.graph, small.feat)
    with pytest.raises(RuntimeError, match="no class moments yet"):
        model.train()(small.graph, small.feat)


def test_wrong_layers():
    head = MetSelectHead((3, 4), 2)
    with pytest.raises(ValueError, match="1 layers, the head was made for 2"):
        head([torch.randn(5, 3)])
    with pytest.raises(ValueError, match=r"layer 1 has shape \(5, 3\)"):
        head([torch.randn(5, 3), torch.randn(5, 3)])


SEPARABLE = {
    "one-node-class": lambda h, y: (h, y.where(torch.arange(60) != 0, 3)),
    "fewer-nodes-than-dimensions": lambda h, y: (h[:9], y[:9]),
    "dead-dimension": lambda h, y: (h * (torch.arange(16) != 2), y),
    "collinear": lambda h, y: (torch.cat([h[:, :8], h[:, :8]], 1), y),
    "scale-1e-20": lambda h, y: (h * 1e-20, y),
    "scale-1e20": lambda h, y: (h * 1e20, y),
    "mean-1e4": lambda h, y: (h + 1e4, y),
}


@pytest.mark.parametrize("change", SEPARABLE.values(), ids=SEPARABLE.keys())
def test_difficult_but_right(change):
    """Layer 0 is noise, layer 1 tells the classes apart: it is chosen, and its class is right."""
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    means = torch.zeros(4, 16)
    means[torch.arange(4), torch.arange(4)] = 9.0
    h, y = change(means[y] + torch.randn(60, 16), y)
    noise = torch.randn(len(h), 16)
    head = MetSelectHead((16, 16), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some classes are missing here
        out = head([noise, h], labels=y)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    head.eval()
    selection = head([noise, h])
    assert torch.isfinite(selection.score).all()
    assert (selection.layer == 1).double().mean() > 0.9
    _, answer, _ = MF.select_layer([noise, h], **head.prototypes.metric())
    assert (answer == y).double().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_integers(model, small, dtype):
    """-1 is 255 among uint8."""
    train = small.split(0).train
    expected = model(small.graph, small.feat, small.labels, train[train < 100])
    narrow = train[train < 100].to(dtype)
    out = model(small.graph, small.feat, small.labels.to(dtype), narrow)
    assert torch.equal(out.logits, expected.logits)


@pytest.mark.parametrize("bad", ["nan", "label"])
def test_batch_norm_remembers_nothing_of_bad_input(small, bad):
    model = MetSelect(GIN(32, 16, batch_norm=True), 5)
    before = copy.deepcopy(model.state_dict())
    feat = spoil(small.feat, torch.nan, 3) if bad == "nan" else small.feat
    labels = small.labels.where(torch.arange(300) != 9, 7) if bad == "label" else small.labels
    with pytest.raises(ValueError, match="node"):
        model(small.graph, feat, labels, small.split(0).train)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("val", "match"),
    [(torch.zeros(0, dtype=torch.long), "index is empty"), (torch.arange(5), "got 5")],
    ids=["empty", "too-few-for-the-gate"],
)
def test_failed_calibration_changes_nothing(small, val, match):
    split = small.split(0)
    model = MetSelect(GCN(32, 16, self_loop=True), 5, select="gate")
    model.calibrate(small.graph, small.feat, small.labels, split.train, split.val)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        model.calibrate(small.graph, small.feat, small.labels, split.train[:60], val)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    "options",
    [{"shrinkage": "foo"}, {"shrinkage": 7.0}, {"metric_dim": 0}, {"deep_supervision": -1.0}],
    ids=str,
)
def test_options_are_checked_when_they_are_given(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MetSelectHead((4,), 3, **options)


def test_masks_in_functions():
    """A bool mask picks its rows; one of integers is refused, as it would pick rows 0 and 1."""
    h, labels = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 2
    mask = torch.arange(30) < 20
    by_mask = MF.moments([h], labels[:20], 2, index=mask)
    by_number = MF.moments([h], labels[:20], 2, index=torch.arange(20))
    assert torch.equal(by_mask.grams[0], by_number.grams[0])
    metric = {"means": by_mask.means(), "factors": MF.whitening(by_mask)}
    metric["valid"] = torch.ones(2, dtype=torch.bool)
    assert torch.equal(
        MF.class_distances([h], **metric, index=mask),
        MF.class_distances([h], **metric, index=torch.arange(20)),
    )
    for wrong in (mask.long(), mask.byte()):
        with pytest.raises(ValueError, match=r"pass index\.bool"):
            MF.class_distances([h], **metric, index=wrong)
    with pytest.raises(ValueError, match=r"mask has shape \(29,\) for 30 rows"):
        MF.class_distances([h], **metric, index=mask[1:])
