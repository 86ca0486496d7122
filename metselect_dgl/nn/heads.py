"""What every head shares: a list of layers comes in, a Selection goes out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional as MF
from ..checks import check_index, check_layers, labelled


@dataclass
class Selection:
    """What a head says of the nodes it was asked about (`index`, all of them if None).

    `logits` [n, C]; `layer` [n], the chosen layer; `score` [n], what it was chosen by (how sure
    it is, as log-odds, under the default rule); `loss`, when labels were given.
    """

    logits: Tensor
    layer: Tensor
    score: Tensor
    index: Tensor | None = None
    loss: Tensor | None = None


class LayerHead(nn.Module):
    """A head over layers of widths `in_feats`; subclasses write `forward_rows`.

    Called with labels it also returns the loss over the labelled nodes among `index`; in training
    mode the labels may guide the choice of the layer, in evaluation mode they never do.
    """

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes is {n_classes}; there is at least one class")
        self.in_feats, self.n_classes = list(in_feats), n_classes
        self.n_choices = len(self.in_feats)

    def forward(
        self,
        layers: Sequence[Tensor],
        *,
        labels: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Selection:
        return self.forward_rows(*self.check(layers, labels, index))

    def check(self, layers, labels, index) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """(layers, labels, index) that are sound; the labels are those of the rows `index`."""
        layers = check_layers(layers, self.in_feats, next(self.parameters()))
        return layers, *self.check_targets(labels, index, len(layers[0]))

    def check_targets(self, labels, index, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """(labels, index) that are sound: of the labelled nodes, if there are labels."""
        device = next(self.parameters()).device
        if labels is not None:
            return labelled(labels, index, self.n_classes, rows, device)
        return None, None if index is None else check_index(index, rows, device)

    def check_calibration(self, nodes: int) -> None:
        """Refuse a number of validation nodes that `calibrate` could not use."""

    def forward_rows(
        self, layers: list[Tensor], labels: Tensor | None, index: Tensor | None
    ) -> Selection:
        """`forward` after `check`."""
        raise NotImplementedError("a subclass says how it chooses and decodes")

    def fit(self, layers: Sequence[Tensor], labels: Tensor, index: Tensor | None = None) -> None:
        """Estimate from training nodes what is estimated, not learned: nothing by default."""

    def calibrate(
        self, layers: Sequence[Tensor], labels: Tensor, index: Tensor | None = None
    ) -> Selection | None:
        """Fit on validation nodes what compares layers, and return what is said of those nodes;
        None where there is nothing to fit, as by default."""

    def layer_logits(self, layers: Sequence[Tensor], index: Tensor | None = None) -> Tensor | None:
        """What every layer's own decoder says, [L, n, C]; None if layers have no decoders."""
        return None

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and forget what was estimated."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.in_feats}, n_classes={self.n_classes}"


def rows_of(h: Tensor, index: Tensor | None) -> Tensor:
    """The rows `index`, all of them without it."""
    return h if index is None else h[index]


def answer(logits: Tensor, layer: int | Tensor, labels: Tensor | None, index: Tensor | None):
    """The Selection of a head whose only output is logits."""
    layer = torch.as_tensor(layer, device=logits.device).expand(len(logits))
    score = MF.log_odds(logits.detach()).amax(-1)
    loss = None if labels is None else F.cross_entropy(logits, labels)
    return Selection(logits, layer, score, index, loss)


class DecodersHead(LayerHead):
    """One linear decoder per layer, applied to the layer that was chosen for the node."""

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.decoders = nn.ModuleList(nn.Linear(width, n_classes) for width in self.in_feats)

    @property
    def weights(self) -> list[Tensor]:
        return [decoder.weight for decoder in self.decoders]

    @property
    def biases(self) -> list[Tensor]:
        return [decoder.bias for decoder in self.decoders]

    def layer_logits(self, layers, index=None):
        pairs = zip(self.decoders, layers, strict=True)
        return torch.stack([decoder(rows_of(h, index)) for decoder, h in pairs])

    def decode(self, layers, layer, labels, index, deep_supervision=0.0):
        """(logits, loss) from the chosen layers; no loss without labels."""
        decoders = layers, self.weights, self.biases, layer
        if labels is None:
            return MF.selected_logits(*decoders, index=index), None
        loss, logits = MF.selected_cross_entropy(
            *decoders, labels, index=index, deep_supervision=deep_supervision
        )
        return logits, loss
