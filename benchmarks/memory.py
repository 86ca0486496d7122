"""Peak memory of the head beyond its inputs and outputs, at a million nodes: with all layers at
hand, and in inference with one layer after the other."""

import argparse
import ctypes
from pathlib import Path

import torch

from metselect_dgl import functional as MF

N, D, L, C = 1_000_000, 64, 3, 40


def status_mb(field: str) -> float:
    """VmRSS, the memory in use, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def give_back() -> float:
    """Return what was freed to the system, forget the peak, and say what is in use, in MB."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_mb("VmRSS")


def inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(C, (N,), generator=draw)
    layers = []
    for _ in range(L):
        h = torch.randn(N, D, generator=draw)
        for c in range(C):  # in place: nothing large besides the layers is ever made
            h[:, c % D] += (labels == c).float()
        layers.append(h)
    return layers, labels


def head(layers, labels) -> None:
    moments = MF.moments(layers, labels, C)
    means, factors = (
        [each.float() for each in part] for part in (moments.means(), MF.whitening(moments))
    )
    MF.select_layer(layers, means, factors, labels=labels)
    MF.select_layer(layers, means, factors)


def one_by_one(layers: int):
    """Layers that are made when they are asked for, as a backbone does."""
    for seed in range(layers):
        yield torch.randn(N, D, generator=torch.Generator().manual_seed(seed))


def megabytes(*shapes: tuple[int, int]) -> float:
    """Of (numbers, bytes each)."""
    return sum(count * size for count, size in shapes) / 2**20


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"N = {N:,}, D = {D}, L = {L}, C = {C}")
    layers, labels = inputs()
    small = [h[:5000] for h in layers]
    head(small, labels[:5000])  # what libraries allocate once
    before = give_back()
    head(layers, labels)
    extra = status_mb("VmHWM") - before
    outputs = megabytes((N, 8), (N, 8), (N, 4))  # layer, class, score
    print(f"moments and selection, all layers at hand ({megabytes((L * N * D, 4)):.0f} MB):")
    print(f"  peak beyond them {extra:.1f} MB, outputs {outputs:.1f} MB")
    print(f"  extra memory of the head: {extra - outputs:.1f} MB")

    moments = MF.moments(small, labels[:5000], C)
    means = [each.float() for each in moments.means()]
    factors = [each.float() for each in MF.whitening(moments)]
    weights, biases = [torch.randn(C, D)] * L, [torch.zeros(C)] * L
    del layers, small, labels
    before = give_back()
    MF.select_and_decode(one_by_one(L), means, factors, weights, biases)
    extra = status_mb("VmHWM") - before
    layer, logits = megabytes((N * D, 4)), megabytes((N * C, 4))
    print("selection and decoding, one layer after the other:")
    print(f"  peak {extra:.0f} MB: a layer {layer:.0f} MB, the logits {logits:.0f} MB")
    print(f"  and {extra - layer - logits:.0f} MB more")


if __name__ == "__main__":
    main()
