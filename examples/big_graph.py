"""A large graph on one machine: mini-batch training and exact prediction, with time and memory.

    python examples/big_graph.py [--nodes 1000000] [--degree 10] [--epochs 2]

Every node has one of 16 classes, its features are noise with a hint of it, and of its in-neighbours
seven in ten have the same class. Prints a line of JSON.
"""

import argparse
import json
import resource
import time

import dgl
import torch

from metselect_dgl.config import Config
from metselect_dgl.data import NodeDataset
from metselect_dgl.train import TrainingLoop, prepare

CLASSES, FEATS, HOMOPHILY, SIGNAL = 16, 64, 0.7, 0.7


def planted(nodes: int, degree: int) -> NodeDataset:
    """Node i has class i % 16, so that another of its class is a multiple of 16 away."""
    torch.manual_seed(0)
    labels = torch.arange(nodes) % CLASSES
    means = SIGNAL * torch.nn.functional.one_hot(torch.arange(CLASSES), FEATS).float()
    feat = torch.randn(nodes, FEATS).add_(means[labels])
    target = torch.arange(nodes, dtype=torch.int32).repeat_interleave(degree)
    source = torch.randint(nodes, (len(target),), dtype=torch.int32)
    same = torch.rand(len(target)) < HOMOPHILY
    source[same] -= source[same] % CLASSES - target[same] % CLASSES
    graph = dgl.graph((source.clamp_(max=nodes - 1), target), num_nodes=nodes)
    part = torch.rand(nodes)
    masks = (part < 0.1, (part >= 0.1) & (part < 0.15), part >= 0.15)
    return NodeDataset("planted", graph, feat, labels, CLASSES, *(m[None] for m in masks))


def memory() -> float:
    """The most that the process ever had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--fanout", type=int, default=10)
    parser.add_argument("--steps", type=int, help="an epoch has at most so many batches")
    args = parser.parse_args()
    start = time.perf_counter()
    config = Config(
        batch_size=args.batch_size, fanout=args.fanout, row_normalize=False, select="temperature"
    )
    data = prepare(config, planted(args.nodes, args.degree))
    record = {"nodes": args.nodes, "edges": data.graph.num_edges(), "classes": CLASSES}
    record |= {"feats": FEATS, "hidden": config.hidden, "batch_size": args.batch_size}
    record |= {"fanout": args.fanout, "threads": torch.get_num_threads(), "data_gb": memory()}
    loop = TrainingLoop(config, data, None)
    split = loop.batches.split
    if args.steps:
        split = split._replace(train=split.train[: args.steps * args.batch_size])
        loop.batches.split = split
    print(f"{data!r} made in {time.perf_counter() - start:.0f} s", flush=True)
    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss = loop.step()
        loop.state.epoch += 1
        seconds = time.perf_counter() - start
        steps = -(-len(split.train) // args.batch_size)
        if epoch == 0:
            steps *= 2  # the first pass, for the moments to start from
        record |= {"batch_seconds": round(seconds / steps, 4), "train_gb": memory()}
        print(f"epoch {epoch}: loss {loss:.3f}, {seconds:.0f} s", flush=True)
    start = time.perf_counter()
    loop.batches.validate(loop.model)
    record |= {"calibrate_seconds": round(time.perf_counter() - start, 1)}
    start = time.perf_counter()
    out = loop.batches.predict(loop.model)
    record |= {"infer_seconds": round(time.perf_counter() - start, 1), "peak_gb": memory()}
    right = out.logits.argmax(1) == data.labels
    record |= {"test_accuracy": round(right[split.test].double().mean().item(), 4)}
    share = torch.bincount(out.layer, minlength=3).double() / args.nodes
    record |= {"layer_share": [round(each, 3) for each in share.tolist()]}
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}))


if __name__ == "__main__":
    main()
