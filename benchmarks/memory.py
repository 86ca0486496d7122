"""Peak memory of the head beyond its inputs and outputs, at a million nodes."""

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


def outputs_mb() -> float:
    """Layer and class as int64, the score as float32."""
    return N * (8 + 8 + 4) / 2**20


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    layers, labels = inputs()
    head([h[:5000] for h in layers], labels[:5000])  # what libraries allocate once
    before = give_back()
    head(layers, labels)
    extra = status_mb("VmHWM") - before
    print(f"N = {N:,}, D = {D}, L = {L}, C = {C}: layers {L * N * D * 4 / 2**20:.0f} MB")
    print(f"peak beyond them: {extra:.1f} MB, outputs {outputs_mb():.1f} MB")
    print(f"extra memory of the head: {extra - outputs_mb():.1f} MB")


if __name__ == "__main__":
    main()
