"""The rows of the layers that a head consumes: stored, picked by an index, or not yet computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional as MF
from ..checks import check_finite
from .feature_rows import FeatureRows
from .plain_modules import is_plain_linear


@dataclass
class LayerRows:
    """The n rows of one layer, to which a linear map may still have to be applied."""

    source: Tensor  # [N, D], the stored layer, or what the map is to be applied to
    index: Tensor | None = None  # int64 [n], the rows in question; None: all of them
    linear: nn.Linear | None = None  # the map, which moments and decoders can absorb
    features: FeatureRows | None = None  # with a map, what was prepared for its constant source

    def __len__(self) -> int:
        return len(self.source if self.index is None else self.index)

    def part(self, some: slice) -> "LayerRows":
        """Return some of the rows of a stored layer."""
        if self.index is None:
            return LayerRows(self.source[some])
        return LayerRows(self.source, self.index[some])

    def rows(self) -> Tensor:
        """Return the rows themselves, [n, D]."""
        if self.linear is not None:
            return self.features.map(self.linear)
        return self.source if self.index is None else self.source[self.index]

    def stored(self, keep_map: bool = False) -> "LayerRows":
        """Return the layer with its map applied; with `keep_map`, unless it is `worth_mapping`."""
        kept = self.linear is None or (keep_map and self.worth_mapping)
        return self if kept else LayerRows(self.rows())

    @property
    def worth_mapping(self) -> bool:
        """Whether moments and decoders on the source, at the cost of its width squared, cost less
        than the rows of the layer."""
        return self.linear is not None and len(self) >= 16 * self.source.shape[1]

    def decoder(self, decoder: nn.Linear) -> tuple[Tensor, Tensor]:
        """Return weight and bias that decode the source as `decoder` decodes the layer."""
        if self.linear is None:
            return decoder.weight, decoder.bias
        weight = decoder.weight @ self.linear.weight
        return weight, decoder.weight @ self.linear.bias + decoder.bias


class LayerStack:
    """The same n rows of every layer."""

    def __init__(self, layers: Sequence[LayerRows]) -> None:
        self.layers = list(layers)

    @classmethod
    def of(cls, layers: Sequence[Tensor], index: Tensor | None = None) -> "LayerStack":
        """Return the rows `index` of stored layers."""
        return cls([LayerRows(h, index) for h in layers])

    @property
    def n_rows(self) -> int:
        """The number of rows, n."""
        return len(self.layers[0])

    def rows(self) -> list[Tensor]:
        """Return the rows of every layer, L tensors [n, D_l]."""
        return [layer.rows() for layer in self.layers]

    def split(self, first: int) -> tuple["LayerStack", "LayerStack"]:
        """Return the `first` rows of stored layers, and the others."""
        parts = slice(first), slice(first, None)
        return tuple(LayerStack([layer.part(some) for layer in self.layers]) for some in parts)

    def stored(self, keep_maps: bool = False) -> "LayerStack":
        """Return the stack with the maps of its layers applied; see :meth:`LayerRows.stored`."""
        return LayerStack([layer.stored(keep_maps) for layer in self.layers])

    def checked(self, nodes: Tensor | None = None) -> "LayerStack":
        """Return the stack, or raise an error that names what is not finite; rows are `nodes`."""
        for depth, layer in enumerate(self.layers):
            if layer.index is None or layer.linear is not None:
                check_finite([layer.rows()], depth, nodes)
            else:
                check_finite([layer.source], depth)
        return self

    def moments(self, labels: Tensor, n_classes: int) -> MF.Moments:
        """Return the class moments of every layer; of a mapped one, those of its source, mapped."""
        stored = LayerStack([layer for layer in self.layers if layer.linear is None])
        moments = MF.moments(**stored.sources(), labels=labels, n_classes=n_classes)
        for depth, layer in enumerate(self.layers):
            if layer.linear is not None:
                source = layer.features.moments(labels, n_classes)
                image = source.mapped(layer.linear.weight, layer.linear.bias)
                moments = moments.with_layer(depth, image)
        return moments

    def sources(self) -> dict:
        """Return the layers as the functions of :mod:`metselect_dgl.functional` take them."""
        index = [layer.index for layer in self.layers]
        return {"layers": [layer.source for layer in self.layers], "index": index}

    def select(
        self, metric: dict, temperature: Tensor, rule: str, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return layer and score of every row (Eq. 4; with `labels`, Eq. 5).

        With labels, `metric` was estimated from these rows: of a mapped layer it is measured on the
        source, since R (W x - W mu) = (R W) (x - mu).
        """
        means, factors = list(metric["means"]), list(metric["factors"])
        for depth, layer in enumerate(self.layers):
            if layer.linear is not None:
                source = layer.features.moments(labels, len(means[depth]))
                means[depth] = source.means()[0].to(means[depth])
                factors[depth] = factors[depth] @ layer.linear.weight.detach()
        metric = {**metric, "means": means, "factors": factors, "temperature": temperature}
        layer, _, score = MF.select_layer(**self.sources(), **metric, labels=labels, rule=rule)
        return layer, score

    def decode(
        self,
        decoders: Sequence[nn.Linear],
        layer: Tensor,
        labels: Tensor | None = None,
        deep_supervision: float = 0.0,
        logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return logits [n, C] and loss (Eq. 6) of every row by the decoder of its layer; no loss
        without labels, and no logits beside a loss if they are not wanted."""
        if not all(is_plain_linear(decoder) for decoder in decoders):
            return self._decode_by_modules(decoders, layer, labels, deep_supervision)
        pairs = zip(self.layers, decoders, strict=True)
        weights, biases = zip(*(rows.decoder(decoder) for rows, decoder in pairs), strict=True)
        selected = {**self.sources(), "weights": weights, "biases": biases, "layer": layer}
        if labels is None:
            return MF.selected_logits(**selected), None
        loss, kept = MF.selected_cross_entropy(
            **selected, labels=labels, deep_supervision=deep_supervision, keep_logits=logits
        )
        return kept, loss

    def _decode_by_modules(
        self, decoders: Sequence[nn.Module], layer: Tensor, labels: Tensor | None, deep: float
    ) -> tuple[Tensor, Tensor | None]:
        """Decode every row by every decoder, called as the user changed it."""
        pairs = zip(decoders, self.rows(), strict=True)
        every = torch.stack([decoder(h) for decoder, h in pairs])  # [L, n, C]
        logits = every[layer, torch.arange(len(layer), device=layer.device)]
        if labels is None:
            return logits, None
        loss = F.cross_entropy(logits, labels)
        if deep:
            loss = loss + deep * F.cross_entropy(every.flatten(0, 1), labels.repeat(len(every)))
        return logits, loss
