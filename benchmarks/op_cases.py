"""Random inputs of the operators and comparisons of results, for tests and benchmarks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metselect_dgl import functional as MF


@dataclass
class Case:
    """Random layers with class structure, and the other arguments of the operators."""

    layers: list[Tensor]
    labels: Tensor
    index: Tensor | None
    n_classes: int
    weights: list[Tensor]
    biases: list[Tensor]

    def picked(self, h: Tensor) -> Tensor:
        """Return the rows of `h` that `index` picks."""
        return h if self.index is None else h[self.index]

    def metric(self, shrinkage: str | float = "oas") -> dict:
        """Return means, factors and valid classes of the picked rows, in the layers' dtype."""
        moments = MF.moments(self.layers, self.labels, self.n_classes, index=self.index)
        dtype = self.layers[0].dtype
        return {
            "means": [mean.to(dtype) for mean in moments.means()],
            "factors": [factor.to(dtype) for factor in MF.whitening(moments, shrinkage)],
            "valid": moments.count > 0,
        }


def make_case(
    n: int = 63,
    widths: Sequence[int] = (5, 37),
    n_classes: int = 4,
    *,
    picked: int | None = None,
    empty_class: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Return random layers, correlated within classes and shifted between them.

    `picked` of the `n` rows are picked, in random order and some of them twice; `empty_class` has
    no nodes.
    """
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(n_classes, (n,), generator=draw)
    if empty_class is not None:
        classes = classes.where(classes != empty_class, (empty_class + 1) % n_classes)
    index = None if picked is None else torch.randint(n, (picked,), generator=draw)
    layers, weights = [], []
    for width in widths:
        mix = torch.randn(width, width, generator=draw, dtype=torch.float64)
        means = 2 * torch.randn(n_classes, width, generator=draw, dtype=torch.float64)
        noise = torch.randn(n, width, generator=draw, dtype=torch.float64)
        layers.append((means[classes] + noise @ mix).to(dtype))
        weights.append(torch.randn(n_classes, width, generator=draw, dtype=torch.float64).to(dtype))
    biases = [weight[:, 0].clone() for weight in weights]
    labels = classes if index is None else classes[index]
    return Case(layers, labels, index, n_classes, weights, biases)


def compressed_edges(src: Tensor, dst: Tensor, n_src: int, n_dst: int) -> tuple[Tensor, ...]:
    """Return (indptr, indices, back_indptr, back_indices, back_edges) of the edges src -> dst."""

    def starts(end: Tensor, n: int) -> Tensor:
        return torch.cat([end.new_zeros(1), torch.bincount(end, minlength=n).cumsum(0)])

    into = dst.argsort(stable=True)
    src, dst = src[into], dst[into]
    out_of = src.argsort(stable=True)
    back = (starts(src, n_src), dst[out_of].int(), out_of.int())
    return starts(dst, n_dst), src.int(), *back


def assert_close(actual: Tensor, exact: Tensor, plain: Tensor, factor: float = 2.0) -> None:
    """Assert that the largest error of `actual` against the float64 result `exact` is at most
    `factor` times that of `plain`, the plain torch expression in the same dtype, plus one rounding
    of the largest entry."""
    scale = exact.abs().nan_to_num(posinf=0).max() if exact.numel() else exact.new_zeros(())
    finite = torch.isfinite(exact)
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)} != {tuple(exact.shape)}"
    assert torch.equal(torch.isfinite(actual), finite), "finite entries differ"
    if not finite.any():
        return
    error, plain_error = (
        (value[finite].double() - exact[finite]).abs().max() for value in (actual, plain)
    )
    allowed = factor * plain_error + torch.finfo(actual.dtype).eps * scale
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g} (plain {plain_error:.3g})"


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of sum(function * fixed weights) to the inputs."""
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), inputs))
