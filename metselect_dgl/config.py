"""The settings of a run, and the model they describe."""

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import yaml


class Part(NamedTuple):
    """A name in `metselect_dgl.nn`, the fields of Config it understands, and options of its own."""

    name: str
    fields: tuple[str, ...] = ()
    options: dict = {}  # noqa: RUF012  never written

    def make(self, *args, **given):
        from . import nn  # so that the command line can speak where DGL cannot be imported

        return attrgetter(self.name)(nn)(*args, **self.options, **given)


_METRIC = ("rule", "loss", "select", "shrinkage", "deep_supervision", "metric_dim", "moments")
BACKBONES = {
    "gat": Part("GAT", ("heads", "allow_zero_in_degree")),
    "gcn": Part("GCN", ("allow_zero_in_degree", "propagate_once")),
    "gin": Part("GIN", ("learn_eps", "batch_norm", "propagate_once")),
}
SELECTORS = {
    "attn": Part("AttnSelect"),
    "final": Part("FinalSelect"),
    "jknet-cat": Part("JKNet", (), {"mode": "cat"}),
    "jknet-lstm": Part("JKNet", (), {"mode": "lstm"}),
    "jknet-max": Part("JKNet", (), {"mode": "max"}),
    "jknet-metselect": Part("JKNetMetSelect", _METRIC),
    "metselect": Part("MetSelect", _METRIC),
    "metselect-max": Part("MetSelect", _METRIC[1:], {"rule": "opposite"}),
    "metselect-paper": Part("MetSelect.paper", _METRIC),
    "ndls": Part("NDLSelect", ("eps",)),
}


def _option(default, text: str):
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """One run. None means the default of the backbone or selector itself."""

    dataset: str = _option("hop_chain", "a synthetic set, a .npz in the data folder, or a download")
    split: int = _option(0, "which of the dataset's splits")
    seed: int = _option(0, "of the weights, and of a synthetic dataset")
    backbone: str = _option("gcn", ", ".join(BACKBONES))
    selector: str = _option("metselect", ", ".join(SELECTORS))
    num_layers: int = _option(2, "depth; the features are one layer more")
    hidden: int = _option(64, "width of every layer")
    dropout: float = _option(0.0, "on the input of every layer")
    self_loop: bool = _option(False, "see every node as its own neighbour")
    allow_zero_in_degree: bool = _option(True, "let nodes without in-edges pass")
    propagate_once: bool = _option(True, "GCN, GIN: aggregate the features only once")
    engine: str = _option("auto", "of the convolutions: fused, dgl, or fused where compiled: auto")
    heads: int | None = _option(None, "GAT: attention heads")
    learn_eps: bool | None = _option(None, "GIN: train its eps")
    batch_norm: bool | None = _option(None, "GIN: BatchNorm in its MLP")
    rule: str | None = _option(None, "MetSelect: confidence, distance, opposite")
    loss: str | None = _option(None, "MetSelect: ce, distance, posterior")
    select: str | None = _option(None, "MetSelect: plain, temperature, gate, auto")
    shrinkage: str | float | None = _option(None, "MetSelect: oas, ledoit_wolf, a number")
    deep_supervision: float | None = _option(None, "MetSelect: weight of every layer's own loss")
    metric_dim: int | None = _option(None, "MetSelect: measure distances in fewer dimensions")
    moments: str | None = _option(
        None, "MetSelect: of the call, the last epoch, or a moving average: call, epoch, ema"
    )
    eps: float | None = _option(None, "NDLS: how near to the limit")
    row_normalize: bool | None = _option(
        None, "divide a node's features by their sum (default: if none is negative)"
    )
    lr: float = _option(0.01, "learning rate of Adam")
    weight_decay: float = _option(5e-4, "of Adam")
    epochs: int = _option(200, "at most")
    patience: int = _option(100, "stop after so many epochs without a better validation result")
    validate_every: int = _option(1, "look at the validation nodes after every so many epochs")
    batch_size: int | None = _option(None, "nodes of a mini-batch (default: the whole graph)")
    fanout: int = _option(10, "in mini-batches, in-neighbours sampled for every layer; -1: all")
    device: str = _option("cpu", "cpu, cuda, cuda:1, ...")

    def __post_init__(self) -> None:
        if self.shrinkage == "auto":  # in files written when "auto" was the name of the default
            object.__setattr__(self, "shrinkage", None)
        for kind, name, known in (
            ("backbone", self.backbone, BACKBONES),
            ("selector", self.selector, SELECTORS),
        ):
            if name not in known:
                raise ValueError(f"{kind} is {name!r}; use one of {', '.join(known)}")
        for name in ("epochs", "patience", "validate_every", "num_layers", "hidden", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.fanout < 1 and self.fanout != -1:
            raise ValueError(f"fanout is {self.fanout}; it must be at least 1, or -1 for all")

    def build(self, in_feats: int, n_classes: int):
        """The model: this backbone under this selector."""
        backbone, selector = BACKBONES[self.backbone], SELECTORS[self.selector]
        common = ("num_layers", "dropout", "self_loop", "engine")
        layers = backbone.make(in_feats, self.hidden, **self._given(*common, *backbone.fields))
        given = self._given(*selector.fields)
        if self.batch_size is not None and "moments" in selector.fields:
            given.setdefault("moments", "epoch")
        return selector.make(layers, n_classes, **given)

    def _given(self, *names: str) -> dict:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def to_yaml(self) -> str:
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Read what `to_yaml` wrote."""
        values = yaml.safe_load(Path(path).read_text())
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) - known:
            strange = sorted(set(values) - known) if isinstance(values, dict) else values
            raise ValueError(f"{path} is not a run's settings: it has {strange}")
        return cls(**values)

    def differences(self, other: "Config") -> str:
        """`lr 0.01 -> 0.02, ...`"""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return ", ".join(f"{k} {mine[k]} -> {theirs[k]}" for k in mine if mine[k] != theirs[k])
