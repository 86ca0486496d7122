"""The batches of a training loop: the whole graph in one batch, or sampled mini-batches.

Every process draws the same order of the training nodes and cuts it into the same batches, each of
which is shared out: all processes take the same number of steps.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import dgl
import torch
from torch import Tensor

from ..config import Config
from ..data import NodeDataset, Split
from ..nn import DegreeSampler, LayerSelect, Selection, sampling_graph
from ..nn.source import BATCH
from .distributed import ProcessGroup

_LARGE = 100_000  # nodes from which on prediction shows a progress bar


class Batch(NamedTuple):
    """The arguments of one training call, and its weight in the mean over processes."""

    weight: float
    graph: dgl.DGLGraph | list[dgl.DGLGraph]
    feat: Tensor
    labels: Tensor
    index: Tensor | None = None


class WholeGraph:
    """One batch per epoch: all training nodes of the graph."""

    batch_size: int | None = None  # of prediction and calibration
    uneven = False  # whether some processes have fewer batches and wait for the others

    def __init__(
        self, config: Config, data: NodeDataset, backbone: torch.nn.Module, group: ProcessGroup
    ) -> None:
        self.config, self.data, self.group = config, data, group
        self.split = Split(*(part[data.labels[part] >= 0] for part in data.split(config.split)))
        for name, part in self.split._asdict().items():
            if name != "test" and len(part) == 0:
                where = f"split {config.split} of {data.name}"
                raise ValueError(f"{where} has no labelled node for {name}")

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch; epoch -1 is a pass before the first."""
        data = self.data
        yield Batch(1.0, data.graph, data.feat, data.labels, self.split.train)

    def validate(self, model: LayerSelect) -> tuple[Selection, Tensor]:
        """Calibrate with the present weights; return selection and labels of validation nodes."""
        data, split = self.data, self.split
        selection = model.calibrate(
            data.graph, data.feat, data.labels, split.train, split.val, batch_size=self.batch_size
        )
        return selection, data.labels[split.val]

    def predict(self, model: LayerSelect) -> Selection:
        """Return the selection for all nodes."""
        data, large = self.data, self.data.graph.num_nodes() >= _LARGE
        progress = large and self.batch_size is not None
        return model.predict(data.graph, data.feat, batch_size=self.batch_size, progress=progress)


class MiniBatches(WholeGraph):
    """Batches of training nodes with sampled neighbours."""

    batch_size = BATCH

    def __init__(
        self, config: Config, data: NodeDataset, backbone: torch.nn.Module, group: ProcessGroup
    ) -> None:
        super().__init__(config, data, backbone, group)
        if len(self.split.train) < group.size:
            raise ValueError(f"{group.size} processes for {len(self.split.train)} training nodes")
        self.graph = sampling_graph(backbone, data.graph)
        self.sampler = DegreeSampler(config.num_layers * [config.fanout], self.graph)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this process's part of every batch; the weights make the mean over processes the
        mean over the nodes of the batch."""
        seed_all(self.config.seed, epoch, self.group.rank)
        generator = torch.Generator().manual_seed(mixed_seed(self.config.seed, epoch))
        train, data = self.split.train, self.data
        order = train[torch.randperm(len(train), generator=generator).to(train.device)]
        parts, weights = share_out(order.to(self.graph.idtype), self.config.batch_size, self.group)
        for part, weight in zip(parts, weights, strict=True):
            sources, seeds, blocks = self.sampler.sample(self.graph, part)
            yield Batch(weight, blocks, data.feat[sources], data.labels[seeds])

    def validate(self, model: LayerSelect) -> tuple[Selection, Tensor] | None:
        """Do so in the first process alone, on the whole graph; None in others."""
        return super().validate(model) if self.group.rank == 0 else None


def share_out(
    order: Tensor, batch_size: int, group: ProcessGroup
) -> tuple[list[Tensor], list[float]]:
    """Return this process's part of every batch, and its weight in the mean over processes. No part
    is empty or, for BatchNorm, of one node, unless there are too few."""
    batches = list(order.split(max(batch_size, group.size)))
    if len(batches) > 1 and len(batches[-1]) < 2 * group.size:
        batches[-2:] = [torch.cat(batches[-2:])]
    parts, weights = [], []
    for batch in batches:
        parts.append(batch.tensor_split(group.size)[group.rank])
        weights.append(group.size * len(parts[-1]) / len(batch))
    return parts, weights


def mixed_seed(*numbers: int) -> int:
    """Return one seed made of several numbers."""
    return zlib.crc32(repr(numbers).encode())


def seed_all(*numbers: int) -> None:
    """Seed torch and DGL."""
    torch.manual_seed(mixed_seed(*numbers))
    dgl.seed(mixed_seed(*numbers) % 2**31)
