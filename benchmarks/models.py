"""Whole models: what takes part in epochs, inference, start-up and memory, and its definition."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metselect_dgl import nn, reference
from metselect_dgl.data import NodeDataset
from metselect_dgl.experiments.bench import same_setting

from .providers import ClassesLastGNN, PlainGNN

BACKBONES = {"gcn": nn.GCN, "gat": nn.GAT, "gin": nn.GIN}


class ByReference(TorchDispatchMode):
    """Inside, every op of ours is computed as metselect_dgl/reference.py defines it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "metselect":
            return getattr(reference, func._opname)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Size:
    """Of the model: which convolutions, how many, how wide."""

    backbone: str = "gcn"
    depth: int = 2
    hidden: int = 64


@dataclass(frozen=True)
class Provider:
    """`kind` is a class of metselect_dgl.nn or a plain one of providers.py."""

    kind: str
    paper: bool = False  # the paper's setting of MetSelect
    engine: str = "auto"
    propagate_once: bool = False

    @property
    def plain(self) -> bool:
        return self.kind in ("PlainGNN", "ClassesLastGNN")

    def model(self, size: Size, data: NodeDataset):
        """Of the same weights for every provider that has the same."""
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
        """Defines what this one computes: DGL's convolutions, to be run inside ByReference."""
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


def against(name: str) -> tuple[str, ...]:
    """A plain DGL loop, our FinalSelect, and FinalSelect of the same setting."""
    every = dict.fromkeys(["plain-DGL", "FinalSelect", same_setting(name)])
    return tuple(other for other in every if other not in (name, ""))


def absent(name: str, size: Size, data: NodeDataset) -> str:
    """Why a provider cannot take part, if it cannot."""
    if PROVIDERS[name].propagate_once and size.backbone == "gat":
        return "propagate_once is not for GAT, whose aggregation has weights"
    if name == "plain-DGL-classes-last" and size.backbone == "gat":
        heads = nn.GAT(1, 4).heads
        return f"{data.n_classes} classes are not for {heads} heads" * (data.n_classes % heads > 0)
    if name.startswith("AttnSelect") and (size.depth, size.hidden) != (2, 64):
        return "AttnSelect runs at depth 2, hidden 64 alone: its LSTM has the width of all layers"
    return ""


class Epochs:
    """Calling it does one epoch: forward pass on the training nodes, backward pass, Adam."""

    def __init__(self, provider: Provider, size: Size, data: NodeDataset) -> None:
        self.provider, self.size, self.data = provider, size, data
        self.model = provider.model(size, data)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.train = data.split(0).train
        self.graph = nn.backbone._add_self_loop(data.graph) if provider.plain else data.graph

    def loss(self) -> Tensor:
        data = self.data
        if self.provider.plain:
            logits = self.model(self.graph, data.feat)
            return F.cross_entropy(logits[self.train], data.labels[self.train])
        return self.model(self.graph, data.feat, data.labels, self.train).loss

    def __call__(self) -> None:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def check(self) -> None:
        """Loss and gradients of the first step are those of the reference."""
        if self.provider.kind == "ClassesLastGNN":
            return  # nothing of ours is in it
        expected = _expected(self.provider.reference(), self.size, self.data)
        found = _slope(self)
        close(found.pop(""), expected[""], "loss", 1e-4)
        if self.provider.kind == "PlainGNN":
            found = {_in_final(name): gradient for name, gradient in found.items()}
        missing = {name for name, each in expected.items() if each.any()} - {"", *found}
        assert not missing, f"no gradient to {', '.join(sorted(missing))}"
        rounding = 1e-6 * max(gradient.norm().item() for gradient in found.values())
        for name, gradient in found.items():
            close(gradient, expected[name], f"gradient to {name}", 1e-2, rounding)


def _in_final(name: str) -> str:
    """What FinalSelect calls a parameter of PlainGNN."""
    return f"head.{name}" if name.startswith("decoder") else f"backbone.{name}"


@lru_cache(maxsize=4)
def _expected(provider: Provider, size: Size, data: NodeDataset) -> dict[str, Tensor]:
    with ByReference():
        return _slope(Epochs(provider, size, data))


def _slope(epochs: Epochs) -> dict[str, Tensor]:
    """The loss (under "") and its gradients, by parameter."""
    loss = epochs.loss()
    loss.backward()
    named = {
        name: each.grad for name, each in epochs.model.named_parameters() if each.grad is not None
    }
    epochs.model.zero_grad()
    return {"": loss.detach()} | named


def close(
    found: Tensor, expected: Tensor, what: str, tolerance: float, rounding: float = 0.0
) -> None:
    """The difference is small against what is expected, as a whole."""
    error, size = (found.double() - expected.double()).norm(), expected.double().norm()
    if not error <= tolerance * size + rounding:
        raise AssertionError(f"{what} is off by {error:.3g} of {size:.3g}")


def classifier(provider: Provider, size: Size, data: NodeDataset) -> Callable[[], Tensor]:
    """A function that gives the logits of all nodes, of a model with moments."""
    model = provider.model(size, data)
    graph = nn.backbone._add_self_loop(data.graph) if provider.plain else data.graph
    split = data.split(0)
    if not provider.plain:
        model.calibrate(graph, data.feat, data.labels, split.train, split.val)
    model.eval()

    @torch.no_grad()
    def classify() -> Tensor:
        said = model(graph, data.feat)
        return said if provider.plain else said.logits

    return classify
