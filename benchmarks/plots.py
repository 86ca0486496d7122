"""Figures of the benchmarks: epochs, growth with the sizes, and memory."""

from pathlib import Path

from matplotlib import pyplot as plt

from metselect_dgl.plots import name_ticks, save_figure


def plot_epochs(ratios: dict[str, dict[str, dict]], data: str, path: Path) -> None:
    """Bars of the time of an epoch as a share of a plain DGL loop's, with quartiles."""
    width = 1 + 0.3 * sum(map(len, ratios.values()))
    shares = [max(len(bars), 1) for bars in ratios.values()]
    figure, panels = plt.subplots(
        1,
        len(ratios),
        figsize=(width, 5),
        sharey=True,
        layout="constrained",
        squeeze=False,
        width_ratios=shares,
    )
    for axes, (backbone, bars) in zip(panels[0], ratios.items(), strict=True):
        for name, found in bars.items():
            below, above = found["median"] - found["q1"], found["q3"] - found["median"]
            color = "C1" if name.startswith("MetSelect") else "C0"
            axes.bar(name, found["median"], yerr=[[below], [above]], color=color, capsize=3)
        axes.axhline(1, color="0.4", lw=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.set_title(backbone)
        axes.tick_params(axis="x", rotation=90)
    panels[0][0].set_ylabel("epoch / epoch of the plain DGL loop")
    figure.suptitle(f"{data}; depth 2, hidden 64; bars: median and quartiles", fontsize=10)
    save_figure(figure, path)


def plot_growth(curves: dict[str, dict[str, tuple]], path: Path) -> None:
    """Time against each size, with the fitted exponent of every provider."""
    size = (4 * len(curves), 3.6)
    figure, panels = plt.subplots(1, len(curves), figsize=size, layout="constrained", squeeze=False)
    for axes, (axis, providers) in zip(panels[0], curves.items(), strict=True):
        for name, (sizes, seconds, fitted) in providers.items():
            power = "" if fitted is None else f" ~ {axis}$^{{{fitted:.2f}}}$"
            axes.loglog(sizes, [1e3 * each for each in seconds], "o-", label=name + power)
        name_ticks(axes, {size for sizes, _, _ in providers.values() for size in sizes})
        axes.set_xlabel(axis)
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("ms")
    save_figure(figure, path)


def plot_memory(peaks: dict[str, dict[str, float]], path: Path) -> None:
    """Peak memory of the head against the number of rows."""
    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for name, by_rows in peaks.items():
        rows = sorted(map(int, by_rows))
        axes.loglog(rows, [by_rows[str(n)] / 2**20 for n in rows], "o-", label=name)
        name_ticks(axes, rows)
    axes.set_xlabel("rows")
    axes.set_ylabel("MB beyond the inputs")
    axes.legend(fontsize=8)
    save_figure(figure, path)
