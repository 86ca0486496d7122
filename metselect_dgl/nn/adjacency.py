"""The edges of a graph, and features that are mostly 0, as the sparse ops take them."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..functional import graph as MG

if TYPE_CHECKING:
    from dgl import DGLGraph


class Adjacency(NamedTuple):
    """Edges by target, the same edges by source, and the numbers of edges at either end.

    The in-edges of target i come from `indices[indptr[i] : indptr[i + 1]]`; `back_*` say where the
    out-edges of a source go, and `back_edges` which entries of `indices` they are.
    """

    indptr: Tensor  # int64 [M + 1]
    indices: Tensor  # int32 [E]
    back_indptr: Tensor  # int64 [N + 1]
    back_indices: Tensor  # int32 [E]
    back_edges: Tensor  # int32 [E]
    in_degrees: Tensor  # of the targets, [M]
    out_degrees: Tensor  # of the sources in the whole graph, [N]

    @classmethod
    def of(cls, graph: "DGLGraph", index: Tensor | None = None) -> "Adjacency":
        """Return the edges into all nodes, or into the nodes `index`, in that order."""
        source, target = (ends.long() for ends in graph.edges())  # whatever its format
        indices = source[target.argsort(stable=True)]
        degrees, out_degrees = graph.in_degrees().long(), graph.out_degrees().long()
        indptr = _pointers(degrees)
        if index is not None:
            first, degrees = indptr[index], degrees[index]
            indptr = _pointers(degrees)
            within = torch.arange(indptr[-1], device=indptr.device)
            indices = indices[within + torch.repeat_interleave(first - indptr[:-1], degrees)]
        order = indices.argsort(stable=True)
        back_indptr = _pointers(torch.bincount(indices, minlength=len(out_degrees)))
        back_indices = torch.repeat_interleave(degrees)[order]
        small = (part.int() for part in (back_indices, order))
        return cls(indptr, indices.int(), back_indptr, *small, degrees, out_degrees)

    def neighbour_sum(self, feat: Tensor, *, normalized: bool = False) -> tuple[Tensor, Tensor]:
        """Return (A h, h), or (D^{-1/2} A D^{-1/2} h, h), where a node without edges counts as if
        it had one; see `metselect_dgl.functional.graph.neighbour_sum`."""
        if not normalized:
            return MG.neighbour_sum(*self[:4], feat)
        degrees = self.out_degrees, self.in_degrees
        source, target = (d.clamp(min=1).to(feat.dtype).rsqrt() for d in degrees)
        return MG.neighbour_sum(*self[:4], feat, source_scale=source, target_scale=target)


class SparseRows(NamedTuple):
    """A matrix [n, F] of which few entries are not 0: edges from columns to rows."""

    indptr: Tensor  # int64 [n + 1]
    indices: Tensor  # int32 [E]
    back_indptr: Tensor  # int64 [F + 1]
    back_indices: Tensor  # int32 [E]
    weights: Tensor  # [E]
    back_weights: Tensor  # [E]

    @classmethod
    def of(cls, matrix: Tensor) -> "SparseRows":
        row, column = matrix.nonzero().T
        order, values = column.argsort(stable=True), matrix[row, column]
        indptr = _pointers(torch.bincount(row, minlength=matrix.shape[0]))
        back_indptr = _pointers(torch.bincount(column, minlength=matrix.shape[1]))
        return cls(indptr, column.int(), back_indptr, row[order].int(), values, values[order])

    @classmethod
    def if_sparse(cls, matrix: Tensor) -> "SparseRows | None":
        """Return the compressed form where that is faster than a dense product, else None."""
        if not MG.compiled(matrix.device) or 16 * matrix.count_nonzero() > matrix.numel():
            return None
        return cls.of(matrix)

    def times(self, weight: Tensor) -> Tensor:
        """Return the product with a dense [F, D]."""
        edges, (weights, back_weights) = self[:4], self[4:]
        return MG.neighbour_sum(*edges, weight, weights=weights, back_weights=back_weights)[0]


def _pointers(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
