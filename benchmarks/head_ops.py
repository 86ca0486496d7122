"""Implementations of the head's ops, one by one and together: the reference, optimised eager torch,
this package, other libraries, and the matrix products alone."""

from collections.abc import Callable

import numpy as np
import torch
from scipy.spatial.distance import cdist as scipy_cdist
from torch import Tensor

from metselect_dgl import functional as MF
from metselect_dgl import ops, reference

from .baselines import (
    bare_products,
    careful_loss,
    careful_torch,
    fitted_lda,
    lda_logits,
    lda_of_every_layer,
    log_odds_of,
    paper_formula,
)
from .comparison import Implementation
from .inputs import EPS, Inputs
from .models import close
from .runs import LIMITS

metselect = ops.functions
LIMIT, CHOLESKY = LIMITS

Op = Callable[[Inputs], dict[str, Callable]]


def moments(x: Inputs) -> dict[str, Callable]:
    def careful():
        means, covariances = [], []
        count = torch.bincount(x.labels, minlength=x.rows.C).unsqueeze(1)
        for h in x.layers:
            mean = h.new_zeros(x.rows.C, x.rows.D).index_add_(0, x.labels, h) / count
            r = h - mean[x.labels]
            means.append(mean)
            covariances.append(r.T @ r / (x.rows.n - 1))
        return means, covariances

    grams = [h.new_empty(x.rows.D, x.rows.D) for h in x.layers]
    return {
        "reference": lambda: means_and_covariances(reference_moments(x)),
        "careful-torch": careful,
        "native": lambda: means_and_covariances(MF.moments(x.layers, x.labels, x.rows.C)),
        LIMIT: lambda: [torch.mm(h.T, h, out=g) for h, g in zip(x.layers, grams, strict=True)],
    }


def reference_moments(x: Inputs) -> MF.Moments:
    """Return the moments by the reference, which is given the shifts."""
    count, sums, grams = reference.moments(x.layers, x.labels, x.index, x.shifts)
    return MF.Moments(count, x.shifts, sums, grams)


def means_and_covariances(moments: MF.Moments) -> tuple[list[Tensor], list[Tensor]]:
    return moments.means(), moments.covariances()


def whitening(x: Inputs) -> dict[str, Callable]:
    given = x.covariances, x.rho, EPS
    eye = torch.eye(x.rows.D, dtype=torch.float64)

    def careful():
        shrunk = torch.stack(x.covariances)
        trace = shrunk.diagonal(dim1=1, dim2=2).sum(1)
        rho = x.rho[:, None, None]
        shrunk = (1 - rho) * shrunk + rho * (trace / x.rows.D)[:, None, None] * eye
        factor = torch.linalg.cholesky(shrunk)
        return list(torch.linalg.solve_triangular(factor, eye, upper=False))

    stacked = torch.stack(x.covariances) + 1e-3 * eye
    return {
        "reference": lambda: reference.whitening(*given),
        "careful-torch": careful,
        "native": lambda: metselect.whitening(*given),
        CHOLESKY: lambda: torch.linalg.cholesky_ex(stacked),
    }


def class_distances(x: Inputs) -> dict[str, Callable]:
    given = *x.metric, x.index
    inverses = [(factor.double().T @ factor.double()).numpy() for factor in x.factors]
    buffers = [
        (h.new_empty(h.shape), h.new_empty(len(h), x.rows.C), mean @ factor.T)
        for h, mean, factor in zip(*x.metric[:3], strict=True)
    ]

    def products():
        for h, factor, (z, d, m) in zip(x.layers, x.factors, buffers, strict=True):
            torch.mm(h, factor.T, out=z)
            torch.mm(z, m.T, out=d)

    def scipy():
        distances = []
        for h, mean, inverse in zip(x.layers, x.means, inverses, strict=True):
            distances.append(scipy_cdist(h, mean, "mahalanobis", VI=inverse))
        return torch.from_numpy(np.stack(distances)).square_()

    return {
        "reference": lambda: reference.class_distances(*given),
        "careful-torch": lambda: expanded_distances(*x.metric[:3]),
        "torch.cdist": lambda: whitened_cdist(*x.metric[:3]),
        "scipy.cdist": scipy,
        "native": lambda: metselect.class_distances(*given),
        LIMIT: products,
    }


def expanded_distances(layers, means, factors) -> Tensor:
    """Return |z|^2 - 2 z m + |m|^2 of centred and whitened rows z and means m."""
    distances = []
    for h, mean, factor in zip(layers, means, factors, strict=True):
        center = mean.mean(0)
        z, m = (h - center) @ factor.T, (mean - center) @ factor.T
        squares = z.square().sum(1, keepdim=True) + m.square().sum(1)
        distances.append(torch.addmm(squares, z, m.T, alpha=-2))
    return torch.stack(distances)


def whitened_cdist(layers, means, factors) -> Tensor:
    """Return the squared torch.cdist of whitened rows and means."""
    distances = []
    for h, mean, factor in zip(layers, means, factors, strict=True):
        distances.append(torch.cdist(h @ factor.T, mean @ factor.T).square())
    return torch.stack(distances)


def class_distances_gradient(x: Inputs) -> dict[str, Callable]:
    """Forward and backward pass: the gradients of the layers."""
    given = *x.metric, x.index
    leaves = [h.clone().requires_grad_() for h in x.layers]

    def by_autograd(function):
        distances = function(leaves, x.means, x.factors)
        return torch.autograd.grad(distances, leaves, x.pull)

    def by_op():
        distances = metselect.class_distances(leaves, *x.metric[1:], x.index)
        return torch.autograd.grad(distances, leaves, x.pull)

    def by_reference():
        reference.class_distances(*given)
        return reference.class_distances_backward(x.pull, *given)

    forward = class_distances(x)[LIMIT]
    spare = [(h.new_empty(h.shape), h.new_empty(h.shape)) for h in x.layers]

    def products():
        forward()
        for g, mean, factor, (a, b) in zip(x.pull, x.means, x.factors, spare, strict=True):
            torch.mm(g, mean, out=a)
            torch.mm(a, factor, out=b)

    return {
        "reference": by_reference,
        "careful-torch": lambda: by_autograd(expanded_distances),
        "torch.cdist": lambda: by_autograd(whitened_cdist),
        "native": by_op,
        LIMIT: products,
    }


def select_layer(x: Inputs) -> dict[str, Callable]:
    """Selection in training: the layer with the largest log-odds of the true class. It has no
    gradient."""
    given = *x.metric, x.temperature, x.index, x.labels, "confidence"

    def careful():
        logits = []
        for h, mean, factor in zip(*x.metric[:3], strict=True):
            whitened = (mean - mean.mean(0)).double() @ factor.double().T
            slope, offset = whitened @ factor.double(), whitened.square().sum(1) / 2
            offset = offset + slope @ mean.mean(0).double()
            logits.append(torch.addmm(-offset.to(h.dtype), h, slope.to(h.dtype).T))
        return best(logits)

    def best(logits):
        score, layer = torch.stack([log_odds_of(each, x.labels) for each in logits]).max(0)
        return layer, score

    def op(function):
        layer, _, score = function(*given)
        return layer, score

    pairs = zip(x.layers, x.rho, strict=True)
    fitted = [fitted_lda(h.float(), x.labels, float(rho)) for h, rho in pairs]
    slopes = [torch.ones_like(mean) for mean in x.means]
    scores = [h.new_empty(len(h), x.rows.C) for h in x.layers]

    def products():
        for h, slope, score in zip(x.layers, slopes, scores, strict=True):
            torch.mm(h, slope.T, out=score)

    return {
        "reference": lambda: op(reference.select_layer),
        "careful-torch": careful,
        "torch.cdist": lambda: best(whitened_cdist(*x.metric[:3]) / -2),
        "sklearn-LDA": lambda: best(
            [lda_logits(lda, h) for lda, h in zip(fitted, x.layers, strict=True)]
        ),
        "native": lambda: op(metselect.select_layer),
        LIMIT: products,
    }


def selected_cross_entropy(x: Inputs) -> dict[str, Callable]:
    """Forward pass of the loss with deep supervision."""
    return {
        "reference": lambda: reference.selected_cross_entropy(*x.decoders, 1.0, [], False)[0],
        "careful-torch": lambda: careful_loss(*x.decoders[:5]),
        "native": lambda: metselect.selected_cross_entropy(*x.decoders, 1.0, [], False)[0],
        LIMIT: _decoder_products(x, backward=False),
    }


def selected_cross_entropy_gradient(x: Inputs) -> dict[str, Callable]:
    """Forward and backward pass: the gradients of layers and decoders."""
    leaves = [
        [each.clone().requires_grad_() for each in part] for part in (x.layers, x.weights, x.biases)
    ]
    wanted = x.rows.L * [True]

    def by_autograd(function):
        return torch.autograd.grad(function(), [each for part in leaves for each in part])

    def by_op():
        loss, *_ = metselect.selected_cross_entropy(*leaves, *x.decoders[3:], 1.0, wanted, False)
        return loss

    def by_reference():
        _, _, *grads = reference.selected_cross_entropy(*x.decoders, 1.0, wanted, False)
        return [each for part in grads for each in part]

    return {
        "reference": by_reference,
        "careful-torch": lambda: by_autograd(lambda: careful_loss(*leaves, x.layer, x.labels)),
        "native": lambda: by_autograd(by_op),
        LIMIT: _decoder_products(x, backward=True),
    }


def _decoder_products(x: Inputs, backward: bool) -> Callable:
    logits = [h.new_empty(len(h), x.rows.C) for h in x.layers]
    grads = [
        (h.new_empty(h.shape), torch.empty_like(w))
        for h, w in zip(x.layers, x.weights, strict=True)
    ]

    def run():
        for h, weight, a, (to_layer, to_weight) in zip(
            x.layers, x.weights, logits, grads, strict=True
        ):
            torch.mm(h, weight.T, out=a)
            if backward:
                torch.mm(a, weight, out=to_layer)
                torch.mm(a.T, h, out=to_weight)

    return run


def head(x: Inputs) -> dict[str, Callable]:
    """Moments, whitening and selection in training: the whole cost of selecting a layer."""
    given = x.layers, x.labels, x.rows.C, x.rho.to(x.layers[0].dtype)

    def by_reference():
        means, covariances = means_and_covariances(reference_moments(x))
        dtype = x.layers[0].dtype
        factors = reference.whitening(covariances, x.rho, EPS)
        constants = ([each.to(dtype) for each in part] for part in (means, factors))
        rest = x.valid, x.temperature, x.index, x.labels, "confidence"
        layer, _, score = reference.select_layer(x.layers, *constants, *rest)
        return layer, score

    return {
        "reference": by_reference,
        "paper-formula": lambda: paper_formula(*given),
        "careful-torch": lambda: careful_torch(*given),
        "sklearn-LDA": lambda: lda_of_every_layer(*given),
        "native": lambda: by_package(x.layers, x.labels, x.rows.C),
        LIMIT: bare_products(x.layers, x.rows.C),
    }


def by_package(layers, labels, n_classes) -> tuple[Tensor, Tensor]:
    """Return (layer, score) by metselect_dgl.functional, which also computes the shrinkage that the
    other implementations are given."""
    moments = MF.moments(layers, labels, n_classes)
    dtype = layers[0].dtype
    means = [mean.to(dtype) for mean in moments.means()]
    factors = [factor.to(dtype) for factor in MF.whitening(moments)]
    layer, _, score = MF.select_layer(layers, means, factors, labels=labels)
    return layer, score


OPS: dict[str, Op] = {
    each.__name__: each
    for each in (
        moments,
        whitening,
        class_distances,
        class_distances_gradient,
        select_layer,
        selected_cross_entropy,
        selected_cross_entropy_gradient,
        head,
    )
}
PROVIDERS = {
    "moments": ("reference", "careful-torch", "native", LIMIT),
    "whitening": ("reference", "careful-torch", "native", CHOLESKY),
    "class_distances": (
        *("reference", "careful-torch", "torch.cdist", "scipy.cdist"),
        *("native", LIMIT),
    ),
    "class_distances_gradient": ("reference", "careful-torch", "torch.cdist", "native", LIMIT),
    "select_layer": (
        *("reference", "careful-torch", "torch.cdist", "sklearn-LDA"),
        *("native", LIMIT),
    ),
    "selected_cross_entropy": ("reference", "careful-torch", "native", LIMIT),
    "selected_cross_entropy_gradient": ("reference", "careful-torch", "native", LIMIT),
    "head": (
        *("reference", "paper-formula", "careful-torch", "sklearn-LDA"),
        *("native", LIMIT),
    ),
}


def expected(op: str, x: Inputs):
    """Return the result of the op by definition: the reference in float64."""
    if op not in x.known:
        x.known[op] = OPS[op](x.double())["reference"]()
    return x.known[op]


def implementations(op: str, x: Inputs) -> dict[str, Implementation]:
    """Return the implementations of an op, compared with the reference, optimised torch and the
    bare products. All but the bare products are checked against the reference in float64."""
    runs = OPS[op](x)
    denominators = ("reference", "paper-formula", "careful-torch", *LIMITS)
    result = {}
    for name, run in runs.items():
        others = tuple(other for other in denominators if other in runs and other != name)
        result[name] = Implementation(run, others)
        if name not in LIMITS:
            result[name].check = lambda run=run: check_same(run(), expected(op, x))
    return result


def check_same(found, expected) -> None:
    """Raise AssertionError unless floating-point results agree as a whole to 1e-3 and selected
    layers in all but 1 of 1000 rows."""
    if isinstance(expected, Tensor) and expected.dtype == torch.long:
        agree = (found == expected).double().mean().item()
        assert agree >= 0.999, f"{agree:.4f} of the selected layers agree"
    elif isinstance(expected, Tensor):
        close(found, expected, "result", 1e-3)
    else:
        assert len(found) == len(expected), f"{len(found)} results for {len(expected)}"
        for pair in zip(found, expected, strict=True):
            check_same(*pair)
