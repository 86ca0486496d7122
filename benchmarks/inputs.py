"""What the head's ops are given: rows of the classes of ogbn-arxiv's training nodes."""

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from metselect_dgl import functional as MF
from metselect_dgl import reference
from metselect_dgl.data.synthetic import ARXIV_TRAIN_PER_CLASS
from metselect_dgl.functional.moments import oas_shrinkage

EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Rows:
    """n rows of L layers of D features, of C classes that are as frequent as in ogbn-arxiv."""

    n: int = int(ARXIV_TRAIN_PER_CLASS.sum())
    L: int = 3
    C: int = 40
    D: int = 64

    def draw(self) -> tuple[list[Tensor], Tensor]:
        """(layers, labels): correlated rows, with class means a little apart."""
        draw = torch.Generator().manual_seed(0)
        share = torch.from_numpy(np.resize(ARXIV_TRAIN_PER_CLASS, self.C)).double()
        labels = torch.multinomial(share, self.n, True, generator=draw)
        labels[: self.C] = torch.arange(self.C)  # every class has a row
        layers = []
        for _ in range(self.L):
            means = torch.randn(self.C, self.D, generator=draw) / 2
            mix = torch.randn(self.D, self.D, generator=draw) / self.D**0.5
            noise = torch.randn(self.n, self.D, generator=draw)
            layers.append(means[labels] + noise @ mix)
        return layers, labels


class Inputs:
    """What the ops take, each from the one before."""

    def __init__(self, rows: Rows) -> None:
        self.rows, (self.layers, self.labels) = rows, rows.draw()
        self.index, self.valid = rows.L * [None], torch.ones(rows.C, dtype=torch.bool)
        self.temperature = torch.ones(rows.L)
        moments = MF.moments(self.layers, self.labels, rows.C)
        self.shifts, self.covariances = moments.shifts, moments.covariances()
        oas = oas_shrinkage(torch.stack(self.covariances), moments.count.sum())
        self.rho = oas.clamp(min=16 * rows.D * EPS)  # the least that the package takes
        self.means = [mean.float() for mean in moments.means()]
        factors = reference.whitening(self.covariances, self.rho, EPS)
        self.factors = [factor.float() for factor in factors]
        draw = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(rows.C, rows.D, generator=draw) / 8 for _ in self.layers]
        self.biases = [torch.zeros(rows.C) for _ in self.layers]
        self.layer = torch.randint(rows.L, (rows.n,), generator=draw)
        self.known: dict[str, object] = {}  # results, by op

    def double(self) -> "Inputs":
        """The same in float64."""
        wide = copy(self)
        vars(wide).pop("pull", None)  # made anew
        names = "layers shifts means factors weights biases temperature".split()
        vars(wide).update((name, _double(getattr(self, name))) for name in names)
        return wide

    @cached_property
    def pull(self) -> Tensor:
        """A gradient to the distances."""
        draw = torch.Generator().manual_seed(2)
        some = torch.rand(self.rows.L, self.rows.n, self.rows.C, generator=draw)
        return some.to(self.means[0].dtype) / self.rows.n

    @property
    def metric(self) -> tuple:
        return self.layers, self.means, self.factors, self.valid

    @property
    def decoders(self) -> tuple:
        return self.layers, self.weights, self.biases, self.layer, self.labels, self.index


def _double(value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return value.double() if isinstance(value, Tensor) else [each.double() for each in value]
