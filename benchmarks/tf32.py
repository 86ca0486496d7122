"""Count the layers and classes that tf32 products would change on trained models.

tf32 keeps 10 of the 23 mantissa bits of a float32. Tensor cores multiply such numbers exactly and
add the products in float32; they are emulated in torch here. `tf32` drops the other bits, as
Triton's `input_precision="tf32"` does; `tf32x3` splits every operand in two such parts, rounded to
nearest, and adds three products.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from metselect_dgl.config import BACKBONES, Config
from metselect_dgl.data import load_dataset
from metselect_dgl.experiments.tables import markdown
from metselect_dgl.reference import _center, log_odds
from metselect_dgl.train import prepare, train

DATASETS = "hop_chain cora citeseer chameleon squirrel actor texas wisconsin cornell".split()
PRECISIONS = ("fp32", "tf32", "tf32x3")
DROPPED = 13  # mantissa bits of a float32 that tf32 does not have


def to_tf32(x: Tensor, rounding: str = "truncate") -> Tensor:
    """Return float32 numbers with 10 bits of mantissa, truncated or rounded to `nearest` with ties
    away from 0 (PTX's cvt.rna); infinities and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    if rounding == "nearest":
        bits = bits + (1 << (DROPPED - 1))
    rounded = (bits & -(1 << DROPPED)).view(torch.float32)
    return rounded.where(x.isfinite(), x)


def product(x: Tensor, y: Tensor, precision: str) -> Tensor:
    """Return x y^T as a tensor core computes it, [n, D] by [C, D]."""
    if precision == "tf32x3":
        big, large = to_tf32(x, "nearest"), to_tf32(y, "nearest")
        small, little = to_tf32(x - big, "nearest"), to_tf32(y - large, "nearest")
        return small @ large.T + big @ little.T + big @ large.T
    if precision == "tf32":
        x, y = to_tf32(x), to_tf32(y)
    return x @ y.T


def scores(layers: Sequence[Tensor], metric: dict, temperature: Tensor, precision: str) -> Tensor:
    """Return the log-odds of the best class in every layer, [L, n], as `select_layer` computes
    them: a_c = (<h - center, slope_c> - offset_c) / T."""
    valid, odds = metric["valid"], []
    for h, mean, factor, t in zip(
        layers, metric["means"], metric["factors"], temperature, strict=True
    ):
        center = _center(mean, valid)
        m = (mean - center)[valid].double() @ factor.double().T
        slope, offset = m @ factor.double(), m.square().sum(1) / 2
        logits = product(h - center, slope.to(h.dtype), precision) - offset.to(h.dtype)
        odds.append(log_odds(logits / t).amax(-1))
    return torch.stack(odds)


def rows(config: Config, data_dir: str | None) -> list[list[str]]:
    """Train on split 0; return a table row per precision."""
    data = load_dataset(config.dataset, data_dir)
    model = train(config, data, progress=False).model.eval()
    data = prepare(config, data)
    head, test = model.head, data.split(0).test
    with torch.no_grad():
        layers, metric = model.backbone(data.graph, data.feat), head.prototypes.metric()
        temperature = head.comparer.temperature
        doubled = {"valid": metric["valid"]}
        for name in ("means", "factors"):
            doubled[name] = [part.double() for part in metric[name]]
        exact = scores([h.double() for h in layers], doubled, temperature, "fp32")
        table, before = [], None
        for precision in PRECISIONS:
            found = scores(layers, metric, temperature, precision)
            layer, answers = found.argmax(0), []
            for h, decoder in zip(layers, head.decoders, strict=True):
                logits = product(h, decoder.weight, precision) + decoder.bias
                answers.append(logits.masked_fill(~metric["valid"], -torch.inf).argmax(1))
            answer = torch.stack(answers).gather(0, layer.unsqueeze(0)).squeeze(0)
            before = before or (layer, answer)
            error = (found - exact).abs()
            table.append(
                [
                    f"{config.dataset}, {precision}",
                    f"{error.median():.0e}",
                    f"{error.max():.0e}",
                    _percent(layer != before[0]),
                    _percent(answer != before[1]),
                    _percent((answer == data.labels)[test]),
                ]
            )
    return table


def _percent(mask: Tensor) -> str:
    return f"{100 * mask.double().mean().item():.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=DATASETS)
    parser.add_argument("--data-dir")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--backbone", choices=BACKBONES, default="gcn")
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    config = Config(
        backbone=args.backbone,
        num_layers=args.depth,
        epochs=args.epochs,
        patience=args.epochs,
        select="temperature",
    )
    header = ["", "error of log-odds, median", "largest"]
    header += ["layers changed, %", "classes changed, %", "test accuracy, %"]
    table = []
    for name in args.datasets:
        table += rows(replace(config, dataset=name), args.data_dir)
    print(markdown((header, table)))


if __name__ == "__main__":
    main()
