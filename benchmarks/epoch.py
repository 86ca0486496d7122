"""Epochs of whole models on the twin of ogbn-arxiv, or on another dataset.

Every contestant lives in a process of its own, with its own memory allocator, and they take turns.
An epoch is a forward pass on the training nodes, the backward pass and a step of Adam.
"""

import argparse
import multiprocessing
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from metselect_dgl import nn, ops
from metselect_dgl.data import NodeDataset, load_dataset

from .providers import ClassesLastGNN, PlainGNN
from .timing import interleaved, machine, table

BACKBONES = {"gcn": nn.GCN, "gin": nn.GIN, "gat": nn.GAT}


@dataclass(frozen=True)
class Contestant:
    """`kind` is a class of metselect_dgl.nn, or one of the plain ones of the providers;
    `everything`: our convolutions, the first aggregation once, and freed memory kept."""

    kind: str
    everything: bool = False

    def model(self, backbone: str, data: NodeDataset, hidden: int, depth: int):
        torch.manual_seed(0)
        widths = [hidden] * (depth + 1)
        if self.kind == "ClassesLastGNN":
            widths[-1] = data.n_classes
        options = {"num_layers": depth, "self_loop": True}
        options["engine"] = "auto" if self.everything else "dgl"
        if self.everything and backbone != "gat":
            options["propagate_once"] = True
        layers = BACKBONES[backbone](data.feat.shape[1], widths, **options)
        if self.kind == "ClassesLastGNN":
            return ClassesLastGNN(layers.convs)
        if self.kind == "PlainGNN":
            return PlainGNN(layers.convs, hidden, data.n_classes)
        return getattr(nn, self.kind)(layers, data.n_classes)

    def epochs(self, backbone: str, data: NodeDataset, hidden: int, depth: int):
        """A function that does one epoch and returns the loss."""
        if self.everything:
            ops.keep_freed_memory()
        plain = self.kind in ("PlainGNN", "ClassesLastGNN")
        model = self.model(backbone, data, hidden, depth)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        train, graph = data.split(0).train, nn.backbone._add_self_loop(data.graph)

        def epoch() -> float:
            if plain:
                logits = model(graph, data.feat)
                loss = F.cross_entropy(logits[train], data.labels[train])
            else:
                loss = model(data.graph, data.feat, data.labels, train).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return epoch


CONTESTANTS = {
    "plain DGL": Contestant("PlainGNN"),
    "plain DGL, classes last": Contestant("ClassesLastGNN"),
    "FinalSelect, DGL's convs": Contestant("FinalSelect"),
    "MetSelect, DGL's convs": Contestant("MetSelect"),
    "FinalSelect, everything on": Contestant("FinalSelect", everything=True),
    "MetSelect, everything on": Contestant("MetSelect", everything=True),
}


def serve(contestant: Contestant, args, pipe) -> None:
    """In its own process: an epoch for every word that comes."""
    torch.set_num_threads(args.threads)
    data = load_dataset(args.dataset, args.data_dir)
    epoch = contestant.epochs(args.backbone, data, args.hidden, args.depth)
    while pipe.recv():
        pipe.send(epoch())


def contestants(args) -> dict[str, Contestant]:
    """All, unless the classes cannot be dealt out to the heads of a last GATConv."""
    entered = dict(CONTESTANTS)
    heads = nn.GAT(1, 4).heads
    if args.backbone == "gat" and load_dataset(args.dataset, args.data_dir).n_classes % heads:
        del entered["plain DGL, classes last"]
    return entered


def measure(args) -> tuple[dict[str, float], dict[str, list[float]]]:
    """(the shortest epoch of each, its losses)."""
    spawn = multiprocessing.get_context("spawn")
    turns, pipes, losses = {}, {}, {}
    for name, contestant in contestants(args).items():
        pipe, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(contestant, args, theirs), daemon=True).start()
        pipes[name], losses[name] = pipe, []

        def turn(pipe=pipe, seen=losses[name]) -> None:
            pipe.send(True)
            seen.append(pipe.recv())

        turn()  # everybody has loaded before the first turn that counts
        turns[name] = turn
    best = interleaved(turns, args.epochs)
    for pipe in pipes.values():
        pipe.send(False)
    return best, losses


def agree(losses: dict[str, list[float]]) -> None:
    """The same weights must give the same losses, whatever computes them: the first to rounding,
    and the last, after as many steps, nearly."""
    for model in ("FinalSelect", "MetSelect"):
        a, b = (losses[f"{model}, {how}"] for how in ("DGL's convs", "everything on"))
        for at, tolerance in ((0, 1e-4), (-1, 2e-2)):
            if not abs(a[at] - b[at]) <= tolerance * abs(a[at]):
                raise SystemExit(f"{model}: loss {a[at]} on DGL's convs, {b[at]} everything on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backbone", choices=BACKBONES)
    parser.add_argument("--dataset", default="arxiv-twin")
    parser.add_argument("--data-dir")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    best, losses = measure(args)
    agree(losses)
    print(
        f"{args.backbone} on {args.dataset}, hidden {args.hidden}, depth {args.depth}; {machine()}"
    )
    print(table(best, "plain DGL"))
    print()
    for above, below in (
        ("MetSelect, DGL's convs", "FinalSelect, DGL's convs"),
        ("MetSelect, everything on", "plain DGL"),
        ("MetSelect, everything on", "plain DGL, classes last"),
        ("MetSelect, everything on", "FinalSelect, everything on"),
    ):
        if below in best:
            print(f"{best[above] / best[below]:.3f}  {above} / {below}")


if __name__ == "__main__":
    main()
