"""The MetSelect head: equations 4 to 7 of the paper over a list of layers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import functional as MF
from .calibration import (
    FOLDS,
    cross_fit_gate,
    fit_temperature,
    gate_features,
    gate_odds,
    gate_score,
    gate_width,
)
from .heads import DecodersHead, Selection
from .layers import Layer
from .losses import distance_loss, posterior_loss
from .prototypes import Prototypes

_GATED = 196608  # rows of layers that the gate looks at together
_NODES_PER_WEIGHT = 8  # validation nodes without which `auto` tries no gate


class MetSelectHead(DecodersHead):
    r"""Choose for every node the layer that is most sure of its class, and decode it there.

    .. math::
        d^{(l)}_{ic} = \lVert R_l (h^{(l)}_i - \mu^{(l)}_c) \rVert^2, \quad
        p^{(l)}_i = \mathrm{softmax}_c(-d^{(l)}_{ic} / 2 T_l), \quad
        l^*_i = \arg\max_l \max_c \log \frac{p^{(l)}_{ic}}{1 - p^{(l)}_{ic}}

    In training the true class takes the place of the best one, and the prototypes are estimated
    anew from the nodes of the call; in evaluation those of the last training call (or of `fit`)
    are used.

    Parameters
    ----------
    in_feats : width of every layer
    n_classes : number of classes
    rule : ``"confidence"`` as above; ``"distance"``: the smallest distance; ``"opposite"``: the
        least confident layer (the paper's MetSelect-max)
    loss : ``"ce"``: cross entropy of the selected decoder; ``"distance"`` (Eq. 7) and
        ``"posterior"``: of the metric itself, which then also gives the logits
    select : how `calibrate` makes layers comparable: ``"plain"`` (not at all: T = 1),
        ``"temperature"`` (one per layer), ``"gate"`` (a logistic regression on what all layers
        think of a layer's answer), ``"auto"`` (the gate, if there are eight validation nodes or
        more for each of a layer's weights in it, else the temperatures)
    shrinkage : ``"oas"``, ``"ledoit_wolf"`` or a number in [0, 1]
    deep_supervision : weight of the mean over layers of every layer's own loss
    metric_dim : measure distances in a projection to this many dimensions: learned if the loss
        is of the metric, random otherwise
    moments : what the prototypes are made of in training: ``"call"`` (as above); in mini-batches,
        ``"epoch"`` (the calls of the epoch before, see `renew_moments`) or ``"ema"`` (an
        exponential moving average over calls)
    alpha : margin of the ``"distance"`` loss

    Examples
    --------
    >>> import torch
    >>> head = MetSelectHead([8, 16], 3)
    >>> layers = [torch.randn(60, 8), torch.randn(60, 16)]
    >>> out = head(layers, labels=torch.arange(60) % 3)
    >>> out.loss.backward()
    >>> head.eval()(layers).logits.shape
    torch.Size([60, 3])
    """

    LOSSES = ("ce", "distance", "posterior")
    SELECTS = ("plain", "temperature", "gate", "auto")

    def __init__(
        self,
        in_feats: Sequence[int],
        n_classes: int,
        *,
        rule: str = "confidence",
        loss: str = "ce",
        select: str = "auto",
        shrinkage: str | float = "oas",
        deep_supervision: float = 1.0,
        metric_dim: int | None = None,
        moments: str = "call",
        alpha: float = 1.0,
    ) -> None:
        super().__init__(in_feats, n_classes)
        for name, value, known in (
            ("rule", rule, MF.RULES),
            ("loss", loss, self.LOSSES),
            ("select", select, self.SELECTS),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; use one of {', '.join(known)}")
        MF.check_shrinkage(shrinkage)
        if metric_dim is not None and metric_dim < 1:
            raise ValueError(f"metric_dim is {metric_dim}; use 1 or more, or None")
        if deep_supervision < 0:
            raise ValueError(f"deep_supervision is {deep_supervision}; it cannot be negative")
        if moments != "call" and shrinkage == "ledoit_wolf":
            raise ValueError(f"moments={moments!r} is one pass, ledoit_wolf needs two; use 'oas'")
        if select == "gate" and (loss, rule) != ("ce", "confidence"):
            raise ValueError(
                f"select='gate' needs loss='ce' and rule='confidence', not {loss!r} and {rule!r}"
            )
        self.rule, self.loss, self.select = rule, loss, select
        self.deep_supervision, self.alpha = deep_supervision, alpha
        self.projections = self._projections(metric_dim)
        widths = self.in_feats if metric_dim is None else [metric_dim] * len(self.in_feats)
        self.prototypes = Prototypes(widths, n_classes, shrinkage=shrinkage, source=moments)
        self.register_buffer("temperature", torch.ones(len(widths)))
        self.register_buffer("decoder_temperature", torch.ones(len(widths)))
        self.register_buffer("gate", torch.zeros(len(widths), gate_width(len(widths)) + 1))
        if loss != "ce":
            self.decoders.requires_grad_(False)

    def _projections(self, metric_dim: int | None) -> nn.ModuleList | None:
        if metric_dim is None:
            return None
        lines = [nn.Linear(width, metric_dim, bias=False) for width in self.in_feats]
        return nn.ModuleList(lines).requires_grad_(self.loss != "ce")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.temperature.fill_(1)
        self.decoder_temperature.fill_(1)
        self.gate.zero_()

    def project(self, layers: Sequence[Layer]) -> list[Layer]:
        """The space in which distances are measured."""
        if self.projections is None:
            return list(layers)
        pairs = zip(self.projections, layers, strict=True)
        return [Layer(line(layer.rows())) for line, layer in pairs]

    def forward_rows(self, layers, labels):
        guided = labels if self.training else None
        mapped = guided is not None and self._maps
        layers = [h if mapped and h.worth_mapping else h.stored() for h in layers]
        metric = self.project(layers)
        if guided is not None:
            self.prototypes.learn(metric, labels)
        layer, score = self.choose(layers, metric, guided)
        return self._decode(layers, metric, layer, score, labels)

    @property
    def _maps(self) -> bool:
        """Whether moments and loss can do without a layer that is a linear map of constants."""
        return self.loss == "ce" and self.projections is None and self.prototypes.source == "call"

    def renew_moments(self, merge=None):
        if self.prototypes.source != "call":
            self.prototypes.renew(merge)

    @torch.no_grad()
    def gather(self, layers, labels):
        """Take nodes into the moments that `renew_moments` sets, without choosing for them."""
        layers, labels, _ = self.check(layers, labels, None)
        self.prototypes.gather(self.project(layers), labels)

    @property
    def streams(self) -> bool:
        """Whether one layer after the other will do: the gate compares them all."""
        return self.loss == "ce" and self.projections is None and not self.gate.any()

    def stream(self, layers: Iterable[Tensor]) -> Selection:
        """What `forward` says of all nodes, without holding more than one layer at a time."""
        weights, biases = zip(*((each.weight, each.bias) for each in self.decoders), strict=True)
        logits, layer, score = MF.select_and_decode(
            layers,
            **self.prototypes.metric(),
            weights=weights,
            biases=biases,
            temperature=self.temperature,
            rule=self.rule,
        )
        return Selection(self._predictable(logits), layer, score)

    def judge(self, depth, h):
        metric, known = self._measured(depth, h), self.prototypes.metric_of(depth)
        temperature = self.temperature[depth : depth + 1]
        _, _, rank = MF.select_layer([metric], **known, temperature=temperature, rule=self.rule)
        rank = rank if known["factors"][0].any() else None
        if self.loss == "ce":
            return rank, self._predictable(self.decoders[depth](h))
        return rank, -MF.class_distances([metric], **known)[0] / (2 * temperature)

    def _measured(self, depth: int, h: Tensor) -> Tensor:
        """`project` of one layer."""
        return h if self.projections is None else self.projections[depth](h)

    def opinion(self, depth: int, h: Tensor) -> Tensor:
        """What the gate is told of every class by layer `depth`: the log-odds by metric and by
        decoder, [2, n, C]."""
        known = self.prototypes.metric_of(depth)
        measured = MF.metric_logits([self._measured(depth, h)], **known)[0]
        decoded = self._predictable(self.decoders[depth](h))
        pair = measured / self.temperature[depth], decoded / self.decoder_temperature[depth]
        return gate_odds(*pair)

    def _decode(self, layers, metric, layer, score, labels) -> Selection:
        """The Selection of a choice; a class without training node is never predicted."""
        if self.loss == "ce":
            deep = self.deep_supervision if self.training else 0.0
            logits, loss = self.decode(layers, layer, labels, deep)
        else:
            logits, loss = self._metric_decode(metric, layer, labels)
        return Selection(self._predictable(logits), layer, score, loss=loss)

    def _predictable(self, logits: Tensor | None) -> Tensor | None:
        """-inf for a class that has no training node."""
        valid = self.prototypes.valid
        return logits if logits is None or valid.all() else logits.masked_fill(~valid, -torch.inf)

    def choose(self, layers, metric, labels) -> tuple[Tensor, Tensor]:
        """(layer, score) of every row."""
        if labels is None and self.gate.any():
            score, layer = self._gate_scores(layers, metric).max(0)
            return layer, score
        layer, _, score = MF.select_layer(
            **_rows(metric),
            **self.prototypes.metric(metric, labels),
            temperature=self.temperature,
            labels=labels,
            rule=self.rule,
        )
        return layer, score

    def _metric_decode(self, metric, layer, labels):
        """Logits -d/2T of the selected layer, and the loss of the metric."""
        dist2 = MF.class_distances(**_rows(metric), **self.prototypes.metric())  # [L, n, C]
        temperature = self.temperature.clone()
        scaled = -dist2 / (2 * temperature[:, None, None])
        logits = scaled[layer, torch.arange(len(layer), device=layer.device)]
        if labels is None:
            return logits, None
        if self.loss == "distance":
            losses = distance_loss(dist2, labels, self.alpha)  # [L, n]
        else:
            losses = posterior_loss(dist2, labels, temperature)
        known = self.prototypes.valid[labels]  # always, in training
        loss = losses.gather(0, layer.unsqueeze(0))[:, known].mean()
        if self.training and self.deep_supervision:
            loss = loss + self.deep_supervision * losses.mean()
        return logits, loss

    @torch.no_grad()
    def fit(self, layers, labels, index=None):
        """Estimate the prototypes from the training nodes `index` of `labels` [N]."""
        layers, labels, _ = self.check(layers, labels, index)
        self.prototypes.update(self.project(layers), labels)

    @torch.no_grad()
    def calibrate(self, layers, labels, index=None):
        """Fit temperatures, and the gate if it is wanted, on the validation nodes `index`.

        Returns the Selection of those nodes; the gate that judges one has not seen its label, so
        that accuracies on validation nodes stay honest.
        """
        layers, labels, index = self.check(layers, labels, index)
        self.check_calibration(len(labels))
        metric = self.project(layers)
        self.gate.zero_()
        if self.select == "plain":
            layer, score = self.choose(layers, metric, None)
        else:
            layer, score = self._compare_layers(layers, metric, labels)
        return replace(self._decode(layers, metric, layer, score, None), index=index)

    def check_calibration(self, nodes: int) -> None:
        if self.select == "gate" and nodes < 2 * FOLDS:
            raise ValueError(
                f"select='gate' needs {2 * FOLDS} validation nodes or more, got {nodes}; "
                "use select='temperature'"
            )

    def _wants_gate(self, nodes: int) -> bool:
        """Asked for; or allowed to, with nodes enough for its weights."""
        if self.select == "auto" and (self.loss, self.rule) == ("ce", "confidence"):
            return nodes >= _NODES_PER_WEIGHT * self.gate.shape[1]
        return self.select == "gate"

    def _compare_layers(self, layers, metric, labels) -> tuple[Tensor, Tensor]:
        """Fit temperatures and, if it is wanted, the gate; what is chosen by them."""
        if not self._wants_gate(len(labels)):
            measured = MF.metric_logits(**_rows(metric), **self.prototypes.metric())
            self.temperature.copy_(fit_temperature(measured, labels))
            return self.choose(layers, metric, None)
        measured, decoded = self._opinions(layers, metric)
        fitted = fit_temperature(torch.cat([measured, decoded]), labels)
        self.temperature.copy_(fitted[: len(layers)])
        self.decoder_temperature.copy_(fitted[len(layers) :])
        right = decoded.argmax(-1) == labels  # [L, n]
        gate, held_out = cross_fit_gate(self._gate_features(measured, decoded), right)
        self.gate.copy_(gate)
        score, layer = self._alive_only(held_out).max(0)
        return layer, score

    def _gate_features(self, measured: Tensor, decoded: Tensor) -> Tensor:
        """Of the logits [L, n, C] of metric and decoders, not yet divided by temperatures."""
        cool = measured / self.temperature[:, None, None].to(measured.dtype)
        warm = decoded / self.decoder_temperature[:, None, None]
        return gate_features(cool, warm, decoded.argmax(-1))

    def _gate_scores(self, layers, metric) -> Tensor:
        """[L, n], a part of the nodes at a time: their features are many."""
        scores, step = [], max(1, _GATED // len(layers))
        for start in range(0, max(len(layers[0]), 1), step):
            some = slice(start, start + step)
            parts = ([layer.part(some) for layer in each] for each in (layers, metric))
            scores.append(gate_score(self._gate_features(*self._opinions(*parts)), self.gate))
        return self._alive_only(torch.cat(scores, 1))

    def _opinions(self, layers, metric) -> tuple[Tensor, Tensor]:
        """What the metric and the decoder of every layer say, [L, n, C] each."""
        measured = MF.metric_logits(**_rows(metric), **self.prototypes.metric())
        return measured, self._all_logits(layers)

    def _alive_only(self, score: Tensor) -> Tensor:
        """A collapsed layer is never selected."""
        return score.masked_fill(~self.prototypes.alive.unsqueeze(1), -torch.inf)

    def layer_logits(self, layers, index=None):
        return self._all_logits([Layer(h, index) for h in layers])

    def _all_logits(self, layers: list[Layer]) -> Tensor:
        if self.loss != "ce":  # the metric decodes; the linear decoders are not trained
            known = self.prototypes.metric() | {"temperature": self.temperature}
            return MF.metric_logits(**_rows(self.project(layers)), **known)
        return self._predictable(self.decode_all([layer.rows() for layer in layers]))

    @torch.no_grad()
    def explain(self, layers: Sequence[Tensor], index: Tensor) -> dict[str, Tensor]:
        """What every layer thinks of one node: dist2 and posterior [L, C], and, [L] each, the
        temperature, the log-odds of its best class, the score it is chosen by (`gated`: the
        gate's), and its decoder's answer."""
        layers, _, _ = self.check(layers, None, index)
        metric, known = self.project(layers), self.prototypes.metric()
        rows = _rows(metric)
        dist2 = MF.class_distances(**rows, **known)[:, 0]
        logits = MF.metric_logits(**rows, **known, temperature=self.temperature)[:, 0]
        log_odds = MF.log_odds(logits).amax(-1)
        score = {"confidence": log_odds, "distance": -dist2.amin(-1), "opposite": -log_odds}[
            self.rule
        ]
        if self.gate.any():
            score = self._gate_scores(layers, metric)[:, 0]
        return {
            "dist2": dist2,
            "posterior": logits.softmax(-1),
            "temperature": self.temperature,
            "log_odds": log_odds,
            "score": self._alive_only(score.unsqueeze(1))[:, 0],
            "gated": self.gate.any(),
            "decoder": self._all_logits(layers)[:, 0].argmax(-1),
        }

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, rule={self.rule!r}, loss={self.loss!r}, "
            f"select={self.select!r}, deep_supervision={self.deep_supervision}"
        )


def _rows(layers: Sequence[Layer]) -> dict:
    """As the functions of :mod:`metselect_dgl.functional` take them."""
    return {"layers": [h.source for h in layers], "index": [h.index for h in layers]}
