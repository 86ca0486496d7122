"""Alternatives that the package is compared with: a plain DGL model, the paper's formula, optimised
eager torch, and scikit-learn."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Head = tuple[Tensor, Tensor]  # selected layer and score of every node


class PlainGNN(nn.Module):
    """DGL's convolutions with ReLU and a linear decoder: the same network as FinalSelect."""

    def __init__(self, convs: nn.ModuleList, decoder: nn.Linear) -> None:
        super().__init__()
        self.convs, self.decoder = convs, decoder

    def forward(self, graph, feat: Tensor) -> Tensor:
        for conv in self.convs:
            feat = torch.relu(conv(graph, feat).flatten(1))
        return self.decoder(feat)


class ClassesLastGNN(nn.Module):
    """As in DGL's examples: the last convolution gives the logits, without ReLU and decoder."""

    def __init__(self, convs: nn.ModuleList) -> None:
        super().__init__()
        self.convs = convs

    def forward(self, graph, feat: Tensor) -> Tensor:
        *hidden, last = self.convs
        for conv in hidden:
            feat = torch.relu(conv(graph, feat).flatten(1))
        return last(graph, feat).flatten(1)


def paper_formula(layers: list[Tensor], labels: Tensor, n_classes: int, rho: Tensor) -> Head:
    """Select layers by Equations 2 to 5 as printed (with the argmax): invert every layer's
    covariance and compute (h - mu) K^-1 (h - mu)^T class by class."""
    scores = []
    for h, amount in zip(layers, rho, strict=True):
        n, width = h.shape
        mean = torch.stack([h[labels == c].mean(0) for c in range(n_classes)])
        r = h - mean[labels]
        covariance = r.T @ r / (n - 1)
        shrunk = (1 - amount) * covariance + amount * covariance.trace() / width * torch.eye(width)
        inverse = torch.linalg.inv(shrunk)
        gaps = (h - mean[c] for c in range(n_classes))
        dist2 = torch.stack([(gap @ inverse * gap).sum(1) for gap in gaps], 1)
        scores.append(log_odds_of(-dist2 / 2, labels))
    score, layer = torch.stack(scores).max(0)
    return layer, score


def careful_torch(layers: list[Tensor], labels: Tensor, n_classes: int, rho: Tensor) -> Head:
    """Select layers in optimised eager torch: sums by index_add, a Cholesky factor, triangular
    solves for all class means, and scores that are linear in h, by one addmm."""
    scores = []
    count = torch.bincount(labels, minlength=n_classes).unsqueeze(1)
    for h, amount in zip(layers, rho, strict=True):
        n, width = h.shape
        mean = h.new_zeros(n_classes, width).index_add_(0, labels, h) / count
        r = h - mean[labels]
        covariance = r.T @ r / (n - 1)
        shrunk = (1 - amount) * covariance + amount * covariance.trace() / width * torch.eye(width)
        factor = torch.linalg.cholesky(shrunk.double())
        whitened = torch.linalg.solve_triangular(factor, mean.double().T, upper=False)  # [D, C]
        slope = torch.linalg.solve_triangular(factor.T, whitened, upper=True)
        offset = whitened.square().sum(0) / 2
        logits = torch.addmm(-offset.to(h.dtype), h, slope.to(h.dtype))
        scores.append(log_odds_of(logits, labels))
    score, layer = torch.stack(scores).max(0)
    return layer, score


def lda_of_every_layer(layers: list[Tensor], labels: Tensor, n_classes: int, rho: Tensor) -> Head:
    """Select layers with scikit-learn's LinearDiscriminantAnalysis, fitted to each layer."""
    scores = [
        log_odds_of(lda_logits(fitted_lda(h, labels, float(amount)), h), labels)
        for h, amount in zip(layers, rho, strict=True)
    ]
    score, layer = torch.stack(scores).max(0)
    return layer, score


def fitted_lda(h: Tensor, labels: Tensor, rho: float):
    """Fit it with a given shrinkage and, like the paper, |T| - 1 in the covariance and no
    priors."""
    from sklearn.covariance import ShrunkCovariance
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    shrunk = ShrunkCovariance(store_precision=False, shrinkage=rho)
    lda = LinearDiscriminantAnalysis("lsqr", covariance_estimator=shrunk)
    lda.fit(h.numpy(), labels.numpy())
    share = (len(h) - 1) / len(h)
    lda.coef_, lda.intercept_ = share * lda.coef_, share * (lda.intercept_ - np.log(lda.priors_))
    return lda


def lda_logits(lda, h: Tensor) -> Tensor:
    return torch.from_numpy(lda.decision_function(h.numpy()))


def bare_products(layers: list[Tensor], n_classes: int) -> Callable[[], None]:
    """Return a function that computes only the matrix products of the head, into preallocated
    memory."""
    slopes = [h.new_ones(h.shape[1], n_classes) for h in layers]
    grams = [h.new_empty(h.shape[1], h.shape[1]) for h in layers]
    scores = [h.new_empty(len(h), n_classes) for h in layers]

    def run() -> None:
        for h, slope, gram, score in zip(layers, slopes, grams, scores, strict=True):
            torch.mm(h.T, h, out=gram)
            torch.mm(h, slope, out=score)

    return run


def log_odds_of(logits: Tensor, labels: Tensor) -> Tensor:
    own = logits.gather(1, labels.unsqueeze(1))
    rest = logits.scatter(1, labels.unsqueeze(1), -torch.inf)
    return (own - rest.logsumexp(1, keepdim=True)).squeeze(1)


def plain_loss(layers, weights, biases, layer, labels, index, deep_supervision=1.0) -> Tensor:
    """Return the cross entropy of the selected decoders plus that of all, in eager torch."""
    logits = [
        F.linear(h[index], weight, bias)
        for h, weight, bias in zip(layers, weights, biases, strict=True)
    ]
    every = torch.arange(len(labels), device=labels.device)
    loss = F.cross_entropy(torch.stack(logits)[layer, every], labels)
    deep = sum(F.cross_entropy(each, labels) for each in logits) / len(logits)
    return loss + deep_supervision * deep


def careful_loss(layers, weights, biases, layer, labels, deep_supervision=1.0) -> Tensor:
    """Return the same loss over all rows, with one cross entropy per layer and no copy of the
    logits."""
    every = zip(layers, weights, biases, strict=True)
    losses = torch.stack(
        [F.cross_entropy(F.linear(h, w, b), labels, reduction="none") for h, w, b in every]
    )  # [L, n]
    return losses.gather(0, layer.unsqueeze(0)).mean() + deep_supervision * losses.mean()
