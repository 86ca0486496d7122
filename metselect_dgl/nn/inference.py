"""Prediction layer by layer: kept are per row the best layer so far, its score and its logits.

Where a gate compares the answers of all layers, they are swept three times: for the answers, for
the scores, and for the logits of the selected layers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from .calibration import gate_table
from .head import LayerwiseHead, Selection
from .layer_rows import LayerStack
from .source import LayerSource, Rows, StoredLayers


@torch.no_grad()
def predict_layer_by_layer(
    head: LayerwiseHead, source: LayerSource, *, exit_at: float = 1.0, progress: bool = False
) -> Selection:
    """Return the selection for all rows of a source. A row whose class has the probability
    `exit_at` at a layer asks for no deeper layer; deeper layers are computed, and compared, only
    for rows that the others need; at 1 all are computed. `progress` shows a progress bar."""
    if not 0 < exit_at <= 1:
        raise ValueError(f"exit_at is {exit_at}, expected a probability above 0, at most 1")
    if exit_at < 1 and not head.scores_are_log_odds:
        raise ValueError("exit_at needs a MetSelect head with rule='confidence'")
    together = head.sees_all_layers
    source = source.repeatable() if together else source
    total = (3 if together else 1) * (len(head.in_feats) - head.first_scored) * source.n_rows
    with tqdm(total=total, unit="node", disable=not progress) as bar:
        best = _BestLayer(head, source, exit_at, bar)
        answers = best.by_score()
        if together:
            best.by_gate(answers)
    score = best.score if head.compares_layers else None
    return Selection(best.logits, best.layer, score, edges=source.n_edges)


@torch.no_grad()
def gate_scores(head: LayerwiseHead, stack: LayerStack) -> Tensor:
    """Return the gate's score of every layer for the rows of a stack, [n, L]."""
    source = StoredLayers(stack.rows, None, stack.n_rows)
    best = _BestLayer(head, source, 1.0, tqdm(disable=True))
    return best.gate_scores(best.by_score())


class _BestLayer:
    """The best layer of every row so far."""

    def __init__(self, head: LayerwiseHead, source: LayerSource, exit_at: float, bar: tqdm) -> None:
        n, like = source.n_rows, next(head.parameters())
        self.head, self.source, self.exit_at, self.bar = head, source, exit_at, bar
        self.layer = torch.zeros(n, dtype=torch.long, device=like.device)
        self.score = like.new_full((n,), -torch.inf)
        self.logits = like.new_zeros(n, head.n_classes)
        self.scored = torch.zeros(n, dtype=torch.bool, device=like.device)
        self.pending = torch.ones(n, dtype=torch.bool, device=like.device)  # not settled

    def _sweep(self) -> Iterator[tuple[int, Rows, Tensor]]:
        """Yield (depth, rows, the layer there); after each layer, settle the rows that may exit."""
        for depth, batches in self.source.sweep(self.head.first_scored):
            for rows, h in batches:
                yield depth, rows, h
                self.bar.update(len(h))
                del h  # before the next layer is computed
            if self.exit_at < 1 and depth + 1 < len(self.head.in_feats):
                self.pending &= self.score.sigmoid() < self.exit_at
                self.source.settle(depth, self.pending)

    def by_score(self) -> Tensor | None:
        """Select by the scores of single layers. If a gate compares layers, return the class that
        every layer's decoder gives, [N, L]; scores are then computed for early exit only."""
        gated, answers = self.head.sees_all_layers, None
        if gated:
            small = self.head.n_classes <= torch.iinfo(torch.int16).max
            shape = len(self.layer), len(self.head.in_feats)
            answers = self.layer.new_zeros(shape, dtype=torch.int16 if small else torch.int32)
        for depth, rows, h in self._sweep():
            if gated:
                answers[rows, depth] = self.head.decode_layer(depth, h).argmax(-1).to(answers.dtype)
            if not gated or self.exit_at < 1:
                self._take_better(depth, rows, h)
        return answers

    def _take_better(self, depth: int, rows: Rows, h: Tensor) -> None:
        """Select layer `depth` for those of the rows where its score is better."""
        score = self.head.score_layer(depth, h)
        sign = -1 if self.head.lowest_wins else 1
        better = (sign * score > sign * self.score[rows]) | ~self.scored[rows]
        if better.all():
            self.score[rows], self.layer[rows], self.scored[rows] = score, depth, True
            self.logits[rows] = self.head.decode_layer(depth, h)
            return
        here = better.nonzero().squeeze(1)
        to = _positions(rows, here)
        self.score[to], self.layer[to], self.scored[to] = score[here], depth, True
        self.logits[to] = self.head.decode_layer(depth, h[here])

    def gate_scores(self, answers: Tensor) -> Tensor:
        """Return the gate's scores, [N, L], of answers [N, L]."""
        gate = self.head.comparer.gate
        table = gate_table(gate).to(self.score.dtype)  # [L, 2, L]
        scores = gate[:, -1].to(table).expand(len(self.layer), -1).clone()  # [N, L]
        for depth, rows, h in self._sweep():
            odds = self.head.log_odds_of(depth, h, answers[rows].long())  # [2, n, L]
            scores[rows] += torch.einsum("bnl,lb->nl", odds, table[:, :, depth])
        return scores.masked_fill_(~self.head.prototypes.alive, -torch.inf)

    def by_gate(self, answers: Tensor) -> None:
        """Select by the gate among the rows that are not settled, and decode these."""
        score, layer = self.gate_scores(answers).max(1)
        self.score = torch.where(self.pending, score, self.score)
        self.layer = torch.where(self.pending, layer, self.layer)
        for depth, rows, h in self._sweep():
            here = ((self.layer[rows] == depth) & self.pending[rows]).nonzero().squeeze(1)
            self.logits[_positions(rows, here)] = self.head.decode_layer(depth, h[here])


def _positions(rows: Rows, here: Tensor) -> Tensor:
    """Return the entries `here` of a batch of rows."""
    return here + (rows.start or 0) if isinstance(rows, slice) else rows[here]
