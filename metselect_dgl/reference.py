"""Every op in plain torch: the definition of what the fast engines compute, and the CPU fall-back.

Equations 2 to 6 of the paper, read as the README says. Lists have one entry per layer and the
layers may differ in width. `index` has for every layer the numbers [n] of the rows that are picked
from it (None: all of them), and `labels` [n] and `layer` [n] belong to the picked rows. Layers
may be of a narrower dtype than the constants, in whose dtype everything is computed.

Edges come as two compressed lists. The in-edges of destination i are `indptr[i]` to
`indptr[i + 1]` of `indices`, their sources; the out-edges of source j likewise lie in
`back_indices`, their destinations, and `back_edges`, their places in `indices`. M destinations,
N sources, E edges, H heads of F features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4096
Indices = list[Tensor | None]


def moments(
    layers: list[Tensor], labels: Tensor, index: Indices, shifts: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """count[c] = |{i: y_i = c}|, sum[c] = sum_i r_i, gram = sum_i r_i r_i^T with r = h - shift[y].

    Products are taken in the dtype of the shifts, to which narrower layers are converted, on tiles
    scaled to below 2 by a power of two, so that features of 1e20 do not overflow; the sums over
    tiles are float64.
    """
    count = torch.bincount(labels, minlength=shifts[0].shape[0]).double()
    sums, grams = [], []
    for h, picked, shift in zip(layers, index, shifts, strict=True):
        total = torch.zeros_like(shift, dtype=torch.float64)
        gram = total.new_zeros(h.shape[1], h.shape[1])
        for start in range(0, len(labels), TILE):
            rows = slice(start, start + TILE)
            y = labels[rows]
            r = (h[rows] if picked is None else h[picked[rows]]).to(shift.dtype) - shift[y]
            _, exponent = torch.frexp(r.abs().amax())
            unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 1)
            r = r / unit.to(r.dtype)
            total.index_add_(0, y, r.double() * unit)
            gram += (r.T @ r).double() * unit**2
        sums.append(total)
        grams.append(gram)
    return count, sums, grams


def whitening(covariances: list[Tensor], rho: Tensor, eps: float) -> list[Tensor]:
    """R with R^T R = K^-1, where K = (1 - rho) K + max(rho, 16 D eps) tr(K)/D I; R = 0 if tr K = 0.

    R is the inverse of the lower Cholesky factor, in float64, of K divided by its mean variance.
    `eps` is the rounding unit of the layers: sums of n products err by a few D eps of the variance.
    """
    factors = []
    for covariance, amount in zip(covariances, rho.double(), strict=True):
        eye = torch.eye(covariance.shape[0], dtype=torch.float64, device=covariance.device)
        variance = covariance.double().diagonal().mean()
        unit = variance.where(variance > 0, variance.new_ones(()))
        floor = amount.clamp(min=16 * len(eye) * eps)
        shrunk = (1 - amount) * covariance.double() / unit + floor * eye
        factor = torch.linalg.solve_triangular(torch.linalg.cholesky(shrunk), eye, upper=False)
        factors.append((factor * (variance > 0) / unit.sqrt()).contiguous())
    return factors


def _rows(h: Tensor, index: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (h if index is None else h[index]).to(dtype)


def _scatter(rows: Tensor, index: Tensor | None, h: Tensor) -> Tensor:
    """The gradient of `_rows`, in the dtype of the rows."""
    return rows if index is None else rows.new_zeros(h.shape).index_add_(0, index, rows)


def _center(mean: Tensor, valid: Tensor) -> Tensor:
    """The middle of the class means: distances do not change, and far from 0 digits are kept."""
    return mean[valid].mean(0) if valid.any() else mean.new_zeros(mean.shape[1])


def _whitened(
    h: Tensor, mean: Tensor, factor: Tensor, valid: Tensor, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """R (h - center) [n, K] and R (mu - center) [C, K]."""
    center = _center(mean, valid)
    return (_rows(h, index, mean.dtype) - center) @ factor.T, (mean - center) @ factor.T


def class_distances(
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    index: Indices,
) -> Tensor:
    """dist2[l, i, c] = || R_l (h_i - mu_c) ||^2, infinite for a class that is not valid.

    R_l [K, D] is square unless the layer is seen through a linear map that is worked into it.
    """
    dist2 = []
    for h, mean, factor, picked in zip(layers, means, factors, index, strict=True):
        z, m = _whitened(h, mean, factor, valid, picked)
        distance = torch.cdist(z, m, compute_mode="donot_use_mm_for_euclid_dist")  # [n, C]
        dist2.append(distance.square().masked_fill(~valid, torch.inf))
    return torch.stack(dist2)


def class_distances_backward(
    grad: Tensor,
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    index: Indices,
) -> list[Tensor]:
    """dh_i = 2 R^T sum_c g[i, c] (R (h_i - mu_c)); the means and factors are constants."""
    grads = []
    for g, h, mean, factor, picked in zip(grad, layers, means, factors, index, strict=True):
        g = g.masked_fill(~valid, 0)
        z, m = _whitened(h, mean, factor, valid, picked)
        rows = 2 * (g.sum(1, keepdim=True) * z - g @ m) @ factor
        grads.append(_scatter(rows, picked, h).to(h.dtype))
    return grads


def log_odds(logits: Tensor) -> Tensor:
    """log p_c - log(1 - p_c) of p = softmax(logits), with the digits that 1 - p_c loses near 1."""
    top = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    log_p = logits.log_softmax(-1)
    odds = log_p - torch.log1p(-log_p.exp())
    return odds.scatter(-1, top, logits.gather(-1, top) - rest)


def metric_logits(
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    temperature: Tensor,
    index: Indices,
) -> Tensor:
    """-dist2 / (2 T_l) up to a constant of each node and layer, [L, n, C]: linear in h.

    || R h ||^2 is the same for every class, so with everything taken from the centre what is left
    is h K^-1 mu_c - mu_c K^-1 mu_c / 2: no D x D product per node.
    """
    logits = []
    every = zip(layers, means, factors, temperature, index, strict=True)
    for h, mean, factor, t, picked in every:
        center = _center(mean, valid)
        m = (mean - center).double() @ factor.double().T  # [C, K]
        slope = (m @ factor.double()).to(mean.dtype)
        offset = (m.square().sum(1) / 2).to(mean.dtype)
        linear = (_rows(h, picked, mean.dtype) - center) @ slope.T - offset
        logits.append(linear.masked_fill(~valid, -torch.inf) / t)
    return torch.stack(logits)


def select_layer(
    layers: list[Tensor],
    means: list[Tensor],
    factors: list[Tensor],
    valid: Tensor,
    temperature: Tensor,
    index: Indices,
    labels: Tensor | None,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(layer, class, score) of each node: the layer with the largest score (Eq. 4, 5).

    `confidence`: the log-odds of the label, or of the best class when there are no labels.
    `distance`: minus the squared distance to the same class. `opposite`: the layer that is least
    confident (MetSelect-max). Equal scores go to the shallower layer; a collapsed layer (R = 0)
    is taken only if all are.
    """
    logits = metric_logits(layers, means, factors, valid, temperature, index)  # [L, n, C]
    answer = logits.argmax(-1)  # [L, n]
    asked = answer if labels is None else labels.expand_as(answer)
    if rule == "distance":
        odds = -class_distances(layers, means, factors, valid, index)
    else:
        odds = log_odds(logits)
    score = odds.gather(-1, asked.unsqueeze(-1)).squeeze(-1)  # [L, n]
    alive = torch.stack([factor.any() for factor in factors]).unsqueeze(-1)
    rank = (-score if rule == "opposite" else score).masked_fill(~alive, -torch.inf)
    layer = rank.argmax(0, keepdim=True)
    chosen = (layer, answer.gather(0, layer), score.gather(0, layer))
    return tuple(part.squeeze(0) for part in chosen)


def selected_logits(
    layers: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    layer: Tensor,
    index: Indices,
) -> Tensor:
    """logits[i] = W_l h_i + b_l with l = layer[i], [n, C]."""
    logits = weights[0].new_empty(len(layer), weights[0].shape[0])
    for depth, (h, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
        here = (layer == depth).nonzero().squeeze(1)
        rows = here if index[depth] is None else index[depth][here]
        logits[here] = F.linear(h[rows].to(weight.dtype), weight, bias)
    return logits


def selected_logits_backward(
    grad: Tensor,
    layers: list[Tensor],
    weights: list[Tensor],
    layer: Tensor,
    index: Indices,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients to every layer and decoder; zero, not missing, where no node selected the layer."""
    to_layers, to_weights, to_biases = [], [], []
    for depth, (h, weight) in enumerate(zip(layers, weights, strict=True)):
        g = grad * (layer == depth).unsqueeze(1)
        to_layers.append(_scatter(g @ weight, index[depth], h).to(h.dtype))
        to_weights.append(g.T @ _rows(h, index[depth], g.dtype))
        to_biases.append(g.sum(0))
    return to_layers, to_weights, to_biases


def selected_cross_entropy(
    layers: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    layer: Tensor,
    labels: Tensor,
    index: Indices,
    deep_supervision: float,
    wanted: list[bool],
    keep_logits: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """(loss, logits, and the loss's gradients to layers, weights and biases).

    The loss is the mean cross entropy of the selected decoders (Eq. 6), plus deep_supervision
    times the mean over layers of the cross entropy of that layer's decoder. `wanted` says of every
    layer whether its gradient is wanted, or is empty where none is at all; the logits are of no
    row unless they are to be kept. A gradient to a layer is float32 at least: the loss may yet be
    scaled, to save small ones from a narrow dtype.

    With a = W h + b and k_i the weight of row i in the loss, da = k (softmax(a) - onehot).
    """
    logits = weights[0].new_empty(0, weights[0].shape[0])
    if keep_logits:
        logits = selected_logits(layers, weights, biases, layer, index)
    loss = logits.new_zeros(())
    onehot = F.one_hot(labels, logits.shape[1])
    grads = [], [], []
    for depth, (h, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
        rows = _rows(h, index[depth], weight.dtype)
        a = F.linear(rows, weight, bias)
        k = ((layer == depth).to(a.dtype) + deep_supervision / len(layers)) / len(labels)  # [n]
        loss = loss + (k * F.cross_entropy(a, labels, reduction="none")).sum()
        if wanted:
            slope = k.unsqueeze(1) * (a.softmax(1) - onehot)
            to_layer = slope.new_empty(0)
            if wanted[depth]:
                to_layer = _scatter(slope @ weight, index[depth], h)
            to_layer = to_layer.to(torch.promote_types(slope.dtype, torch.float32))
            for out, grad in zip(grads, (to_layer, slope.T @ rows, slope.sum(0)), strict=True):
                out.append(grad)
    return loss if len(labels) else loss / 0, logits, *grads


def neighbour_sum(
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    weights: Tensor | None,
    back_weights: Tensor | None,
    source_scale: Tensor | None,
    target_scale: Tensor | None,
    feat: Tensor,
    more: Tensor | None,
) -> Tensor:
    """out_i = more_i + t_i sum over the in-edges j -> i of w_ij s_j h_j, [M, D].

    `weights` [E] are in the order of `indices`, `back_weights` in that of `back_indices`.
    """
    rows = feat if source_scale is None else feat * source_scale.unsqueeze(1)
    rows = rows[indices.long()]
    rows = rows if weights is None else rows * weights.unsqueeze(1)
    out = feat.new_zeros(len(indptr) - 1, feat.shape[1])
    out.index_add_(0, _destinations(indptr), rows)
    if target_scale is not None:
        out = out * target_scale.unsqueeze(1)
    return out if more is None else more + out


def linear_relu(feat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """max(0, h W + b)"""
    return torch.relu(torch.addmm(bias, feat, weight))


def linear_relu_backward(
    grad: Tensor, feat: Tensor, weight: Tensor, out: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With g = grad where out > 0: dh = g W^T (no rows unless wanted), dW = h^T g, db = sum g."""
    g = grad * (out > 0)
    to_feat = g @ weight.T if wanted else feat.new_empty(0, feat.shape[1])
    return to_feat, feat.T @ g, g.sum(0)


def _destinations(indptr: Tensor) -> Tensor:
    """The destination of every edge in the order of `indices`, [E]."""
    every = torch.arange(len(indptr) - 1, device=indptr.device)
    return every.repeat_interleave(indptr.diff())


def attention_sum(
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    back_edges: Tensor,
    feat: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
) -> tuple[Tensor, Tensor]:
    """(out, attention) of a graph attention layer: for every head, over the in-edges j -> i,

    e_ij = leaky_relu(source[j] + target[i]), a_i = softmax(e_i), out[i] = sum_j a_ij feat[j].

    feat [N, H, F], source [N, H], target [M, H]; out [M, H, F], 0 without in-edges; attention
    [E, H] in the order of `indices`, without a gradient of its own.
    """
    to = _destinations(indptr)
    e = F.leaky_relu(source.index_select(0, indices) + target.index_select(0, to), slope)  # [E, H]
    top = target.new_full(target.shape, -torch.inf)
    top.scatter_reduce_(0, to.unsqueeze(1).expand_as(e), e, "amax")
    power = (e - top.index_select(0, to)).exp()
    total = target.new_zeros(target.shape).index_add_(0, to, power)
    attention = power / total.index_select(0, to)
    out = feat.new_zeros(len(target), *feat.shape[1:])
    out.index_add_(0, to, attention.unsqueeze(-1) * feat.index_select(0, indices))
    return out, attention


def attention_sum_backward(
    grad: Tensor,
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    back_edges: Tensor,
    feat: Tensor,
    source: Tensor,
    target: Tensor,
    attention: Tensor,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to feat, source and target of sum(grad * out):

    da_ij = <grad[i], feat[j]>, de_ij = a_ij (da_ij - sum_k a_ik da_ik) leaky_relu'(e_ij),
    dfeat[j] = sum_i a_ij grad[i], dsource[j] = sum_i de_ij, dtarget[i] = sum_j de_ij.
    """
    to = _destinations(indptr)
    grad = grad.index_select(0, to)  # [E, H, F]
    da = (grad * feat.index_select(0, indices)).sum(-1)  # [E, H]
    mean = target.new_zeros(target.shape).index_add_(0, to, attention * da)
    positive = source.index_select(0, indices) + target.index_select(0, to) > 0
    de = attention * (da - mean.index_select(0, to))
    de = de.where(positive, slope * de)
    return (
        feat.new_zeros(feat.shape).index_add_(0, indices, attention.unsqueeze(-1) * grad),
        source.new_zeros(source.shape).index_add_(0, indices, de),
        target.new_zeros(target.shape).index_add_(0, to, de),
    )
