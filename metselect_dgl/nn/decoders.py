"""How the selected layer gives logits and a loss: by linear decoders, or by the metric itself."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .layer_rows import LayerStack
from .losses import distance_loss, posterior_loss


class LinearDecoders(nn.ModuleList):
    """One linear decoder per layer, applied to the layer that was selected for the row; the loss is
    cross entropy (Eq. 6)."""

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(nn.Linear(width, n_classes) for width in in_feats)

    def decode(
        self,
        stack: LayerStack,
        layer: Tensor,
        labels: Tensor | None = None,
        deep_supervision: float = 0.0,
        logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return logits and loss by the decoders of the selected layers; no loss without labels,
        and no logits beside a loss if they are not wanted."""
        if labels is None:
            return stack.decode(self, layer), None
        loss, kept = stack.cross_entropy(self, layer, labels, deep_supervision, logits)
        return kept, loss

    def decode_layer(self, depth: int, h: Tensor) -> Tensor:
        """Return the logits of one layer, [n, C]."""
        return self[depth](h)

    def decode_all(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the logits of every layer, [L, n, C]."""
        return torch.stack([self[depth](h) for depth, h in enumerate(rows)])

    def reset_parameters(self) -> None:
        """Draw every weight anew."""
        for decoder in self:
            decoder.reset_parameters()


class MetricDecoder:
    """The logits -d/2T of the selected layer, and a loss of the distances.

    Parameters
    ----------
    loss : a function of distances [L, n, C], labels [n] and temperatures [L] that returns the loss
        [L, n] of every row at every layer
    """

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.loss = loss

    @classmethod
    def of(cls, name: str, alpha: float) -> "MetricDecoder":
        """Return the decoder of ``"distance"`` (Eq. 7, margin alpha) or ``"posterior"``."""
        if name == "posterior":
            return cls(posterior_loss)
        return cls(lambda dist2, labels, temperature: distance_loss(dist2, labels, alpha))

    def decode(
        self,
        dist2: Tensor,
        temperature: Tensor,
        layer: Tensor,
        labels: Tensor | None,
        known: Tensor,
        deep_supervision: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and loss; rows of classes that are not `known` [C] do not count."""
        temperature = temperature.clone()
        scaled = -dist2 / (2 * temperature[:, None, None])
        logits = scaled[layer, torch.arange(len(layer), device=layer.device)]
        if labels is None:
            return logits, None
        losses = self.loss(dist2, labels, temperature)  # [L, n]
        loss = losses.gather(0, layer.unsqueeze(0))[:, known[labels]].mean()
        return logits, loss + deep_supervision * losses.mean() if deep_supervision else loss
