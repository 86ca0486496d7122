"""What every head shares: a list of layers comes in, a Selection goes out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import functional as MF
from ..checks import check_index, check_layers, labelled
from .cache import Cache
from .layers import Layer


@dataclass
class Selection:
    """What a head says of the nodes it was asked about (`index`, all of them if None).

    `logits` [n, C], None in training `without_logits`; `layer` [n], the chosen
    layer; `chosen_by` [n], the score of that choice where there was one; `loss`, when labels were
    given; `edges`, how many were aggregated, where `infer` counted them.
    """

    logits: Tensor | None
    layer: Tensor
    chosen_by: Tensor | None = None
    index: Tensor | None = None
    loss: Tensor | None = None
    edges: int | None = None

    @property
    def score(self) -> Tensor:
        """What the layer was chosen by (how sure it is, as log-odds, under the default rule), or
        how sure the answer is, [n]."""
        if self.chosen_by is not None:
            return self.chosen_by
        if self.logits is None:
            raise RuntimeError("no logits were kept to tell it from; see `without_logits`")
        return MF.log_odds(self.logits.detach()).amax(-1)


class LayerHead(nn.Module):
    """A head over layers of widths `in_feats`; subclasses write `forward_rows`.

    Called with labels it also returns the loss over the labelled nodes among `index`; in training
    mode the labels may guide the choice of the layer, in evaluation mode they never do.
    """

    keep_logits = True

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes is {n_classes}; there is at least one class")
        self.in_feats, self.n_classes = list(in_feats), n_classes
        self.n_choices = len(self.in_feats)
        self._labelled = Cache(labelled)

    def forward(
        self,
        layers: Sequence[Tensor],
        *,
        labels: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Selection:
        layers, labels, index = self.check(layers, labels, index)
        return replace(self.forward_rows(layers, labels), index=index)

    def check(self, layers, labels, index) -> tuple[list[Layer], Tensor | None, Tensor | None]:
        """(layers, labels, index) that are sound; layers and labels are those of `index`."""
        layers = check_layers(layers, self.in_feats, next(self.parameters()))
        labels, index = self.check_targets(labels, index, len(layers[0]))
        return [Layer(h, index) for h in layers], labels, index

    def check_targets(self, labels, index, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """(labels, index) that are sound: of the labelled nodes, if there are labels."""
        device = next(self.parameters()).device
        if labels is not None:
            return self._labelled(labels, index, self.n_classes, rows, device)
        return None, None if index is None else check_index(index, rows, device)

    def check_calibration(self, nodes: int) -> None:
        """Refuse a number of validation nodes that `calibrate` could not use."""

    def forward_rows(self, layers: list[Layer], labels: Tensor | None) -> Selection:
        """`forward` after `check`."""
        raise NotImplementedError("a subclass says how it chooses and decodes")

    @property
    def gives_logits(self) -> bool:
        """Whether the next call has to; see `without_logits`."""
        return self.keep_logits or not self.training

    @property
    def streams(self) -> bool:
        """Whether it can take one layer after the other (`stream`), each freed before the next."""
        return False

    def fit(self, layers: Sequence[Tensor], labels: Tensor, index: Tensor | None = None) -> None:
        """Estimate from training nodes what is estimated, not learned: nothing by default."""

    def judge(self, depth: int, h: Tensor) -> tuple[Tensor | None, Tensor]:
        """(how good layer `depth` is, None for one that is never chosen, and its logits) at rows of
        that layer alone: for `infer`, which takes the best."""
        raise ValueError(f"{type(self).__name__} looks at all layers together; it has no `infer`")

    def renew_moments(self, merge: Callable[[Tensor], None] | None = None) -> None:
        """At the end of an epoch of mini-batches: use what its calls gathered, added up over
        processes by `merge`. Nothing by default."""

    def calibrate(
        self, layers: Sequence[Tensor], labels: Tensor, index: Tensor | None = None
    ) -> Selection | None:
        """Fit on validation nodes what compares layers, and return what is said of those nodes;
        None where there is nothing to fit, as by default."""

    def layer_logits(self, layers: Sequence[Tensor], index: Tensor | None = None) -> Tensor | None:
        """What every layer's own decoder says, [L, n, C]; None if layers have no decoders."""
        return None

    def explain(self, layers: Sequence[Tensor], index: Tensor) -> dict[str, Tensor] | None:
        """Return distances, posteriors and scores at every layer; None if none are measured."""
        return None

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and forget what was estimated."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.in_feats}, n_classes={self.n_classes}"


@contextmanager
def without_logits(model: nn.Module) -> Iterator[None]:
    """In here, calls of the model in training mode with labels give the loss, but no logits where
    the loss needs none in memory (cross entropy of linear decoders): that saves [n, C]."""
    heads = [module for module in model.modules() if isinstance(module, LayerHead)]
    for head in heads:
        head.keep_logits = False
    try:
        yield
    finally:
        for head in heads:
            head.keep_logits = True


class DecodersHead(LayerHead):
    """One linear decoder per layer, applied to the layer that was chosen for the node."""

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.decoders = nn.ModuleList(nn.Linear(width, n_classes) for width in self.in_feats)

    def layer_logits(self, layers, index=None):
        rows = [Layer(h, index).rows() for h in layers]
        return self.decode_all(rows)

    def decode_all(self, rows: Sequence[Tensor]) -> Tensor:
        """[L, n, C]"""
        pairs = zip(self.decoders, rows, strict=True)
        return torch.stack([decoder(h) for decoder, h in pairs])

    def decode(
        self,
        layers: list[Layer],
        layer: Tensor,
        labels: Tensor | None,
        deep_supervision: float = 0.0,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, loss) from the chosen layers; no loss without labels."""
        return decode(layers, self.decoders, layer, labels, deep_supervision, self.gives_logits)


def decode(
    layers: list[Layer],
    decoders: Sequence[nn.Linear],
    layer: Tensor,
    labels: Tensor | None,
    deep_supervision: float = 0.0,
    keep_logits: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """(logits, loss) of every row by the decoder of its layer; no loss without labels."""
    pairs = zip(layers, decoders, strict=True)
    weights, biases = zip(*(_decoder_of(each, decoder) for each, decoder in pairs), strict=True)
    sources, index = [each.source for each in layers], [each.index for each in layers]
    given = sources, weights, biases, layer
    if labels is None:
        return MF.selected_logits(*given, index=index), None
    loss, logits = MF.selected_cross_entropy(
        *given,
        labels,
        index=index,
        deep_supervision=deep_supervision,
        keep_logits=keep_logits,
    )
    return logits, loss


def _decoder_of(layer: Layer, decoder: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight and bias on what the layer stores."""
    if layer.linear is None:
        return decoder.weight, decoder.bias
    return (
        decoder.weight @ layer.linear.weight,
        decoder.weight @ layer.linear.bias + decoder.bias,
    )
