"""Functions that graph convolutions are built from: sums and attention over edges, linear + ReLU.

Edges are stored twice: `indptr` and `indices` by target, `back_indptr` and `back_indices` by
source; `back_edges` [E] has the positions in `indices` of the edges of `back_indices`. Shapes: M
targets, N sources, E edges, H heads of F features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..ops.neighbour_sum import NeighbourSum

__all__ = ["attention_sum", "compiled", "fingerprint", "linear_relu", "neighbour_sum"]

_ops = ops.functions


def compiled(device: torch.device) -> bool:
    """Return whether these functions are compiled for the device, not run as plain torch."""
    return ops.compiled("neighbour_sum", device)


def linear_relu(feat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return max(0, h W + b); `weight` is [in, out], as in :class:`dgl.nn.GraphConv`."""
    return _ops.linear_relu(feat, weight, bias)


def neighbour_sum(
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    feat: Tensor,
    *,
    weights: Tensor | None = None,
    back_weights: Tensor | None = None,
    source_scale: Tensor | None = None,
    target_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sums, feat): sums_i = t_i sum over in-edges j -> i of w_ij s_j h_j, [M, D].

    Use the returned `feat` for any further computation on it: the gradient of that use is then
    added inside the sum over the reversed edges instead of in a separate pass. `weights` and
    `back_weights` are w [E] in the order of `indices` and of `back_indices`, both or none;
    `source_scale` and `target_scale` are s [N] and t [M], ones by default.
    """
    edges = indptr, indices, back_indptr, back_indices, weights, back_weights
    return NeighbourSum.apply(feat, None, *edges, source_scale, target_scale)


def attention_sum(
    indptr: Tensor,
    indices: Tensor,
    back_indptr: Tensor,
    back_indices: Tensor,
    back_edges: Tensor,
    feat: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    slope: float = 0.2,
) -> Tensor:
    """Return out_i = sum over in-edges j -> i of a_ij feat_j, [M, H, F], with a_i = softmax over
    these edges of leaky_relu(source_j + target_i, slope), for each of H heads; `feat` [N, H, F],
    `source` [N, H], `target` [M, H]."""
    edges = indptr, indices, back_indptr, back_indices, back_edges
    return _ops.attention_sum(*edges, feat, source, target, slope)[0]


def fingerprint(matrix: Tensor) -> int:
    """Return a hash of all bits of a matrix and their positions; two matrices that differ have the
    same one with a probability of about 2^-32."""
    matrix = matrix.detach().resolve_neg().contiguous()
    if matrix.shape[1] * matrix.element_size() % 4:  # half precision, odd width
        matrix = F.pad(matrix, (0, 1))
    return _ops.fingerprint(matrix.view(torch.int32)).item()
