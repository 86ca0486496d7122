"""Class moments of layers, and the whitening factors of their shrunk covariances (Eq. 2, 3)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..checks import check_labels
from .arguments import Index, Tensors, index_per_layer, same_dtype

_SAMPLE_ROWS = 512  # that the default shifts are computed from


@dataclass
class Moments:
    """Streaming class moments of every layer; they are additive, so subsets of nodes merge exactly.

    With r = h - shift[y]: `count` [C], and per layer `shifts` [C, D], `sums` = sum r [C, D] and
    `grams` = sum r r^T [D, D].

    Examples
    --------
    >>> import torch
    >>> h, y = torch.randn(100, 8).double(), torch.randint(3, (100,))
    >>> whole = moments([h], y, 3)
    >>> parts = moments([h[:60]], y[:60], 3).merge(moments([h[60:]], y[60:], 3))
    >>> torch.allclose(whole.covariances()[0], parts.covariances()[0], rtol=1e-5)
    True
    """

    count: Tensor
    shifts: list[Tensor]
    sums: list[Tensor]
    grams: list[Tensor]

    @classmethod
    def zeros(cls, shifts: Tensors) -> "Moments":
        """Return the moments of no nodes about the given shifts."""
        sums = [torch.zeros_like(shift, dtype=torch.float64) for shift in shifts]
        grams = [total.new_zeros(total.shape[1], total.shape[1]) for total in sums]
        return cls(sums[0].new_zeros(len(sums[0])), list(shifts), sums, grams)

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of the nodes of both, about the shifts of `self`."""
        sums, grams = [], []
        for depth, shift in enumerate(self.shifts):
            total, gram = other.sums[depth], other.grams[depth]
            move = other.shifts[depth].double() - shift.double()  # r about shift = other's r + move
            weighted = other.count.unsqueeze(1) * move
            cross = move.T @ total
            sums.append(self.sums[depth] + total + weighted)
            grams.append(self.grams[depth] + gram + cross + cross.T + move.T @ weighted)
        return Moments(self.count + other.count, self.shifts, sums, grams)

    def about(self, shifts: Tensors) -> "Moments":
        """Return the same moments about other shifts."""
        return Moments.zeros(shifts).merge(self)

    def scaled(self, weight: float) -> "Moments":
        """Return the moments with every node counted `weight` times."""
        sums = [weight * total for total in self.sums]
        grams = [weight * gram for gram in self.grams]
        return Moments(weight * self.count, self.shifts, sums, grams)

    def flat(self) -> Tensor:
        """Return counts, sums and grams as one vector; those about the same shifts can be added."""
        return torch.cat([part.flatten() for part in (self.count, *self.sums, *self.grams)])

    def with_flat(self, vector: Tensor) -> "Moments":
        """Return the moments of a vector made by `flat`, about the shifts of `self`."""
        parts = [self.count, *self.sums, *self.grams]
        pieces = vector.split([part.numel() for part in parts])
        count, *rest = (piece.view_as(part) for piece, part in zip(pieces, parts, strict=True))
        return Moments.of_parts([count, *self.shifts, *rest])

    def parts(self) -> list[Tensor]:
        """Return all tensors as one list, for a checkpoint."""
        return [self.count, *self.shifts, *self.sums, *self.grams]

    @classmethod
    def of_parts(cls, parts: list[Tensor]) -> "Moments":
        """Return the moments of a list made by `parts`."""
        count, *rest = parts
        n_layers = len(rest) // 3
        return cls(count, rest[:n_layers], rest[n_layers : 2 * n_layers], rest[2 * n_layers :])

    def add(self, layers: Tensors, labels: Tensor, index: Index = None) -> None:
        """Add the nodes of a batch in place, about the same shifts."""
        batch = moments(layers, labels, len(self.count), index=index, shifts=self.shifts)
        both = self.merge(batch)
        self.count, self.sums, self.grams = both.count, both.sums, both.grams

    def mapped(self, weight: Tensor, bias: Tensor) -> "Moments":
        """Return the moments of W h + b from those of a single layer h."""
        wide, (shift,), (total,), (gram,) = weight.double(), self.shifts, self.sums, self.grams
        shift = (shift.double() @ wide.T + bias.double()).to(weight.dtype)
        return Moments(self.count, [shift], [total @ wide.T], [wide @ gram @ wide.T])

    def with_layer(self, depth: int, other: "Moments") -> "Moments":
        """Return these moments with layers of `other`, of the same nodes, inserted at `depth`."""
        joined = Moments(self.count, self.shifts.copy(), self.sums.copy(), self.grams.copy())
        joined.shifts[depth:depth] = other.shifts
        joined.sums[depth:depth] = other.sums
        joined.grams[depth:depth] = other.grams
        return joined

    def means(self) -> list[Tensor]:
        """Return mu[c] (Eq. 2) per layer, float64 [C, D]; a class without nodes has the mean of
        the other class means."""
        seen, divisor = self.count > 0, self._divisor()
        means = []
        for shift, total in zip(self.shifts, self.sums, strict=True):
            mean = shift.double() + total / divisor
            means.append(mean.where(seen.unsqueeze(1), mean[seen].mean(0)))
        return means

    def covariances(self) -> list[Tensor]:
        """Return K (Eq. 3) per layer, the pooled within-class covariance with denominator |T| - 1,
        float64 [D, D]."""
        divisor, freedom = self._divisor(), (self.count.sum() - 1).clamp(min=1)
        pairs = zip(self.grams, self.sums, strict=True)
        return [(gram - total.T @ (total / divisor)) / freedom for gram, total in pairs]

    def _divisor(self) -> Tensor:
        """Return the counts [C, 1], which a moving average makes fractional; 1 instead of 0."""
        return (self.count + (self.count == 0)).unsqueeze(1)


def moments(
    layers: Tensors,
    labels: Tensor,
    n_classes: int,
    *,
    index: Index = None,
    shifts: Tensors | None = None,
) -> Moments:
    """Return the class moments of every layer over the picked nodes.

    `labels` [n] are the classes of the picked nodes. `shifts`, L tensors [C, D_l] near the class
    means, avoid cancellation; by default they are the class means of a sample of the nodes.
    """
    index = index_per_layer(index, layers)
    n_rows = len(layers[0] if index[0] is None else index[0])
    labels = check_labels(labels, n_rows, n_classes)
    if (labels < 0).any():
        raise ValueError("labels contain -1 (not labelled); leave those nodes out of index")
    layers = same_dtype([h.detach() for h in layers])
    if shifts is None:
        shifts = sampled_means(layers, labels, n_classes, index)
    count, sums, grams = ops.functions.moments(layers, labels, index, list(shifts))
    return Moments(count, list(shifts), sums, grams)


def sampled_means(
    layers: Tensors, labels: Tensor, n_classes: int, index: list[Tensor | None]
) -> list[Tensor]:
    """Return class means [C, D] of a sample of each layer's picked rows, at least float32; 0 for a
    class without nodes. The sample are evenly spaced rows and the first row of every class: a
    single row is as near to its class mean as the other rows are."""
    n = len(labels)
    sample, step = torch.arange(n, device=labels.device), n // _SAMPLE_ROWS
    if step > 1:
        first = labels.new_full((n_classes,), n).scatter_reduce(0, labels, sample, "amin")
        sample = torch.cat([sample[::step], first[first < n]])
    member = F.one_hot(labels[sample], n_classes).double()  # [s, C]
    share = (member / member.sum(0).clamp(min=1)).T
    means = []
    for h, picked in zip(layers, index, strict=True):
        rows = h[sample if picked is None else picked[sample]]
        means.append((share @ rows.double()).to(torch.promote_types(h.dtype, torch.float32)))
    return means


def fourth_moments(layers: Tensors, labels: Tensor, means: Tensors, index: Index = None) -> Tensor:
    """Return sum_i ||h_i - mu_{y_i}||^4 per layer, float64 [L], for Ledoit-Wolf shrinkage."""
    fourth = []
    for h, mean, picked in zip(layers, means, index_per_layer(index, layers), strict=True):
        rows = (h if picked is None else h[picked]).detach().double() - mean.double()[labels]
        fourth.append(rows.square().sum(1).square().sum())
    return torch.stack(fourth)


def whitening(
    moments: Moments, shrinkage: str | float = "oas", *, fourth: Tensor | None = None
) -> list[Tensor]:
    r"""Return R [D, D] per layer, lower triangular, with R^T R the inverse of the shrunk covariance

    .. math:: \hat K = (1 - \rho) K + \rho \, \mathrm{tr}(K) / D \, I .

    rho is at least 16 D rounding units of the layers' dtype: below that K is rounding error.
    A layer without any spread gets R = 0 and is never selected. A covariance of 0 under class
    means that differ (one node per class) is replaced by the variance of those means.

    Parameters
    ----------
    shrinkage : ``"oas"`` (Oracle Approximating Shrinkage), ``"ledoit_wolf"`` or rho in [0, 1]
    fourth : the result of :func:`fourth_moments`, which ``"ledoit_wolf"`` needs
    """
    check_shrinkage(shrinkage)
    if shrinkage == "ledoit_wolf" and fourth is None:
        raise ValueError("shrinkage='ledoit_wolf' needs fourth=fourth_moments(...)")
    n = moments.count.sum()
    eps = torch.finfo(moments.shifts[0].dtype).eps
    means, covariances = moments.means(), moments.covariances()
    rho = list(covariances)
    for width in {len(covariance) for covariance in covariances}:  # layers of one width at once
        depths = [depth for depth, mean in enumerate(means) if mean.shape[1] == width]
        covariance = torch.stack([covariances[depth] for depth in depths])
        covariance = _spread(torch.stack([means[depth] for depth in depths]), covariance, eps)
        if shrinkage == "oas":
            group_rho = oas_shrinkage(covariance, n)
        elif shrinkage == "ledoit_wolf":
            group_rho = _ledoit_wolf_shrinkage(covariance, n, fourth[depths])
        else:
            group_rho = n.new_full((len(depths),), shrinkage)
        for position, depth in enumerate(depths):
            covariances[depth], rho[depth] = covariance[position], group_rho[position]
    return ops.functions.whitening(covariances, torch.stack(rho), eps)


def _spread(mean: Tensor, covariance: Tensor, eps: float) -> Tensor:
    """Return the covariances [G, D, D] of layers with class means [G, C, D]: the variance of the
    means in place of a zero covariance, 0 where a layer varies by rounding only."""
    between = mean.var(1, correction=0)  # [G, D]
    rounding = (4 * eps * mean.abs().amax(1)) ** 2
    eye = torch.eye(covariance.shape[1], dtype=torch.float64, device=covariance.device)
    varies = covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] > 0
    covariance = covariance.where(varies, between.mean(1)[:, None, None] * eye)
    real = covariance.diagonal(dim1=1, dim2=2) + between > rounding
    return covariance * real.any(1)[:, None, None]


def check_shrinkage(kind: str | float) -> None:
    """Raise ValueError unless `whitening` accepts the shrinkage."""
    if isinstance(kind, int | float) and not isinstance(kind, bool):
        if not 0 <= kind <= 1:
            raise ValueError(f"shrinkage is {kind}; a number must be between 0 and 1")
    elif kind not in ("oas", "ledoit_wolf"):
        raise ValueError(f"shrinkage is {kind!r}; use 'oas', 'ledoit_wolf' or a number")


def oas_shrinkage(covariance: Tensor, n: Tensor) -> Tensor:
    """Return rho [G] of covariances [G, D, D] of n nodes by Chen, Wiesel, Eldar and Hero (2010),
    Eq. 23, as scikit-learn computes it."""
    square = covariance.square().mean((1, 2))
    mean2 = covariance.diagonal(dim1=1, dim2=2).mean(1) ** 2
    excess = (n + 1) * (square - mean2 / covariance.shape[1])
    rho = (square + mean2) / excess
    return torch.where(excess > 0, rho, torch.ones_like(rho)).clamp(max=1)


def _ledoit_wolf_shrinkage(covariance: Tensor, n: Tensor, fourth: Tensor) -> Tensor:
    """Return rho [G] by Ledoit and Wolf (2004), with denominator n, as scikit-learn computes it."""
    biased = covariance * ((n - 1).clamp(min=1) / n)
    square = biased.square().sum((1, 2))
    noise = (fourth / n - square) / n
    excess = square - biased.diagonal(dim1=1, dim2=2).sum(1) ** 2 / covariance.shape[1]
    rho = noise.minimum(excess) / excess
    return torch.where(excess > 0, rho, torch.ones_like(rho)).clamp(min=0)
