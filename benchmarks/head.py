"""The head alone (moments and selection) on as many rows as ogbn-arxiv has training nodes."""

import argparse

import torch

from metselect_dgl import functional as MF
from metselect_dgl.data.synthetic import ARXIV_TRAIN_PER_CLASS

from .providers import bare_products, careful_torch, paper_formula
from .timing import interleaved, machine, table


def rows(width: int, n_layers: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Layers of the classes of ogbn-arxiv's training nodes, with means a little apart."""
    draw = torch.Generator().manual_seed(seed)
    count = torch.from_numpy(ARXIV_TRAIN_PER_CLASS)
    labels = torch.repeat_interleave(count)
    labels = labels[torch.randperm(len(labels), generator=draw)]
    layers = []
    for _ in range(n_layers):
        means = torch.randn(len(count), width, generator=draw) / 2
        mix = torch.randn(width, width, generator=draw) / width**0.5
        noise = torch.randn(len(labels), width, generator=draw)
        layers.append(means[labels] + noise @ mix)
    return layers, labels


def ours(layers, labels, n_classes):
    """(layer, score) by the package; the shrinkage, which the others are given, included."""
    moments = MF.moments(layers, labels, n_classes)
    dtype = layers[0].dtype
    means, factors = (
        [each.to(dtype) for each in part] for part in (moments.means(), MF.whitening(moments))
    )
    layer, _, score = MF.select_layer(layers, means, factors, labels=labels)
    return layer, score


def agree(found, expected, name: str) -> None:
    """Refuse to time what gives another answer."""
    same = (found[0] == expected[0]).double().mean().item()
    error = (found[1] - expected[1]).abs().max().item()
    if same < 0.999 or error > 1e-2 * expected[1].abs().max().item():
        raise SystemExit(f"{name} disagrees: {same:.4f} of the layers, score off by {error:.3g}")


def measure(width: int, n_layers: int, rounds: int, against_paper: bool = True) -> dict:
    layers, labels = rows(width, n_layers)
    n_classes = int(labels.max()) + 1
    moments = MF.moments(layers, labels, n_classes)
    rho = MF._oas(torch.stack(moments.covariances()), moments.count.sum())
    contestants = {
        "paper's formula": lambda: paper_formula(layers, labels, n_classes, rho.float()),
        "careful torch": lambda: careful_torch(layers, labels, n_classes, rho.float()),
        "ours": lambda: ours(layers, labels, n_classes),
    }
    if not against_paper:
        del contestants["paper's formula"]
    expected = careful_torch([h.double() for h in layers], labels, n_classes, rho)
    for name, run in contestants.items():
        agree(run(), expected, name)
    contestants["bare products"] = bare_products(layers, n_classes)
    return interleaved(contestants, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine())
    for width in (64, 128):
        best = measure(width, 3, args.rounds)
        print(f"\n90,941 rows, L = 3, C = 40, D = {width}\n{table(best, 'ours')}")
    print("\ndepth 64 against depth 16, D = 64: the time of a layer")
    per_layer = {
        depth: measure(64, depth, 2, against_paper=False)["ours"] / depth for depth in (16, 64)
    }
    print(f"{per_layer[64] / per_layer[16]:.2f} of that at 16 layers; 1 is linear")


if __name__ == "__main__":
    main()
