"""The settings of a run and the model that they describe."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

if TYPE_CHECKING:
    from .nn import LayerSelect


class Part(NamedTuple):
    """A class of `metselect_dgl.nn`, the fields of Config that it takes, its fixed options, and its
    title in tables, if it is not the name of the class."""

    name: str
    fields: tuple[str, ...] = ()
    options: dict = {}  # noqa: RUF012  never written
    title: str = ""

    def make(self, *args, **settings) -> object:
        """Call the class."""
        from . import nn  # imports DGL, which `metselect doctor` must not need

        return attrgetter(self.name)(nn)(*args, **self.options, **settings)


_METRIC = ("rule", "loss", "select", "shrinkage", "deep_supervision", "metric_dim", "moments")
BACKBONES = {
    "gat": Part("GAT", ("heads", "allow_zero_in_degree")),
    "gcn": Part("GCN", ("allow_zero_in_degree", "propagate_once")),
    "gin": Part("GIN", ("learn_eps", "batch_norm", "propagate_once")),
}
SELECTORS = {  # in the order of tables
    "final": Part("FinalSelect"),
    "ndls": Part("NDLSelect", ("eps",)),
    "attn": Part("AttnSelect"),
    "metselect": Part("MetSelect", _METRIC),
    "metselect-paper": Part("MetSelect.paper", _METRIC, title="MetSelect-paper"),
    "metselect-max": Part("MetSelect", _METRIC[1:], {"rule": "opposite"}, "MetSelect-max"),
    "jknet-max": Part("JKNet", (), {"mode": "max"}, "JKNet-Max"),
    "jknet-cat": Part("JKNet", (), {"mode": "cat"}, "JKNet-Cat"),
    "jknet-lstm": Part("JKNet", (), {"mode": "lstm"}, "JKNet-LSTM"),
    "jknet-metselect": Part("JKNetMetSelect", _METRIC, title="JKNet-MetSelect"),
}
SELECTOR_TITLES = {name: part.title or part.name for name, part in SELECTORS.items()}


def _option(default, text: str):
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Settings of one run.

    None means the default of the backbone or selector. The other model options have the default of
    the Python API, except `allow_zero_in_degree`: the public datasets have isolated nodes.
    """

    dataset: str = _option("hop_chain", "name of a synthetic, .npz or downloadable dataset")
    split: int = _option(0, "number of the dataset's split")
    seed: int = _option(0, "seed of the weights and of a synthetic dataset")
    backbone: str = _option("gcn", ", ".join(BACKBONES))
    selector: str = _option("metselect", ", ".join(sorted(SELECTORS)))
    num_layers: int = _option(2, "number of convolutions; layer 0 is a linear map of the features")
    hidden: int = _option(64, "width of the layers")
    dropout: float = _option(0.0, "dropout on the input of every convolution")
    self_loop: bool = _option(False, "add a self-loop to every node")
    allow_zero_in_degree: bool = _option(
        True, "accept nodes without in-edges; the Python API raises DGL's error by default"
    )
    propagate_once: bool | None = _option(None, "GCN, GIN: aggregate the features only once")
    engine: str = _option("auto", "convolutions: fused, dgl, or auto: fused where compiled")
    heads: int | None = _option(None, "GAT: number of attention heads")
    learn_eps: bool | None = _option(None, "GIN: train eps")
    batch_norm: bool | None = _option(None, "GIN: BatchNorm in the MLP")
    rule: str | None = _option(None, "MetSelect: confidence, distance, opposite")
    loss: str | None = _option(None, "MetSelect: ce, distance, posterior")
    select: str | None = _option(None, "MetSelect: plain, temperature, gate, auto")
    shrinkage: str | float | None = _option(None, "MetSelect: oas, ledoit_wolf, a number")
    deep_supervision: float | None = _option(None, "MetSelect: weight of the losses of all layers")
    metric_dim: int | None = _option(None, "MetSelect: project to this dimension for distances")
    moments: str | None = _option(
        None,
        "MetSelect: class moments of the batch, the last epoch or a moving average: "
        "call, epoch, ema",
    )
    eps: float | None = _option(None, "NDLSelect: distance to the stationary state")
    row_normalize: bool | None = _option(
        None, "divide each row of features by its sum (default: if no feature is negative)"
    )
    lr: float = _option(0.01, "learning rate of Adam")
    weight_decay: float = _option(5e-4, "weight decay of Adam")
    epochs: int = _option(200, "largest number of epochs")
    patience: int = _option(50, "stop after this many epochs without a better validation result")
    validate_every: int = _option(5, "evaluate the validation nodes every this many epochs")
    batch_size: int | None = _option(None, "nodes per mini-batch (default: the whole graph)")
    fanout: int = _option(10, "mini-batches: in-neighbours to sample per layer; -1: all")
    device: str = _option("cpu", "cpu, cuda, cuda:1, ...")

    def __post_init__(self) -> None:
        if self.shrinkage == "auto":  # the former name, in stored configs
            object.__setattr__(self, "shrinkage", "oas")
        for field, known in (("backbone", BACKBONES), ("selector", SELECTORS)):
            name = getattr(self, field)
            if name not in known:
                raise ValueError(f"{field} is {name!r}; use one of {', '.join(sorted(known))}")
        for name in ("epochs", "patience", "validate_every", "num_layers", "hidden", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^63")
        if self.fanout < 1 and self.fanout != -1:
            raise ValueError(f"fanout is {self.fanout}; it must be at least 1, or -1 for all")

    def build(self, in_feats: int, n_classes: int) -> "LayerSelect":
        """Return the model: the backbone with the selector."""
        backbone, selector = BACKBONES[self.backbone], SELECTORS[self.selector]
        names = ("num_layers", "dropout", "self_loop", "engine", *backbone.fields)
        layers = backbone.make(in_feats, self.hidden, **self._given(names))
        options = self._given(selector.fields)
        if self.batch_size is not None and "moments" in selector.fields:
            options.setdefault("moments", "epoch")
        return selector.make(layers, n_classes, **options)

    @staticmethod
    def check_used(names: Collection[str], backbone: str, selectors: Collection[str]) -> None:
        """Raise ValueError for a setting of `names` that belongs to other parts alone."""
        if "fanout" in names and "batch_size" not in names:
            raise ValueError("fanout is a setting of mini-batches; add a --batch-size")
        used, known = set(BACKBONES[backbone].fields), set()
        for part in (*BACKBONES.values(), *SELECTORS.values()):
            known.update(part.fields)
        for selector in selectors:
            used.update(SELECTORS[selector].fields)
        for name in names:
            if name in known - used - {"allow_zero_in_degree"}:
                models = " or ".join([backbone, *selectors])
                raise ValueError(f"{name} is not a setting of {models}; leave it out")

    def _given(self, names: tuple[str, ...]) -> dict:
        """Return the named settings that are not None."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def to_yaml(self) -> str:
        """Return the settings as YAML."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Read a file that `to_yaml` wrote."""
        values = yaml.safe_load(Path(path).read_text())
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) - known:
            unknown = sorted(set(values) - known) if isinstance(values, dict) else values
            raise ValueError(f"{path} is not a config of a run: it has {unknown}")
        return cls(**values)

    def differences(self, other: "Config") -> str:
        """Return the settings that differ: `lr 0.01 -> 0.02, ...`."""
        changes = []
        for name, value in dataclasses.asdict(self).items():
            if value != getattr(other, name):
                changes.append(f"{name} {value} -> {getattr(other, name)}")
        return ", ".join(changes)
