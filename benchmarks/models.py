"""The models that are timed (epochs, inference, start-up, memory), and their definition by the
reference."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metselect_dgl import nn, reference
from metselect_dgl.data import NodeDataset

from .baselines import ClassesLastGNN, PlainGNN
from .runs import same_setting

SAME_INDEX = "same-index"  # kind of FreshIndexEpochs
BACKBONES = {"gcn": nn.GCN, "gat": nn.GAT, "gin": nn.GIN}


class ByReference(TorchDispatchMode):
    """Compute every metselect op inside the context by metselect_dgl/reference.py."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "metselect":
            name = func.name().partition("::")[2]
            return getattr(reference, name)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Size:
    """Size of a model: type and number of convolutions, hidden width."""

    backbone: str = "gcn"
    depth: int = 2
    hidden: int = 64


@dataclass(frozen=True)
class Provider:
    """How to build a model: `kind` is a class of metselect_dgl.nn or of baselines.py."""

    kind: str
    paper: bool = False  # the paper's setting of MetSelect
    engine: str = "auto"
    propagate_once: bool = False

    @property
    def plain(self) -> bool:
        return self.kind in ("PlainGNN", "ClassesLastGNN")

    def model(self, size: Size, data: NodeDataset):
        """Build the model; providers with the same parameters get the same initial weights."""
        torch.manual_seed(0)
        widths = (size.depth + 1) * [size.hidden]
        if self.kind == "ClassesLastGNN":
            widths[-1] = data.n_classes
        backbone = BACKBONES[size.backbone](
            data.feat.shape[1],
            widths,
            num_layers=size.depth,
            self_loop=True,
            engine=self.engine,
            propagate_once=self.propagate_once,
        )
        if self.kind == "ClassesLastGNN":
            return ClassesLastGNN(backbone.convs)
        if self.kind == "PlainGNN":
            final = nn.FinalSelect(backbone, data.n_classes)
            return PlainGNN(backbone.convs, final.head.decoder)
        build = getattr(nn, self.kind)
        return (build.paper if self.paper else build)(backbone, data.n_classes)

    def reference(self) -> "Provider":
        """Return the provider that defines the result, on DGL's convolutions; run it inside
        ByReference."""
        kind = "FinalSelect" if self.kind == "PlainGNN" else self.kind
        return replace(self, kind=kind, engine="dgl", propagate_once=False)


PROVIDERS = {
    "plain-DGL": Provider("PlainGNN", engine="dgl"),
    "plain-DGL-classes-last": Provider("ClassesLastGNN", engine="dgl"),
    "FinalSelect-DGL-convs": Provider("FinalSelect", engine="dgl"),
    "MetSelect-DGL-convs": Provider("MetSelect", engine="dgl"),
    "FinalSelect": Provider("FinalSelect"),
    "NDLSelect": Provider("NDLSelect"),
    "AttnSelect": Provider("AttnSelect"),
    "MetSelect-paper": Provider("MetSelect", paper=True),
    "MetSelect": Provider("MetSelect"),
    "FinalSelect-once": Provider("FinalSelect", propagate_once=True),
    "NDLSelect-once": Provider("NDLSelect", propagate_once=True),
    "AttnSelect-once": Provider("AttnSelect", propagate_once=True),
    "MetSelect-paper-once": Provider("MetSelect", paper=True, propagate_once=True),
    "MetSelect-once": Provider("MetSelect", propagate_once=True),
}


def denominators(name: str) -> tuple[str, ...]:
    """Return the providers that `name` is compared with: a plain DGL loop, FinalSelect, and
    FinalSelect in the same setting."""
    candidates = dict.fromkeys(["plain-DGL", "FinalSelect", same_setting(name)])
    return tuple(other for other in candidates if other not in (name, ""))


def why_unavailable(name: str, size: Size, data: NodeDataset) -> str:
    """Return why a provider cannot run at this size, or an empty string."""
    if PROVIDERS[name].propagate_once and size.backbone == "gat":
        return "propagate_once does not apply to GAT, whose aggregation has learned weights"
    if name == "plain-DGL-classes-last" and size.backbone == "gat":
        heads = nn.GAT(1, 4).heads
        if data.n_classes % heads:
            return f"{data.n_classes} classes are not divisible by {heads} heads"
    if name.startswith("AttnSelect") and (size.depth, size.hidden) != (2, 64):
        return "AttnSelect runs at depth 2, hidden 64 only: its LSTM is as wide as all layers"
    return ""


def with_self_loops(graph: dgl.DGLGraph) -> dgl.DGLGraph:
    """Return the graph with exactly one self-loop per node."""
    return dgl.add_self_loop(dgl.remove_self_loop(graph))


class Epochs:
    """A model in training: a call runs one epoch, that is forward pass on the training nodes,
    backward pass and a step of Adam."""

    def __init__(self, provider: Provider, size: Size, data: NodeDataset) -> None:
        self.provider, self.size, self.data = provider, size, data
        self.model = provider.model(size, data)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.train = data.split(0).train
        self.graph = with_self_loops(data.graph) if provider.plain else data.graph

    def loss(self) -> Tensor:
        data = self.data
        if self.provider.plain:
            logits = self.model(self.graph, data.feat)
            return F.cross_entropy(logits[self.train], data.labels[self.train])
        return self.model(self.graph, data.feat, labels=data.labels, index=self.train).loss

    def __call__(self) -> None:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def check(self) -> None:
        """Raise AssertionError unless loss and gradients of the first step match the reference."""
        if self.provider.kind == "ClassesLastGNN":
            return  # DGL alone
        expected = _expected(self.provider.reference(), self.size, self.data)
        found = _loss_and_gradients(self)
        close(found.pop(""), expected[""], "loss", 1e-4)
        if self.provider.kind == "PlainGNN":
            found = {_in_final(name): gradient for name, gradient in found.items()}
        nonzero = {name for name, gradient in expected.items() if gradient.any()}
        missing = nonzero - {"", *found}
        assert not missing, f"no gradient to {', '.join(sorted(missing))}"
        rounding = 1e-6 * max(gradient.norm().item() for gradient in found.values())
        for name, gradient in found.items():
            close(gradient, expected[name], f"gradient to {name}", 1e-2, rounding)


class FreshIndexEpochs(Epochs):
    """Epochs of MetSelect with `index` as in `kind`: the same object in every epoch, new node
    numbers, or a new mask."""

    def __init__(self, kind: str, size: Size, data) -> None:
        super().__init__(PROVIDERS["MetSelect"], size, data)
        self.kind = kind
        self.mask = self.train.new_zeros(data.graph.num_nodes(), dtype=bool)
        self.mask[self.train] = True
        self.train = self.mask.nonzero().flatten()

    def index(self) -> Tensor:
        if self.kind == SAME_INDEX:
            return self.train
        return self.mask.clone() if self.kind == "fresh-mask" else self.mask.nonzero().flatten()

    def loss(self) -> Tensor:
        data = self.data
        return self.model(self.graph, data.feat, labels=data.labels, index=self.index()).loss


def _in_final(name: str) -> str:
    """Return the name in FinalSelect of a parameter of PlainGNN."""
    return f"head.{name}" if name.startswith("decoder") else f"backbone.{name}"


@lru_cache(maxsize=4)
def _expected(provider: Provider, size: Size, data: NodeDataset) -> dict[str, Tensor]:
    with ByReference():
        return _loss_and_gradients(Epochs(provider, size, data))


def _loss_and_gradients(epochs: Epochs) -> dict[str, Tensor]:
    """Return the loss (under "") and its gradients by parameter name."""
    loss = epochs.loss()
    loss.backward()
    result = {"": loss.detach()}
    for name, parameter in epochs.model.named_parameters():
        if parameter.grad is not None:
            result[name] = parameter.grad
    epochs.model.zero_grad()
    return result


def close(
    found: Tensor, expected: Tensor, what: str, tolerance: float, rounding: float = 0.0
) -> None:
    """Raise AssertionError unless the norm of the difference is small relative to `expected`."""
    error, size = (found.double() - expected.double()).norm(), expected.double().norm()
    if not error <= tolerance * size + rounding:
        raise AssertionError(f"{what} is off by {error:.3g} of {size:.3g}")


def classifier(provider: Provider, size: Size, data: NodeDataset) -> Callable[[], Tensor]:
    """Return a function that computes the logits of all nodes with a calibrated model."""
    model = provider.model(size, data)
    graph = with_self_loops(data.graph) if provider.plain else data.graph
    split = data.split(0)
    if not provider.plain:
        model.calibrate(graph, data.feat, data.labels, split.train, split.val)
    model.eval()

    @torch.no_grad()
    def classify() -> Tensor:
        if provider.plain:
            return model(graph, data.feat)
        return model(graph, data.feat).logits

    return classify
