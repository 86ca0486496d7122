"""The rows of the layers that a head consumes: stored, picked by an index, or not yet computed.

No head asks which of these a layer is: it calls the methods of a `LayerStack`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .. import functional as MF
from ..checks import check_finite
from .prepared import FeatureRows


@dataclass
class LayerRows:
    """The n rows of one layer.

    Parameters
    ----------
    source : [N, D], the stored layer; with `linear`, what the map is to be applied to
    index : int64 [n], the rows in question; None: all of them
    linear : a linear map that is not applied yet: moments and decoders can absorb it
    features : what was prepared for a source of constant features
    """

    source: Tensor
    index: Tensor | None = None
    linear: nn.Linear | None = None
    features: FeatureRows | None = None

    def __len__(self) -> int:
        return len(self.source if self.index is None else self.index)

    def part(self, some: slice) -> "LayerRows":
        """Return some of the rows of a stored layer."""
        if self.index is None:
            return LayerRows(self.source[some])
        return LayerRows(self.source, self.index[some])

    def rows(self) -> Tensor:
        """Return the rows themselves, [n, D]."""
        if self.features is not None:
            return self.features.map(self.linear)
        h = self.source if self.index is None else self.source[self.index]
        return h if self.linear is None else self.linear(h)

    def stored(self) -> "LayerRows":
        """Return the layer with its map applied."""
        return self if self.linear is None else LayerRows(self.rows())

    @property
    def worth_mapping(self) -> bool:
        """Whether moments and decoders on the source cost less than the rows of the layer: they
        take the square of the source's width, and in return no row is computed."""
        return self.linear is not None and len(self) >= 16 * self.source.shape[1]

    def source_moments(self, labels: Tensor, n_classes: int) -> MF.Moments:
        """Return the class moments of the source at these rows."""
        if self.features is not None:
            return self.features.moments(labels, n_classes)
        return MF.moments([self.source], labels, n_classes, index=self.index)

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
        """Return the stack with the maps of its layers applied; with `keep_maps`, only where
        leaving a map out costs more."""
        layers = []
        for layer in self.layers:
            layers.append(layer if keep_maps and layer.worth_mapping else layer.stored())
        return LayerStack(layers)

    def checked(self, nodes: Tensor | None = None) -> "LayerStack":
        """Return the stack, or raise an error that names layer and node of the first value that is
        not finite; rows are those of `nodes`."""
        for depth, layer in enumerate(self.layers):
            if layer.index is None or layer.linear is not None:
                check_finite([layer.rows()], depth, nodes)
            else:
                check_finite([layer.source], depth)
        return self

    def moments(self, labels: Tensor, n_classes: int) -> MF.Moments:
        """Return the class moments of every layer; of a mapped layer, the moments of its source
        under the map."""
        stored = [layer for layer in self.layers if layer.linear is None]
        sources, index = [layer.source for layer in stored], [layer.index for layer in stored]
        moments = MF.moments(sources, labels, n_classes, index=index)
        for depth, layer in enumerate(self.layers):
            if layer.linear is not None:
                source = layer.source_moments(labels, n_classes)
                image = source.mapped(layer.linear.weight, layer.linear.bias)
                moments = moments.with_layer(depth, image)
        return moments

    def class_distances(self, metric: dict) -> Tensor:
        """Return the squared distance of every row to every class mean, [L, n, C]."""
        return MF.class_distances(**self._sources(), **metric)

    def metric_logits(self, metric: dict, temperature: Tensor | None = None) -> Tensor:
        """Return the logits of the posterior of every layer, [L, n, C]."""
        return MF.metric_logits(**self._sources(), **metric, temperature=temperature)

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
                source = layer.source_moments(labels, len(means[depth]))
                means[depth] = source.means()[0].to(means[depth])
                factors[depth] = factors[depth] @ layer.linear.weight.detach()
        layer, _, score = MF.select_layer(
            **self._sources(),
            means=means,
            factors=factors,
            valid=metric["valid"],
            temperature=temperature,
            labels=labels,
            rule=rule,
        )
        return layer, score

    def decode(self, decoders: Sequence[nn.Linear], layer: Tensor) -> Tensor:
        """Return the logits of every row by the decoder of its layer, [n, C]."""
        weights, biases = self._decoders(decoders)
        return MF.selected_logits(**self._sources(), weights=weights, biases=biases, layer=layer)

    def cross_entropy(
        self,
        decoders: Sequence[nn.Linear],
        layer: Tensor,
        labels: Tensor,
        deep_supervision: float = 0.0,
        logits: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of the selected decoders (Eq. 6) and, if asked for, their logits."""
        weights, biases = self._decoders(decoders)
        return MF.selected_cross_entropy(
            **self._sources(),
            weights=weights,
            biases=biases,
            layer=layer,
            labels=labels,
            deep_supervision=deep_supervision,
            keep_logits=logits,
        )

    def _sources(self) -> dict:
        """Return the layers as the functions of :mod:`metselect_dgl.functional` take them."""
        sources, index = [], []
        for layer in self.layers:
            sources.append(layer.source)
            index.append(layer.index)
        return {"layers": sources, "index": index}

    def _decoders(self, decoders: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
        weights, biases = [], []
        for layer, decoder in zip(self.layers, decoders, strict=True):
            weight, bias = layer.decoder(decoder)
            weights.append(weight)
            biases.append(bias)
        return weights, biases
