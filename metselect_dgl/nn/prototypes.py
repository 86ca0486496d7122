"""The class prototypes of every layer, kept as buffers (Eq. 2 and 3 of the paper)."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import functional as MF
from ..checks import check_finite
from .cache import Cache
from .layers import Layer


class Prototypes(nn.Module):
    r"""Class means :math:`\mu^{(l)}_c` and whitening factors :math:`R_l` of every layer.

    With :math:`R_l^\top R_l = \hat K_l^{-1}` the squared distance of a node to a class is
    :math:`\lVert R_l (h - \mu_c) \rVert^2`. No gradient flows through them.

    Parameters
    ----------
    in_feats : width of every layer
    n_classes : number of classes
    shrinkage : of the covariance; see :func:`metselect_dgl.functional.whitening`

    Examples
    --------
    >>> import torch
    >>> prototypes = Prototypes([4, 6], 3)
    >>> prototypes.update([torch.randn(50, 4), torch.randn(50, 6)], torch.arange(50) % 3)
    >>> prototypes.count
    tensor([17., 17., 16.])
    """

    def __init__(
        self, in_feats: Sequence[int], n_classes: int, *, shrinkage: str | float = "auto"
    ) -> None:
        super().__init__()
        self.in_feats, self.n_classes, self.shrinkage = list(in_feats), n_classes, shrinkage
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
        moments = self._moments(layers, labels)
        means = moments.means()
        if not all(torch.isfinite(each.sum()) for each in means + moments.grams):
            nodes = next((layer.index for layer in layers if layer.index is not None), None)
            check_finite([layer.rows() for layer in layers], nodes=nodes)
        fourth = None
        if self.shrinkage == "ledoit_wolf":
            fourth = MF.fourth_moments([layer.rows() for layer in layers], labels, means)
        factors = MF.whitening(moments, self.shrinkage, fourth=fourth)
        self.count.copy_(moments.count)
        for old, new in zip(self.means + self.factors, means + factors, strict=True):
            old.copy_(new)
        self._warn_missing()

    def _moments(self, layers: list[Layer], labels: Tensor) -> MF.Moments:
        """Of a layer that is a linear map of constants, by mapping the moments of those."""
        plain = [layer for layer in layers if layer.linear is None]
        index = [layer.index for layer in plain]
        moments = MF.moments([h.source for h in plain], labels, self.n_classes, index=index)
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
        if not self.valid.any():
            raise RuntimeError(
                "there are no class moments yet; train with model(graph, feat, labels=..., "
                "index=...), call model.calibrate(...), or load a state_dict first"
            )
        means, factors = ([each.clone() for each in all_] for all_ in (self.means, self.factors))
        for depth, layer in enumerate(layers):
            if layer.linear is not None:
                source = self._of_source(layer.source, layer.index, labels, self.n_classes)
                means[depth] = source.means()[0].to(means[depth])
                factors[depth] = factors[depth] @ layer.linear.weight.detach()
        return {"means": means, "factors": factors, "valid": self.valid}

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
