"""Comparers make the scores of layers comparable: not at all, by temperatures, or by a gate.

They are fitted on validation nodes. Only the gate compares the answers of all layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .calibration import FOLDS, cross_fit_gate, fit_temperature, gate_features, gate_width

_NODES_PER_WEIGHT = 8  # validation nodes per weight of the gate, without which "auto" fits none


class PlainComparer(nn.Module):
    """Compare scores as they are: every temperature is 1."""

    sees_all_layers = False

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(n_layers), persistent=False)

    def check(self, nodes: int) -> None:
        """Raise an error if there are too few validation nodes."""

    def fit(self, measured: Tensor, decode: Callable[[], Tensor], labels: Tensor) -> Tensor | None:
        """Fit on validation nodes, to `measured` [L, n, C], the logits of the metric at temperature
        1, and the logits of every layer's decoder, [L, n, C], that `decode` returns. Returns scores
        [L, n] that did not see the label of their node; None if layers are scored singly."""

    def reset_parameters(self) -> None:
        """Forget what was fitted."""
        self.temperature.fill_(1)


class TemperatureComparer(PlainComparer):
    """Divide the squared distances of a layer by a temperature of its own."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(n_layers)
        self.register_buffer("temperature", torch.ones(n_layers))

    def fit(self, measured, decode, labels):
        self.temperature.copy_(fit_temperature(measured, labels))


class GateComparer(TemperatureComparer):
    """Score a layer by a logistic regression on the log-odds of all layers for its answer. If it is
    not `required`, only temperatures are fitted to less than eight validation nodes per weight."""

    def __init__(self, n_layers: int, *, required: bool) -> None:
        super().__init__(n_layers)
        self.required = required
        self.register_buffer("decoder_temperature", torch.ones(n_layers))
        self.register_buffer("gate", torch.zeros(n_layers, gate_width(n_layers) + 1))

    @property
    def sees_all_layers(self) -> bool:
        """Whether the gate is fitted."""
        return bool(self.gate.any())

    def check(self, nodes: int) -> None:
        if self.required and nodes < 2 * FOLDS:
            raise ValueError(
                f"select='gate' needs {2 * FOLDS} validation nodes or more, got {nodes}; "
                "use select='temperature'"
            )

    def fit(self, measured, decode, labels):
        self.gate.zero_()
        if not self.required and len(labels) < _NODES_PER_WEIGHT * self.gate.shape[1]:
            return super().fit(measured, decode, labels)
        decoded, n_layers = decode(), len(measured)
        fitted = fit_temperature(torch.cat([measured, decoded]), labels)
        self.temperature.copy_(fitted[:n_layers])
        self.decoder_temperature.copy_(fitted[n_layers:])
        metric = measured / self.temperature[:, None, None].to(measured.dtype)
        decoder = decoded / self.decoder_temperature[:, None, None]
        answer = decoded.argmax(-1)  # [L, n]
        gate, held_out = cross_fit_gate(gate_features(metric, decoder, answer), answer == labels)
        self.gate.copy_(gate)
        return held_out

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.decoder_temperature.fill_(1)
        self.gate.zero_()
