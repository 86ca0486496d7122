"""What the paper compares MetSelect with: the last layer, attention, jumping knowledge."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from dgl.nn import JumpingKnowledge
from torch import Tensor, nn

from .. import functional as MF
from .heads import DecodersHead, LayerHead, Selection, decode
from .layers import Layer
from .model import LayerSelect, MetSelect
from .selectors import MetSelectHead


class FinalHead(LayerHead):
    """FinalSelect: decode every node from the last layer, as a plain GNN does.

    Examples
    --------
    >>> import torch
    >>> FinalHead([8, 8], 3)([torch.randn(5, 8), torch.randn(5, 8)]).layer
    tensor([1, 1, 1, 1, 1])
    """

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.decoder = nn.Linear(self.in_feats[-1], n_classes)

    def forward_rows(self, layers, labels):
        last = layers[-1].stored()
        only = torch.zeros(len(last), dtype=torch.long, device=last.source.device)
        logits, loss = decode([last], [self.decoder], only, labels, keep_logits=self.gives_logits)
        return Selection(logits, only + len(layers) - 1, loss=loss)

    def judge(self, depth, h):
        if depth + 1 < self.n_choices:
            return None, None
        logits = self.decoder(h)
        return MF.log_odds(logits).amax(-1), logits


class JumpingHead(LayerHead):
    """JKNet: merge the layers with :class:`dgl.nn.JumpingKnowledge` and decode the result.

    `mode` is ``"max"``, ``"cat"`` or ``"lstm"``; the first and the last need layers of one width.
    There is no choice: `layer` is the last one for every node.
    """

    def __init__(self, in_feats: Sequence[int], n_classes: int, *, mode: str = "cat") -> None:
        super().__init__(in_feats, n_classes)
        self.jump = _jumping(mode, self.in_feats)
        width = sum(self.in_feats) if mode == "cat" else self.in_feats[0]
        self.decoder = nn.Linear(width, n_classes)

    def forward_rows(self, layers, labels):
        logits = self.decoder(self.jump([layer.rows() for layer in layers]))
        last = torch.full((len(logits),), len(layers) - 1, device=logits.device)
        return Selection(logits, last, loss=_cross_entropy(logits, labels))


def _cross_entropy(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    return None if labels is None else F.cross_entropy(logits, labels)


def _jumping(mode: str, in_feats: list[int]) -> JumpingKnowledge:
    if mode != "cat" and len(set(in_feats)) > 1:
        raise ValueError(f"JumpingKnowledge {mode!r} needs layers of one width, got {in_feats}")
    return JumpingKnowledge(mode, in_feats[0], len(in_feats))


class AttentionHead(DecodersHead):
    """AttnSelect: the attention of JKNet-LSTM with the softmax replaced by its largest entry.

    The hard choice has no gradient, so the attention learns through the soft one
    (straight-through).
    """

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.jump = _jumping("lstm", self.in_feats)

    def forward_rows(self, layers, labels):
        rows = [layer.rows() for layer in layers]
        stack = torch.stack(rows, 1)  # [n, L, D]
        attention = self.jump.att(self.jump.lstm(stack)[0]).squeeze(-1)  # [n, L]
        layer = attention.argmax(1)
        soft = attention.softmax(1)
        hard = F.one_hot(layer, len(layers)) + soft - soft.detach()
        logits = torch.einsum("nl,lnc->nc", hard, self.decode_all(rows))
        score = MF.log_odds(attention.detach()).amax(-1)
        return Selection(logits, layer, score, loss=_cross_entropy(logits, labels))


class JumpingMetSelectHead(LayerHead):
    """JKNet-MetSelect: MetSelect among JK-LSTM, JK-CAT (projected back) and JK-MAX.

    `layer` is 0, 1 or 2 for these three. Options are those of :class:`MetSelectHead`.
    """

    def __init__(self, in_feats: Sequence[int], n_classes: int, **options) -> None:
        super().__init__(in_feats, n_classes)
        self.lstm, self.cat, self.max = (_jumping(m, self.in_feats) for m in ("lstm", "cat", "max"))
        self.squeeze = nn.Linear(sum(self.in_feats), self.in_feats[0])
        self.n_choices = 3
        self.head = MetSelectHead(3 * [self.in_feats[0]], n_classes, **options)

    def merged(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """The three views that MetSelect chooses from."""
        layers = list(layers)
        return [self.lstm(layers), self.squeeze(self.cat(layers)), self.max(layers)]

    def forward_rows(self, layers, labels):
        merged = self.merged([layer.rows() for layer in layers])
        return self.head.forward_rows([Layer(h) for h in merged], labels)

    def check_calibration(self, nodes):
        self.head.check_calibration(nodes)

    @torch.no_grad()
    def fit(self, layers, labels, index=None):
        self.head.fit(self.merged(layers), labels, index)

    @torch.no_grad()
    def calibrate(self, layers, labels, index=None):
        return self.head.calibrate(self.merged(layers), labels, index)

    def layer_logits(self, layers, index=None):
        return self.head.layer_logits(self.merged(layers), index)

    @torch.no_grad()
    def explain(self, layers, index):
        """As :meth:`MetSelectHead.explain`, over the three views."""
        return self.head.explain(self.merged(layers), index)


class FinalSelect(LayerSelect):
    """A plain GNN: every node is decoded from the last layer.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> model = FinalSelect(GCN(8, 16, self_loop=True), 3)
    >>> model(dgl.rand_graph(30, 99), torch.randn(30, 8)).logits.shape
    torch.Size([30, 3])
    """

    head_class = FinalHead


class MetSelectMax(MetSelect):
    """The paper's ablation: the layer that MetSelect trusts least.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> model = MetSelectMax(GCN(8, 16, self_loop=True), 3)
    >>> model(dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3).logits.shape
    torch.Size([30, 3])
    """

    def __init__(self, backbone: nn.Module, n_classes: int, **options) -> None:
        super().__init__(backbone, n_classes, **{**options, "rule": "opposite"})


class AttnSelect(LayerSelect):
    """The layer with the largest attention of a JKNet-LSTM.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> model = AttnSelect(GCN(8, 16, self_loop=True), 3)
    >>> model(dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3).logits.shape
    torch.Size([30, 3])
    """

    head_class = AttentionHead


class JKNet(LayerSelect):
    """JKNet: all layers merged by :class:`dgl.nn.JumpingKnowledge`; `mode` max, cat or lstm.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> model = JKNet(GCN(8, 16, self_loop=True), 3, mode="max")
    >>> model(dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3).logits.shape
    torch.Size([30, 3])
    """

    head_class = JumpingHead


class JKNetMetSelect(LayerSelect):
    """MetSelect among the three jumping-knowledge views of the layers.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> model = JKNetMetSelect(GCN(8, 16, self_loop=True), 3)
    >>> model(dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3).logits.shape
    torch.Size([30, 3])
    """

    head_class = JumpingMetSelectHead
