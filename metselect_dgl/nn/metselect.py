"""MetSelect: prototypes measure every layer, a comparer selects one, a decoder classifies there."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import functional as MF
from .calibration import log_odds_at
from .comparers import GateComparer, PlainComparer, TemperatureComparer
from .decoders import LinearDecoders, MetricDecoder, Projections
from .head import LayerwiseHead, Selection
from .inference import gate_scores
from .layer_rows import LayerStack
from .model import LayerSelect
from .prototypes import Prototypes


class MetSelectHead(LayerwiseHead):
    r"""Select for every node the layer that is most sure of its class, and decode it there.

    .. math::
        d^{(l)}_{ic} = \lVert R_l (h^{(l)}_i - \mu^{(l)}_c) \rVert^2, \quad
        p^{(l)}_i = \mathrm{softmax}_c(-d^{(l)}_{ic} / 2 T_l), \quad
        l^*_i = \arg\max_l \max_c \log \frac{p^{(l)}_{ic}}{1 - p^{(l)}_{ic}}

    In training the true class takes the place of the best one, and the prototypes are estimated
    from the nodes of the call; in evaluation those of the last training call are used.

    Parameters
    ----------
    in_feats : width of every layer
    n_classes : number of classes
    rule : ``"confidence"`` as above; ``"distance"``: the smallest distance; ``"opposite"``: the
        least confident layer (the paper's MetSelect-max)
    loss : ``"ce"``: cross entropy of the selected decoder; ``"distance"`` (Eq. 7) and
        ``"posterior"``: of the metric itself, which then also gives the logits
    select : how `calibrate` makes layers comparable: ``"plain"`` (not at all: T = 1),
        ``"temperature"`` (one per layer), ``"gate"`` (a logistic regression on the log-odds that
        all layers give to a layer's answer), ``"auto"`` (the gate, if there are eight validation
        nodes or more for each of a layer's weights in it, else the temperatures)
    shrinkage : ``"oas"``, ``"ledoit_wolf"`` or a number in [0, 1]
    deep_supervision : weight of the mean over layers of every layer's own loss
    metric_dim : measure distances in a projection to this many dimensions: learned if the loss
        is of the metric, random otherwise
    moments : what the prototypes are estimated from in training: ``"call"`` (as above); in
        mini-batches, ``"epoch"`` (the calls of the epoch before, see `renew_moments`) or ``"ema"``
        (an exponential moving average over calls)
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
        _check_options(rule, loss, select, shrinkage, deep_supervision, metric_dim, moments)
        if not math.isfinite(alpha):
            raise ValueError(f"alpha is {alpha}; it must be a finite number")
        self.options = f"rule={rule!r}, loss={loss!r}, select={select!r}"
        self.rule, self.loss, self.deep_supervision = rule, loss, deep_supervision
        self.lowest_wins = rule == "opposite"
        self.scores_are_log_odds = rule == "confidence"
        self.decoders = LinearDecoders(self.in_feats, n_classes)
        self.decoders.requires_grad_(loss == "ce")  # kept, so that all losses have one state_dict
        self.metric_decoder = None if loss == "ce" else MetricDecoder(loss, alpha)
        self.projections = Projections(self.in_feats, metric_dim).requires_grad_(loss != "ce")
        widths = [metric_dim or width for width in self.in_feats]
        self.prototypes = Prototypes(widths, n_classes, shrinkage=shrinkage, source=moments)
        self.comparer = _comparer(select, (loss, rule) == ("ce", "confidence"), len(widths))
        # whether moments and loss can do without the rows of a layer that is a linear map
        self.keeps_maps = loss == "ce" and metric_dim is None and moments == "call"

    @property
    def sees_all_layers(self) -> bool:
        """Whether layers are compared by a gate, which sees the answers of all of them."""
        return self.comparer.sees_all_layers

    def select(self, stack, labels, logits=True):
        guided = labels if self.training else None
        stack = stack.stored(keep_maps=self.keeps_maps and guided is not None)
        metric = self.projections(stack)
        if guided is not None:
            self.prototypes.learn(metric, guided)
        layer, score = self._choose(stack, metric, guided)
        return self._decode(stack, metric, layer, score, labels, logits)

    def _choose(self, stack, metric, labels=None) -> tuple[Tensor, Tensor]:
        """Return layer and score of every row."""
        if labels is None and self.sees_all_layers:
            score, layer = gate_scores(self, stack).max(1)
            return layer, score
        known = self.prototypes.metric()
        return metric.select(known, self.comparer.temperature, self.rule, labels)

    def _decode(self, stack, metric, layer, score, labels, logits=True) -> Selection:
        """Return the selection; a class without training node is never predicted."""
        deep = self.deep_supervision if self.training else 0.0
        if self.metric_decoder is None:
            kept, loss = stack.decode(self.decoders, layer, labels, deep, logits)
        else:
            known = self.prototypes.metric()
            dist2 = MF.class_distances(**metric.sources(), **known)
            kept, loss = self.metric_decoder.decode(
                dist2, self.comparer.temperature, layer, labels, known["valid"], deep
            )
        return Selection(self.prototypes.predictable(kept), layer, score, loss=loss)

    def score_layer(self, depth, h):
        known = self.prototypes.metric(depth)
        temperature = self.comparer.temperature[depth : depth + 1]
        h = self.projections.layer(depth, h)
        _, _, score = MF.select_layer([h], **known, temperature=temperature, rule=self.rule)
        worst = torch.inf if self.lowest_wins else -torch.inf
        return score if known["factors"][0].any() else torch.full_like(score, worst)

    def decode_layer(self, depth, h):
        if self.metric_decoder is None:
            return self.prototypes.predictable(self.decoders[depth](h))
        known = self.prototypes.metric(depth)
        dist2 = MF.class_distances([self.projections.layer(depth, h)], **known)[0]
        return -dist2 / (2 * self.comparer.temperature[depth])

    def log_odds_of(self, depth: int, h: Tensor, classes: Tensor) -> Tensor:
        """Return a layer's log-odds of `classes` [n, K] by metric and by decoder, [2, n, K]."""
        known = self.prototypes.metric(depth)
        metric = MF.metric_logits([self.projections.layer(depth, h)], **known)[0]
        metric = metric / self.comparer.temperature[depth]
        decoder = self.decode_layer(depth, h) / self.comparer.decoder_temperature[depth]
        odds = torch.stack([log_odds_at(metric, classes), log_odds_at(decoder, classes)])
        return odds.clamp(-30, 30)

    def gather(self, stack: LayerStack, labels: Tensor) -> None:
        """Add training rows to those that the next prototypes are estimated from."""
        self.prototypes.gather(self.projections(stack), labels)

    def estimate(self, stack, labels, merge=None):
        self.prototypes.estimate(self.projections(stack), labels, merge)

    def check_calibration(self, nodes: int) -> None:
        self.comparer.check(nodes)

    def compare(self, stack, labels):
        metric = self.projections(stack)
        measured = MF.metric_logits(**metric.sources(), **self.prototypes.metric())
        scores = self.comparer.fit(measured, lambda: self.layer_logits(stack.rows()), labels)
        if scores is None:
            layer, score = self._choose(stack, metric)
        else:
            score, layer = scores.masked_fill(~self.prototypes.alive[:, None], -torch.inf).max(0)
        return self._decode(stack, metric, layer, score, None)

    @torch.no_grad()
    def explain(self, layers: Sequence[Tensor], index: Tensor) -> dict[str, Tensor]:
        """Return what every layer measures at one node: dist2 and posterior [L, C], and [L] each,
        temperature, log-odds of the best class, score (`gated`: the gate's), decoder's answer."""
        stack, _, _ = self.check(layers, None, index)
        metric = {**self.projections(stack).sources(), **self.prototypes.metric()}
        dist2 = MF.class_distances(**metric)[:, 0]
        logits = MF.metric_logits(**metric, temperature=self.comparer.temperature)[:, 0]
        log_odds = MF.log_odds(logits).amax(-1)
        scores = {"confidence": log_odds, "distance": -dist2.amin(-1), "opposite": -log_odds}
        gated = self.sees_all_layers
        score = gate_scores(self, stack)[0] if gated else scores[self.rule]
        return {
            "dist2": dist2,
            "posterior": logits.softmax(-1),
            "temperature": self.comparer.temperature,
            "log_odds": log_odds,
            "score": score.masked_fill(~self.prototypes.alive, -torch.inf),
            "gated": gated,
            "decoder": self.layer_logits(stack.rows())[:, 0].argmax(-1),
        }

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Read checkpoints in which the comparer's buffers belonged to the head."""
        for name in ("temperature", "decoder_temperature", "gate"):
            value = state_dict.pop(prefix + name, None)
            if value is not None and name in self.comparer.state_dict():
                state_dict[f"{prefix}comparer.{name}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.options}, deep_supervision={self.deep_supervision}"


def _comparer(select: str, gate_fits: bool, n_layers: int) -> PlainComparer:
    if select == "plain":
        return PlainComparer(n_layers)
    if select == "gate" or (select == "auto" and gate_fits):
        return GateComparer(n_layers, required=select == "gate")
    return TemperatureComparer(n_layers)


def _check_options(rule, loss, select, shrinkage, deep_supervision, metric_dim, moments) -> None:
    for name, value, known in (
        ("rule", rule, MF.RULES),
        ("loss", loss, MetSelectHead.LOSSES),
        ("select", select, MetSelectHead.SELECTS),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; use one of {', '.join(known)}")
    MF.check_shrinkage(shrinkage)
    if metric_dim is not None and metric_dim < 1:
        raise ValueError(f"metric_dim is {metric_dim}; use 1 or more, or None")
    if not 0 <= deep_supervision < math.inf:
        raise ValueError(
            f"deep_supervision is {deep_supervision}; it cannot be negative or infinite"
        )
    if moments != "call" and shrinkage == "ledoit_wolf":
        raise ValueError(f"moments={moments!r} is one pass, ledoit_wolf needs two; use 'oas'")
    if select == "gate" and (loss, rule) != ("ce", "confidence"):
        raise ValueError(
            f"select='gate' needs loss='ce' and rule='confidence', not {loss!r} and {rule!r}"
        )


class MetSelect(LayerSelect):
    """MetSelect on any backbone that returns its layers and has their widths as `layer_feats`.

    Options are those of :class:`metselect_dgl.nn.MetSelectHead`.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> graph, feat, labels = dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3
    >>> model = MetSelect(GCN(8, 16, num_layers=2, self_loop=True), 3)
    >>> model(graph, feat, labels=labels, index=torch.arange(20)).loss.backward()
    >>> model.predict(graph, feat).layer.shape
    torch.Size([30])
    """

    head_class = MetSelectHead

    @classmethod
    def paper(cls, backbone: nn.Module, n_classes: int, **options) -> "MetSelect":
        """Return the paper's plain setting: no deep supervision, nothing fitted on validation."""
        return cls(backbone, n_classes, **{"deep_supervision": 0.0, "select": "plain", **options})
