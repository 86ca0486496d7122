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

from .providers import PlainGNN
from .timing import interleaved, machine, table

BACKBONES = {"gcn": nn.GCN, "gin": nn.GIN, "gat": nn.GAT}


@dataclass(frozen=True)
class Contestant:
    """`selector` is a class of metselect_dgl.nn, or None for DGL's plain loop; `everything`: our
    convolutions, the first aggregation once, and freed memory kept."""

    selector: str | None = None
    everything: bool = False

    def model(self, backbone: str, data: NodeDataset, hidden: int, depth: int):
        torch.manual_seed(0)
        once = {} if backbone == "gat" or not self.everything else {"propagate_once": True}
        engine = "auto" if self.everything else "dgl"
        make = BACKBONES[backbone]
        layers = make(
            data.feat.shape[1], hidden, num_layers=depth, engine=engine, self_loop=True, **once
        )
        if self.selector is None:
            return PlainGNN(layers.convs, hidden, data.n_classes)
        return getattr(nn, self.selector)(layers, data.n_classes)

    def epochs(self, backbone: str, data: NodeDataset, hidden: int, depth: int):
        """A function that does one epoch and returns the loss."""
        ops.keep_freed_memory(self.everything)
        model = self.model(backbone, data, hidden, depth)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        train, graph = data.split(0).train, nn.backbones._add_self_loop(data.graph)

        def epoch() -> float:
            if self.selector is None:
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
    "plain DGL": Contestant(),
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


def measure(args) -> tuple[dict[str, float], dict[str, float]]:
    """(the shortest epoch of each, its first loss)."""
    spawn = multiprocessing.get_context("spawn")
    pipes, losses = {}, {}
    for name, contestant in CONTESTANTS.items():
        pipes[name], theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(contestant, args, theirs), daemon=True).start()
        pipes[name].send(True)
        losses[name] = pipes[name].recv()  # and everybody has loaded before the first turn

    def turn(pipe):
        def epoch():
            pipe.send(True)
            pipe.recv()

        return epoch

    best = interleaved({name: turn(pipe) for name, pipe in pipes.items()}, args.epochs)
    for pipe in pipes.values():
        pipe.send(False)
    return best, losses


def agree(losses: dict[str, float]) -> None:
    """The same weights must give the same loss, whatever computes it."""
    for selector in ("FinalSelect", "MetSelect"):
        a, b = (losses[f"{selector}, {how}"] for how in ("DGL's convs", "everything on"))
        if abs(a - b) > 1e-3 * abs(a):
            raise SystemExit(f"{selector}: loss {a} on DGL's convs, {b} with everything on")


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
    plain, final, met, _, everything = best.values()
    print(
        f"{args.backbone} on {args.dataset}, hidden {args.hidden}, depth {args.depth}; {machine()}"
    )
    print(table(best, "plain DGL"))
    print(f"MetSelect / FinalSelect, both on DGL's convs: {met / final:.3f}")
    print(f"MetSelect, everything on / plain DGL:         {everything / plain:.3f}")


if __name__ == "__main__":
    main()
