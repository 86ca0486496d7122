"""Peak memory of the head beyond its inputs and outputs, at a million nodes."""

import argparse
import resource
import subprocess
import sys

import torch

from metselect_dgl import functional as MF

N, D, L, C = 1_000_000, 64, 3, 40


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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
    """Layer and class as int64, the score as float32; twice: in training and in inference."""
    return N * (8 + 8 + 4) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    if not parser.parse_args().child:  # a fresh process: the peak is that of its whole life
        sys.exit(subprocess.run([sys.executable, "-m", "benchmarks.memory", "--child"]).returncode)
    layers, labels = inputs()
    small = [h[:5000] for h in layers]
    head(small, labels[:5000])  # what libraries allocate once
    before = peak_mb()
    head(layers, labels)
    extra = peak_mb() - before
    print(f"N = {N:,}, D = {D}, L = {L}, C = {C}: layers {L * N * D * 4 / 2**20:.0f} MB")
    print(f"peak beyond them: {extra:.1f} MB, outputs {outputs_mb():.1f} MB")
    print(f"extra memory of the head: {extra - outputs_mb():.1f} MB")


if __name__ == "__main__":
    main()
