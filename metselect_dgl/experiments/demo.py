"""The demo: on data where no fixed layer can win, choosing per node does."""

from pathlib import Path

from ..config import Config
from ..data import load_dataset
from ..train import Run, train
from .tables import percent, text_table


def demo(out: Path, seed: int = 0) -> str:
    """Train GCN + FinalSelect and GCN + MetSelect on `hop_chain`; return the tables."""
    data = load_dataset("hop_chain", seed=seed)
    runs = []
    for selector in ("final", "metselect"):
        config = Config(selector=selector, seed=seed, epochs=100)
        folder = out / f"{selector}-seed{seed}"
        runs.append(train(config, data, folder))
    picture = folder / "layers.png"
    return f"\n{data!r}\n\n{_accuracies(*runs)}\n\n{_choices(runs[1])}\n\npicture: {picture}"


def _accuracies(final: Run, metselect: Run) -> str:
    metrics = metselect.metrics
    rows = [["GCN + FinalSelect", percent(final.metrics["test"]["accuracy"])]]
    rows += [["GCN + MetSelect", percent(metrics["test"]["accuracy"])]]
    rows += [
        [f"  the same model, all nodes at layer {depth}", percent(value)]
        for depth, value in enumerate(metrics["fixed"])
    ]
    rows += [
        ["  oracle: any of its layers is right", percent(metrics["oracle"])],
        ["  lucky oracle: the chance in it", percent(metrics["lucky_oracle"])],
        ["  share of the oracle's gain realised", percent(metrics["realised"])],
    ]
    return text_table(["", "test accuracy %"], rows)


def _choices(run: Run) -> str:
    shares = run.metrics["layer_share_by_type"]
    header = ["layer chosen, % of test nodes", *(f"layer {d}" for d in range(len(shares[0])))]
    rows = [
        [f"type {kind}: class seen {kind} hops upstream", *map(percent, share)]
        for kind, share in enumerate(shares)
    ]
    return text_table(header, [*rows, ["all", *map(percent, run.metrics["layer_share"])]])
