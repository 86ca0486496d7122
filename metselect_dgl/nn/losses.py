"""The losses of the metric: the paper's hinge (Eq. 7) and the posterior of the selected layer."""

import torch
import torch.nn.functional as F
from torch import Tensor


def distance_loss(dist2: Tensor, layer: Tensor, labels: Tensor, alpha: float = 1.0) -> Tensor:
    r"""Mean over nodes of Eq. 7,

    .. math:: \max(0, \alpha + d^{(l^*)}_{y} + \log \sum_l \sum_{j \ne y} e^{-d^{(l)}_j}) .

    With the moments held constant this inflates the embeddings of deep networks; ``"posterior"``
    trains where it fails.

    Parameters
    ----------
    dist2 : [L, n, C], squared distances
    layer, labels : int64 [n]
    """
    own = _pick(dist2, layer, labels)  # [n]
    other = F.one_hot(labels, dist2.shape[-1]).bool()
    rest = (-dist2).masked_fill(other, -torch.inf).logsumexp((0, 2))  # [n]
    return F.relu(alpha + own + rest).mean()


def posterior_loss(dist2: Tensor, layer: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    r"""Mean over nodes of :math:`-\log p^{(l^*)}_y` with
    :math:`p^{(l)} = \mathrm{softmax}_c(-d^{(l)}_c / 2 T_l)`."""
    logits = -dist2 / (2 * temperature[:, None, None])
    return -_pick(logits.log_softmax(-1), layer, labels).mean()


def _pick(values: Tensor, layer: Tensor, labels: Tensor) -> Tensor:
    """values[layer[i], i, labels[i]], [n]."""
    return values[layer, torch.arange(len(labels), device=labels.device), labels]
