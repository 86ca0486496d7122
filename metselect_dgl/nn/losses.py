"""The losses [L, n] of the metric at every layer: the paper's hinge (Eq. 7) and the posterior."""

import torch
import torch.nn.functional as F
from torch import Tensor


def distance_loss(dist2: Tensor, labels: Tensor, alpha: float = 1.0) -> Tensor:
    r"""Return Eq. 7 of node i at layer l, [L, n],

    .. math:: \max(0, \alpha + d^{(l)}_{iy} + \log \sum_k \sum_{j \ne y} e^{-d^{(k)}_{ij}}) .

    With the moments held constant this inflates the embeddings of deep networks;
    :func:`posterior_loss` trains where it fails.

    Parameters
    ----------
    dist2 : [L, n, C], squared distances
    labels : int64 [n]
    """
    own = F.one_hot(labels, dist2.shape[-1]).bool()
    rest = (-dist2).masked_fill(own, -torch.inf).logsumexp((0, 2))  # [n]
    return F.relu(alpha + _of_class(dist2, labels) + rest)


def posterior_loss(dist2: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    r"""Return :math:`-\log p^{(l)}_{iy}`, [L, n], where :math:`p^{(l)}_i` is the posterior
    :math:`\mathrm{softmax}_c(-d^{(l)}_{ic} / 2 T_l)`."""
    logits = -dist2 / (2 * temperature[:, None, None])
    return -_of_class(logits.log_softmax(-1), labels)


def _of_class(values: Tensor, labels: Tensor) -> Tensor:
    """Return values[l, i, labels[i]], [L, n]."""
    return values[:, torch.arange(len(labels), device=labels.device), labels]
