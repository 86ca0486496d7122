"""Bytes, FLOP and launches of the head's ops, in three paths, as functions of the sizes.

`eager` is the paper's formula and a plain loss in torch (`providers.py`), `reference` is
`metselect_dgl/reference.py` op by op, `fused` the Triton and CUDA kernels. What is assumed stands
in `roofline.py`; the tests count the first two on the code itself.

Letters: N nodes, n picked rows, L layers, C classes, D features of a layer, s bytes of a feature,
M multiprocessors; t tiles of the reference's moments, q pieces of 64 x 64 in which the kernel makes
half of a Gram matrix, P classes as the Triton kernels pad them, B blocks of 32 of these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

import sympy

from metselect_dgl.reference import TILE

EXP = 8  # FLOP of an exponential or logarithm


@dataclass(frozen=True)
class Size:
    """By default those of ogbn-arxiv, on a V100."""

    N: int = 169_343
    n: int = 90_941  # its training nodes
    L: int = 3
    C: int = 40
    D: int = 64
    s: int = 4
    M: int = 80
    tile: int = TILE

    def letters(self) -> dict[str, int]:
        """What the costs are functions of."""
        columns = ceil(self.D / 64)
        padded = max(16, 2 ** ceil(log2(self.C))) if self.C <= 64 else 64 * ceil(self.C / 64)
        derived = {"t": ceil(self.n / self.tile), "q": columns * (columns + 1) // 2}
        derived |= {"P": padded, "B": ceil(padded / 32)}
        return {name: value for name, value in vars(self).items() if name != "tile"} | derived


def symbols() -> dict[str, sympy.Symbol]:
    """The letters themselves: a cost of these is its formula."""
    return {letter: sympy.Symbol(letter) for letter in Size().letters()}


@dataclass(frozen=True)
class Cost:
    """Of DRAM traffic, of products that tensor cores could do, of other FLOP, and of launches."""

    bytes: float = 0
    matmul: float = 0
    other: float = 0
    launches: float = 0

    def __add__(self, more: "Cost") -> "Cost":
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Cost(*(mine + theirs for mine, theirs in pairs))

    @property
    def flops(self) -> float:
        return self.matmul + self.other


# eager: paper_formula and plain_loss of the providers


def eager_moments(n, L, C, D, s, **_) -> Cost:
    """For every class h[labels == c].mean(0); then r = h - mean[labels] and r^T r."""
    return Cost(
        bytes=L * (n * (7 * D * s + 10 * C + 8) + 4 * C * D * s + 3 * D * D * s),
        matmul=L * 2 * n * D**2,
        other=L * 2 * n * D,
        launches=L * (3 * C + 5),
    )


def eager_whitening(L, D, s, **_) -> Cost:
    """Shrink and invert."""
    return Cost(bytes=L * 14 * D**2 * s, launches=L * (8 + D / 8))


def eager_select_layer(n, L, C, D, s, **_) -> Cost:
    """(h - mu) K^-1 (h - mu)^T for one class after the other, then the log-odds."""
    return Cost(
        bytes=L * n * (8 * C * D * s + 11 * C * s + 40),
        matmul=L * C * 2 * n * D**2,
        other=L * n * C * (3 * D + EXP),
        launches=L * (4 * C + 7) + 2,
    )


def eager_loss(N, n, L, C, D, s, **_) -> Cost:
    """Gather, decode every layer, pick the selected logits, cross entropy of all, autograd."""
    return Cost(
        bytes=L * (N * D * s + n * (8 * D * s + 19 * C * s + 40)) + n * (10 * C * s + 32),
        matmul=L * 6 * n * C * D,
        other=(L + 1) * 2 * EXP * n * C,
        launches=13 * L + 15,
    )


# reference: metselect_dgl/reference.py, op by op


def reference_moments(n, L, C, D, s, t, **_) -> Cost:
    """t tiles: gather, shift, scale, float64 class sums, Gram matrix."""
    return Cost(
        bytes=L * (n * (13 * D * s + 32 * D + 24) + t * D * (C * (s + 16) + D * (2 * s + 48))),
        matmul=L * 2 * n * D**2,
        other=L * 6 * n * D,
        launches=L * (19 * t + 2) + 2,
    )


def checks_and_shifts(n, L, D, s, **_) -> Cost:
    """Labels looked at, class means of a sample as shifts: functional.moments, in both paths."""
    return Cost(bytes=100 * n + L * 512 * D * (3 * s + 20), launches=5 * L + 22)


def whitening(L, D, **_) -> Cost:
    """Means, covariances, OAS in float64, Cholesky, triangular inverse: the same in both paths."""
    return Cost(bytes=L * 400 * D**2, launches=43 + 33 * L + 2 * L * D / 8)


def reference_select_layer(n, L, C, D, s, **_) -> Cost:
    """metric_logits, log_odds, and the gathers of the winner."""
    return Cost(
        bytes=L * (n * (5 * D * s + 27 * C * s + 104) + 44 * D * (D + C)),
        matmul=L * (2 * n * C * D + 4 * C * D**2),
        other=L * n * (D + C * (6 + 5 * EXP)),
        launches=23 * L + 21,
    )


def reference_loss(N, n, L, C, D, s, **_) -> Cost:
    """selected_cross_entropy with deep supervision, one layer after the other."""
    return Cost(
        bytes=L * (N * D * s + n * (8 * D * s + C * (13 * s + 8) + 80)) + 24 * n * C,
        matmul=L * 6 * n * C * D,
        other=L * n * C * (5 + 2 * EXP),
        launches=19 * L + 6,
    )


def scale_gradients(N, L, C, D, s, **_) -> Cost:
    """autograd multiplies the stored gradients by that of the loss, which a GPU does not know."""
    return Cost(bytes=L * 2 * D * s * (N + C), other=L * N * D, launches=3 * L)


def reference_class_distances(n, L, C, D, s, **_) -> Cost:
    return Cost(
        bytes=L * n * (7 * D * s + 7 * C * s + 8),
        matmul=L * (2 * n * D**2 + 2 * C * D**2),
        other=L * 3 * n * C * D,
        launches=13 * L + 1,
    )


def reference_class_distances_backward(N, n, L, C, D, s, **_) -> Cost:
    return Cost(
        bytes=L * (N * D * s + n * (19 * D * s + 5 * C * s + 16)),
        matmul=L * (4 * n * D**2 + 2 * n * C * D + 2 * C * D**2),
        other=L * 4 * n * D,
        launches=19 * L + 1,
    )


# fused: the Triton and CUDA kernels


def fused_moments(n, L, C, D, s, M, q, **_) -> Cost:
    """All layers in two launches; 3 blocks on each multiprocessor share out rows and pieces, and
    each writes a float64 slot. Not for tensor cores."""
    return Cost(
        bytes=L * n * (D * s + 16) + 48 * M * (64**2 + C * D / q),
        other=L * n * (2 * q * 64**2 + 2 * D),
        launches=4,
    )


def fused_select_layer(n, L, C, D, P, s, **_) -> Cost:
    """Slopes by small torch ops; then one kernel keeps the best layer in registers."""
    return Cost(
        bytes=L * (n * (D * s + 8) + 24 * D**2) + 28 * n,
        matmul=L * (2 * n * P * D + 4 * C * D**2),
        other=L * n * (D + P * EXP),
        launches=29,
    )


def fused_loss(N, n, L, C, D, P, s, M, **_) -> Cost:
    """Zero fill, then logits, loss and gradients of a tile at once; no logits are kept."""
    return Cost(
        bytes=L * (N * D * s + n * (3 * D * s + 8) + 16 * M * C * D) + 16 * n,
        matmul=L * 6 * n * P * D,
        other=L * n * P * (3 + EXP),
        launches=5 * L + 3,
    )


def fused_class_distances(n, L, C, D, P, B, s, **_) -> Cost:
    """Whitened anew for every block of classes."""
    return Cost(
        bytes=L * n * (D * s + 8 + 4 * C),
        matmul=L * B * n * D * (D + 1),
        other=L * 3 * n * P * D,
        launches=28,
    )


def fused_class_distances_backward(N, n, L, C, D, P, s, **_) -> Cost:
    """Two kernels, with the whitened pull of the classes between them."""
    return Cost(
        bytes=L * (N * D * s + n * (3 * D * s + 8 * D + 16 + 4 * C)),
        matmul=L * (2 * n * D * (D + 1) + 2 * n * P * D),
        other=L * 4 * n * D,
        launches=29 + 2 * L,
    )


Op = Callable[..., Cost]
HEAD: dict[str, dict[str, Op]] = {
    "eager": {
        "moments": eager_moments,
        "whitening": eager_whitening,
        "select_layer": eager_select_layer,
        "selected_cross_entropy": eager_loss,
    },
    "reference": {
        "checks and shifts": checks_and_shifts,
        "moments": reference_moments,
        "whitening": whitening,
        "select_layer": reference_select_layer,
        "selected_cross_entropy": reference_loss,
        "scale gradients": scale_gradients,
    },
    "fused": {
        "checks and shifts": checks_and_shifts,
        "moments": fused_moments,
        "whitening": whitening,
        "select_layer": fused_select_layer,
        "selected_cross_entropy": fused_loss,
        "scale gradients": scale_gradients,
    },
}
BESIDE: dict[str, dict[str, Op]] = {  # of the losses that are made of distances
    "reference": {
        "class_distances": reference_class_distances,
        "class_distances_backward": reference_class_distances_backward,
    },
    "fused": {
        "class_distances": fused_class_distances,
        "class_distances_backward": fused_class_distances_backward,
    },
}
