"""What is fitted on validation nodes: a temperature per layer, and the gate between layers."""

import torch
from torch import Tensor

from .. import functional as MF

_HOTTEST = 100.0
_ENOUGH = 4096
FOLDS = 5


def fit_temperature(logits: Tensor, labels: Tensor, steps: int = 40) -> Tensor:
    r"""T_l > 0 that minimises the mean of :math:`-\log \mathrm{softmax}(a_l / T_l)_y`, [L].

    The loss is convex in 1/T; the root of its slope is bracketed and found by Newton's method.
    T stays within [1/100, 100]: it has no minimum where a layer's answers are all right or wrong.
    Of many nodes, 4096 to 8191 are looked at, evenly spread: enough for one number.

    Parameters
    ----------
    logits : [L, n, C]; classes that cannot be are -inf
    labels : int64 [n]
    """
    step = max(1, len(labels) // _ENOUGH)
    logits, labels = logits[:, ::step], labels[::step]
    known = torch.isfinite(logits[:, torch.arange(len(labels)), labels]).all(0)
    logits, labels = logits[:, known].double(), labels[known]
    if len(labels) == 0:
        return logits.new_ones(len(logits))
    finite = logits.masked_fill(~torch.isfinite(logits), 0)
    own = logits[:, torch.arange(len(labels)), labels]  # [L, n]
    low, high = (logits.new_full((len(logits),), value) for value in (1 / _HOTTEST, _HOTTEST))
    beta = torch.ones_like(low)
    for _ in range(steps):
        p = (logits * beta[:, None, None]).softmax(-1)
        mean = (p * finite).sum(-1)
        slope = (mean - own).mean(1)
        curvature = ((p * finite.square()).sum(-1) - mean.square()).mean(1)
        low, high = beta.where(slope < 0, low), beta.where(slope >= 0, high)
        newton = beta - slope / curvature
        inside = (newton > low) & (newton < high)
        step = newton.where(inside, (low * high).sqrt()) - beta
        beta = beta + step
        if (step.abs() < 1e-6 * beta).all():
            break
    return 1 / beta


def gate_features(metric: Tensor, decoder: Tensor, answer: Tensor) -> Tensor:
    """What every layer k thinks of layer l's answer: its log-odds by metric and by decoder.

    Parameters
    ----------
    metric, decoder : calibrated logits [L, n, C]
    answer : int64 [L, n], the class that layer l's decoder gives

    Returns
    -------
    [L, n, 2 L]
    """
    odds = torch.cat([MF.log_odds(metric), MF.log_odds(decoder)]).clamp(-30, 30)  # [2L, n, C]
    spread = odds.unsqueeze(0).expand(len(answer), *odds.shape)
    asked = answer[:, None, :, None].expand(-1, len(odds), -1, 1)
    return spread.gather(-1, asked).squeeze(-1).transpose(1, 2)


def fit_gate(features: Tensor, right: Tensor, ridge: float = 1.0, steps: int = 50) -> Tensor:
    r"""Per layer a ridge logistic regression :math:`P(\text{right}) = \sigma(w \cdot f + b)`.

    Parameters
    ----------
    features : [L, n, F]
    right : bool [L, n]

    Returns
    -------
    [L, F + 1], the weights and, last, the bias
    """
    features = features.double()
    mean, scale = features.mean(1, keepdim=True), features.std(1, keepdim=True, correction=0)
    scale = scale.where(scale > 0, torch.ones_like(scale))
    design = torch.cat([(features - mean) / scale, torch.ones_like(features[..., :1])], -1)
    target = right.double()
    penalty = design.new_full((design.shape[-1],), ridge)
    penalty[-1] = 1e-3  # keeps the bias finite where a layer is always right
    weight = design.new_zeros(len(design), design.shape[-1])
    for _ in range(steps):
        p = (design @ weight.unsqueeze(-1)).squeeze(-1).sigmoid()
        slope = ((p - target).unsqueeze(1) @ design).squeeze(1) + penalty * weight
        curvature = design.mT @ ((p * (1 - p)).unsqueeze(-1) * design) + penalty.diag()
        step = torch.linalg.solve(curvature, slope)
        weight = weight - step
        if (step.abs() < 1e-8).all():
            break
    plain = weight[:, :-1] / scale.squeeze(1)
    bias = weight[:, -1] - (plain * mean.squeeze(1)).sum(1)
    return torch.cat([plain, bias.unsqueeze(1)], 1)


def cross_fit_gate(features: Tensor, right: Tensor) -> Tensor:
    """`gate_score` [L, n] of every node by a gate that was fitted on the other folds."""
    fold = torch.arange(right.shape[1], device=right.device) % FOLDS
    score = features.new_empty(right.shape)
    for held in range(FOLDS):
        gate = fit_gate(features[:, fold != held], right[:, fold != held])
        score[:, fold == held] = gate_score(features[:, fold == held], gate)
    return score


def gate_score(features: Tensor, gate: Tensor) -> Tensor:
    """Log-odds that layer l's decoder is right, [L, n]."""
    gate = gate.to(features.dtype)
    return (features @ gate[:, :-1].unsqueeze(-1)).squeeze(-1) + gate[:, -1:]
