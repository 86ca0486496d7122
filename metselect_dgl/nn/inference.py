"""Prediction layer by layer: every layer is scored as it is computed, and need not be kept.

Kept are per row the best layer so far, its score and its logits. Where a layer's score depends on
the answers of the others (the gate), the layers are swept three times: for the answers, for the
scores, and for the logits of the selected layers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from .calibration import gate_table
from .head import LayerwiseHead, Selection
from .source import LayerSource, Rows


@torch.no_grad()
def predict_layer_by_layer(
    head: LayerwiseHead, source: LayerSource, *, exit_at: float = 1.0, progress: bool = False
) -> Selection:
    """Return the selection for all rows of a source.

    Parameters
    ----------
    exit_at : a row whose class is this probable at a layer (0 to 1) is settled there, and deeper
        layers are computed only as far as other rows need them; at 1 all are computed
    progress : show a progress bar
    """
    if not 0 < exit_at <= 1:
        raise ValueError(f"exit_at is {exit_at}, expected a probability above 0, at most 1")
    if exit_at < 1 and not head.scores_are_log_odds:
        raise ValueError("exit_at needs a MetSelect head with rule='confidence'")
    together = head.sees_all_layers
    source = source.repeatable() if together else source
    total = (3 if together else 1) * len(head.in_feats) * source.n_rows
    with tqdm(total=total, unit="node", disable=not progress) as bar:
        best = _BestLayer(head, source, exit_at, bar)
        if not together:
            best.by_score()
        else:
            answers = best.by_score() if exit_at < 1 else best.collect_answers()
            best.by_gate(answers)
            best.decode()
    return Selection(best.logits, best.layer, best.score, edges=source.n_edges)


@torch.no_grad()
def gate_scores(head: LayerwiseHead, source: LayerSource) -> Tensor:
    """Return the gate's score of every layer for all rows of stored layers, [N, L]."""
    best = _BestLayer(head, source, 1.0, tqdm(disable=True))
    return best.gate_scores(best.collect_answers())


class _BestLayer:
    """The best layer of every row so far."""

    def __init__(self, head: LayerwiseHead, source: LayerSource, exit_at: float, bar: tqdm) -> None:
        n, like = source.n_rows, next(head.parameters())
        self.head, self.source, self.exit_at, self.bar = head, source, exit_at, bar
        self.depths = len(head.in_feats)
        self.layer = torch.zeros(n, dtype=torch.long, device=like.device)
        self.score = like.new_full((n,), -torch.inf)
        self.logits = like.new_zeros(n, head.n_classes)
        self.scored = torch.zeros(n, dtype=torch.bool, device=like.device)
        self.pending = torch.ones(n, dtype=torch.bool, device=like.device)  # not settled

    def _sweep(self) -> Iterator[tuple[int, Rows, Tensor]]:
        """Yield (depth, rows, the layer there); after each layer, settle the rows that may exit."""
        for depth, batches in self.source.sweep():
            for rows, h in batches:
                yield depth, rows, h
                self.bar.update(len(h))
                del h  # before the next layer is computed
            self._settle(depth)

    def _settle(self, depth: int) -> None:
        if self.exit_at < 1 and depth + 1 < self.depths:
            self.pending &= self.score.sigmoid() < self.exit_at
            self.source.settle(depth, self.pending)

    def by_score(self) -> Tensor:
        """Select by the scores of single layers; return every layer's answer, [N, L], if they are
        compared by the gate afterwards."""
        answers = self._no_answers() if self.head.sees_all_layers else None
        sign = -1 if self.head.lowest_wins else 1
        for depth, rows, h in self._sweep():
            if answers is not None:
                answers[rows, depth] = self._answer(depth, h).to(answers.dtype)
            score = self.head.score_layer(depth, h)
            if score is None:
                continue
            better = (sign * score > sign * self.score[rows]) | ~self.scored[rows]
            self._take(depth, rows, h, score, better)
        return answers

    def _take(self, depth: int, rows: Rows, h: Tensor, score: Tensor, better: Tensor) -> None:
        """Select layer `depth` for those of the rows where it is better."""
        if better.all():
            self.score[rows], self.layer[rows], self.scored[rows] = score, depth, True
            self.logits[rows] = self.head.decode_layer(depth, h)
            return
        here = better.nonzero().squeeze(1)
        to = here + (rows.start or 0) if isinstance(rows, slice) else rows[here]
        self.score[to], self.layer[to], self.scored[to] = score[here], depth, True
        self.logits[to] = self.head.decode_layer(depth, h[here])

    def _no_answers(self) -> Tensor:
        small = self.head.n_classes <= torch.iinfo(torch.int16).max
        return self.layer.new_zeros(
            len(self.layer), self.depths, dtype=torch.int16 if small else torch.int32
        )

    def _answer(self, depth: int, h: Tensor) -> Tensor:
        return self.head.decode_layer(depth, h).argmax(-1).int()

    def collect_answers(self) -> Tensor:
        """Return the class that every layer's decoder gives, [N, L]."""
        answers = self._no_answers()
        for depth, rows, h in self._sweep():
            answers[rows, depth] = self._answer(depth, h).to(answers.dtype)
        return answers

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
        """Select by the gate among the rows that are not settled."""
        score, layer = self.gate_scores(answers).max(1)
        self.score = torch.where(self.pending, score, self.score)
        self.layer = torch.where(self.pending, layer, self.layer)

    def decode(self) -> None:
        """Compute the logits of the selected layers."""
        for depth, rows, h in self._sweep():
            here = ((self.layer[rows] == depth) & self.pending[rows]).nonzero().squeeze(1)
            to = here + (rows.start or 0) if isinstance(rows, slice) else rows[here]
            self.logits[to] = self.head.decode_layer(depth, h[here])
