"""Class distances, layer selection and the selected decoders (Eq. 4 to 7)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import ops
from ..checks import check_finite
from .arguments import Index, Tensors, index_per_layer, same_dtype

RULES = ("confidence", "distance", "opposite")
_ops = ops.functions


def class_distances(
    layers: Tensors,
    means: Tensors,
    factors: Tensors,
    *,
    valid: Tensor | None = None,
    index: Index = None,
) -> Tensor:
    """Return dist2[l, i, c], the squared Mahalanobis distance of node i to mean c in layer l.

    The result [L, n, C] is differentiable in the layers. `valid` [C] marks the classes that have
    nodes; the distance to other classes is infinite.

    Examples
    --------
    >>> import torch
    >>> h = torch.tensor([[3.0, 4.0]])
    >>> class_distances([h], [torch.zeros(1, 2)], [torch.eye(2)])
    tensor([[[25.]]])
    """
    metric, _ = _metric(layers, means, factors, valid)
    return _ops.class_distances(*metric, index_per_layer(index, layers))


def metric_logits(
    layers: Tensors,
    means: Tensors,
    factors: Tensors,
    *,
    valid: Tensor | None = None,
    temperature: Tensor | None = None,
    index: Index = None,
) -> Tensor:
    """Return logits of the posterior softmax_c(-dist2 / (2 T_l)), [L, n, C]; not differentiable."""
    layers = [h.detach() for h in layers]
    metric, temperature = _metric(layers, means, factors, valid, temperature)
    return _ops.metric_logits(*metric, temperature, index_per_layer(index, layers))


def select_layer(
    layers: Tensors,
    means: Tensors,
    factors: Tensors,
    *,
    valid: Tensor | None = None,
    temperature: Tensor | None = None,
    index: Index = None,
    labels: Tensor | None = None,
    rule: str = "confidence",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (layer, class, score), each [n], of the picked nodes (Eq. 4; with `labels`, Eq. 5).

    Parameters
    ----------
    temperature : [L], divides the squared distances of a layer; ones by default
    labels : int64 [n], classes of the picked nodes: score the true class instead of the best
    rule : ``"confidence"`` selects the layer with the largest log-odds, ``"distance"`` the one with
        the smallest distance, ``"opposite"`` the least confident one (MetSelect-max)
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; use one of {', '.join(RULES)}")
    layers = [h.detach() for h in layers]
    metric, temperature = _metric(layers, means, factors, valid, temperature)
    labels = None if labels is None else labels.long().contiguous()
    return _ops.select_layer(*metric, temperature, index_per_layer(index, layers), labels, rule)


def _metric(layers, means, factors, valid, temperature=None) -> tuple[tuple, Tensor]:
    """Return layers, means, factors and valid classes as the operators take them; temperatures."""
    if valid is None:
        valid = torch.ones(len(means[0]), dtype=torch.bool, device=means[0].device)
    if temperature is None:
        temperature = layers[0].new_ones(len(layers))
    return (same_dtype(layers), list(means), list(factors), valid), temperature


def selected_logits(
    layers: Tensors, weights: Tensors, biases: Tensors, layer: Tensor, *, index: Index = None
) -> Tensor:
    """Return the logits W_l h_i + b_l with l = layer[i] of the picked nodes, [n, C]."""
    decoders = same_dtype(layers), list(weights), list(biases), layer.long().contiguous()
    return _ops.selected_logits(*decoders, index_per_layer(index, layers))


@torch.no_grad()
def select_and_decode(
    layers: Iterable[Tensor],
    means: Tensors,
    factors: Tensors,
    weights: Tensors,
    biases: Tensors,
    *,
    valid: Tensor | None = None,
    temperature: Tensor | None = None,
    rule: str = "confidence",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits, layer, score) of all nodes from layers that are passed one at a time.

    The result is that of :func:`select_layer` and :func:`selected_logits`. A layer is not used
    after the next one is requested, so it can be freed: memory is one layer and the logits, N x C.
    """
    depth, logits = 0, None
    for h in layers:
        check_finite([h], first=depth)
        t = None if temperature is None else temperature[depth : depth + 1]
        mean, factor, weight, bias = ([of[depth]] for of in (means, factors, weights, biases))
        _, _, own_score = select_layer([h], mean, factor, valid=valid, temperature=t, rule=rule)
        rank = -own_score if rule == "opposite" else own_score
        rank = rank if factor[0].any() else torch.full_like(rank, -torch.inf)
        if logits is None:
            layer = torch.zeros(len(h), dtype=torch.long, device=h.device)
            logits = selected_logits([h], weight, bias, layer)
            best_rank, score = rank.clone(), own_score
        rows = (rank > best_rank).nonzero().squeeze(1)
        for chunk in rows.split(65536):
            own_logits = selected_logits([h], weight, bias, torch.zeros_like(chunk), index=chunk)
            logits.index_copy_(0, chunk, own_logits)
        layer[rows], best_rank[rows], score[rows] = depth, rank[rows], own_score[rows]
        depth += 1  # enumerate would keep a reference to the layer
        del h  # before the next layer is computed
    if depth != len(means):
        raise ValueError(f"got {depth} layers for the means of {len(means)}")
    return logits, layer, score


def selected_cross_entropy(
    layers: Tensors,
    weights: Tensors,
    biases: Tensors,
    layer: Tensor,
    labels: Tensor,
    *,
    index: Index = None,
    deep_supervision: float = 0.0,
    keep_logits: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return (loss, logits) of the selected decoders (Eq. 6), plus `deep_supervision` times the
    mean cross entropy of every layer's decoder on the same nodes.

    The loss and its gradients need no logits [n, C] in memory; with `keep_logits=False` they are
    not stored and None is returned for them.
    """
    decoders = same_dtype(layers), list(weights), list(biases), layer.long().contiguous()
    targets = labels.long().contiguous(), index_per_layer(index, layers)
    differentiable = any(tensor.requires_grad for tensor in (*layers, *weights, *biases))
    wanted = []  # whether each layer needs a gradient; empty: no tensor does
    if torch.is_grad_enabled() and differentiable:
        wanted = [h.requires_grad for h in layers]
    options = float(deep_supervision), wanted, keep_logits
    loss, logits, *_ = _ops.selected_cross_entropy(*decoders, *targets, *options)
    return loss, logits if keep_logits else None
