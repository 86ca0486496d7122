"""Linear maps per layer, and how the selected layer gives logits and a loss."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .layer_rows import LayerStack
from .losses import distance_loss, posterior_loss


class LinearDecoders(nn.ModuleList):
    """One linear map per layer; to the number of classes, the decoders."""

    def __init__(self, in_feats: Sequence[int], out_feats: int, bias: bool = True) -> None:
        super().__init__(nn.Linear(width, out_feats, bias) for width in in_feats)

    def reset_parameters(self) -> None:
        """Draw every weight anew."""
        for linear in self:
            linear.reset_parameters()


class Projections(LinearDecoders):
    """One linear map per layer into the space in which distances are measured; without
    `metric_dim`, the layers as they are."""

    def __init__(self, in_feats: Sequence[int], metric_dim: int | None) -> None:
        super().__init__([] if metric_dim is None else in_feats, metric_dim, bias=False)

    def layer(self, depth: int, h: Tensor) -> Tensor:
        """Return one layer in that space."""
        return self[depth](h) if len(self) else h

    def forward(self, stack: LayerStack) -> LayerStack:
        if not len(self):
            return stack
        return LayerStack.of([self[depth](h) for depth, h in enumerate(stack.rows())])


class MetricDecoder:
    """The logits -d/2T of the selected layer, and the loss of the distances: ``"distance"`` (Eq. 7,
    margin alpha) or ``"posterior"``."""

    def __init__(self, loss: str, alpha: float) -> None:
        self.loss, self.alpha = loss, alpha

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
        if self.loss == "posterior":
            losses = posterior_loss(dist2, labels, temperature)  # [L, n]
        else:
            losses = distance_loss(dist2, labels, self.alpha)
        loss = losses.gather(0, layer.unsqueeze(0))[:, known[labels]].mean()
        return logits, loss + deep_supervision * losses.mean() if deep_supervision else loss
