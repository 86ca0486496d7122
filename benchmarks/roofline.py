"""What the head must cost on a GPU: bytes, FLOP and launches of every op, and the times they imply.

Nothing here was run on a GPU: every time is predicted, except the paper's epochs, which its authors
measured. Assumptions:

- An op takes max(bytes / (0.8 bandwidth), FLOP / (0.6 rate)) + launches x 10 us: nothing overlaps
  with a launch, and an op's traffic and arithmetic overlap fully. The fused kernels reach 0.3 of
  the rate: their float32 products read most operands from shared memory.
- `eager` and `reference`: every aten op is one kernel that reads its inputs and writes its results
  once, from and to DRAM; a gather or scatter-add touches the smaller of its rows and its table.
  That is generous: nonzero, logsumexp or index_put take several kernels, and waits for the host
  are not counted. Tests count both on the code itself.
- `fused`: a tile of rows is read from DRAM once and again from L2; sums over rows go through
  slots, written and read once: for the decoders 2 of float32 on each multiprocessor, for the
  moments 3 of float64. The moments are always made on the FP32 units.
- A Cholesky factor, an inverse or a triangular solve of D columns is D / 8 dependent launches.
- Products of float32 run on the FP32 units, with `--precision tf32` on the tensor cores (the V100
  has none for them). An exponential or logarithm counts as 8 FLOP. Caches keep nothing else.
"""

import argparse
from dataclasses import dataclass, replace

from metselect_dgl.experiments.paper import EPOCH_SECONDS

from . import costs
from .costs import BESIDE, HEAD, Cost, Size, symbols


@dataclass(frozen=True)
class GPU:
    """Published peaks: bytes/s, FLOP/s of the FP32 units, of dense tf32 (0: none), and SMs."""

    name: str
    bandwidth: float
    fp32: float
    tf32: float
    multiprocessors: int

    def rate(self, precision: str) -> float:
        return self.tf32 if precision == "tf32" and self.tf32 else self.fp32

    def size(self, size: Size) -> Size:
        return replace(size, M=self.multiprocessors)


# As published for the V100 (SXM2, 32 GB), A100 (SXM4, 80 GB) and H100 (SXM5, 80 GB).
GPUS = {
    "V100": GPU("V100", 900e9, 15.7e12, 0, 80),
    "A100": GPU("A100", 2039e9, 19.5e12, 156e12, 108),
    "H100": GPU("H100", 3350e9, 66.9e12, 494.7e12, 132),
}


@dataclass(frozen=True)
class Model:
    """How a cost becomes seconds."""

    bandwidth_share: float = 0.8
    rate_share: float = 0.6
    fused_rate_share: float = 0.3
    launch: float = 10e-6
    precision: str = "ieee"

    def of(self, path: str) -> "Model":
        """As it applies to a path."""
        return replace(self, rate_share=self.fused_rate_share) if path == "fused" else self

    def seconds(self, cost: Cost, gpu: GPU) -> float:
        traffic = cost.bytes / (self.bandwidth_share * gpu.bandwidth)
        products = cost.matmul / (self.rate_share * gpu.rate(self.precision))
        arithmetic = products + cost.other / (self.rate_share * gpu.fp32)
        return max(traffic, arithmetic) + cost.launches * self.launch


DEFAULT = Model()


def head_costs(path: str, size: Size) -> dict[str, Cost]:
    """Of the ops of a path's head."""
    return {name: op(**size.letters()) for name, op in HEAD[path].items()}


def head_seconds(path: str, size: Size, gpu: GPU, model: Model = DEFAULT) -> float:
    costs_of = head_costs(path, gpu.size(size)).values()
    return sum(model.of(path).seconds(cost, gpu) for cost in costs_of)


def _formula(cost: Cost) -> str:
    parts = {"bytes": cost.bytes, "matmul FLOP": cost.matmul, "other FLOP": cost.other}
    parts["launches"] = cost.launches
    return "\n".join(f"    {what:11} {formula}" for what, formula in parts.items() if formula)


def formulas() -> str:
    """Every cost as a function of the letters."""
    lines = costs.__doc__.split("\n\n")[-1].splitlines()
    for path, ops in HEAD.items():
        for name, op in (ops | BESIDE.get(path, {})).items():
            lines += [f"{path} {name}", _formula(op(**symbols()))]
    return "\n".join(lines)


def op_table(size: Size, model: Model) -> str:
    """Bytes, FLOP and predicted milliseconds of every op, and of every path's head."""
    head = f"{'path':9} {'op':24} {'MB':>9} {'GFLOP':>8} {'FLOP/byte':>9} {'launches':>8}"
    lines = [head + "".join(f" {gpu:>8}" for gpu in GPUS) + "  ms"]
    for path, ops in HEAD.items():
        for name, op in (ops | BESIDE.get(path, {})).items():
            cost = op(**size.letters())
            each = [op(**gpu.size(size).letters()) for gpu in GPUS.values()]
            times = [
                model.of(path).seconds(*pair) for pair in zip(each, GPUS.values(), strict=True)
            ]
            lines.append(_row(path, name, cost, times))
        total = sum(head_costs(path, size).values(), Cost())
        times = [head_seconds(path, size, gpu, model) for gpu in GPUS.values()]
        lines.append(_row(path, "head", total, times))
    return "\n".join(lines)


def _row(path: str, name: str, cost: Cost, seconds: list[float]) -> str:
    counted = f"{cost.bytes / 1e6:9.1f} {cost.flops / 1e9:8.2f} {cost.flops / cost.bytes:9.2f}"
    times = "".join(f" {1e3 * each:8.3f}" for each in seconds)
    return f"{path:9} {name:24} {counted} {cost.launches:8.0f}{times}  predicted"


def paper_table(size: Size, model: Model) -> str:
    """The head on a V100 as a share of the epochs that the paper measured on one."""
    epochs = {
        f"{backbone} {method}": seconds
        for backbone, methods in EPOCH_SECONDS.items()
        for method, seconds in methods.items()
        if method != "NDLSelect"
    }
    lines = [f"{'':9} {'ms':>8}" + "".join(f" {name:>16}" for name in epochs)]
    lines.append(f"{'epoch':18}" + _cells(epochs.values(), "{:.0f} ms", 1e3) + "  paper, measured")
    for path in HEAD:
        head = head_seconds(path, size, GPUS["V100"], model)
        shares = [head / seconds for seconds in epochs.values()]
        cells = _cells(shares, "{:.2f} %", 100)
        lines.append(f"{path:9} {1e3 * head:8.2f}{cells}  predicted")
    return "\n".join(lines)


def _cells(values, form: str, unit: float) -> str:
    return "".join(f" {form.format(unit * value):>16}" for value in values)


COMPARABLE = """\
Comparable: the same number of nodes, rows and classes. Not comparable: the paper's epoch is a whole
one in eager torch (convolutions, backward, optimizer, perhaps evaluation, perhaps another width);
the head here is moments, selection, loss and their gradients alone, deep supervision included.
The V100 is for this comparison only: Triton needs compute capability 8.0, CUDA 13 needs 7.5."""


def plot(size: Size, model: Model, gpu: GPU, file: str) -> None:
    """The roof of a GPU, and every op under it: lower by as much as its launches cost."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    _draw_roofs(axes, model, gpu)
    for path, marker in zip(HEAD, "so^", strict=True):
        points = {}
        for name, cost in head_costs(path, gpu.size(size)).items():
            if cost.flops:
                seconds = model.of(path).seconds(cost, gpu)
                at = cost.flops / cost.bytes, cost.flops / seconds / 1e12
                points[f"{name.removeprefix('selected_')}, {1e3 * seconds:.2f} ms"] = at
        dots = axes.scatter(*zip(*points.values(), strict=True), marker=marker, label=path)
        for label, at in points.items():
            if not (path == "reference" and label.startswith("scale")):  # the same as fused
                side = "below" if path == "eager" else "right"
                side = "left" if path == "fused" and label.startswith("cross") else side
                _annotate(axes, label, at, side, dots.get_facecolor()[0])
    axes.set(xscale="log", yscale="log", xlim=SPAN, xlabel="FLOP per byte of DRAM traffic")
    axes.set_ylabel("TFLOP/s, predicted")
    axes.set_title(
        f"Ops of the head, predicted for the {gpu.name}: n = {size.n:,}, L = {size.L}, "
        f"C = {size.C}, D = {size.D}, products {model.precision}\n"
        f"roofs: {model.bandwidth_share:.0%} of the bandwidth, {model.rate_share:.0%} of the FLOP "
        f"rate (fused: {model.fused_rate_share:.0%}); {1e6 * model.launch:.0f} µs a launch",
        fontsize=10,
    )
    axes.legend(loc="upper left")
    figure.savefig(file, dpi=150)


SPAN = (0.05, 300)  # FLOP per byte


def _draw_roofs(axes, model: Model, gpu: GPU) -> None:
    bandwidth = model.bandwidth_share * gpu.bandwidth
    for name, peak in (("FP32 units", gpu.fp32), ("tf32 tensor cores", gpu.tf32)):
        if peak:
            rate = model.rate_share * peak
            corners = SPAN[0], rate / bandwidth, SPAN[1]
            heights = [min(rate, x * bandwidth) / 1e12 for x in corners]
            axes.plot(corners, heights, color="0.4", lw=1.2, zorder=1)
            axes.text(0.97 * SPAN[1], 0.95 * heights[1], name, ha="right", va="top", color="0.4")


PLACES = {
    "below": ((-4, -7), "left", "top"),
    "left": ((-7, 0), "right", "center"),
    "right": ((7, 0), "left", "center"),
}


def _annotate(axes, label: str, at: tuple[float, float], side: str, color) -> None:
    offset, ha, va = PLACES[side]
    style = {"textcoords": "offset points", "fontsize": 7.5, "color": color}
    axes.annotate(label, at, offset, ha=ha, va=va, **style)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size, model = Size(), DEFAULT
    parser.add_argument("--nodes", type=int, default=size.N)
    parser.add_argument("--rows", type=int, default=size.n)
    parser.add_argument("--layers", type=int, default=size.L)
    parser.add_argument("--classes", type=int, default=size.C)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--bandwidth-share", type=float, default=model.bandwidth_share)
    parser.add_argument("--rate-share", type=float, default=model.rate_share)
    parser.add_argument("--fused-rate-share", type=float, default=model.fused_rate_share)
    parser.add_argument("--launch-us", type=float, default=1e6 * model.launch)
    parser.add_argument("--precision", choices=("ieee", "tf32"), default="ieee")
    parser.add_argument("--plot", metavar="FILE.png", help="a roofline of the first width")
    parser.add_argument("--gpu", choices=GPUS, default="A100", help="of the plot")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    model = Model(
        bandwidth_share=args.bandwidth_share,
        rate_share=args.rate_share,
        fused_rate_share=args.fused_rate_share,
        launch=args.launch_us / 1e6,
        precision=args.precision,
    )
    size = Size(args.nodes, args.rows, args.layers, args.classes, args.width[0])
    print(__doc__)
    print(formulas())
    for width in args.width:
        wide = replace(size, D=width)
        print(
            f"\nN = {wide.N:,}, n = {wide.n:,}, L = {wide.L}, C = {wide.C}, D = {width};", end=" "
        )
        print(f"products {model.precision}; MB with the slots of a V100")
        print(op_table(wide, model))
        print(f"\nhead on a V100 as a share of the paper's epoch on ogbn-arxiv, D = {width}")
        print(paper_table(wide, model))
    print(f"\n{COMPARABLE}")
    if args.plot:
        plot(size, model, GPUS[args.gpu], args.plot)


if __name__ == "__main__":
    main()
