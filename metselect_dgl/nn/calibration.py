"""Fits on validation nodes: a temperature per layer, and the gate between layers."""

import torch
from torch import Tensor

from .. import functional as MF

_HOTTEST = 100.0
_ENOUGH = 4096
_PAIRED_LAYERS = 33  # up to so many, the gate compares every layer with every other
_CONSTANT = 1e-5  # log-odds that vary less are rounding
FOLDS = 5


def fit_temperature(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Return T_l > 0 that minimises the mean of :math:`-\log \mathrm{softmax}(a_l / T_l)_y`, [L].

    The loss is convex in 1/T: Newton's method with bisection, within [1/100, 100], since there is
    no minimum where a layer is always right or wrong. Of many nodes, 4096 to 8191 are used.
    `logits` are [L, n, C], -inf for classes that cannot be, `labels` int64 [n].
    """
    every = max(1, len(labels) // _ENOUGH)
    logits, labels = logits[:, ::every], labels[::every]
    nodes = torch.arange(len(labels), device=labels.device)
    known = torch.isfinite(logits[:, nodes, labels]).all(0)
    logits, labels = logits[:, known].double().mT.contiguous(), labels[known]  # [L, C, n]
    if len(labels) == 0:
        return logits.new_ones(len(logits))
    finite = logits.masked_fill(~torch.isfinite(logits), 0)
    own = logits.gather(1, labels.expand(len(logits), 1, -1)).mean((1, 2))  # [L]
    low, high = (logits.new_full((len(logits),), value) for value in (1 / _HOTTEST, _HOTTEST))

    def slopes(beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and second derivative of the loss."""
        p = (logits * beta[:, None, None]).softmax(1)
        mean = (p * finite).sum(1)
        second = (p * finite.square()).sum(1) - mean.square()
        return mean.mean(1) - own, second.mean(1)

    beta = high.where(slopes(high)[0] < 0, torch.ones_like(low))
    beta = low.where(slopes(low)[0] >= 0, beta)
    inner = (beta > low) & (beta < high)
    for _ in range(40):
        slope, curvature = slopes(beta)
        low, high = beta.where(slope < 0, low), beta.where(slope >= 0, high)
        newton = beta - slope / curvature
        step = newton.where((newton > low) & (newton < high), (low * high).sqrt()) - beta
        step = step.where(inner, torch.zeros_like(step))
        beta = beta + step
        if (step.abs() < 1e-6 * beta).all():
            break
    return 1 / beta


def gate_width(n_layers: int) -> int:
    """Return the number of features that the gate has of every layer's answer."""
    return 2 * n_layers if n_layers <= _PAIRED_LAYERS else 4


def gate_features(metric: Tensor, decoder: Tensor, answer: Tensor) -> Tensor:
    """Return the log-odds that the layers k give to layer l's answer, by metric and by decoder;
    in a deep network, those of layer l itself and the mean over all: [L, n, gate_width(L)].

    `metric` and `decoder` are calibrated logits [L, n, C]; `answer` [L, n] is the class that layer
    l's decoder gives.
    """
    odds = torch.stack([MF.log_odds(metric), MF.log_odds(decoder)]).clamp(-30, 30)  # [2, L, n, C]
    nodes = torch.arange(answer.shape[1], device=answer.device)
    if len(answer) <= _PAIRED_LAYERS:
        return odds.flatten(0, 1)[:, nodes, answer].permute(1, 2, 0)
    layers = torch.arange(len(answer), device=answer.device).unsqueeze(1)
    own, mean = odds[:, layers, nodes, answer], odds.mean(1)[:, nodes, answer]  # [2, L, n] each
    return torch.cat([own, mean]).permute(1, 2, 0)


def log_odds_at(logits: Tensor, classes: Tensor) -> Tensor:
    """Return ``log_odds(logits).gather(-1, classes)`` of logits [n, C] and classes [n, K], without
    the log-odds of the other classes."""
    top, best = logits.max(-1, keepdim=True)
    others = (logits - top).exp_().scatter_(-1, best, 0).sum(-1, keepdim=True)
    chosen = logits.gather(-1, classes) - top  # [n, K]
    rest = torch.where(classes == best, others, 1 + others - chosen.exp())
    return chosen - rest.log()


def gate_table(gate: Tensor) -> Tensor:
    """Return the weights of layer k's log-odds, by metric and by decoder, for layer l's answer,
    [L, 2, L], of a gate [L, gate_width(L) + 1]."""
    layers, weights = len(gate), gate[:, :-1]
    if layers <= _PAIRED_LAYERS:
        return weights.unflatten(1, (2, layers))
    own, mean = weights.unflatten(1, (2, 2)).unbind(1)  # [L, 2] each
    return own.unsqueeze(-1) * torch.eye(layers).to(gate)[:, None] + mean.unsqueeze(-1) / layers


def fit_gate(features: Tensor, right: Tensor, used: Tensor | None = None) -> Tensor:
    r"""Fit per layer a ridge logistic regression :math:`P(\text{right}) = \sigma(w \cdot f + b)`.

    `features` are [L, n, F], `right` is bool [L, n]. With `used`, bool [K, n], K gates are fitted
    together, each on its own nodes. Returns the weights and, last, the bias: [L, F + 1], or
    [K, L, F + 1] if `used` is given.
    """
    if used is None:
        return fit_gate(features, right, torch.ones_like(right[:1]))[0]
    features, target = features.double(), right.double()
    used = used[:, None, :, None].double()  # [K, 1, n, 1]
    count = used.sum(2, keepdim=True)
    mean = (used * features).sum(2, keepdim=True) / count
    scale = ((used * (features - mean).square()).sum(2, keepdim=True) / count).sqrt()
    scale = scale.where(scale > _CONSTANT, torch.ones_like(scale))
    design = torch.cat([(features - mean) / scale, torch.ones_like(mean[..., :1] * used)], -1)
    transposed = (design * used).mT.contiguous()  # [K, L, F + 1, n]
    penalty = design.new_ones(design.shape[-1])
    penalty[-1] = 1e-3  # keeps the bias finite where a layer is always right
    weight = design.new_zeros(*design.shape[:2], design.shape[-1], 1)
    for _ in range(50):
        p = (design @ weight).sigmoid()
        slope = transposed @ (p - target.unsqueeze(-1)) + penalty.unsqueeze(1) * weight
        curvature = transposed @ (p * (1 - p) * design) + penalty.diag()
        step = torch.linalg.solve(curvature, slope)
        weight = weight - step
        if (step.abs() < 1e-6).all():
            break
    plain, mean = weight[..., :-1, 0] / scale.squeeze(2), mean.squeeze(2)
    bias = weight[..., -1, 0] - (plain * mean).sum(-1)
    return torch.cat([plain, bias.unsqueeze(-1)], -1)


def cross_fit_gate(features: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate of all nodes, and `gate_score` [L, n] of every node by a gate of other folds;
    of many nodes a part is used, as in `fit_temperature`."""
    nodes = torch.arange(right.shape[1], device=right.device)
    every = max(1, len(nodes) // _ENOUGH)
    fold = nodes // every % FOLDS
    folds = torch.arange(FOLDS + 1, device=right.device).unsqueeze(1)  # the last: nothing held out
    *held_out, whole = fit_gate(features[:, ::every], right[:, ::every], fold[::every] != folds)
    scores = torch.stack([gate_score(features, gate) for gate in held_out])  # [FOLDS, L, n]
    return whole, scores[fold, :, nodes].mT


def gate_score(features: Tensor, gate: Tensor) -> Tensor:
    """Return the log-odds that layer l's decoder is right, [L, n]."""
    gate = gate.to(features.dtype)
    return (features @ gate[:, :-1].unsqueeze(-1)).squeeze(-1) + gate[:, -1:]
