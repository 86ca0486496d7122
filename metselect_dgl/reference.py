"""Every operator in plain torch: the definition of the other backends, and the fall-back for them.

Equations 2 to 6 of the paper, as docs/method.md reads them. Lists have one entry per layer; layers
may differ in width. `index` has the numbers [n] of the picked rows of each layer (None: all rows);
`labels` [n] and `layer` [n] belong to the picked rows. Layers may be of a narrower dtype than the
constants (shifts, means, factors, weights), in whose dtype everything is computed.

Edges are stored twice. The in-edges of target i are `indptr[i]` to `indptr[i + 1]` of `indices`,
which has their sources; the out-edges of source j are `back_indptr[j]` to `back_indptr[j + 1]` of
`back_indices`, which has their targets, and of `back_edges`, which has their positions in
`indices`. Shapes: M targets, N sources, E edges, H heads of F features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4096
Tensors = list[Tensor]
Indices = list[Tensor | None]


def moments(
    layers: Tensors, labels: Tensor, index: Indices, shifts: Tensors
) -> tuple[Tensor, Tensors, Tensors]:
    """count[c] = |{i: y_i = c}|, sum[c] = sum_i r_i, gram = sum_i r_i r_i^T with r = h - shift[y].

    Products are computed in the dtype of the shifts on tiles that are scaled to below 2 by a power
    of two, so that features of 1e20 do not overflow; sums over tiles are float64.
    """
    count = torch.bincount(labels, minlength=shifts[0].shape[0]).double()
    sums, grams = [], []
    for h, picked, shift in zip(layers, index, shifts, strict=True):
        total = torch.zeros_like(shift, dtype=torch.float64)
        gram = total.new_zeros(h.shape[1], h.shape[1])
        for start in range(0, len(labels), TILE):
            rows, y = slice(start, start + TILE), labels[start : start + TILE]
            r = (h[rows] if picked is None else h[picked[rows]]).to(shift.dtype) - shift[y]
            _, exponent = torch.frexp(r.abs().amax())
            unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 1)
            r = r / unit.to(r.dtype)
            total.index_add_(0, y, r.double() * unit)
            gram += (r.T @ r).double() * unit**2
        sums.append(total)
        grams.append(gram)
    return count, sums, grams


def whitening(covariances: Tensors, rho: Tensor, eps: float) -> Tensors:
    """R with R^T R = K^-1, where K = (1 - rho) K + max(rho, 16 D eps) tr(K)/D I; R = 0 if tr K = 0.
    R is the inverse of the lower Cholesky factor, in float64, of K divided by its mean variance.
    `eps` is the rounding unit of the layers; K has errors of a few D eps of the mean variance.
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
    """Return the picked rows in the given dtype."""
    return (h if index is None else h[index]).to(dtype)


def _scatter(rows: Tensor, index: Tensor | None, h: Tensor) -> Tensor:
    """Return the gradient [N, D] of `_rows` from the gradient [n, D] of the rows."""
    return rows if index is None else rows.new_zeros(h.shape).index_add_(0, index, rows)


def _center(mean: Tensor, valid: Tensor) -> Tensor:
    """Return the mean of the class means; rows relative to it keep their digits far from 0."""
    return mean[valid].mean(0) if valid.any() else mean.new_zeros(mean.shape[1])


def _whitened(h: Tensor, mean: Tensor, factor: Tensor, valid: Tensor, index: Tensor | None):
    """Return R (h - center) [n, K] and R (mu - center) [C, K]."""
    center = _center(mean, valid)
    return (_rows(h, index, mean.dtype) - center) @ factor.T, (mean - center) @ factor.T


def class_distances(
    layers: Tensors, means: Tensors, factors: Tensors, valid: Tensor, index: Indices
) -> Tensor:
    """dist2[l, i, c] = || R_l (h_i - mu_c) ||^2, infinite for a class that is not valid; R_l [K, D]
    is square unless a linear map of the layer is multiplied into it."""
    dist2 = []
    for h, mean, factor, picked in zip(layers, means, factors, index, strict=True):
        z, m = _whitened(h, mean, factor, valid, picked)
        distance = torch.cdist(z, m, compute_mode="donot_use_mm_for_euclid_dist")  # [n, C]
        dist2.append(distance.square().masked_fill(~valid, torch.inf))
    return torch.stack(dist2)


def class_distances_backward(
    grad: Tensor, layers: Tensors, means: Tensors, factors: Tensors, valid: Tensor, index: Indices
) -> Tensors:
    """dh_i = 2 R^T sum_c g[i, c] (R (h_i - mu_c)); the means and factors are constants."""
    grads = []
    for g, h, mean, factor, picked in zip(grad, layers, means, factors, index, strict=True):
        g = g.masked_fill(~valid, 0)
        z, m = _whitened(h, mean, factor, valid, picked)
        rows = 2 * (g.sum(1, keepdim=True) * z - g @ m) @ factor
        grads.append(_scatter(rows, picked, h).to(h.dtype))
    return grads


def log_odds(logits: Tensor) -> Tensor:
    """Return log p_c - log(1 - p_c) of p = softmax(logits), also accurate where p_c is near 1."""
    top = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    log_p = logits.log_softmax(-1)
    odds = log_p - torch.log1p(-log_p.exp())
    return odds.scatter(-1, top, logits.gather(-1, top) - rest)


def metric_logits(
    layers: Tensors,
    means: Tensors,
    factors: Tensors,
    valid: Tensor,
    temperature: Tensor,
    index: Indices,
) -> Tensor:
    """-dist2 / (2 T_l) up to a constant per node and layer, [L, n, C]: linear in h, because
    || R h ||^2 is the same for every class; relative to the centre the remaining terms are
    h K^-1 mu_c - mu_c K^-1 mu_c / 2, without a D x D product per node."""
    logits = []
    for h, mean, factor, t, rows in zip(layers, means, factors, temperature, index, strict=True):
        center = _center(mean, valid)
        m = (mean - center).double() @ factor.double().T  # [C, K]
        slope = (m @ factor.double()).to(mean.dtype)
        offset = (m.square().sum(1) / 2).to(mean.dtype)
        linear = (_rows(h, rows, mean.dtype) - center) @ slope.T - offset
        logits.append(linear.masked_fill(~valid, -torch.inf) / t)
    return torch.stack(logits)


def select_layer(
    layers: Tensors,
    means: Tensors,
    factors: Tensors,
    valid: Tensor,
    temperature: Tensor,
    index: Indices,
    labels: Tensor | None,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(layer, class, score) of each node in the layer with the largest score (Eq. 4, 5).
    The score is, by `rule`: `confidence`: the log-odds of the label, without labels of the best
    class; `distance`: minus the squared distance to that class; `opposite`: as `confidence`, but
    the smallest score is selected (MetSelect-max). Equal scores select the shallower layer; a
    collapsed layer (R = 0) is selected only if all layers are.
    """
    logits = metric_logits(layers, means, factors, valid, temperature, index)  # [L, n, C]
    answer = logits.argmax(-1)  # [L, n]
    asked = answer if labels is None else labels.expand_as(answer)
    near = rule == "distance"
    odds = -class_distances(layers, means, factors, valid, index) if near else log_odds(logits)
    score = odds.gather(-1, asked.unsqueeze(-1)).squeeze(-1)  # [L, n]
    alive = torch.stack([factor.any() for factor in factors]).unsqueeze(-1)
    rank = (-score if rule == "opposite" else score).masked_fill(~alive, -torch.inf)
    layer = rank.argmax(0)
    return layer, *(part.gather(0, layer.unsqueeze(0)).squeeze(0) for part in (answer, score))


def selected_logits(
    layers: Tensors, weights: Tensors, biases: Tensors, layer: Tensor, index: Indices
) -> Tensor:
    """logits[i] = W_l h_i + b_l with l = layer[i], [n, C]."""
    logits = weights[0].new_empty(len(layer), weights[0].shape[0])
    for depth, (h, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
        here = (layer == depth).nonzero().squeeze(1)
        rows = here if index[depth] is None else index[depth][here]
        logits[here] = F.linear(h[rows].to(weight.dtype), weight, bias)
    return logits


def selected_logits_backward(
    grad: Tensor, layers: Tensors, weights: Tensors, layer: Tensor, index: Indices
) -> tuple[Tensors, Tensors, Tensors]:
    """Gradients to layers, weights and biases; zero for a layer that no node selected."""
    to_layers, to_weights, to_biases = [], [], []
    for depth, (h, weight) in enumerate(zip(layers, weights, strict=True)):
        g = grad * (layer == depth).unsqueeze(1)
        to_layers.append(_scatter(g @ weight, index[depth], h).to(h.dtype))
        to_weights.append(g.T @ _rows(h, index[depth], g.dtype))
        to_biases.append(g.sum(0))
    return to_layers, to_weights, to_biases


def selected_cross_entropy(
    layers: Tensors,
    weights: Tensors,
    biases: Tensors,
    layer: Tensor,
    labels: Tensor,
    index: Indices,
    deep_supervision: float,
    wanted: list[bool],
    keep_logits: bool,
) -> tuple[Tensor, Tensor, Tensors, Tensors, Tensors]:
    """(loss, logits, and the gradients of the loss to layers, weights and biases); the loss is the
    mean cross entropy of the selected decoders (Eq. 6), plus deep_supervision times the mean over
    layers of the cross entropy of the layer's decoder. `wanted` has a flag per layer for its
    gradient, and is empty if no gradient is wanted. The logits have no rows unless `keep_logits`.
    A gradient to a layer is at least float32: a scaled loss still multiplies it.
    With a = W h + b and k_i the weight of row i in the loss, da = k (softmax(a) - onehot)."""
    logits = selected_logits(layers, weights, biases, layer if keep_logits else layer[:0], index)
    loss = logits.new_zeros(())
    onehot = F.one_hot(labels, logits.shape[1])
    to_layers, to_weights, to_biases = [], [], []
    for depth, (h, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
        rows = _rows(h, index[depth], weight.dtype)
        a = F.linear(rows, weight, bias)
        k = ((layer == depth).to(a.dtype) + deep_supervision / len(layers)) / len(labels)  # [n]
        loss = loss + (k * F.cross_entropy(a, labels, reduction="none")).sum()
        if wanted:
            da = k.unsqueeze(1) * (a.softmax(1) - onehot)
            to_layer = _scatter(da @ weight, index[depth], h) if wanted[depth] else da.new_empty(0)
            to_layers.append(to_layer.to(torch.promote_types(da.dtype, torch.float32)))
            to_weights.append(da.T @ rows)
            to_biases.append(da.sum(0))
    return loss if len(labels) else loss / 0, logits, to_layers, to_weights, to_biases


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
    """out_i = more_i + t_i sum over the in-edges j -> i of w_ij s_j h_j, [M, D]; `weights` [E] has
    w in the order of `indices`, `back_weights` in the order of `back_indices`."""
    rows = (feat if source_scale is None else feat * source_scale.unsqueeze(1))[indices.long()]
    rows = rows if weights is None else rows * weights.unsqueeze(1)
    out = feat.new_zeros(len(indptr) - 1, feat.shape[1])
    out.index_add_(0, _targets(indptr), rows)
    if target_scale is not None:
        out = out * target_scale.unsqueeze(1)
    return out if more is None else more + out


def linear_relu(feat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """max(0, h W + b)"""
    return torch.relu(torch.addmm(bias, feat, weight))


def linear_relu_backward(
    grad: Tensor, feat: Tensor, weight: Tensor, out: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With g = grad where out > 0: dh = g W^T (0 rows unless wanted), dW = h^T g, db = sum g."""
    g = grad * (out > 0)
    to_feat = g @ weight.T if wanted else feat.new_empty(0, feat.shape[1])
    return to_feat, feat.T @ g, g.sum(0)


def _targets(indptr: Tensor) -> Tensor:
    """Return the target of each edge in the order of `indices`, [E]."""
    targets = torch.arange(len(indptr) - 1, device=indptr.device)
    return targets.repeat_interleave(indptr.diff())


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
    """(out, attention) of a graph attention layer: for each head, over the in-edges j -> i,
    e_ij = leaky_relu(source[j] + target[i]), a_i = softmax(e_i), out[i] = sum_j a_ij feat[j].

    feat [N, H, F], source [N, H], target [M, H]; out [M, H, F], 0 without in-edges; attention
    [E, H] in the order of `indices`, not differentiable.
    """
    to = _targets(indptr)
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
    dfeat[j] = sum_i a_ij grad[i], dsource[j] = sum_i de_ij, dtarget[i] = sum_j de_ij."""
    to = _targets(indptr)
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


def fingerprint(bits: Tensor) -> Tensor:
    """The sum over rows i of m(n_i + m(i)) modulo 2^64, where m mixes all bits of an integer and
    n_i = sum_j u_i,2j u_i,2j+1 with u_ij = bits_ij + m(j) modulo 2^32; `bits` is int32."""
    odd, rows = bits.shape[1] % 2, []
    keys = _mix(torch.arange(bits.shape[1] + odd, device=bits.device))
    for tile in bits.split(TILE):
        u = (F.pad(tile.long(), (0, odd)) + keys) & 0xFFFFFFFF
        rows.append((u[:, ::2] * u[:, 1::2]).sum(1))
    return _mix(torch.cat(rows) + _mix(torch.arange(len(bits), device=bits.device))).sum()


def _mix(x: Tensor) -> Tensor:
    """Return SplitMix64 of int64, computed with the overflow of integers."""
    x = x - 0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x
