"""The selectors that the paper compares with: the last layer, attention, jumping knowledge."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from dgl.nn import JumpingKnowledge
from torch import Tensor, nn

from .. import functional as MF
from .decoders import LinearDecoders
from .head import LayerHead, LayerwiseHead, Selection
from .layer_rows import LayerStack
from .metselect import MetSelectHead
from .model import LayerSelect


class FinalHead(LayerwiseHead):
    """FinalSelect: decode every node from the last layer, as a plain GNN does."""

    decodes_layers = compares_layers = False

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.first_scored = self.n_choices - 1
        self.decoder = nn.Linear(self.in_feats[-1], n_classes)

    def select(self, stack, labels, logits=True):
        last = LayerStack([stack.layers[-1].stored()])
        only = torch.zeros(last.n_rows, dtype=torch.long, device=self.decoder.weight.device)
        kept, loss = last.decode([self.decoder], only, labels, logits=logits)
        return Selection(kept, only + len(stack.layers) - 1, loss=loss)

    def score_layer(self, depth, h):
        return h.new_zeros(len(h))

    def decode_layer(self, depth, h):
        return self.decoder(h)


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

    def select(self, stack, labels, logits=True):
        logits = self.decoder(self.jump(stack.rows()))
        last = torch.full((len(logits),), len(stack.layers) - 1, device=logits.device)
        return Selection(logits, last, loss=_cross_entropy(logits, labels))


def _cross_entropy(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    return None if labels is None else F.cross_entropy(logits, labels)


def _jumping(mode: str, in_feats: list[int]) -> JumpingKnowledge:
    if mode != "cat" and len(set(in_feats)) > 1:
        raise ValueError(f"JumpingKnowledge {mode!r} needs layers of one width, got {in_feats}")
    return JumpingKnowledge(mode, in_feats[0], len(in_feats))


class AttentionHead(LayerHead):
    """AttnSelect: the attention of JKNet-LSTM with the softmax replaced by its largest entry.

    The hard choice has no gradient: the attention learns through the soft one (straight-through).
    """

    decodes_layers = True

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__(in_feats, n_classes)
        self.decoders = LinearDecoders(self.in_feats, n_classes)
        self.jump = _jumping("lstm", self.in_feats)

    def select(self, stack, labels, logits=True):
        rows = stack.rows()
        sequence = torch.stack(rows, 1)  # [n, L, D]
        attention = self.jump.att(self.jump.lstm(sequence)[0]).squeeze(-1)  # [n, L]
        layer = attention.argmax(1)
        soft = attention.softmax(1)
        hard = F.one_hot(layer, len(rows)) + soft - soft.detach()
        logits = torch.einsum("nl,lnc->nc", hard, self.layer_logits(rows))
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
        """Return the three views that MetSelect selects from."""
        layers = list(layers)
        return [self.lstm(layers), self.squeeze(self.cat(layers)), self.max(layers)]

    def select(self, stack, labels, logits=True):
        return self.head.select(LayerStack.of(self.merged(stack.rows())), labels, logits)

    def check_calibration(self, nodes):
        self.head.check_calibration(nodes)

    def estimate(self, stack, labels, merge=None):
        self.head.estimate(LayerStack.of(self.merged(stack.rows())), labels, merge)

    def compare(self, stack, labels):
        return self.head.compare(LayerStack.of(self.merged(stack.rows())), labels)

    def layer_logits(self, layers, index=None):
        return self.head.layer_logits(self.merged(layers), index)

    @torch.no_grad()
    def explain(self, layers, index):
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


class AttnSelect(LayerSelect):
    """The layer with the largest attention of a JKNet-LSTM."""

    head_class = AttentionHead


class JKNet(LayerSelect):
    """JKNet: all layers merged by :class:`dgl.nn.JumpingKnowledge`; `mode` max, cat or lstm."""

    head_class = JumpingHead


class JKNetMetSelect(LayerSelect):
    """MetSelect among the three jumping-knowledge views of the layers."""

    head_class = JumpingMetSelectHead
