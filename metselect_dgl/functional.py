"""The public maths of MetSelect: moments, whitening, class distances, layer selection, decoding.

Equations 2 to 7 of the paper as plain functions over lists of layers, with shapes
N nodes, L layers (layer 0 is the feature layer), C classes, D features of a layer.
`index` picks the n nodes in question, without being given all of them: node numbers, or one such
vector (or None) for each layer, where layers do not hold the same nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops  # noqa: F401  registers torch.ops.metselect
from .checks import check_finite, check_labels
from .reference import log_odds

__all__ = [
    "Moments",
    "class_distances",
    "fourth_moments",
    "log_odds",
    "metric_logits",
    "moments",
    "select_and_decode",
    "select_layer",
    "selected_cross_entropy",
    "selected_logits",
    "whitening",
]

_SAMPLED = 512
RULES = ("confidence", "distance", "opposite")
Index = Tensor | None | Sequence[Tensor | None]
_ops = torch.ops.metselect


def _indices(index: Index, layers: Sequence[Tensor]) -> list[Tensor | None]:
    """One for every layer."""
    if index is None or isinstance(index, Tensor):
        index = [index] * len(layers)
    return [None if each is None else each.long().contiguous() for each in index]


def _of_one_dtype(layers: Sequence[Tensor]) -> list[Tensor]:
    """The layers in the widest of their dtypes, which under autocast may differ; on a CPU, where
    nothing computes in half, in float32 at least."""
    least = {torch.float32} if layers[0].device.type == "cpu" else set()
    widest = reduce(torch.promote_types, least | {h.dtype for h in layers})
    return [h.to(widest) for h in layers]


@dataclass
class Moments:
    """Streaming class moments of every layer: additive, so parts of the nodes merge exactly.

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

    def merge(self, other: "Moments") -> "Moments":
        """The moments of the nodes of both."""
        sums, grams = [], []
        for mine, theirs, s, o, g, og in zip(
            self.shifts, other.shifts, self.sums, other.sums, self.grams, other.grams, strict=True
        ):
            move = theirs.double() - mine.double()  # r about my shift = r about theirs + move
            weighted = other.count.unsqueeze(1) * move
            cross = move.T @ o
            sums.append(s + o + weighted)
            grams.append(g + og + cross + cross.T + move.T @ weighted)
        return Moments(self.count + other.count, self.shifts, sums, grams)

    def about(self, shifts: Sequence[Tensor]) -> "Moments":
        """The same moments, measured from other shifts."""
        zeros = ([torch.zeros_like(each) for each in some] for some in (self.sums, self.grams))
        return Moments(torch.zeros_like(self.count), list(shifts), *zeros).merge(self)

    def scaled(self, weight: float) -> "Moments":
        """Every node counted `weight` times."""
        lists = ([weight * each for each in some] for some in (self.sums, self.grams))
        return Moments(weight * self.count, self.shifts, *lists)

    def flat(self) -> Tensor:
        """Counts, sums and grams in one float64 vector: those of parts with equal shifts add up."""
        parts = [self.count, *self.sums, *self.grams]
        return torch.cat([each.double().flatten() for each in parts])

    def with_flat(self, vector: Tensor) -> "Moments":
        """What `flat` gives as `vector`, with the shifts of these."""
        parts = [self.count, *self.sums, *self.grams]
        pieces = vector.split([each.numel() for each in parts])
        pairs = zip(pieces, parts, strict=True)
        count, *rest = (piece.view(each.shape).to(each.dtype) for piece, each in pairs)
        depth = len(self.sums)
        return Moments(count, self.shifts, rest[:depth], rest[depth:])

    def parts(self) -> list[Tensor]:
        """All tensors in one list, as a checkpoint keeps them."""
        return [self.count, *self.shifts, *self.sums, *self.grams]

    @classmethod
    def of_parts(cls, parts: list[Tensor]) -> "Moments":
        """What `parts` gave."""
        count, *rest = parts
        depth = len(rest) // 3
        return cls(count, rest[:depth], rest[depth : 2 * depth], rest[2 * depth :])

    def add(self, layers: Sequence[Tensor], labels: Tensor, index: Index = None) -> None:
        """Take in further nodes, measured from the same shifts: streaming, batch by batch."""
        more = moments(layers, labels, len(self.count), index=index, shifts=self.shifts)
        for mine, theirs in zip(
            [self.count, *self.sums, *self.grams],
            [more.count, *more.sums, *more.grams],
            strict=True,
        ):
            mine += theirs

    def mapped(self, weight: Tensor, bias: Tensor) -> "Moments":
        """The moments of W h + b, for moments of a single layer."""
        wide = weight.double()
        (shift,), (total,), (gram,) = self.shifts, self.sums, self.grams
        shift = (shift.double() @ wide.T + bias.double()).to(weight.dtype)
        total, gram = total @ wide.T, wide @ gram @ wide.T
        return Moments(self.count, [shift], [total], [gram])

    def with_layer(self, depth: int, other: "Moments") -> "Moments":
        """These moments with the layers of `other`, of the same nodes, put in at `depth`."""
        pairs = zip(self._lists(), other._lists(), strict=True)
        lists = [[*mine[:depth], *theirs, *mine[depth:]] for mine, theirs in pairs]
        return Moments(self.count, *lists)

    def _lists(self) -> tuple[list[Tensor], ...]:
        return self.shifts, self.sums, self.grams

    def means(self) -> list[Tensor]:
        """mu[c] (Eq. 2), float64 [C, D]; a class without nodes gets the mean of the others."""
        seen, weight = self.count > 0, self._divisor()
        means = []
        for shift, total in zip(self.shifts, self.sums, strict=True):
            mean = shift.double() + total / weight
            means.append(mean.where(seen.unsqueeze(1), mean[seen].mean(0)))
        return means

    def _divisor(self) -> Tensor:
        """The counts, which may be below 1 in a moving average; 1 for a class without nodes."""
        return (self.count + (self.count == 0)).unsqueeze(1)

    def covariances(self) -> list[Tensor]:
        """K (Eq. 3): pooled within-class covariance, denominator |T| - 1, float64 [D, D]."""
        dof = (self.count.sum() - 1).clamp(min=1)
        weight = self._divisor()
        pairs = zip(self.grams, self.sums, strict=True)
        return [(gram - total.T @ (total / weight)) / dof for gram, total in pairs]


def moments(
    layers: Sequence[Tensor],
    labels: Tensor,
    n_classes: int,
    *,
    index: Index = None,
    shifts: Sequence[Tensor] | None = None,
) -> Moments:
    """Class moments of every layer over the nodes `index`, whose classes are `labels`.

    Parameters
    ----------
    layers : L tensors [N, D_l]
    labels : int64 [n], the classes of the picked nodes (all N without `index`)
    shifts : L tensors [C, D_l] near the class means, against cancellation;
        by default the class means of a sample of the nodes
    """
    index = _indices(index, layers)
    rows = len(layers[0] if index[0] is None else index[0])
    labels = check_labels(labels, rows, n_classes)
    if (labels < 0).any():
        raise ValueError("labels hold -1 (not labelled); leave those nodes out of index")
    layers = _of_one_dtype([h.detach() for h in layers])
    if shifts is None:
        shifts = _sampled_means(layers, labels, n_classes, index)
    count, sums, grams = _ops.moments(layers, labels, index, list(shifts))
    return Moments(count, list(shifts), sums, grams)


def _sample(labels: Tensor, n_classes: int) -> Tensor:
    """Some rows, evenly spread, and the first of every class, in whatever order they are: one row
    is as near to its class mean as the others are."""
    n = len(labels)
    every, step = torch.arange(n, device=labels.device), n // _SAMPLED
    if step <= 1:
        return every
    first = labels.new_full((n_classes,), n).scatter_reduce(0, labels, every, "amin")
    return torch.cat([every[::step], first[first < n]])


def _sampled_means(
    layers: list[Tensor], labels: Tensor, n_classes: int, index: list[Tensor | None]
) -> list[Tensor]:
    """Class means of a sample of the rows of every layer, at least float32; 0 for a class without
    nodes."""
    sample = _sample(labels, n_classes)
    member = F.one_hot(labels[sample], n_classes).double()  # [s, C]
    share = (member / member.sum(0).clamp(min=1)).T
    rows = [h[sample if at is None else at[sample]] for h, at in zip(layers, index, strict=True)]
    return [(share @ h.double()).to(torch.promote_types(h.dtype, torch.float32)) for h in rows]


def whitening(
    moments: Moments,
    shrinkage: str | float = "auto",
    *,
    fourth: Tensor | None = None,
) -> list[Tensor]:
    r"""Per layer R [D, D], lower triangular, with R^T R the inverse of the shrunk covariance

    .. math:: \hat K = (1 - \rho) K + \rho \, \mathrm{tr}(K) / D \, I .

    rho is at least 16 D rounding units of the layers' dtype: below that K is noise.
    A layer without any spread gets R = 0 and is never selected. A covariance of 0 under class
    means that differ (one node a class) is replaced by the variance of those means.

    Parameters
    ----------
    shrinkage : ``"auto"`` and ``"oas"`` (Oracle Approximating Shrinkage), ``"ledoit_wolf"``
        or a number rho in [0, 1]
    fourth : sum over nodes of ||h - mu||^4 per layer [L]; ``"ledoit_wolf"`` needs it
        (:func:`fourth_moments`)
    """
    check_shrinkage(shrinkage)
    eps = torch.finfo(moments.shifts[0].dtype).eps
    means, covariances = moments.means(), moments.covariances()
    amounts = list(covariances)
    for width in {len(covariance) for covariance in covariances}:
        same = [depth for depth, each in enumerate(covariances) if len(each) == width]
        mean, covariance = (
            torch.stack([each[depth] for depth in same]) for each in (means, covariances)
        )
        covariance = _spread(mean, covariance, eps)
        q = None if fourth is None else fourth[same]
        rho = _amount(shrinkage, covariance, moments.count.sum(), q)
        for at, depth in enumerate(same):
            covariances[depth], amounts[depth] = covariance[at], rho[at]
    return _ops.whitening(covariances, torch.stack(amounts), eps)


def _spread(mean: Tensor, covariance: Tensor, eps: float) -> Tensor:
    """The covariances [G, D, D] of layers, by class means [G, C, D] where they are 0, and 0 where
    there is nothing but rounding."""
    between = mean.var(1, correction=0)  # [G, D]
    rounding = (4 * eps * mean.abs().amax(1)) ** 2
    eye = torch.eye(covariance.shape[1], dtype=torch.float64, device=covariance.device)
    varies = covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] > 0
    covariance = covariance.where(varies, between.mean(1)[:, None, None] * eye)
    real = covariance.diagonal(dim1=1, dim2=2) + between > rounding
    return covariance * real.any(1)[:, None, None]


def check_shrinkage(kind: str | float) -> None:
    """A name or a number that `whitening` knows."""
    if isinstance(kind, int | float) and not isinstance(kind, bool):
        if not 0 <= kind <= 1:
            raise ValueError(f"shrinkage is {kind}; a number must be between 0 and 1")
    elif kind not in ("auto", "oas", "ledoit_wolf"):
        raise ValueError(f"shrinkage is {kind!r}; use 'auto', 'oas', 'ledoit_wolf' or a number")


def _amount(kind: str | float, covariance: Tensor, n: Tensor, fourth: Tensor | None) -> Tensor:
    """rho of covariances [G, D, D]."""
    if kind == "ledoit_wolf":
        if fourth is None:
            raise ValueError("shrinkage='ledoit_wolf' needs fourth=fourth_moments(...)")
        return _ledoit_wolf(covariance, n, fourth)
    return _oas(covariance, n) if isinstance(kind, str) else n.new_full((len(covariance),), kind)


def _oas(covariance: Tensor, n: Tensor) -> Tensor:
    """Chen, Wiesel, Eldar and Hero (2010), Eq. 23, as scikit-learn reads it."""
    square = covariance.square().mean((1, 2))
    mean2 = covariance.diagonal(dim1=1, dim2=2).mean(1) ** 2
    excess = (n + 1) * (square - mean2 / covariance.shape[1])
    rho = (square + mean2) / excess
    return torch.where(excess > 0, rho, torch.ones_like(rho)).clamp(max=1)


def _ledoit_wolf(covariance: Tensor, n: Tensor, fourth: Tensor) -> Tensor:
    """Ledoit and Wolf (2004) with the covariance over n, as scikit-learn reads it."""
    biased = covariance * ((n - 1).clamp(min=1) / n)
    square = biased.square().sum((1, 2))
    noise = (fourth / n - square) / n
    excess = square - biased.diagonal(dim1=1, dim2=2).sum(1) ** 2 / covariance.shape[1]
    rho = noise.minimum(excess) / excess
    return torch.where(excess > 0, rho, torch.ones_like(rho)).clamp(min=0)


def fourth_moments(
    layers: Sequence[Tensor], labels: Tensor, means: Sequence[Tensor], index: Index = None
) -> Tensor:
    """sum_i ||h_i - mu_{y_i}||^4 per layer, float64 [L]: the second pass of Ledoit-Wolf."""
    spread = []
    for h, mean, picked in zip(layers, means, _indices(index, layers), strict=True):
        rows = (h if picked is None else h[picked]).detach().double() - mean.double()[labels]
        spread.append(rows.square().sum(1).square().sum())
    return torch.stack(spread)


def class_distances(
    layers: Sequence[Tensor],
    means: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    valid: Tensor | None = None,
    index: Index = None,
) -> Tensor:
    """Squared Mahalanobis distance dist2[l, i, c] of node i to mean c in layer l, [L, n, C].

    Differentiable in the layers. `valid` [C] marks the classes that have nodes; the others are
    infinitely far away.

    Examples
    --------
    >>> import torch
    >>> h = torch.tensor([[3.0, 4.0]])
    >>> class_distances([h], [torch.zeros(1, 2)], [torch.eye(2)])
    tensor([[[25.]]])
    """
    metric = _metric(layers, means, factors, valid)
    return _ops.class_distances(*metric, _indices(index, layers))


def metric_logits(
    layers: Sequence[Tensor],
    means: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    valid: Tensor | None = None,
    temperature: Tensor | None = None,
    index: Index = None,
) -> Tensor:
    """Logits of the posterior softmax_c(-dist2 / (2 T_l)), [L, n, C]; not differentiable."""
    metric = _metric([h.detach() for h in layers], means, factors, valid)
    return _ops.metric_logits(*metric, _temperature(temperature, layers), _indices(index, layers))


def select_layer(
    layers: Sequence[Tensor],
    means: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    valid: Tensor | None = None,
    temperature: Tensor | None = None,
    index: Index = None,
    labels: Tensor | None = None,
    rule: str = "confidence",
) -> tuple[Tensor, Tensor, Tensor]:
    """(layer, class, score) [n] of every picked node (Eq. 4; with `labels`, Eq. 5).

    Parameters
    ----------
    temperature : [L], divides the squared distances of a layer; ones by default
    labels : int64 [n], classes of the picked nodes: score the true class instead of the best
    rule : ``"confidence"`` takes the layer with the largest log-odds, ``"distance"`` the one with
        the smallest distance, ``"opposite"`` the least confident one (MetSelect-max)
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; use one of {', '.join(RULES)}")
    metric = _metric([h.detach() for h in layers], means, factors, valid)
    temperature = _temperature(temperature, layers)
    labels = None if labels is None else labels.long().contiguous()
    return _ops.select_layer(*metric, temperature, _indices(index, layers), labels, rule)


def _metric(layers, means, factors, valid) -> tuple:
    if valid is None:
        valid = torch.ones(len(means[0]), dtype=torch.bool, device=means[0].device)
    return _of_one_dtype(layers), list(means), list(factors), valid


def _temperature(temperature: Tensor | None, layers: Sequence[Tensor]) -> Tensor:
    return layers[0].new_ones(len(layers)) if temperature is None else temperature


def selected_logits(
    layers: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    layer: Tensor,
    *,
    index: Index = None,
) -> Tensor:
    """Decode every picked node from its own layer: W_l h_i + b_l with l = layer[i], [n, C]."""
    decoders = _of_one_dtype(layers), list(weights), list(biases), layer.long().contiguous()
    return _ops.selected_logits(*decoders, _indices(index, layers))


@torch.no_grad()
def select_and_decode(
    layers: Iterable[Tensor],
    means: Sequence[Tensor],
    factors: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    valid: Tensor | None = None,
    temperature: Tensor | None = None,
    rule: str = "confidence",
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, layer, score) of all nodes, from layers that come one at a time.

    What :func:`select_layer` and :func:`selected_logits` give together, but a layer is not looked
    at again once the next one is asked for, so that it can be freed: beyond the layer at hand the
    memory is that of the result, N x C.
    """
    depth, logits = 0, None
    for h in layers:
        check_finite([h], first=depth)
        t = None if temperature is None else temperature[depth : depth + 1]
        mean, factor, weight, bias = ([each[depth]] for each in (means, factors, weights, biases))
        _, _, found = select_layer([h], mean, factor, valid=valid, temperature=t, rule=rule)
        rank = -found if rule == "opposite" else found
        rank = rank if factor[0].any() else torch.full_like(rank, -torch.inf)
        if logits is None:
            layer = torch.zeros(len(h), dtype=torch.long, device=h.device)
            logits = selected_logits([h], weight, bias, layer)
            best, score = rank.clone(), found
        rows = (rank > best).nonzero().squeeze(1)
        for some in rows.split(65536):
            own = selected_logits([h], weight, bias, torch.zeros_like(some), index=some)
            logits.index_copy_(0, some, own)
        layer[rows], best[rows], score[rows] = depth, rank[rows], found[rows]
        depth += 1  # enumerate would hold on to the layer
        del h  # before the next one is made
    if depth != len(means):
        raise ValueError(f"got {depth} layers for the means of {len(means)}")
    return logits, layer, score


def selected_cross_entropy(
    layers: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    layer: Tensor,
    labels: Tensor,
    *,
    index: Index = None,
    deep_supervision: float = 0.0,
    keep_logits: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(loss, logits) of the selected decoders (Eq. 6), plus `deep_supervision` times the mean
    cross entropy of every layer's decoder on the same nodes.

    The loss and its gradients need no logits in memory, [n, C]: `keep_logits=False` gives None.
    """
    decoders = _of_one_dtype(layers), list(weights), list(biases), layer.long().contiguous()
    every = [*layers, *weights, *biases]
    learning = torch.is_grad_enabled() and any(each.requires_grad for each in every)
    wanted = [h.requires_grad for h in layers] if learning else []
    picked = _indices(index, layers)
    loss, logits, *_ = _ops.selected_cross_entropy(
        *decoders,
        labels.long().contiguous(),
        picked,
        float(deep_supervision),
        wanted,
        keep_logits,
    )
    return loss, logits if keep_logits else None
