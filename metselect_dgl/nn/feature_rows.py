"""The rows of constant features, and what is derived from them once."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as MF
from .adjacency import SparseRows


class FeatureRows:
    """The rows `index` of features that are the same in every call."""

    def __init__(self, feat: Tensor, index: Tensor | None) -> None:
        self._feat, self.index = weakref.ref(feat), index
        self.derived: dict[str, Any] = {}
        self.labels: Tensor | None = None  # of the moments

    @property
    def feat(self) -> Tensor:
        """The features of this call, which are not kept alive for the next."""
        return self._feat()

    @feat.setter
    def feat(self, feat: Tensor) -> None:
        self._feat = weakref.ref(feat)

    def rows(self) -> Tensor:
        """Return the rows, [n, F]."""
        if self.index is None:
            return self.feat
        return once(self.derived, "rows", lambda: self.feat[self.index])

    def sparse(self) -> SparseRows | None:
        """Return the rows in compressed form where that is faster, else None."""
        return once(self.derived, "sparse", lambda: SparseRows.if_sparse(self.rows()))

    def map(self, linear: nn.Linear) -> Tensor:
        """Return the image of the rows under a linear map, [n, D]."""
        sparse = self.sparse()
        if sparse is None:
            return linear(self.rows())
        return sparse.times(linear.weight.T) + linear.bias

    def moments(self, labels: Tensor, n_classes: int) -> MF.Moments:
        """Return the class moments of the rows, whose classes are `labels` [n]."""
        if self.labels is None or not torch.equal(self.labels, labels):
            self.derived.pop("moments", None)
            self.labels = labels.clone()
        return once(
            self.derived,
            "moments",
            lambda: MF.moments([self.feat], labels, n_classes, index=self.index),
        )


def once(derived: dict, key: Any, make: Callable[[], Any]) -> Any:
    """Return what was made for a key; a later call, with or without gradients, may use it."""
    if key not in derived:
        with torch.inference_mode(False), torch.no_grad():
            derived[key] = make()
    return derived[key]
