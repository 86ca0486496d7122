"""DistDGL: a graph cut into partitions on disk, and training on it by several machines.

Node numbers of a partitioned graph are DGL's own; `node_id` has those of the dataset.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dgl
import torch
from torch import Tensor

from .. import ops
from ..atomic_file import write_atomic
from ..config import Config
from ..data import NodeDataset, Split
from ..nn import BatchedSource, DegreeSampler, LayerSelect, LayerStack, Selection
from ..nn.head import evaluating
from ..nn.source import batches_of
from .batches import Batch, seed_all
from .distributed import JOIN_TIMEOUT, ProcessGroup, process_group
from .evaluate import accuracy
from .job import check_clients, check_part, digest, join
from .loop import TrainingLoop, prepare
from .peers import Hub, Member
from .run import run_folder, run_loop

NAME, ABOUT = "graph", "metselect.json"
ABOUT_TYPES = {
    "dataset": str,
    "split": int,
    "seed": int,
    "n_classes": int,
    "self_loops": bool,
    "fingerprint": str,
    "parts": list,
}


def partition(data: NodeDataset, parts: int, out: Path, *, split: int = 0, seed: int = 0) -> Path:
    """Cut a dataset into `parts` by METIS and write it with one of its splits, as DistDGL reads it;
    return the file that describes the partitions. `seed`: of a synthetic dataset."""
    if parts < 1:
        raise ValueError(f"parts is {parts}; there is at least one")
    data = prepare(Config(dataset=data.name), data)  # features as training on one machine sees them
    graph = data.graph.local_var()
    graph.ndata.update(feat=data.feat, label=data.labels, node_id=graph.nodes().long())
    graph.ndata["in_degree"] = graph.in_degrees().float()
    graph.ndata["out_degree"] = graph.out_degrees().float()
    for part, index in data.split(split)._asdict().items():
        mask = torch.zeros(len(data.labels), dtype=torch.bool).index_fill(0, index, True)
        graph.ndata[f"{part}_mask"] = mask & (data.labels >= 0)
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
    about["parts"] = [digest(out / f"part{part}") for part in range(parts)]
    write_atomic(out / ABOUT, lambda file: file.write(json.dumps(about, indent=1).encode()))
    return out / f"{NAME}.json"


class Partitioned:
    """The partitioned dataset as a trainer sees it: in place of a `NodeDataset`.

    `nodes` are the nodes of this trainer, in order.
    """

    def __init__(self, graph: dgl.distributed.DistGraph, about: dict) -> None:
        self.graph, self.about = graph, about
        self.name, self.n_classes = about["dataset"], about["n_classes"]
        self.feat, self.labels = graph.ndata["feat"], graph.ndata["label"]
        self.nodes = self.share(torch.ones(graph.num_nodes(), dtype=torch.bool))

    def share(self, mask) -> Tensor:
        """Return this trainer's nodes if those of a mask are shared out evenly, in order."""
        book, rank = self.graph.get_partition_book(), int(os.environ.get("RANK", 0))
        # DGL numbers the trainers of a host at random
        return dgl.distributed.node_split(mask, book, rank=rank, force_even=True).sort().values

    def own(self, part: str) -> Tensor:
        """Return the nodes of a set that are among this trainer's `nodes`."""
        return self.nodes[self.graph.ndata[f"{part}_mask"][self.nodes].bool()]

    def fingerprint(self) -> str:
        return self.about["fingerprint"]


def read_partitions(folder: Path) -> tuple[dict, int]:
    """Return the description that `partition` wrote and the number of parts."""
    about, part_config = Path(folder) / ABOUT, Path(folder) / f"{NAME}.json"
    if not about.exists():
        raise ValueError(f"{folder} holds no partitions; make them with `metselect partition`")
    try:
        content = json.loads(about.read_text())
        n_parts = json.loads(part_config.read_text())["num_parts"]
        wrong = [key for key, kind in ABOUT_TYPES.items() if type(content[key]) is not kind]
        if wrong or len(content["parts"]) != n_parts:
            raise ValueError(f"wrong {', '.join(wrong) or 'number of parts'}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{about} or {part_config.name} is damaged ({type(error).__name__}: {error}); run "
            "`metselect partition` again"
        ) from None
    return content, n_parts


def connect(
    folder: Path, ip_config: str | None, join_timeout: float = JOIN_TIMEOUT
) -> tuple[Partitioned, Hub | Member | None]:
    """Return the partitioned graph of the servers in `ip_config`, and the connection to the other
    processes; without `ip_config`, the graph of this process alone. Where the environment makes
    this process a server, it is one until the end."""
    about, parts = read_partitions(folder)
    others = None
    if ip_config is not None:
        check_clients(os.environ, parts)
        others = join(about, folder, ip_config, join_timeout)
        if os.environ.get("DGL_ROLE") != "server":
            time.sleep(0.5)  # until small servers listen: DGL tries again after 3 s only
        os.environ.setdefault("DGL_DIST_MODE", "distributed")
    elif parts > 1:
        raise ValueError(f"{folder} has {parts} partitions; one process alone can use only 1")
    else:
        check_part(Path(folder) / "part0", about["parts"][0])
    dgl.distributed.initialize(ip_config or "")  # before init_process_group
    part_config = str(Path(folder) / f"{NAME}.json") if ip_config is None else None
    graph = dgl.distributed.DistGraph(NAME, part_config=part_config)
    return Partitioned(graph, about), others


class PartitionSource(BatchedSource):
    """A batched source in which a trainer computes its own nodes and reads the layers of others
    from the servers."""

    def __init__(self, backbone: torch.nn.Module, data: Partitioned, batch_size: int) -> None:
        backbone.check_exact_on_blocks()
        super().__init__(backbone, data.graph, data.feat, batch_size, loops=backbone.self_loop)
        self.own = data.nodes

    @property
    def n_rows(self) -> int:
        """The number of nodes of this trainer."""
        return len(self.own)

    def nodes(self, depth: int) -> Iterator:
        return batches_of(self.own, self.batch_size)

    def position(self, nodes: Tensor) -> Tensor:
        """Return the rows of own nodes."""
        return torch.searchsorted(self.own, nodes)

    def store(self, depth: int, width: int):
        """Return one of two tensors of the servers, which layers use in turn."""
        shape, name = (self.graph.num_nodes(), width), f"layer-{depth % 2}-{width}"
        return dgl.distributed.DistTensor(shape, torch.float32, name)

    def layer_done(self) -> None:
        self.graph.barrier()


class PartitionBatches:
    """Mini-batches of a partitioned graph: every trainer has its own training nodes."""

    uneven = True

    def __init__(
        self, config: Config, data: Partitioned, backbone: torch.nn.Module, group: ProcessGroup
    ) -> None:
        if config.self_loop and data.about["self_loops"]:
            raise ValueError(
                f"{data.name} was partitioned with self-loops; leave out --self-loop, or partition "
                "the graph without them"
            )
        self.config, self.data, self.group = config, data, group
        self.train = data.share(data.graph.ndata["train_mask"])
        self.sampler = DegreeSampler(config.num_layers * [config.fanout], data.graph)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of this trainer. The order depends on the number of the epoch alone:
        DGL's `shuffle` continues from the last order, which a resumed run does not have."""
        seed_all(self.config.seed, epoch, self.group.rank)
        order = self.train[torch.randperm(len(self.train))]
        size = -(-self.config.batch_size // self.group.size)
        loader = dgl.dataloading.DistNodeDataLoader(
            self.data.graph, order, self.sampler, batch_size=size
        )
        for sources, seeds, blocks in loader:
            yield Batch(1.0, blocks, self.data.feat[sources], self.data.labels[seeds])

    @torch.no_grad()
    def validate(self, model: LayerSelect) -> tuple[Selection, Tensor] | None:
        """Estimate the moments from the training nodes of all trainers, and calibrate on the
        validation nodes of all in the first one; None in others."""
        source = PartitionSource(model.backbone, self.data, self.config.batch_size)
        train, val = self.data.own("train"), self.data.own("val")
        nodes, n_train = torch.cat([train, val]), len(train)
        with evaluating(model):
            stack = source.stack(source.position(nodes))
            labels = self.data.labels[nodes]
            train, rest = stack.split(n_train)
            model.head.estimate(train, labels[:n_train], self.group.sum)
            rows = rest.rows()
            gathered = self.group.gather([*rows, labels[n_train:]])
            if self.group.rank > 0:
                return None
            *layers, labels = (torch.cat(parts) for parts in zip(*gathered, strict=True))
            return model.head.compare(LayerStack.of(layers), labels), labels


@torch.no_grad()
def partition_result(loop: TrainingLoop) -> dict:
    """Return the accuracies of the best epoch's model; the first trainer writes them."""
    model, group, data = loop.model, loop.group, loop.data
    model.load_state_dict(group.broadcast(loop.state.best_model))
    validation = loop.batches.validate(model)
    group.broadcast_buffers(model)
    source = PartitionSource(model.backbone, data, loop.config.batch_size)
    with evaluating(model):
        answers = model.head.predict(source).logits.argmax(1)
    metrics = {"epochs": loop.state.epoch, "best_epoch": loop.state.best_epoch}
    for part in ("train", "test"):
        nodes = data.own(part)
        right = answers[source.position(nodes)] == data.labels[nodes]
        count = torch.tensor([right.sum(), len(right)], dtype=torch.float64)
        group.sum(count)
        metrics[part] = {"accuracy": (count[0] / count[1]).item()}
    if validation is not None:
        selection, labels = validation
        metrics["val"] = {"accuracy": accuracy(selection.logits.argmax(1), labels)}
        if loop.out is not None:
            text = json.dumps(metrics, indent=1)
            write_atomic(loop.out / "metrics.json", lambda file: file.write(text.encode()))
    return metrics


def train_partitions(
    config: Config,
    folder: Path,
    ip_config: str | None,
    out: Path,
    *,
    join_timeout: float = JOIN_TIMEOUT,
    keep_memory: bool = False,
    overwrite: bool = False,
) -> None:
    """Train on the partitions in `folder`, print the figures and leave them in `out`; `overwrite`
    removes what is there first.

    A trainer that fails must end at once (see `cli.main`): then the other processes end, too.
    """
    trains = os.environ.get("DGL_ROLE") != "server"
    if trains and config.batch_size is None:
        raise ValueError("training on partitions is in mini-batches; give a --batch-size")
    if torch.device(config.device).type != "cpu" or config.row_normalize is not None:
        raise ValueError("training on partitions is on CPUs, on features as `partition` wrote them")
    if keep_memory:
        ops.keep_freed_memory()
    data, others = connect(folder, ip_config, join_timeout)
    given = {name: data.about[name] for name in ("dataset", "split", "seed")}
    with process_group(config.device, join_timeout) as group:
        loop = TrainingLoop(replace(config, **given), data, out, group, PartitionBatches)
        with run_folder(out, group, overwrite):
            run_loop(loop, progress=group.rank == 0)
            metrics = partition_result(loop)
        if group.rank == 0:
            shown = {part: f"{100 * metrics[part]['accuracy']:.1f}" for part in Split._fields}
            print(f"{data.name}, {group.size} trainers: accuracy in % {shown}; results in {out}")
        data.graph.barrier()
        if others is not None:
            others.leave()
            dgl.distributed.exit_client()
