"""Functions shared by the Triton kernels: the table of layers, tiles of picked rows, the launch.

A kernel reads addresses, strides and widths of all layers from an int64 table [L, fields], so one
launch handles any number of layers of any widths, and every offset that is multiplied by a stride
has 64 bits. Rows may be picked by an index per layer; an index out of range is neither read nor
written and gives NaN.
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
# The first fields of a row of the table; those of a single kernel come after them.
ADDRESS, ROW_STRIDE, COLUMN_STRIDE, ROWS, WIDTH, INDEX = map(tl.constexpr, range(6))


def own_fields(count: int) -> tuple[tl.constexpr, ...]:
    """Return the positions of `count` fields of a single kernel, and the number of all fields."""
    first = INDEX.value + 1
    return tuple(map(tl.constexpr, range(first, first + count + 1)))


# Triton 3.0 and 3.1 cannot make a pointer type of a constexpr inside a kernel.
_FLOAT16, _BFLOAT16, _FLOAT32, _FLOAT64, _INT32, _INT64 = (
    tl.constexpr(tl.pointer_type(kind))
    for kind in (tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.int32, tl.int64)
)


@triton.jit
def matrix(row, field: tl.constexpr, DTYPE: tl.constexpr):
    """Load the address in a field of a row of the table."""
    address = tl.load(row + field)
    if DTYPE == tl.float16:  # noqa: SIM300
        return address.to(_FLOAT16)
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        return address.to(_BFLOAT16)
    elif DTYPE == tl.float32:  # noqa: SIM300
        return address.to(_FLOAT32)
    elif DTYPE == tl.float64:  # noqa: SIM300
        return address.to(_FLOAT64)
    elif DTYPE == tl.int32:  # noqa: SIM300
        return address.to(_INT32)
    else:
        return address.to(_INT64)


@triton.jit
def number(field):
    """Load the float64 whose bits are in a field."""
    return tl.load(field).to(tl.float64, bitcast=True)


@triton.jit
def picked_rows(row, i, here):
    """Load the row numbers in the layer of the picked rows i, and whether they are in range."""
    index = matrix(row, INDEX, tl.int64)
    # 0 * i gives shape [BN]: Triton 3.9's interpreter accepts no scalar as a mask.
    given = 0 * i + tl.load(row + INDEX) != 0
    number = tl.where(given, tl.load(index + i, mask=here & given, other=0), i)
    return number, here & (number >= 0) & (number < tl.load(row + ROWS))


@triton.jit
def class_numbers(labels, i, here, n_classes):
    """Load the labels of the rows i as int32, -1 for a label out of range."""
    y = tl.load(labels + i, mask=here, other=0)
    return tl.where((y >= 0) & (y < n_classes), y, -1).to(tl.int32)


@triton.jit
def row_pointers(row, number, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Return (pointers [BN, 1] to the rows, column stride, width); VECTOR > 1 asserts a column
    stride of 1 and that address, row stride and width are multiples of 16 bytes."""
    base, width = matrix(row, ADDRESS, DTYPE), tl.load(row + WIDTH).to(tl.int32)
    stride, step = tl.load(row + ROW_STRIDE), tl.load(row + COLUMN_STRIDE)
    if VECTOR > 1:
        base, width = tl.multiple_of(base, 16), tl.multiple_of(width, VECTOR)
        stride, step = tl.multiple_of(stride, VECTOR), 1
    return base + number[:, None] * stride, step, width


@dataclass(frozen=True)
class Config:
    """Nodes, classes and features of a tile, and the number of warps.

    A float32 product outside the tensor cores holds all BK features of both operands in registers:
    hence BK = 16, the least that Triton allows, and 8 warps per tile. Loads are not pipelined (one
    stage): the loops are short, and fewer registers let more blocks run at a time.
    """

    BN: int
    BC: int
    BK: int
    num_warps: int
    num_stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Return options of the compiler; without maxnreg, NVIDIA's spills registers to fit one
        more block."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if torch.version.hip else options | {"maxnreg": 255}

    def within(self, width: int, n_classes: int) -> "Config":
        """Return the config with a tile no larger than these padded sizes."""
        return replace(self, BC=min(self.BC, n_classes), BK=min(self.BK, width))


FLOAT64 = Config(32, 16, 16, 8)


def tile_of(kernel: triton.JITFunction, config: Config) -> dict[str, int]:
    """Return the sides of the tile that are parameters of the kernel."""
    sides = {"BN": config.BN, "BC": config.BC, "BK": config.BK}
    return {name: side for name, side in sides.items() if name in kernel.arg_names}


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], config: Config, **arguments) -> None:
    """Launch a kernel unless the grid is empty; all launches go through this function."""
    if all(grid):
        kernel[grid](**arguments, **tile_of(kernel, config), **config.options)


def padded(size: int, least: int = 16) -> int:
    """Return the size rounded up to a power of two, at least 16, as `tl.dot` requires."""
    return max(least, triton.next_power_of_2(size))


def rows_fields(h: Tensor, index: Tensor | None) -> list[int]:
    """Return the first fields of a layer's row in the table."""
    return [h.data_ptr(), *h.stride(), *h.shape, 0 if index is None else index.data_ptr()]


def number_bits(value: float) -> int:
    """Return the bits of a float64 as an integer, for `number` to load."""
    return struct.unpack("q", struct.pack("d", value))[0]


def vector(layers: Sequence[Tensor]) -> int:
    """Return the number of features per load: 16 bytes if all layers are aligned, otherwise 1."""
    size = 16 // layers[0].element_size()
    aligned = all(
        h.stride(1) == 1 and (h.data_ptr() % 16, h.stride(0) % size, h.shape[1] % size) == (0, 0, 0)
        for h in layers
    )
    return size if aligned else 1


def table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy the rows to the device without waiting for it."""
    on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def check(layers: list[Tensor], index: list[Tensor | None], **vectors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device, indices and labels are int64 [n] and
    vectors are contiguous; index values are checked by the kernels."""
    device = layers[0].device
    numbers = {f"the index of layer {depth}": rows for depth, rows in enumerate(index)}
    numbers |= {name: vectors[name] for name in ("labels", "layer") if name in vectors}
    for name, value in numbers.items():
        if value is not None and (value.dtype, value.dim()) != (torch.int64, 1):
            raise ValueError(
                f"{name} is {value.dtype} of shape {tuple(value.shape)}; pass int64 [n]"
            )
    tensors = {f"layer {depth}": h for depth, h in enumerate(layers)} | numbers | vectors
    for name, value in tensors.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} is on {value.device}, layer 0 on {device}")
        if value is not None and value.dim() == 1 and not value.is_contiguous():
            raise ValueError(f"{name} is not contiguous; pass {name.split()[-1]}.contiguous()")


def addresses(constants: dict[str, Tensor], names: Sequence[str]) -> list[int]:
    """Return the addresses of the named constants of a layer."""
    return [constants[name].data_ptr() for name in names]


def picked_count(layers: list[Tensor], index: list[Tensor | None]) -> int:
    """Return the number of rows picked from each layer."""
    return len(layers[0] if index[0] is None else index[0])


def arithmetic(layers: list[Tensor], constants: list[Tensor]) -> dict:
    """Return the constexpr arguments for dtypes and layout: features are converted when loaded,
    and kernels compute in the dtype of the constants, at least float32."""
    acc = tl.float64 if constants[0].dtype == torch.float64 else tl.float32
    return {
        "DTYPE": DTYPES[layers[0].dtype],
        "ACC": acc,
        "VECTOR": vector(layers),
        "PRECISION": precision() if acc == tl.float32 else "ieee",
    }


def precision() -> str:
    """Return the precision of float32 products, METSELECT_PRECISION, by default IEEE 754."""
    choice = os.environ.get("METSELECT_PRECISION", "ieee")
    if choice not in PRECISIONS:
        raise ValueError(f"METSELECT_PRECISION is {choice!r}; use {', '.join(PRECISIONS)}")
    if choice == "tf32x3" and torch.version.hip:
        raise ValueError("METSELECT_PRECISION=tf32x3 needs a GPU of NVIDIA; use ieee or tf32")
    return choice


_fastest: dict[Hashable, Config] = {}


def fitting(configs: Sequence[Config], given: dict, layers: list[Tensor]) -> list[Config]:
    """Return the distinct configs with tiles limited to the problem; one config for float64."""
    if given["ACC"] == tl.float64:
        configs = (FLOAT64,)
    width = padded(max(h.shape[1] for h in layers))
    n_classes = padded(given["n_classes"])
    return list(dict.fromkeys(config.within(width, n_classes) for config in configs))


def tuned(
    name: str,
    given: dict,
    layers: list[Tensor],
    configs: Sequence[Config],
    run: Callable[[Config], Result],
) -> Result:
    """Call `run` with the fastest config, which is measured once per kind of input.

    `run` allocates its outputs, so measuring has no side effects. METSELECT_TUNE=0 always uses the
    first config; results are then bitwise equal in every process.
    """
    with torch.cuda.device_of(layers[0]):
        return run(_fastest_config(name, given, layers, fitting(configs, given, layers), run))


def _fastest_config(name, given, layers, configs, run) -> Config:
    device = layers[0].device
    sizes = (
        padded(size) for size in (*(h.shape[1] for h in layers), given["n_classes"], given["n"])
    )
    constants = (value for key, value in given.items() if key.isupper())
    kind = name, device, *sizes, *constants
    if kind in _fastest:
        return _fastest[kind]
    tunes = os.environ.get("METSELECT_TUNE", "1") != "0" and given["n"] > 0
    if len(configs) == 1 or not tunes or not _can_measure(device):
        return configs[0]
    times = [triton.testing.do_bench(lambda c=c: run(c), warmup=5, rep=20) for c in configs]
    _fastest[kind] = configs[times.index(min(times))]
    return _fastest[kind]


def _can_measure(device: torch.device) -> bool:
    """Return False on a CPU and while a CUDA graph is captured."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
