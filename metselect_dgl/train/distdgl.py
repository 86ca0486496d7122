"""DistDGL: a graph cut into partitions on disk, and training on it by several machines.

Node numbers of a partitioned graph are DGL's own; `node_id` has those of the dataset.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import dgl
import torch
from torch import Tensor

from ..atomic_file import write_atomic
from ..config import Config
from ..data import NodeDataset, Split
from ..nn import Prototypes, Selection
from ..nn.inference import Sweep, infer_on, rows_on
from ..nn.layers import Layer
from .distributed import Team, team_of_torchrun
from .loop import prepare
from .minibatch import BatchLoop
from .run import run_loop

NAME, ABOUT = "graph", "metselect.json"


def partition(data: NodeDataset, parts: int, out: Path, *, split: int = 0, seed: int = 0) -> Path:
    """Cut a dataset into `parts` by METIS and write it with one of its splits, as DistDGL reads it;
    returns the file that describes the partitions. `seed`: of a synthetic dataset."""
    if parts < 1:
        raise ValueError(f"parts is {parts}; there is at least one")
    data = prepare(Config(dataset=data.name), data)  # features as training on one machine sees them
    graph = data.graph.local_var()
    masks = {f"{part}_mask": torch.zeros(len(data.labels)).bool() for part in Split._fields}
    for mask, index in zip(masks.values(), data.split(split), strict=True):
        mask[index[data.labels[index] >= 0]] = True
    graph.ndata.update(
        feat=data.feat,
        label=data.labels,
        node_id=graph.nodes().long(),
        in_degree=graph.in_degrees().float(),
        out_degree=graph.out_degrees().float(),
        **masks,
    )
    source, target = graph.edges()
    about = {
        "dataset": data.name,
        "split": split,
        "seed": seed,
        "n_classes": data.n_classes,
        "self_loops": bool((source == target).any()),
        "fingerprint": data.fingerprint(),
    }
    out.mkdir(parents=True, exist_ok=True)
    dgl.distributed.partition_graph(graph, NAME, parts, str(out), part_method="metis")
    write_atomic(out / ABOUT, lambda file: file.write(json.dumps(about, indent=1).encode()))
    return out / f"{NAME}.json"


@dataclass
class Partitioned:
    """The partitioned dataset as a trainer sees it: in the seat of a `NodeDataset`."""

    graph: dgl.distributed.DistGraph
    about: dict

    @property
    def name(self) -> str:
        return self.about["dataset"]

    @property
    def n_classes(self) -> int:
        return self.about["n_classes"]

    @property
    def feat(self):
        return self.graph.ndata["feat"]

    @property
    def labels(self):
        return self.graph.ndata["label"]

    @cached_property
    def nodes(self) -> Tensor:
        """Those of this trainer, in order."""
        return self._share(torch.ones(self.graph.num_nodes(), dtype=torch.bool))

    def split(self, _: int) -> Split:
        """Of every set as many as of the others' for this trainer; `partition` chose the split."""
        return Split(*(self._share(self.graph.ndata[f"{part}_mask"]) for part in Split._fields))

    def own(self, part: str) -> Tensor:
        """Those of a set that are among this trainer's `nodes`."""
        return self.nodes[self.graph.ndata[f"{part}_mask"][self.nodes].bool()]

    def _share(self, mask) -> Tensor:
        book = self.graph.get_partition_book()
        return dgl.distributed.node_split(mask, book, force_even=True).sort().values

    def fingerprint(self) -> str:
        return self.about["fingerprint"]


def connect(folder: Path, ip_config: str | None) -> Partitioned:
    """The partitioned graph: of the servers in `ip_config`, or, without it, of this process alone.
    Where the environment says that this process is a server, it is one until the end."""
    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise ValueError(f"{folder} holds no partitions; make them with `metselect partition`")
    about = json.loads((folder / ABOUT).read_text())
    parts = json.loads((folder / f"{NAME}.json").read_text())["num_parts"]
    if ip_config is None and parts > 1:
        raise ValueError(f"{folder} has {parts} partitions; one process alone can use only 1")
    if ip_config is not None:
        check_clients(os.environ, parts)
        os.environ.setdefault("DGL_DIST_MODE", "distributed")
    dgl.distributed.initialize(ip_config or "")  # before init_process_group
    config = {"part_config": str(folder / f"{NAME}.json")} if ip_config is None else {}
    return Partitioned(dgl.distributed.DistGraph(NAME, **config), about)


def check_clients(environment, parts: int) -> None:
    """Servers wait for exactly DGL_NUM_CLIENT clients, for ever: refuse a number that is wrong."""
    clients, samplers = environment.get("DGL_NUM_CLIENT"), environment.get("DGL_NUM_SAMPLER", "0")
    if clients is None:
        raise ValueError(
            "DGL_NUM_CLIENT is not set; set it for servers and trainers to the number of trainers, "
            "times 1 + DGL_NUM_SAMPLER"
        )
    if int(clients) % parts:
        raise ValueError(f"DGL_NUM_CLIENT is {clients}, no multiple of the {parts} partitions")
    if environment.get("DGL_ROLE") != "server":
        expected = int(environment.get("WORLD_SIZE", 1)) * (1 + int(samplers))
        if int(clients) != expected:
            raise ValueError(
                f"DGL_NUM_CLIENT is {clients}, but there are {expected} clients (WORLD_SIZE times "
                "1 + DGL_NUM_SAMPLER); the servers would wait for ever"
            )


class DistSweep(Sweep):
    """A sweep in which a trainer makes its own nodes and reads the others' from the servers."""

    def __init__(self, backbone, data: Partitioned, batch_size: int) -> None:
        super().__init__(backbone, data.graph, data.feat, batch_size)
        self.mine = data.nodes

    def nodes(self, depth: int) -> Tensor:
        return self.mine

    def position(self, nodes: Tensor) -> Tensor:
        return torch.searchsorted(self.mine, nodes)

    def store(self, depth: int, width: int):
        """Layers take turns in two tensors of the servers."""
        shape, name = (self.graph.num_nodes(), width), f"layer-{depth % 2}-{width}"
        return dgl.distributed.DistTensor(shape, torch.float32, name, init_func=_zeros)

    def layer_done(self) -> None:
        self.graph.barrier()


def _zeros(shape, dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


class DistLoop(BatchLoop):
    """The loop in mini-batches on a partitioned graph: every trainer has its own training nodes."""

    def __init__(self, config: Config, data: Partitioned, out: Path | None, team: Team) -> None:
        if config.self_loop and data.about["self_loops"]:
            raise ValueError(
                f"{data.name} was partitioned with self-loops; leave out --self-loop, or partition "
                "the graph without them"
            )
        super().__init__(config, data, out, team)
        self.loader = dgl.dataloading.DistNodeDataLoader(
            data.graph,
            self.split.train,
            self.sampler,
            batch_size=-(-config.batch_size // team.size),
            shuffle=True,
        )

    def _batches(self, epoch: int) -> Iterator[tuple[float, Tensor, Tensor, list]]:
        for sources, seeds, blocks in self.loader:
            yield 1.0, self.data.feat[sources], self.data.labels[seeds], blocks

    def _learn(self) -> Tensor:
        """Trainers may have unequal numbers of batches: those that are done wait for the others."""
        if self.team.size == 1:
            return super()._learn()
        with self.wrapped.join():
            return super()._learn()

    def _sweep(self) -> DistSweep:
        return DistSweep(self.model.backbone, self.data, self.config.batch_size)

    def judge(self) -> dict:
        self._held_out = self._collect()
        return super().judge()

    def validate(self) -> Selection:
        moments, layers, labels = self._held_out
        if moments is not None:
            self.prototypes.load_state_dict(moments)
        with torch.no_grad():
            self.model.eval()
            return self.model.head.calibrate(layers, labels) or self.model.head(layers)

    def validation_labels(self) -> Tensor:
        return self._held_out[2]

    @torch.no_grad()
    def _collect(self) -> tuple:
        """(prototypes of all training nodes; on the first trainer, the rows of every layer at all
        validation nodes, and their labels), with the present weights."""
        sweep, train, val = self._sweep(), self.data.own("train"), self.data.own("val")
        both = torch.cat([train, val])
        layers = rows_on(self.model, sweep, sweep.position(both))
        labels, cut = self.data.labels[both], len(train)
        moments = None
        if self.prototypes is not None:
            known = self.prototypes
            fresh = Prototypes(
                known.in_feats, known.n_classes, shrinkage=known.shrinkage, source="epoch"
            )
            if cut:
                metric = self.model.head.project([Layer(h[:cut]) for h in layers])
                fresh.gather(metric, labels[:cut])
            fresh.renew(self.team.sum)
            moments = fresh.state_dict()
        parts = self.team.gather([*(h[cut:] for h in layers), labels[cut:]])
        *rows, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        return moments, rows, labels

    @torch.no_grad()
    def result(self) -> dict:
        """Accuracies of the best epoch's model on all nodes; written by the first trainer."""
        self.model.load_state_dict(self.team.share(self.state.best_model))
        self._held_out = self._collect()
        held_out = self.validate() if self.team.rank == 0 else None
        self.team.share_buffers(self.model)
        sweep = self._sweep()
        answers = infer_on(self.model, sweep).logits.argmax(1)
        counts = torch.zeros(2, 2, dtype=torch.float64, device=self.device)
        for row, name in zip(counts, ("train", "test"), strict=True):
            part = self.data.own(name)
            right = answers[sweep.position(part)] == self.data.labels[part]
            row += torch.tensor([right.sum(), len(right)])
        self.team.sum(counts)
        metrics = {"epochs": self.state.epoch, "best_epoch": self.state.best_epoch}
        for name, (right, all_) in zip(("train", "test"), counts.tolist(), strict=True):
            metrics[name] = {"accuracy": right / all_}
        if held_out is not None:
            right = held_out.logits.argmax(1) == self._held_out[2]
            metrics["val"] = {"accuracy": right.double().mean().item()}
            if self.out is not None:
                text = json.dumps(metrics, indent=1)
                write_atomic(self.out / "metrics.json", lambda file: file.write(text.encode()))
        return metrics


def train_partitions(
    config: Config, folder: Path, ip_config: str | None, out: Path, *, progress: bool = True
) -> None:
    """Train on the partitions in `folder`, print the figures and leave them in `out`.

    A trainer that fails would leave the others and the servers waiting for it: its process ends at
    once, and whoever started it should end the rest.
    """
    trains = os.environ.get("DGL_ROLE") != "server"
    if trains and config.batch_size is None:
        raise ValueError("training on partitions is in mini-batches; give a --batch-size")
    if torch.device(config.device).type != "cpu" or config.row_normalize is not None:
        raise ValueError("training on partitions is on CPUs, on features as `partition` wrote them")
    data = connect(folder, ip_config)
    given = {name: data.about[name] for name in ("dataset", "split", "seed")}
    try:
        with team_of_torchrun(config.device) as team:
            loop = DistLoop(replace(config, **given), data, out, team)
            run_loop(loop, progress=progress and team.rank == 0)
            metrics = loop.result()
            if team.rank == 0:
                shown = {part: f"{100 * metrics[part]['accuracy']:.1f}" for part in Split._fields}
                print(f"{data.name}, {team.size} trainers: accuracy in % {shown}; results in {out}")
            data.graph.barrier()
            if ip_config is not None:
                dgl.distributed.exit_client()
    except Exception as error:
        if ip_config is None:
            raise
        print(f"metselect: {error}", file=sys.stderr, flush=True)
        os._exit(1)
