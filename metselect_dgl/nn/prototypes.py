"""The class prototypes of every layer, kept as buffers (Eq. 2 and 3 of the paper)."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import functional as MF


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
    def update(self, layers: Sequence[Tensor], labels: Tensor, index: Tensor | None = None) -> None:
        """Set the prototypes from the nodes `index`, whose classes are `labels`."""
        moments = MF.moments(layers, labels, self.n_classes, index=index)
        means = moments.means()
        fourth = None
        if self.shrinkage == "ledoit_wolf":
            fourth = MF.fourth_moments(layers, labels, means, index)
        factors = MF.whitening(moments, self.shrinkage, fourth=fourth)
        self.count.copy_(moments.count)
        for old, new in zip(self.means + self.factors, means + factors, strict=True):
            old.copy_(new)
        self._warn_missing()

    def metric(self) -> dict:
        """What the functions of :mod:`metselect_dgl.functional` want to know; copies, so that an
        update does not disturb a backward pass that is still to come."""
        if not self.valid.any():
            raise RuntimeError(
                "there are no class moments yet; train with model(graph, feat, labels=..., "
                "index=...), call model.calibrate(...), or load a state_dict first"
            )
        return {
            "means": [mean.clone() for mean in self.means],
            "factors": [factor.clone() for factor in self.factors],
            "valid": self.valid,
        }

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
