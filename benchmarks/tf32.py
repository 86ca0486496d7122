"""What tf32 products would change: emulated in torch, bounded, and counted on trained models.

tf32 keeps 10 of the 23 mantissa bits of a float32. Tensor cores multiply such numbers exactly and
sum the products in float32. `tf32` drops the other bits, which is what Triton's
`input_precision="tf32"` leaves to the tensor cores; `tf32 nearest` rounds the operands first;
`tf32x3` splits every operand in two such parts and adds three products, as Triton does under that
name. docs/precision.md has the derivation of the bound and the results.
"""

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metselect_dgl import functional as MF
from metselect_dgl.config import BACKBONES, Config
from metselect_dgl.data import NodeDataset, load_dataset
from metselect_dgl.nn import LayerSelect
from metselect_dgl.reference import _center, log_odds
from metselect_dgl.train import prepare, train

DATASETS = "hop_chain cora citeseer chameleon squirrel actor texas wisconsin cornell".split()
DROPPED = 13  # mantissa bits of a float32 that tf32 does not have
# The largest relative error of a product of two operands; fp32 has only that of its sum.
TRUNCATED, NEAREST = 2.0**-10, 2.0**-11
PRODUCT_ERROR = {
    "fp32": 0.0,
    "tf32": 2 * TRUNCATED + TRUNCATED**2,
    "tf32 nearest": 2 * NEAREST + NEAREST**2,
    "tf32x3": 4 * NEAREST**2,
}


def to_tf32(x: Tensor, rounding: str = "truncate") -> Tensor:
    """The float32 numbers x with 10 bits of mantissa: `truncate`, or `nearest`, ties away from 0
    (PTX's cvt.rna); infinities and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    if rounding == "nearest":
        bits = bits + (1 << (DROPPED - 1))
    rounded = (bits & -(1 << DROPPED)).view(torch.float32)
    return rounded.where(x.isfinite(), x)


def product(x: Tensor, y: Tensor, precision: str) -> Tensor:
    """x y^T as the named arithmetic computes it, [n, D] by [C, D]."""
    if precision == "tf32x3":
        big, large = to_tf32(x, "nearest"), to_tf32(y, "nearest")
        small, little = to_tf32(x - big, "nearest"), to_tf32(y - large, "nearest")
        return small @ large.T + big @ little.T + big @ large.T
    if precision.startswith("tf32"):
        rounding = "nearest" if precision == "tf32 nearest" else "truncate"
        x, y = to_tf32(x, rounding), to_tf32(y, rounding)
    return x @ y.T


@dataclass
class LayerLogits:
    """a_c = (<x, slope_c> - offset_c) / T with x = h - center: what `select_layer` multiplies in a
    layer, [n, C] over the valid classes."""

    x: Tensor
    slope: Tensor
    offset: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, h, mean, factor, valid, temperature) -> "LayerLogits":
        """The inputs as `reference.metric_logits` makes them."""
        center = _center(mean, valid)
        m = (mean - center)[valid].double() @ factor.double().T
        slope, offset = m @ factor.double(), m.square().sum(1) / 2
        return cls(h - center, slope.to(h.dtype), offset.to(h.dtype), temperature)

    def double(self) -> "LayerLogits":
        return LayerLogits(*(each.double() for each in vars(self).values()))

    def logits(self, precision: str) -> Tensor:
        return (product(self.x, self.slope, precision) - self.offset) / self.temperature

    def bound(self, precision: str) -> Tensor:
        """The most by which any log-odds of a node can be off, [n]: the two largest errors that
        its logits can have, and the rounding of the log-odds themselves."""
        wide = self.double()
        terms = wide.x.abs() @ wide.slope.abs().T  # [n, C]
        summands = wide.x.shape[1] * (3 if precision == "tf32x3" else 1)
        error = terms * PRODUCT_ERROR[precision]
        error += (terms + wide.offset.abs()) * (summands + 4) * 2.0**-22
        size = (terms + wide.offset.abs()).amax(1) / wide.temperature
        rounding = (terms.shape[1] + 8) * 2.0**-23 * (1 + size)
        pair = error.topk(min(2, terms.shape[1])).values.sum(1)
        return pair / wide.temperature + rounding


def scores(layers: list[LayerLogits], precision: str, labels: Tensor | None) -> Tensor:
    """The log-odds of the label, or of the best class, in every layer, [L, n]."""
    odds = torch.stack([log_odds(layer.logits(precision)) for layer in layers])
    if labels is None:
        return odds.amax(-1)
    return odds.gather(-1, labels.expand(len(layers), -1).unsqueeze(-1)).squeeze(-1)


def certified(layers: list[LayerLogits], score: Tensor, precision: str) -> Tensor:
    """The nodes [n] whose layer, chosen by the fp32 `score`, no rounding of this precision can
    change: the best score is ahead of every other by more than both bounds."""
    slack = torch.stack([layer.bound(precision) + layer.bound("fp32") for layer in layers])
    best = score.argmax(0, keepdim=True)
    lead = score.gather(0, best).double() - score - slack.gather(0, best) - slack
    return (lead.scatter(0, best, torch.inf) > 0).all(0)


@dataclass
class Trained:
    """A model trained on split 0, its layers of all nodes, and the logits of its metric in float32
    and float64."""

    model: LayerSelect
    data: NodeDataset
    layers: list[Tensor]
    metric: dict
    logits: list[LayerLogits]
    exact: list[LayerLogits]

    @classmethod
    @torch.no_grad()
    def on(cls, config: Config, data_dir: str | None) -> "Trained":
        data = load_dataset(config.dataset, data_dir)
        with torch.enable_grad():
            model = train(config, data, progress=False).model.eval()
        data = prepare(config, data)
        layers = model.backbone(data.graph, data.feat)
        metric, head = model.head.prototypes.metric(), model.head
        per_layer = [layers, metric["means"], metric["factors"]]
        logits, exact = (
            [
                LayerLogits.of(*(each.to(dtype) for each in some), metric["valid"], t.to(dtype))
                for *some, t in zip(*per_layer, head.temperature, strict=True)
            ]
            for dtype in (torch.float32, torch.float64)
        )
        return cls(model, data, layers, metric, logits, exact)

    def predicted(self, layer: Tensor, precision: str) -> Tensor:
        """The class that the decoder of the chosen layer gives, its product rounded as well."""
        answers = []
        for h, decoder in zip(self.layers, self.model.head.decoders, strict=True):
            logits = product(h, decoder.weight, precision) + decoder.bias
            answers.append(logits.masked_fill(~self.metric["valid"], -torch.inf).argmax(1))
        return torch.stack(answers).gather(0, layer.unsqueeze(0)).squeeze(0)


def _percent(mask: Tensor) -> float:
    return 100 * mask.double().mean().item()


def _spread(error: Tensor) -> str:
    """Median and maximum."""
    return f"{error.median().item():.1e} {error.max().item():.1e}"


@torch.no_grad()
def score_rows(name: str, trained: Trained) -> list[str]:
    """Of every precision: the error of the scores, and what it changes."""
    data, split = trained.data, trained.data.split(0)
    of_class = trained.metric["valid"].cumsum(0) - 1  # logits leave out the classes without nodes
    guide = of_class[data.labels[split.train]]
    taught = [
        LayerLogits(each.x[split.train], each.slope, each.offset, each.temperature)
        for each in trained.logits
    ]
    exact = scores(trained.exact, "fp32", None)
    plain, plain_taught = scores(trained.logits, "fp32", None), scores(taught, "fp32", guide)
    layer = plain.argmax(0)
    answer = trained.predicted(layer, "fp32")
    rows = []
    for precision in PRODUCT_ERROR:
        found = scores(trained.logits, precision, None)
        found_taught = scores(taught, precision, guide)
        now = trained.predicted(found.argmax(0), precision)
        correct = (now == data.labels)[split.test]
        cells = (
            f"{_spread((found - exact).abs())}",
            f"{_percent(found.argmax(0) != layer):8.2f}",
            f"{_percent(certified(trained.logits, plain, precision)):9.1f}",
            f"{_percent(now != answer):8.2f}",
            f"{_percent(correct):8.2f}",
            f"{_percent(found_taught.argmax(0) != plain_taught.argmax(0)):8.2f}",
            f"{_percent(certified(taught, plain_taught, precision)):9.1f}",
        )
        rows.append(f"{name:10} {precision:12} " + "  ".join(cells))
    return rows


@torch.no_grad()
def distance_rows(name: str, trained: Trained) -> list[str]:
    """Of every precision: the relative error of z = R (h - center), the only rounded product of
    `class_distances`, and of the distance to the nearest class, over all layers."""
    rows, whitened, nearest, condition = [], {}, {}, 0.0
    metric = trained.metric
    for h, mean, factor in zip(trained.layers, metric["means"], metric["factors"], strict=True):
        center, valid = _center(mean, metric["valid"]), metric["valid"]
        x, m = h - center, (mean - center)[valid] @ factor.T
        exact = x.double() @ factor.double().T
        exact_m = (mean - center)[valid].double() @ factor.double().T
        best, at = torch.cdist(exact, exact_m).square().min(1)
        condition = max(condition, _condition(factor))
        for precision in PRODUCT_ERROR:
            z = product(x, factor, precision)
            error = (z - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)
            whitened.setdefault(precision, []).append(error)
            off = (z - m[at]).square().sum(1) - best
            nearest.setdefault(precision, []).append((off / best.clamp(min=1e-30)).abs())
    for precision in PRODUCT_ERROR:
        cells = (_spread(torch.cat(each[precision])) for each in (whitened, nearest))
        rows.append(f"{name:10} {precision:12} " + "  ".join(cells) + f"  {condition:.0e}")
    return rows


def bad_rows(n: int = 2000, width: int = 64) -> list[str]:
    """Features that all go up and down together, by far more than the classes differ, and no
    shrinkage: the large terms of a logit cancel, and their rounding is left."""
    draw = torch.Generator().manual_seed(0)
    labels, valid = torch.arange(n) % 4, torch.ones(4, dtype=torch.bool)
    own = torch.randn(4, width, generator=draw)[labels] + torch.randn(n, width, generator=draw)
    h = 3 * torch.randn(n, 1, generator=draw) + 0.05 * own
    moments = MF.moments([h], labels, 4)
    (mean,), (factor,) = moments.means(), MF.whitening(moments, 0.0)
    layer, exact = (
        LayerLogits.of(*(each.to(dtype) for each in (h, mean, factor)), valid, torch.ones(()))
        for dtype in (torch.float32, torch.float64)
    )
    truth = scores([exact], "fp32", None)
    return [
        f"{'collinear':10} {precision:12} "
        f"{_spread((scores([layer], precision, None) - truth).abs())}  {_condition(factor):.0e}"
        for precision in PRODUCT_ERROR
    ]


def _condition(factor: Tensor) -> float:
    """Of the covariance whose inverse is R^T R."""
    return torch.linalg.cond(factor.double()).item() ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=DATASETS)
    parser.add_argument("--data-dir")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--backbone", choices=BACKBONES, default="gcn")
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    plain = Config(
        backbone=args.backbone,
        num_layers=args.depth,
        epochs=args.epochs,
        patience=args.epochs,
        select="temperature",
    )
    print("Error of the log-odds: median and largest, against float64. Per cent of the nodes whose")
    print("layer changes against fp32, whose layer cannot (the bound), whose class changes; test")
    print("accuracy. The same with labels, on the training nodes.\n")
    print(
        f"{'':24}{'median':7} {'largest':7}  {'changed':>8}  {'certain':>9}  {'class':>8}  "
        f"{'accuracy':>8}  {'changed':>8}  {'certain':>9}"
    )
    distances = []
    for name in args.datasets:
        trained = Trained.on(replace(plain, dataset=name), args.data_dir)
        print("\n".join(score_rows(name, trained)), flush=True)
        distances += distance_rows(name, trained)
    print("\nRelative error of R (h - center), and of the squared distance to the nearest class:")
    print("median and largest; the largest condition number of a layer's covariance.\n")
    print("\n".join(distances))
    print("\nError of the log-odds where features are made collinear, and the condition number.\n")
    print("\n".join(bad_rows()))


if __name__ == "__main__":
    main()
