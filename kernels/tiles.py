"""What every Triton kernel shares: layers behind one table, tiles of picked rows, the launch.

A kernel sees all layers through a table of int64 [L, fields], one row per layer: addresses,
strides and widths. So one launch serves any number of layers of any widths, and every offset that
is multiplied by a stride has 64 bits. Rows may be picked by an index of the layer; a number that
points outside reads nothing, writes nothing and gives NaN.
"""

import os
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

Result = TypeVar("Result")
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
PRECISIONS = ("ieee", "tf32", "tf32x3")
# The first fields of a table's row; a kernel's own come after them.
ADDRESS, ROW_STRIDE, COLUMN_STRIDE, ROWS, WIDTH, INDEX = map(tl.constexpr, range(6))


def own_fields(count: int) -> tuple[tl.constexpr, ...]:
    """The numbers of as many fields of a kernel's own, and of all fields together."""
    first = INDEX.value + 1
    return tuple(map(tl.constexpr, range(first, first + count + 1)))


@triton.jit
def matrix(row, field: tl.constexpr, DTYPE: tl.constexpr):
    """The address in a field of a table's row."""
    return tl.load(row + field).to(tl.pointer_type(DTYPE))


@triton.jit
def number(field):
    """The float64 whose bits are in a field."""
    return tl.load(field).to(tl.float64, bitcast=True)


@triton.jit
def picked_rows(row, i, here):
    """(number in the layer, whether it is one) of the picked rows i."""
    index = matrix(row, INDEX, tl.int64)
    # [BN] by way of i: Triton 3.9's interpreter takes no scalar for a mask.
    given = 0 * i + tl.load(row + INDEX) != 0
    number = tl.where(given, tl.load(index + i, mask=here & given, other=0), i)
    return number, here & (number >= 0) & (number < tl.load(row + ROWS))


@triton.jit
def class_numbers(labels, i, here, n_classes):
    """The labels of the rows i in 32 bits, -1 for what is not a class."""
    y = tl.load(labels + i, mask=here, other=0)
    return tl.where((y >= 0) & (y < n_classes), y, -1).to(tl.int32)


@triton.jit
def row_pointers(row, number, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """(the pointers [BN, 1] to the rows, the stride of a column, the width); VECTOR > 1 promises
    columns of stride 1 and that address, row stride and width are multiples of 16 bytes."""
    base, width = matrix(row, ADDRESS, DTYPE), tl.load(row + WIDTH).to(tl.int32)
    stride, step = tl.load(row + ROW_STRIDE), tl.load(row + COLUMN_STRIDE)
    if VECTOR > 1:
        base, width = tl.multiple_of(base, 16), tl.multiple_of(width, VECTOR)
        stride, step = tl.multiple_of(stride, VECTOR), 1
    return base + number[:, None] * stride, step, width


@dataclass(frozen=True)
class Config:
    """Nodes, classes and features of a tile, and how many warps work on it.

    A product of float32 outside the tensor cores holds all BK features of both operands in
    registers: hence 16, the least that Triton allows, and 8 warps for a tile. Loads are not
    pipelined (one stage): the loops are short, and the registers go to further blocks instead.
    """

    BN: int
    BC: int
    BK: int
    num_warps: int
    num_stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Of the compiler. Left alone, NVIDIA's spills a few registers to fit one more block."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if torch.version.hip else options | {"maxnreg": 255}

    def within(self, width: int, n_classes: int) -> "Config":
        """A tile no larger than these padded sizes."""
        return replace(self, BC=min(self.BC, n_classes), BK=min(self.BK, width))


FLOAT64 = Config(32, 16, 16, 8)


def tile_of(kernel: triton.JITFunction, config: Config) -> dict[str, int]:
    """The sides of the tile that the kernel asks for."""
    sides = {"BN": config.BN, "BC": config.BC, "BK": config.BK}
    return {name: side for name, side in sides.items() if name in kernel.arg_names}


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], config: Config, **arguments) -> None:
    """Run a kernel, if there is anything to do; the only place that does."""
    if all(grid):
        kernel[grid](**arguments, **tile_of(kernel, config), **config.options)


def padded(size: int, least: int = 16) -> int:
    """The sides of a product are powers of two, and 16 at least."""
    return max(least, triton.next_power_of_2(size))


def rows_fields(h: Tensor, index: Tensor | None) -> list[int]:
    """The first fields of a layer's row in the table."""
    return [h.data_ptr(), *h.stride(), *h.shape, 0 if index is None else index.data_ptr()]


def number_bits(value: float) -> int:
    """What `number` reads back."""
    return struct.unpack("q", struct.pack("d", value))[0]


def vector(layers: Sequence[Tensor]) -> int:
    """How many features of every layer can be read at once: 16 bytes, or 1 of any layout."""
    many = 16 // layers[0].element_size()
    fits = all(
        h.stride(1) == 1 and (h.data_ptr() % 16, h.stride(0) % many, h.shape[1] % many) == (0, 0, 0)
        for h in layers
    )
    return many if fits else 1


def table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The rows on the device, without waiting for it."""
    on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def check(layers: list[Tensor], index: list[Tensor | None], **vectors: Tensor | None) -> None:
    """What kernels read by address is where they look: on one device, numbers in 64 bits, vectors
    without gaps. What the numbers point to is looked at by the kernels."""
    device = layers[0].device
    numbers = {f"the index of layer {depth}": each for depth, each in enumerate(index)}
    numbers |= {name: vectors[name] for name in ("labels", "layer") if name in vectors}
    for name, value in numbers.items():
        if value is not None and (value.dtype, value.dim()) != (torch.int64, 1):
            raise ValueError(
                f"{name} is {value.dtype} of shape {tuple(value.shape)}; pass int64 [n]"
            )
    every = {f"layer {depth}": h for depth, h in enumerate(layers)} | numbers | vectors
    for name, value in every.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} is on {value.device}, layer 0 on {device}")
        if value is not None and value.dim() == 1 and not value.is_contiguous():
            raise ValueError(f"{name} has gaps; pass {name.split()[-1]}.contiguous()")


def addresses(constants: dict[str, Tensor], names: Sequence[str]) -> list[int]:
    """Of some of a layer's constants."""
    return [constants[name].data_ptr() for name in names]


def picked_count(layers: list[Tensor], index: list[Tensor | None]) -> int:
    """How many rows are picked from each layer."""
    return len(layers[0] if index[0] is None else index[0])


def arithmetic(layers: list[Tensor], constants: list[Tensor]) -> dict:
    """What a kernel must know of dtypes and layout: features are converted as they are read, and
    everything else happens in the dtype of the constants, or in float32 if that is narrower."""
    acc = tl.float64 if constants[0].dtype == torch.float64 else tl.float32
    return {
        "DTYPE": DTYPES[layers[0].dtype],
        "ACC": acc,
        "VECTOR": vector(layers),
        "PRECISION": precision() if acc == tl.float32 else "ieee",
    }


def precision() -> str:
    """How float32 is multiplied: METSELECT_PRECISION, by default as IEEE 754 says."""
    wish = os.environ.get("METSELECT_PRECISION", "ieee")
    if wish not in PRECISIONS:
        raise ValueError(f"METSELECT_PRECISION is {wish!r}; use {', '.join(PRECISIONS)}")
    if wish == "tf32x3" and torch.version.hip:
        raise ValueError("METSELECT_PRECISION=tf32x3 is for NVIDIA's GPUs; use ieee or tf32")
    return wish


_fastest: dict[Hashable, Config] = {}


def fitting(configs: Sequence[Config], given: dict, layers: list[Tensor]) -> list[Config]:
    """The configs cut to the problem, each once; for float64, a tile that fits its registers."""
    if given["ACC"] == tl.float64:
        configs = (FLOAT64,)
    width = padded(max(h.shape[1] for h in layers))
    return list(dict.fromkeys(each.within(width, padded(given["n_classes"])) for each in configs))


def tuned(
    name: str,
    given: dict,
    layers: list[Tensor],
    configs: Sequence[Config],
    run: Callable[[Config], Result],
) -> Result:
    """`run` with the fastest of the configs, which is measured once for every kind of input.

    `run` makes its own outputs, so measuring changes nothing but time. METSELECT_TUNE=0 takes the
    first config always: sums then have the same bits in every process.
    """
    with torch.cuda.device_of(layers[0]):
        return run(_choice(name, given, layers, fitting(configs, given, layers), run))


def _choice(name, given, layers, choices, run) -> Config:
    device = layers[0].device
    sizes = (
        padded(size) for size in (*(h.shape[1] for h in layers), given["n_classes"], given["n"])
    )
    constants = (value for key, value in given.items() if key.isupper())
    kind = name, device, *sizes, *constants
    if kind in _fastest:
        return _fastest[kind]
    tunes = os.environ.get("METSELECT_TUNE", "1") != "0" and given["n"] > 0
    if len(choices) == 1 or not tunes or not _can_measure(device):
        return choices[0]
    times = [triton.testing.do_bench(lambda c=c: run(c), warmup=5, rep=20) for c in choices]
    _fastest[kind] = choices[times.index(min(times))]
    return _fastest[kind]


def _can_measure(device: torch.device) -> bool:
    """Not on a CPU, and not while a CUDA graph is captured."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
