"""Figures: shares of selected layers, the explanation of a node, and curves."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .config import SELECTOR_TITLES


def plot_layers(metrics: dict, path: Path) -> None:
    """Draw the share of test nodes at each layer as stacked bars: all nodes, and by hidden type."""
    by_type = metrics.get("layer_share_by_type", [])
    shares = np.array([*by_type, metrics["layer_share"]])  # [bars, L]
    bars = [f"type {kind}" for kind in range(len(by_type))] + ["all test nodes"]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.55 * len(bars)), layout="constrained")
    colors = plt.colormaps["viridis"](np.linspace(0.1, 0.9, shares.shape[1]))
    left = np.zeros(len(bars))
    for depth, color in enumerate(colors):
        axes.barh(bars, shares[:, depth], left=left, color=color, label=f"layer {depth}")
        style = {"ha": "center", "va": "center"}
        style["color"] = "white" if depth < len(colors) / 2 else "black"
        for row, width in enumerate(shares[:, depth]):
            if width > 0.06:  # wide enough for a text
                text = f"{depth}: {100 * width:.0f} %" if width > 0.12 else f"{100 * width:.0f}"
                axes.text(left[row] + width / 2, row, text, **style)
        left += shares[:, depth]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f} %")
    config, accuracy = metrics["config"], 100 * metrics["test"]["accuracy"]
    model = f"{config['backbone'].upper()} + {SELECTOR_TITLES[config['selector']]}"
    title = (
        f"{model} on {config['dataset']}: layer selected per node, test accuracy {accuracy:.1f} %"
    )
    axes.set_title(title, fontsize=10)
    if len(colors) <= 10:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    save_figure(figure, path)


def plot_explanation(
    posterior: np.ndarray, score: np.ndarray, title: str, layer: int, label: int, path: Path
) -> None:
    """Draw the posteriors [L, C] of the classes at every layer, with the selected layer framed."""
    n_layers, n_classes = posterior.shape
    size = (2.5 + 0.45 * n_classes, 1.6 + 0.45 * n_layers)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(posterior, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(n_classes))
    axes.set_yticks(range(n_layers), [f"layer {d}  ({s:+.1f})" for d, s in enumerate(score)])
    axes.set_xlabel("class" + (f" (true: {label})" if label >= 0 else ""))
    style = {"fill": False, "edgecolor": "red", "lw": 2}
    axes.add_patch(plt.Rectangle((-0.5, layer - 0.5), n_classes, 1, **style))
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, label="posterior")
    save_figure(figure, path)


def name_ticks(axes, sizes) -> None:
    """Label the measured sizes as plain numbers."""
    axes.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)], fontsize=8)
    axes.xaxis.minorticks_off()


def plot_shares(shares: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Draw the share of nodes at each layer as stacked bars by dataset, in a panel per backbone."""
    figure = plt.figure(figsize=(4 * len(shares), 3.6), layout="constrained")
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)
    for axes, (backbone, by_dataset) in zip(panels[0], shares.items(), strict=True):
        table = np.array(list(by_dataset.values()))  # [datasets, L]
        colors = plt.colormaps["viridis"](np.linspace(0.1, 0.9, table.shape[1]))
        bottom = np.zeros(len(table))
        for depth, color in enumerate(colors):
            heights = table[:, depth]
            axes.bar(list(by_dataset), heights, bottom=bottom, color=color, label=f"layer {depth}")
            bottom += heights
        axes.set_title(backbone)
        axes.tick_params(axis="x", rotation=60)
    panels[0][0].set_ylabel("share of test nodes")
    panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    save_figure(figure, path)


def plot_curves(
    panels: dict[str, dict[str, dict[int, np.ndarray]]], x_label: str, path: Path, log: bool = False
) -> None:
    """Draw mean and standard deviation of accuracies over runs against a number, in panels."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    size = (5.2 * columns, 3.4 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, models) in zip(grid.flat, panels.items(), strict=False):
        for number, (name, points) in enumerate(models.items()):
            style = {"color": "0.3", "ls": "--"} if number == 0 else {"color": f"C{number - 1}"}
            means = [values.mean() for values in points.values()]
            spread = [values.std(ddof=1) if len(values) > 1 else 0 for values in points.values()]
            style |= {"marker": "o", "capsize": 3, "label": name}
            axes.errorbar(list(points), means, yerr=spread, **style)
        if log:
            axes.set_xscale("log", base=2)
        name_ticks(axes, {x for points in models.values() for x in points})
        axes.set(title=title, xlabel=x_label, ylabel="accuracy, %")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].legend(fontsize=8)
    save_figure(figure, path)


def save_figure(figure, path: Path) -> None:
    """Write a figure and close it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
