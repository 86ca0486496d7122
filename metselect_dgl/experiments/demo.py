"""The demo: train on data where no fixed layer is good for all nodes, and print the selection."""

from pathlib import Path

from ..config import Config
from ..data import load_dataset
from ..train import train
from .tables import percent, text_table


def demo(out: Path, seed: int = 0, *, keep_memory: bool = False) -> str:
    """Train GCN + FinalSelect and GCN + MetSelect on `hop_chain`; return the tables."""
    data = load_dataset("hop_chain", seed=seed)
    metrics = {}
    for selector in ("final", "metselect"):
        config = Config(selector=selector, seed=seed)
        folder = out / f"{selector}-seed{seed}"
        metrics[selector] = train(config, data, folder, keep_memory=keep_memory).metrics
    accuracies = _accuracy_table(metrics["final"], metrics["metselect"])
    layers = _layer_table(metrics["metselect"])
    return f"\n{data!r}\n\n{accuracies}\n\n{layers}\n\nfigure: {folder / 'layers.png'}"


def _accuracy_table(final: dict, metselect: dict) -> str:
    rows = [
        ["GCN + FinalSelect", percent(final["test"]["accuracy"])],
        ["GCN + MetSelect", percent(metselect["test"]["accuracy"])],
    ]
    for depth, accuracy in enumerate(metselect["fixed"]):
        rows.append([f"  the same model, all nodes at layer {depth}", percent(accuracy)])
    rows += [
        ["  oracle: any of its layers is right", percent(metselect["oracle"])],
        ["  shuffled oracle: the part due to chance", percent(metselect["lucky_oracle"])],
        ["  share of the oracle's gain realised", percent(metselect["realised"])],
    ]
    return text_table(["", "test accuracy %"], rows)


def _layer_table(metrics: dict) -> str:
    """Return the shares of nodes at each layer, by hidden type of the nodes."""
    header = ["selected layer, % of test nodes"]
    for depth in range(len(metrics["layer_share"])):
        header.append(f"layer {depth}")
    rows = []
    for kind, shares in enumerate(metrics["layer_share_by_type"]):
        rows.append([f"type {kind}: class visible {kind} hops upstream", *map(percent, shares)])
    rows.append(["all", *map(percent, metrics["layer_share"])])
    return text_table(header, rows)
