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
    final, metselect = metrics["final"], metrics["metselect"]
    figures = {
        "GCN + FinalSelect": final["test"]["accuracy"],
        "GCN + MetSelect": metselect["test"]["accuracy"],
    }
    header = ["selected layer, % of test nodes"]
    for depth, accuracy in enumerate(metselect["fixed"]):
        figures[f"  the same model, all nodes at layer {depth}"] = accuracy
        header.append(f"layer {depth}")
    figures["  oracle: any of its layers is right"] = metselect["oracle"]
    figures["  shuffled oracle: the part due to chance"] = metselect["lucky_oracle"]
    figures["  share of the oracle's gain realised"] = metselect["realised"]
    rows = [[title, percent(share)] for title, share in figures.items()]
    accuracies = text_table(["", "test accuracy %"], rows)
    rows = []
    for kind, shares in enumerate(metselect["layer_share_by_type"]):
        rows.append([f"type {kind}: class visible {kind} hops upstream", *map(percent, shares)])
    rows.append(["all", *map(percent, metselect["layer_share"])])
    layers = text_table(header, rows)
    return f"\n{data!r}\n\n{accuracies}\n\n{layers}\n\nfigure: {folder / 'layers.png'}"
