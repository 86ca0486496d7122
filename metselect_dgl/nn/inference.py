"""Exact inference on graphs whose layers do not fit into memory together.

Layer after layer is made for all nodes, in batches that see all of their neighbours, and scored as
it is made. Kept are two layers, and per node the best layer, its score and its logits.
"""

from collections.abc import Iterator
from dataclasses import replace

import dgl
import torch
from torch import Tensor
from tqdm import tqdm

from ..checks import check_feat, check_finite, check_index
from .backbone import Backbone
from .calibration import gate_table
from .heads import LayerHead, Selection
from .model import LayerSelect, evaluating
from .sampling import DegreeSampler, loops_left_to

BATCH = 65536


class Sweep:
    """Every layer of a graph, in batches: iterating gives (depth, nodes, the layer's rows there).

    `wanted[depth]`, a mask [N] or None for all, says which nodes of a layer are made. `edges`
    counts the edges that were aggregated.
    """

    def __init__(
        self, backbone: Backbone, graph: dgl.DGLGraph, feat: Tensor, batch_size: int = BATCH
    ) -> None:
        if not isinstance(backbone, Backbone):
            raise TypeError(f"a {type(backbone).__name__} is no Backbone, whose layers are known")
        if not backbone.exact_on_blocks:
            raise ValueError(
                "a GraphConv that is hooked, under autocast or put in by a subclass counts degrees "
                "inside a batch; call model.eval()(graph, feat) instead"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a batch has at least one node")
        self.backbone, self.feat, self.batch_size = backbone, feat, batch_size
        self.graph = loops_left_to(backbone, graph)
        self.sampler = DegreeSampler([-1], self.graph)
        self.wanted: list[Tensor | None] = [None] * len(backbone.layer_feats)
        self.edges = 0

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        h, last = self.feat, len(self.wanted) - 1
        for depth, width in enumerate(self.backbone.layer_feats):
            out = self.store(depth, width) if 0 < depth < last else None
            for nodes in self.nodes(depth).split(self.batch_size):
                rows = self._rows(depth, nodes, h)
                check_finite([rows], first=depth, nodes=nodes)
                if out is not None:
                    out[nodes] = rows
                yield depth, nodes, rows
            self.layer_done()
            h = h if out is None else out

    @torch.no_grad()
    def _rows(self, depth: int, nodes: Tensor, h: Tensor) -> Tensor:
        if depth == 0:
            return self.backbone.input(h[nodes])
        sources, _, (block,) = self.sampler.sample_blocks(self.graph, nodes.to(self.graph.idtype))
        self.edges += block.num_edges() + len(nodes) * self.backbone.self_loop
        return self.backbone.block_conv(self.backbone.convs[depth - 1], block, h[sources])

    def nodes(self, depth: int) -> Tensor:
        """The nodes of a layer that are to be made here."""
        mask = self.wanted[depth]
        if mask is not None:
            return mask.nonzero().squeeze(1)
        return torch.arange(self.graph.num_nodes(), device=self.feat.device)

    def store(self, depth: int, width: int) -> Tensor:
        """Room for a layer."""
        return self.feat.new_empty(self.graph.num_nodes(), width)

    def position(self, nodes: Tensor) -> Tensor:
        """Where a node stands among all that are made here."""
        return nodes

    def layer_done(self) -> None:
        """Called when all batches of a layer are made."""


@torch.no_grad()
def infer(
    model: LayerSelect,
    graph: dgl.DGLGraph,
    feat: Tensor,
    *,
    batch_size: int = BATCH,
    exit_at: float = 1.0,
    progress: bool = False,
) -> Selection:
    """What ``model(graph, feat)`` says in evaluation mode, in O(N (C + D)) memory at any depth.

    Where the gate was fitted, layers are compared with each other: they are made three times, for
    the answers, for the gate's scores and for the logits, with a number for every node and layer.

    Parameters
    ----------
    batch_size : nodes whose neighbours are looked up together
    exit_at : a node whose class is this probable at a layer (0 to 1) is settled, and deeper layers
        are made only as far as other nodes need them; at 1, the default, all are made
    progress : show a bar

    Returns
    -------
    the Selection of all nodes; its `edges` is the number of edges that were aggregated
    """
    check_feat(feat, graph.num_nodes(), model.backbone.in_feats, model.backbone.input.weight)
    sweep = Sweep(model.backbone, graph, feat, batch_size)
    return infer_on(model, sweep, exit_at=exit_at, progress=progress)


@torch.no_grad()
def infer_on(
    model: LayerSelect, sweep: Sweep, *, exit_at: float = 1.0, progress: bool = False
) -> Selection:
    """`infer` for the nodes that a sweep makes here."""
    if not 0 < exit_at <= 1:
        raise ValueError(f"exit_at is {exit_at}, expected a probability above 0, at most 1")
    if exit_at < 1 and getattr(model.head, "rule", None) != "confidence":
        raise ValueError("exit_at needs a MetSelect head with rule='confidence'")
    gate = getattr(model.head, "gate", None)
    gate = gate if gate is not None and gate.any() else None
    total = (1 if gate is None else 3) * len(sweep.wanted) * len(sweep.nodes(0))
    with evaluating(model), tqdm(total=total, unit="node", disable=not progress) as bar:
        kept = _Kept(model.head, sweep, exit_at, bar)
        kept.best(answers=gate is not None)
        if gate is not None:
            kept.choose_by(gate)
    return Selection(kept.logits, kept.layer, kept.score, edges=sweep.edges)


class _Kept:
    """What is remembered of every node."""

    def __init__(self, head: LayerHead, sweep: Sweep, exit_at: float, bar: tqdm) -> None:
        count, like = len(sweep.nodes(0)), sweep.backbone.input.weight
        self.head, self.sweep, self.bar, self.exit_at = head, sweep, bar, exit_at
        self.logits = like.new_zeros(count, head.n_classes)
        self.layer = torch.zeros(count, dtype=torch.long, device=like.device)
        self.score = like.new_full((count,), -torch.inf)
        self.open = torch.ones(count, dtype=torch.bool, device=like.device)

    def _layers(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for depth, nodes, h in self.sweep:
            yield depth, self.sweep.position(nodes), h
            self.bar.update(len(nodes))

    def best(self, answers: bool) -> None:
        """The layer of the best score, as the layers come; if asked for, also every answer."""
        depths, done, total = len(self.sweep.wanted), 0, 0
        sign = -1 if getattr(self.head, "rule", None) == "opposite" else 1
        if answers:
            self.answers = self.layer.new_zeros(len(self.layer), depths, dtype=torch.int16)
        for depth, nodes, h in self._layers():
            score, logits = self.head.judge(depth, h)
            if answers:
                self.answers[nodes, depth] = logits.argmax(-1).short()
            if logits is not None and depth == 0:
                self.logits[nodes] = logits
            if score is not None:
                before = self.score[nodes]
                better = (sign * score > sign * before) | before.isneginf()
                rows = nodes[better]
                self.score[rows], self.layer[rows] = score[better], depth
                self.logits[rows] = logits[better]
            total = total if done else len(self.sweep.nodes(depth))
            done += len(nodes)
            if done == total and self.exit_at < 1 and depth + 1 < depths:
                self.open &= self.score.sigmoid() < self.exit_at
                self.sweep.wanted[depth + 1] = self._upstream(depths - 2 - depth)
            done = 0 if done == total else done

    def _upstream(self, hops: int) -> Tensor:
        """The open nodes and all that is up to `hops` edges upstream of one."""
        mask, (source, target) = self.open.clone(), self.sweep.graph.edges()
        for _ in range(hops):
            mask[source[mask[target]]] = True
        return mask

    def choose_by(self, gate: Tensor) -> None:
        """The gate's choice for the nodes of which every layer was made."""
        table = gate_table(gate).to(self.score.dtype)  # [L, 2, L]
        scores = gate[:, -1].to(table).expand(len(self.layer), -1).clone()  # [N, L]
        for depth, nodes, h in self._layers():
            odds = self.head.opinion(depth, h)  # [2, n, C]
            asked = self.answers[nodes].long().expand(2, -1, -1)
            scores[nodes] += torch.einsum("bnl,lb->nl", odds.gather(-1, asked), table[:, :, depth])
        scores.masked_fill_(~self.head.prototypes.alive, -torch.inf)
        rows = self.open.nonzero().squeeze(1)
        self.score[rows], self.layer[rows] = scores[rows].max(1)
        for depth, nodes, h in self._layers():
            mine = (self.layer[nodes] == depth) & self.open[nodes]
            self.logits[nodes[mine]] = self.head.judge(depth, h[mine])[1]


@torch.no_grad()
def rows_of_layers(
    model: LayerSelect,
    graph: dgl.DGLGraph,
    feat: Tensor,
    index: Tensor,
    *,
    batch_size: int = BATCH,
    progress: bool = False,
) -> list[Tensor]:
    """The rows `index` of every layer in evaluation mode, made in batches."""
    check_feat(feat, graph.num_nodes(), model.backbone.in_feats, model.backbone.input.weight)
    index = check_index(index, graph.num_nodes(), feat.device)
    sweep = Sweep(model.backbone, graph, feat, batch_size)
    return rows_on(model, sweep, index, progress=progress)


@torch.no_grad()
def rows_on(
    model: LayerSelect, sweep: Sweep, at: Tensor, *, progress: bool = False
) -> list[Tensor]:
    """`rows_of_layers` at the positions `at` among the nodes that a sweep makes here."""
    total, like = len(sweep.nodes(0)), sweep.backbone.input.weight
    at, back = at.unique(return_inverse=True)  # a node may be asked for twice
    place = torch.full((total,), -1, device=like.device)
    place[at] = torch.arange(len(at), device=like.device)
    layers = [like.new_empty(len(at), width) for width in model.backbone.layer_feats]
    total *= len(layers)
    with evaluating(model), tqdm(total=total, unit="node", disable=not progress) as bar:
        for depth, nodes, h in sweep:
            to = place[sweep.position(nodes)]
            layers[depth][to[to >= 0]] = h[to >= 0]
            bar.update(len(nodes))
    return [h[back] for h in layers]


@torch.no_grad()
def calibrate_in_batches(
    model: LayerSelect,
    graph: dgl.DGLGraph,
    feat: Tensor,
    labels: Tensor,
    train_index: Tensor,
    val_index: Tensor | None = None,
    **options,
) -> Selection | None:
    """``model.calibrate(...)`` with two layers in memory at a time, and the rows that it needs."""
    head, nodes = model.head, graph.num_nodes()
    train_labels, train = head.check_targets(labels, train_index, nodes)
    val_labels, val = train_labels[:0], train[:0]
    if val_index is not None:
        val_labels, val = head.check_targets(labels, val_index, nodes)
        head.check_calibration(len(val))
    layers = rows_of_layers(model, graph, feat, torch.cat([train, val]), **options)
    with evaluating(model):
        head.fit([h[: len(train)] for h in layers], train_labels)
        if val_index is None:
            return None
        held_out = [h[len(train) :] for h in layers]
        said = head.calibrate(held_out, val_labels) or head(held_out)
    return replace(said, index=val)
