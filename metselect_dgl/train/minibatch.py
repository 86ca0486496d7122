"""The training loop in mini-batches, in one process or several.

Every process draws the same order of the training nodes and cuts it into the same batches, each of
which is shared out: there are as many steps for all, whatever the numbers are.
"""

import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import dgl
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..config import Config
from ..data import NodeDataset
from ..functional import Moments
from ..nn import (
    DegreeSampler,
    LayerHead,
    Selection,
    calibrate_in_batches,
    infer,
    loops_left_to,
    rows_of_layers,
    without_logits,
)
from .distributed import ALONE, Team
from .loop import TrainingLoop

_LARGE = 100_000  # nodes from which on inference shows a bar


class BatchLoop(TrainingLoop):
    """One run whose step is an epoch of mini-batches; `data` as `prepare` gives it."""

    def __init__(
        self, config: Config, data: NodeDataset, out: Path | None, team: Team = ALONE
    ) -> None:
        super().__init__(config, data, out)
        if type(self.model.head).judge is LayerHead.judge:
            raise ValueError(
                f"selector {config.selector!r} compares whole layers and has no mini-batches; use "
                "final or one of metselect, or leave out the batch size"
            )
        if len(self.split.train) < team.size:
            raise ValueError(f"{team.size} processes for {len(self.split.train)} training nodes")
        # FinalSelect leaves layer 0 without a gradient; MetSelect's decoders all get one
        self.team, self.wrapped = team, team.wrap(self.model, unused=self.prototypes is None)
        self.graph = loops_left_to(self.model.backbone, data.graph)
        self.sampler = DegreeSampler(config.num_layers * [config.fanout], self.graph)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def may_diverge(self) -> bool:
        """One of several processes must not end alone: the others would wait for it."""
        return self.team.size == 1

    @property
    def prototypes(self):
        """Of the head; None if it has none."""
        return getattr(self.model.head, "prototypes", None)

    def step(self) -> float:
        """An epoch; the mean loss."""
        _seed(self.config.seed, self.state.epoch, self.team.rank)
        self._first_moments()
        self.model.train()
        total = self._learn()
        self.team.sum(total)
        self._renew_moments()
        return (total[0] / total[1]).item()

    def _learn(self) -> Tensor:
        """One step for every batch; (the sum of the losses of all nodes, their number) here."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for weight, feat, labels, blocks in self._batches(self.state.epoch):
            with without_logits(self.model):
                loss = self.wrapped(blocks, feat, labels).loss
            self.optimizer.zero_grad()
            (weight * loss).backward()
            self.optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)], device=self.device)
        return total

    def _batches(self, epoch: int) -> Iterator[tuple[float, Tensor, Tensor, list]]:
        """(weight, features, labels, blocks) of this process's part of every batch; the weights
        make the mean over processes the mean over the nodes of the batch."""
        generator = torch.Generator().manual_seed(_mixed(self.config.seed, epoch))
        train = self.split.train
        order = train[torch.randperm(len(train), generator=generator).to(train.device)]
        order = order.to(self.graph.idtype)
        parts, weights = share_out(order, self.config.batch_size, self.team)
        plan, data = _Plan(parts, train.device), self.data
        loader = dgl.dataloading.DataLoader(self.graph, plan, self.sampler, device=data.feat.device)
        with warnings.catch_warnings():  # DGL's advice about the affinity of worker processes
            warnings.filterwarnings("ignore", "Dataloader CPU affinity")
            batches = iter(loader)
        for weight, (sources, seeds, blocks) in zip(weights, batches, strict=True):
            yield weight, data.feat[sources], data.labels[seeds], blocks

    @torch.no_grad()
    def _first_moments(self) -> None:
        """Before the first step, one pass for the moments to start from."""
        known = self.prototypes
        if known is None or known.source == "call" or known.valid.any():
            return
        for _, feat, labels, blocks in self._batches(epoch=-1):
            self.model.head.gather(self.model.backbone(blocks, feat), labels)
        self._renew_moments()

    def _renew_moments(self) -> None:
        self.model.renew_moments(self.team.sum if self.team.size > 1 else None)

    def judge(self) -> dict:
        """By the first process, on the whole graph; training goes on with the moments it had."""
        state, record = self.state, None
        if self.team.rank == 0:
            known = {} if self.prototypes is None else self.prototypes.state_dict()
            before = {name: value.clone() for name, value in known.items()}
            record = super().judge()
            if before:
                self.prototypes.load_state_dict(before)
        self.team.share_buffers(self.model)
        known = (record, state.best_accuracy, state.best_loss, state.best_epoch)
        record, state.best_accuracy, state.best_loss, state.best_epoch = self.team.share(known)
        return record

    def validate(self) -> Selection:
        data, split = self.data, self.split
        return calibrate_in_batches(
            self.model, self.graph, data.feat, data.labels, split.train, split.val
        )

    def predict(self) -> Selection:
        long = self.graph.num_nodes() >= _LARGE
        return infer(self.model, self.graph, self.data.feat, progress=long)

    def layers(self, index: Tensor) -> list[Tensor]:
        return rows_of_layers(self.model, self.graph, self.data.feat, index)

    def save(self) -> None:
        if self.team.rank > 0:
            return
        gathered = None if self.prototypes is None else self.prototypes.gathered
        self.state.gathered = [] if gathered is None else gathered.parts()
        super().save()

    def _saved(self) -> dict | None:
        """The first process's, whose disk others may not see."""
        return self.team.share(super()._saved() if self.team.rank == 0 else None)

    def _restore(self, saved: dict) -> None:
        super()._restore(saved)
        if self.state.gathered:
            parts = [each.to(self.device) for each in self.state.gathered]
            self.prototypes.gathered = Moments.of_parts(parts)


class _Plan(IterableDataset):
    """Batches that were made beforehand, as DGL's DataLoader takes them."""

    def __init__(self, parts: list[Tensor], device: torch.device) -> None:
        self.parts, self.device = parts, device

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts)


def share_out(order: Tensor, batch_size: int, team: Team) -> tuple[list[Tensor], list[float]]:
    """This process's part of every batch, and its weight in the mean over processes. No part is
    empty or, for BatchNorm's sake, of one node, unless there are too few."""
    batches = list(order.split(max(batch_size, team.size)))
    if len(batches) > 1 and len(batches[-1]) < 2 * team.size:
        batches[-2:] = [torch.cat(batches[-2:])]
    parts = [batch.tensor_split(team.size)[team.rank] for batch in batches]
    pairs = zip(parts, batches, strict=True)
    return parts, [team.size * len(part) / len(batch) for part, batch in pairs]


def _mixed(*numbers: int) -> int:
    """A seed of several numbers."""
    return zlib.crc32(repr(numbers).encode())


def _seed(*numbers: int) -> None:
    torch.manual_seed(_mixed(*numbers))
    dgl.seed(_mixed(*numbers) % 2**31)
