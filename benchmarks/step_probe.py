"""Time single steps of the checkout whose interpreter runs this file, on request.

Started by compare_checkouts.py in two checkouts at once. It imports nothing but the public API of
metselect_dgl, and of two versions of that API whichever exists. Prints the names of the steps as a
JSON list, then reads one name per line and prints the seconds of that step, or `error: REASON`.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import cache, partial

import torch

from metselect_dgl import functional as MF
from metselect_dgl import nn, ops
from metselect_dgl.data import load_dataset

MIN_SECONDS = 0.1  # a shorter step is repeated within its measurement
BACKBONES = {"gcn": nn.GCN, "gat": nn.GAT, "gin": nn.GIN}
ROWS, LAYERS, CLASSES, FEATURES = 90_941, 3, 40, 64  # of the ops: those of ogbn-arxiv


class ModelSteps:
    """Steps of a model of depth 2, hidden 64."""

    def __init__(self, dataset: str, model: str, backbone: str, **options) -> None:
        self.data = data = load_data(dataset)
        torch.manual_seed(0)
        convs = BACKBONES[backbone](data.feat.shape[1], 64, num_layers=2, self_loop=True, **options)
        self.model = getattr(nn, model)(convs, data.n_classes)
        self.split = data.split(0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.mask = torch.zeros(data.graph.num_nodes(), dtype=torch.bool)
        self.mask[self.split.train] = True

    def epoch(self, fresh_index: bool = False) -> None:
        data = self.data
        index = self.mask.nonzero().flatten() if fresh_index else self.split.train
        loss = self.model(data.graph, data.feat, labels=data.labels, index=index).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def calibrate(self, batches: bool = False) -> None:
        data = self.data
        arguments = data.graph, data.feat, data.labels, self.split.train, self.split.val
        if not batches:
            self.model.calibrate(*arguments)
        elif hasattr(nn, "calibrate_in_batches"):
            nn.calibrate_in_batches(self.model, *arguments)
        else:
            self.model.calibrate(*arguments, batch_size=65536)

    @torch.no_grad()
    def predict(self, batches: bool = False) -> None:
        graph, feat = self.data.graph, self.data.feat
        if hasattr(self.model, "predict"):
            self.model.predict(graph, feat, **({"batch_size": 65536} if batches else {}))
        elif batches:
            nn.infer(self.model, graph, feat)
        else:
            self.model.eval()(graph, feat)


@cache
def load_data(name: str):
    return load_dataset(name)


@cache
def op_inputs() -> dict:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS,), generator=draw)
    layers, weights = [], []
    for _ in range(LAYERS):
        means = torch.randn(CLASSES, FEATURES, generator=draw)
        layers.append(means[labels] + torch.randn(ROWS, FEATURES, generator=draw))
        weights.append(torch.randn(CLASSES, FEATURES, generator=draw) / 8)
    moments = MF.moments(layers, labels, CLASSES)
    return {
        "layers": layers,
        "leaves": [h.clone().requires_grad_() for h in layers],
        "labels": labels,
        "moments": moments,
        "means": [mean.float() for mean in moments.means()],
        "factors": [factor.float() for factor in MF.whitening(moments)],
        "weights": weights,
        "biases": [torch.zeros(CLASSES) for _ in layers],
        "layer": torch.randint(LAYERS, (ROWS,), generator=draw),
    }


def op_step(op: str) -> None:
    """Run one op; those with a gradient run forward and backward."""
    x = op_inputs()
    layers, leaves, labels = x["layers"], x["leaves"], x["labels"]
    if op == "moments":
        MF.moments(layers, labels, CLASSES)
    elif op == "whitening":
        MF.whitening(x["moments"])
    elif op == "select_layer":
        MF.select_layer(layers, x["means"], x["factors"], labels=labels)
    elif op == "class_distances":
        torch.autograd.grad(MF.class_distances(leaves, x["means"], x["factors"]).sum(), leaves)
    else:
        loss, *_ = MF.selected_cross_entropy(
            leaves, x["weights"], x["biases"], x["layer"], labels, deep_supervision=1.0
        )
        torch.autograd.grad(loss, leaves)


OPS = ("moments", "whitening", "select_layer", "class_distances", "selected_cross_entropy")


def steps(dataset: str) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return by name the functions that build the steps."""

    def build(method: str, *model: str, calibrate: bool = False, batches=False, **options):
        made = ModelSteps(dataset, *model, **options)
        if calibrate:
            made.calibrate()
        run = getattr(made, method)
        return partial(run, batches=True) if batches else run

    def build_fresh(backbone: str):
        return partial(ModelSteps(dataset, "MetSelect", backbone).epoch, fresh_index=True)

    found = {}
    for backbone in BACKBONES:
        for model in ("MetSelect", "FinalSelect"):
            found[f"epoch {backbone} {model}"] = partial(build, "epoch", model, backbone)
    found["epoch gcn AttnSelect"] = partial(build, "epoch", "AttnSelect", "gcn")
    found["epoch gcn NDLSelect"] = partial(build, "epoch", "NDLSelect", "gcn")
    found["epoch gcn MetSelect once"] = partial(
        build, "epoch", "MetSelect", "gcn", propagate_once=True
    )
    found["epoch gcn MetSelect fresh index"] = partial(build_fresh, "gcn")
    for backbone in BACKBONES:
        for model in ("MetSelect", "FinalSelect"):
            arguments = (build, "predict", model, backbone)
            found[f"predict {backbone} {model}"] = partial(*arguments, calibrate=True)
    arguments = (build, "predict", "MetSelect", "gcn")
    found["predict gcn MetSelect batches"] = partial(*arguments, calibrate=True, batches=True)
    arguments = (build, "calibrate", "MetSelect", "gcn")
    found["calibrate gcn MetSelect"] = partial(*arguments)
    found["calibrate gcn MetSelect batches"] = partial(*arguments, batches=True)
    for op in OPS:
        found[f"op {op}"] = partial(partial, op_step, op)
    return found


def measure(run: Callable[[], None], repeats: int) -> float:
    """Return the seconds of one call, with the garbage collector off."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = (time.perf_counter() - start) / repeats
    gc.enable()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="arxiv-twin")
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ops.keep_freed_memory(args.keep_memory)
    available, name, run, repeats = steps(args.dataset), None, None, 1
    print(json.dumps(list(available)), flush=True)
    for line in sys.stdin:
        try:
            if line.strip() != name:  # build the step, which replaces the one before, and warm up
                name, run = line.strip(), None
                run = available[name]()
                measure(run, 1)
                repeats = max(1, round(MIN_SECONDS / measure(run, 1)))
            print(measure(run, repeats), flush=True)
        except Exception as error:
            name = None
            reason = " ".join(str(error).split())
            print(f"error: {type(error).__name__}: {reason}", flush=True)


if __name__ == "__main__":
    main()
