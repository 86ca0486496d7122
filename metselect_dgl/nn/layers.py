"""One layer as a head sees it: rows that stay where they are."""

from dataclasses import dataclass

from torch import Tensor, nn

from .adjacency import SparseRows


@dataclass
class Layer:
    """The rows `index` (all of them if None) of `source`; with `linear`, their image under it,
    which is not stored: whoever can work it into a product of its own need not make it. `sparse`
    are the same rows, if they are mostly 0."""

    source: Tensor
    index: Tensor | None = None
    linear: nn.Linear | None = None
    sparse: SparseRows | None = None

    def __len__(self) -> int:
        return len(self.source if self.index is None else self.index)

    def part(self, some: slice) -> "Layer":
        """Some of the rows."""
        if self.index is None:
            return Layer(self.source[some], None, self.linear)
        return Layer(self.source, self.index[some], self.linear)

    def rows(self) -> Tensor:
        """The rows themselves, [n, D]."""
        if self.sparse is not None:
            return self.sparse.times(self.linear.weight.T) + self.linear.bias
        h = self.source if self.index is None else self.source[self.index]
        return h if self.linear is None else self.linear(h)

    @property
    def worth_mapping(self) -> bool:
        """Whether moments and decoders on the source cost less than making the layer: they take
        the square of its width, and in return no row of the layer is made."""
        return self.linear is not None and len(self) >= 16 * self.source.shape[1]

    def stored(self) -> "Layer":
        """The same layer without a map."""
        return self if self.linear is None else Layer(self.rows())
