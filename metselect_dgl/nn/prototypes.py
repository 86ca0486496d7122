"""The class prototypes of every layer, kept as buffers (Eq. 2 and 3 of the paper)."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import functional as MF
from ..checks import NotFiniteError
from .layer_rows import LayerStack

_DECAY = 0.9  # weight of earlier calls in a moving average, at every call
Merge = Callable[[Tensor], None]  # adds a vector up over processes, in place


class _GatheredMoments(nn.Module):
    """Keeps the moments that were gathered in the state_dict."""

    def get_extra_state(self) -> Tensor:
        """Return what was gathered for the next `renew` as one vector; empty if nothing was."""
        if self.gathered is None:
            return torch.empty(0, dtype=torch.float64)
        shifts = [shift.flatten().double() for shift in self.gathered.shifts]
        starting = shifts[0].new_tensor([self._starting])
        return torch.cat([starting, *shifts, self.gathered.flat()])

    def set_extra_state(self, state: Tensor) -> None:
        """Take what `get_extra_state` returned."""
        self.gathered = None
        if len(state):
            sizes = [mean.numel() for mean in self.means]
            starting, *shifts, flat = state.split([1, *sizes, len(state) - sum(sizes) - 1])
            self._starting = bool(starting)
            pairs = zip(shifts, self.means, strict=True)
            zeros = MF.Moments.zeros([shift.view_as(mean).to(mean) for shift, mean in pairs])
            self.gathered = zeros.with_flat(flat.to(self.count.device))

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Read also a state_dict without what was gathered."""
        state_dict.setdefault(f"{prefix}_extra_state", torch.empty(0))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Prototypes(_GatheredMoments):
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
        self._starting = True  # whether gathering began before there were prototypes
        self.register_buffer("count", torch.zeros(n_classes))
        for depth, width in enumerate(self.in_feats):
            self.register_buffer(f"mean_{depth}", torch.zeros(n_classes, width))
            self.register_buffer(f"factor_{depth}", torch.zeros(width, width))
        self._warned = self._checked_offset = False

    def reset_parameters(self) -> None:
        """Forget the moments."""
        for buffer in self.buffers():
            buffer.zero_()
        self.gathered, self._starting = None, True

    @property
    def means(self) -> list[Tensor]:
        """The class means of every layer, [C, D_l]."""
        return [self.get_buffer(f"mean_{depth}") for depth in range(len(self.in_feats))]

    @property
    def factors(self) -> list[Tensor]:
        """The whitening factors of every layer, [D_l, D_l]."""
        return [self.get_buffer(f"factor_{depth}") for depth in range(len(self.in_feats))]

    @property
    def valid(self) -> Tensor:
        """The classes that have a labelled node, [C]."""
        return self.count > 0

    @property
    def alive(self) -> Tensor:
        """The layers that have any spread, [L]."""
        return torch.stack([factor.any() for factor in self.factors])

    def update(self, layers: Sequence[Tensor], labels: Tensor) -> None:
        """Set the prototypes from the rows of a list of layers, whose classes are `labels`."""
        self.estimate(LayerStack.of(layers), labels)

    @torch.no_grad()
    def estimate(self, stack: LayerStack, labels: Tensor, merge: Merge | None = None) -> None:
        """Set the prototypes from rows of classes `labels`; with `merge`, of all processes."""
        fourth = None
        if merge is not None:
            moments = _no_moments(self)
            if len(labels):
                moments = moments.merge(_finite_moments(stack, labels, self.n_classes))
            moments, _ = _merged(moments, merge)
        else:
            moments = _finite_moments(stack, labels, self.n_classes)
            if self.shrinkage == "ledoit_wolf":
                fourth = MF.fourth_moments(stack.rows(), labels, moments.means())
        self.set(moments, fourth)
        _warn_missing(self)

    @torch.no_grad()
    def learn(self, stack: LayerStack, labels: Tensor) -> None:
        """Take in the rows of a training call; in a first epoch, use what was gathered so far."""
        if self.source == "call":
            self.estimate(stack, labels)
            return
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing repeats the call in the backward pass
        self.gather(stack, labels)
        if self.source == "ema" or self._starting:
            self.set(self.gathered)

    @torch.no_grad()
    def gather(self, stack: LayerStack, labels: Tensor) -> None:
        """Add the rows of a call to those that the next prototypes are estimated from."""
        fresh, old = _finite_moments(stack, labels, self.n_classes), self.gathered
        if old is None:
            self._starting = not self.valid.any()
            old = _no_moments(self)
        self.gathered = (old.scaled(_DECAY) if self.source == "ema" else old).merge(fresh)

    @torch.no_grad()
    def renew(self, merge: Merge | None = None) -> None:
        """Set the prototypes from what was gathered, and start over (except for ``"ema"``). With
        `merge` it is called once by every process, also by one that has nothing to add."""
        if self.source == "call":
            return
        gathered, processes = self.gathered, 1
        if merge is not None:
            gathered, processes = _merged(gathered or _no_moments(self), merge)
        if gathered is None or not gathered.count.any():
            raise RuntimeError("there were no training calls to renew the moments from")
        self.set(gathered)
        _warn_missing(self)
        self.gathered, self._starting = None, False
        if self.source == "ema":
            means = [mean.clone() for mean in self.means]
            self.gathered = gathered.scaled(1 / processes).about(means)

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
        if not self._checked_offset:
            self._checked_offset = True
            _warn_offset(means, moments)
        self.count.copy_(moments.count)
        for old, new in zip(self.means + self.factors, means + factors, strict=True):
            old.copy_(new)

    def metric(self, depth: int | None = None) -> dict:
        """Return means, factors and valid classes as :mod:`metselect_dgl.functional` takes them: of
        one layer, or of all as copies, which an update before the backward pass leaves alone."""
        valid = self.valid
        if not valid.any():
            raise RuntimeError(
                "there are no class moments yet; train with model(graph, feat, labels=..., "
                "index=...), call model.calibrate(...), or load a state_dict first"
            )
        if depth is not None:
            mean, factor = self.get_buffer(f"mean_{depth}"), self.get_buffer(f"factor_{depth}")
            return {"means": [mean], "factors": [factor], "valid": valid}
        means = [mean.clone() for mean in self.means]
        factors = [factor.clone() for factor in self.factors]
        return {"means": means, "factors": factors, "valid": valid}

    def predictable(self, logits: Tensor | None) -> Tensor | None:
        """Return the logits with -inf for every class that has no training node."""
        valid = self.valid
        return logits if logits is None or valid.all() else logits.masked_fill(~valid, -torch.inf)

    def extra_repr(self) -> str:
        return f"{self.in_feats}, n_classes={self.n_classes}, shrinkage={self.shrinkage!r}"


def _finite_moments(stack: LayerStack, labels: Tensor, n_classes: int) -> MF.Moments:
    """Return the moments of the rows, or raise an error that names what is not finite."""
    moments = stack.moments(labels, n_classes)
    if not all(torch.isfinite(part.sum()) for part in moments.means() + moments.grams):
        nodes = next((layer.index for layer in stack.layers if layer.index is not None), None)
        stack.checked(nodes)
    return moments


def _no_moments(prototypes: Prototypes) -> MF.Moments:
    """Return the moments of no node about the prototypes, the same shifts in all processes."""
    return MF.Moments.zeros([mean.clone() for mean in prototypes.means])


def _merged(moments: MF.Moments, merge: Merge) -> tuple[MF.Moments, int]:
    """Return the moments of all processes, and their number."""
    vector = torch.cat([moments.flat(), moments.count.new_ones(1).double()])
    merge(vector)
    return moments.with_flat(vector[:-1]), round(vector[-1].item())


def _warn_offset(means: list[Tensor], moments: MF.Moments) -> None:
    """Warn if the rounding of a mean of float32 is not small beside the spread of its layer."""
    for depth, (mean, shift) in enumerate(zip(means, moments.shifts, strict=True)):
        spread = moments.covariances()[depth].diagonal().mean().sqrt()
        if torch.finfo(shift.dtype).eps * mean.abs().max() > 0.05 * spread > 0:
            warnings.warn(
                f"layer {depth} has means up to {mean.abs().max():.0e} and a spread of "
                f"{spread:.0e}, which {shift.dtype} cannot hold together; subtract the mean of the "
                "features, or use feat.double()",
                stacklevel=3,
            )


def _warn_missing(prototypes: Prototypes) -> None:
    missing = (~prototypes.valid).nonzero().flatten().tolist()
    if missing and not prototypes._warned:
        prototypes._warned = True
        which = "class" if len(missing) == 1 else "each of the classes"
        names = ", ".join(map(str, missing[:10]))
        names += f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        warnings.warn(
            f"{which} {names} has no labelled node; its distance is "
            "infinite and it is never predicted",
            stacklevel=3,
        )
