"""The class prototypes of every layer, kept as buffers (Eq. 2 and 3 of the paper)."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import functional as MF
from ..checks import NotFiniteError, check_finite
from .cache import Cache
from .layers import Layer

_KEPT = 0.9  # of the weight of earlier calls, at every call


class Prototypes(nn.Module):
    r"""Class means :math:`\mu^{(l)}_c` and whitening factors :math:`R_l` of every layer.

    With :math:`R_l^\top R_l = \hat K_l^{-1}` the squared distance of a node to a class is
    :math:`\lVert R_l (h - \mu_c) \rVert^2`. No gradient flows through them.

    Parameters
    ----------
    in_feats : width of every layer
    n_classes : number of classes
    shrinkage : of the covariance; see :func:`metselect_dgl.functional.whitening`
    source : of the moments in training: ``"call"``: the nodes of the call; ``"epoch"``: those of
        all calls before the last `renew` (Algorithm 1 of the paper); ``"ema"``: the calls so far,
        one that is k calls old with the weight 0.9^k

    Examples
    --------
    >>> import torch
    >>> prototypes = Prototypes([4, 6], 3)
    >>> prototypes.update([torch.randn(50, 4), torch.randn(50, 6)], torch.arange(50) % 3)
    >>> prototypes.count
    tensor([17., 17., 16.])
    """

    SOURCES = ("call", "epoch", "ema")

    def __init__(
        self,
        in_feats: Sequence[int],
        n_classes: int,
        *,
        shrinkage: str | float = "oas",
        source: str = "call",
    ) -> None:
        super().__init__()
        if source not in self.SOURCES:
            raise ValueError(f"moments is {source!r}; use one of {', '.join(self.SOURCES)}")
        self.in_feats, self.n_classes, self.shrinkage = list(in_feats), n_classes, shrinkage
        self.source = source
        self.gathered: MF.Moments | None = None  # for the next `renew`
        self._starting = True  # whether it began before there were prototypes
        self.register_buffer("count", torch.zeros(n_classes))
        for depth, width in enumerate(self.in_feats):
            self.register_buffer(f"mean_{depth}", torch.zeros(n_classes, width))
            self.register_buffer(f"factor_{depth}", torch.zeros(width, width))
        self._warned = False
        self._of_source = Cache(_source_moments)

    def reset_parameters(self) -> None:
        """Forget the moments."""
        for buffer in self.buffers():
            buffer.zero_()
        self.gathered, self._starting = None, True

    @property
    def means(self) -> list[Tensor]:
        return [self.get_buffer(f"mean_{depth}") for depth in range(len(self.in_feats))]

    @property
    def factors(self) -> list[Tensor]:
        return [self.get_buffer(f"factor_{depth}") for depth in range(len(self.in_feats))]

    @property
    def valid(self) -> Tensor:
        """The classes that have a labelled node, [C]."""
        return self.count > 0

    @property
    def alive(self) -> Tensor:
        """The layers that have any spread, [L]."""
        return torch.stack([factor.any() for factor in self.factors])

    @torch.no_grad()
    def update(self, layers: Sequence[Tensor | Layer], labels: Tensor) -> None:
        """Set the prototypes from the given rows of every layer, whose classes are `labels`."""
        layers = [h if isinstance(h, Layer) else Layer(h) for h in layers]
        moments = self._finite_moments(layers, labels)
        fourth = None
        if self.shrinkage == "ledoit_wolf":
            rows = [layer.rows() for layer in layers]
            fourth = MF.fourth_moments(rows, labels, moments.means())
        self.set(moments, fourth)
        self._warn_missing()

    @torch.no_grad()
    def learn(self, layers: Sequence[Layer], labels: Tensor) -> None:
        """Take in the rows of a training call, as `source` says; in a first epoch without
        prototypes, those of what was gathered so far serve."""
        if self.source == "call":
            self.update(layers, labels)
            return
        self.gather(layers, labels)
        if self.source == "ema" or self._starting:
            self.set(self.gathered)

    @torch.no_grad()
    def gather(self, layers: Sequence[Layer], labels: Tensor) -> None:
        """Add the rows of a call to those that the next prototypes are made of."""
        fresh, old = self._finite_moments(layers, labels), self.gathered
        if old is None:
            self._starting = not self.valid.any()
            old = self._nothing()
        self.gathered = (old.scaled(_KEPT) if self.source == "ema" else old).merge(fresh)

    @torch.no_grad()
    def renew(self, merge: Callable[[Tensor], None] | None = None) -> None:
        """Set the prototypes from what was gathered, and begin anew (but for ``"ema"``). `merge`
        adds a vector up over processes, in place: called once by each, also by one that has
        nothing to add."""
        gathered, processes = (self.gathered, 1) if merge is None else self._merged(merge)
        if gathered is None or not gathered.count.any():
            raise RuntimeError("there were no training calls to renew the moments from")
        self.set(gathered)
        self._warn_missing()
        self._starting = False
        self.gathered = None
        if self.source == "ema":
            self.gathered = gathered.scaled(1 / processes).about([h.clone() for h in self.means])

    def _merged(self, merge: Callable[[Tensor], None]) -> tuple[MF.Moments, int]:
        """(the moments of all processes, their number)."""
        here = self._nothing() if self.gathered is None else self.gathered
        vector = torch.cat([here.flat(), here.count.new_ones(1).double()])
        merge(vector)
        return here.with_flat(vector[:-1]), round(vector[-1].item())

    def _nothing(self) -> MF.Moments:
        """The moments of no node, about the prototypes (0 before there are any): the same shifts in
        all processes, so that their sums add up."""
        shifts = [h.clone() for h in self.means]
        sums = [torch.zeros_like(each, dtype=torch.float64) for each in shifts]
        grams = [each.new_zeros(each.shape[1], each.shape[1]) for each in sums]
        return MF.Moments(sums[0].new_zeros(len(sums[0])), shifts, sums, grams)

    def _finite_moments(self, layers, labels) -> MF.Moments:
        moments = self._moments(layers, labels)
        if not all(torch.isfinite(each.sum()) for each in moments.means() + moments.grams):
            nodes = next((layer.index for layer in layers if layer.index is not None), None)
            check_finite([layer.rows() for layer in layers], nodes=nodes)
        return moments

    @torch.no_grad()
    def set(self, moments: MF.Moments, fourth: Tensor | None = None) -> None:
        """Set the prototypes from moments."""
        means = moments.means()
        try:
            factors = MF.whitening(moments, self.shrinkage, fourth=fourth)
        except torch.linalg.LinAlgError as error:
            raise NotFiniteError(
                f"the covariance of a layer cannot be factored ({error}); lower the learning rate"
            ) from error
        self.count.copy_(moments.count)
        for old, new in zip(self.means + self.factors, means + factors, strict=True):
            old.copy_(new)

    def _moments(self, layers: list[Layer], labels: Tensor) -> MF.Moments:
        """Of a layer that is a linear map of constants, by mapping the moments of those."""
        plain = [layer for layer in layers if layer.linear is None]
        index = [layer.index for layer in plain]
        sources = [layer.source for layer in plain]
        moments = MF.moments(sources, labels, self.n_classes, index=index)
        for depth, layer in enumerate(layers):
            if layer.linear is not None:
                source = self._of_source(layer.source, layer.index, labels, self.n_classes)
                image = source.mapped(layer.linear.weight, layer.linear.bias)
                moments = moments.with_layer(depth, image)
        return moments

    def metric(self, layers: Sequence[Layer] = (), labels: Tensor | None = None) -> dict:
        """What the functions of :mod:`metselect_dgl.functional` want to know; copies, so that an
        update does not disturb a backward pass that is still to come.

        With the `layers` and `labels` of the last update, on the sources of those that are mapped:
        || R (W x - W mu) || = || (R W) (x - mu) ||.
        """
        self._check_there()
        means, factors = ([each.clone() for each in all_] for all_ in (self.means, self.factors))
        for depth, layer in enumerate(layers):
            if layer.linear is not None:
                source = self._of_source(layer.source, layer.index, labels, self.n_classes)
                means[depth] = source.means()[0].to(means[depth])
                factors[depth] = factors[depth] @ layer.linear.weight.detach()
        return {"means": means, "factors": factors, "valid": self.valid}

    def metric_of(self, depth: int) -> dict:
        """The same of one layer; not copied."""
        self._check_there()
        mean, factor = self.get_buffer(f"mean_{depth}"), self.get_buffer(f"factor_{depth}")
        return {"means": [mean], "factors": [factor], "valid": self.valid}

    def _check_there(self) -> None:
        if not self.valid.any():
            raise RuntimeError(
                "there are no class moments yet; train with model(graph, feat, labels=..., "
                "index=...), call model.calibrate(...), or load a state_dict first"
            )

    def _warn_missing(self) -> None:
        missing = (~self.valid).nonzero().flatten().tolist()
        if missing and not self._warned:
            self._warned = True
            which = "class" if len(missing) == 1 else "each of the classes"
            warnings.warn(
                f"{which} {', '.join(map(str, missing))} has no labelled node; its distance is "
                "infinite and it is never predicted",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return f"{self.in_feats}, n_classes={self.n_classes}, shrinkage={self.shrinkage!r}"


def _source_moments(source: Tensor, index: Tensor | None, labels: Tensor, n_classes: int):
    return MF.moments([source], labels, n_classes, index=index)
