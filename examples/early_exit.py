"""Accuracy against edges aggregated: how much work early exit saves, on a dataset of yours.

    python examples/early_exit.py [--dataset hop_chain] [--num-layers 2] [--out runs/early-exit]

Trains a GCN + MetSelect, then infers with `exit_at` from a low probability to 1, where it is exact.
Prints the curve, and leaves it as early-exit-DATASET.json and .png in the folder.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from metselect_dgl.config import Config
from metselect_dgl.data import load_dataset
from metselect_dgl.train import prepare, train

DIAL = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
SHOWN = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


def curve(config: Config, data) -> list[dict]:
    """Of the best epoch's model: a point for every turn of the dial."""
    run = train(config, data)
    data, model = prepare(config, data), run.model
    test, points = data.split(config.split).test, []
    for exit_at in DIAL:
        out = model.predict(data.graph, data.feat, batch_size=65536, exit_at=exit_at)
        right = (out.logits.argmax(1) == data.labels)[test].double().mean().item()
        points.append({"exit_at": exit_at, "edges": out.edges, "accuracy": round(right, 4)})
    every = points[-1]["edges"]
    return [point | {"share": round(point["edges"] / every, 4)} for point in points]


def draw(points: list[dict], title: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    shares = [100 * point["share"] for point in points]
    axes.plot(shares, [100 * point["accuracy"] for point in points], "o-")
    labelled = [each for each in zip(shares, points, strict=True) if each[1]["exit_at"] in SHOWN]
    for share, point in labelled:
        at = share, 100 * point["accuracy"]
        axes.annotate(f"{point['exit_at']:g}", at, xytext=(4, -11), textcoords="offset points")
    axes.set(xlabel="edges aggregated, % of all", ylabel="test accuracy, %", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="hop_chain")
    parser.add_argument("--data-dir")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/early-exit"))
    args = parser.parse_args()
    data = load_dataset(args.dataset, args.data_dir)
    config = Config(
        dataset=args.dataset,
        num_layers=args.num_layers,
        epochs=args.epochs,
        validate_every=5,
        # arxiv-twin comes with self-loops, hop_chain must not have them
        self_loop=args.dataset not in ("arxiv-twin", "hop_chain"),
        # the gate compares all layers and would make them three times
        select="temperature",
    )
    points = curve(config, data)
    for point in points:
        print(
            f"exit_at {point['exit_at']:<6g} {100 * point['share']:6.1f} % of the edges, "
            f"accuracy {100 * point['accuracy']:.1f}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"early-exit-{args.dataset}.json"
    file.write_text("\n".join(json.dumps(point) for point in points) + "\n")
    title = f"{args.dataset}, GCN + MetSelect, depth {args.num_layers}"
    draw(points, title, file.with_suffix(".png"))
    print(file.with_suffix(".png"))


if __name__ == "__main__":
    main()
