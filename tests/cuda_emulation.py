"""The CUDA sources compiled by g++ over tests/emulation, and called from torch through ctypes."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g".split()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]  # enum MetselectDtype
Result = tuple[Tensor, list[Tensor], list[Tensor]]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def build(folder: Path, *flags: str, edits: dict[str, str] | None = None, at: int = 0) -> Path:
    """The library made of a copy of csrc/cuda with `edits`: in moments.cuh the occurrence number
    `at` of each text is replaced."""
    shutil.copytree(ROOT / "csrc/cuda", folder)
    kernel = folder / "moments.cuh"
    source = kernel.read_text()
    for old, new in (edits or {}).items():
        parts = source.split(old)
        assert len(parts) > at + 1, f"moments.cuh has no occurrence {at} of {old!r}"
        source = old.join(parts[: at + 1]) + new + old.join(parts[at + 1 :])
    kernel.write_text(source)
    library = folder / "moments.so"
    command = [compiler(), *"-x c++ -std=c++17 -O1 -shared -fPIC -Wno-unknown-pragmas".split()]
    command += [*flags, f"-I{ROOT / 'tests/emulation'}", str(folder / "moments.cu")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


class Layer(ctypes.Structure):
    """struct MetselectMomentsLayer of csrc/cuda/moments.h"""

    _fields_ = (
        [("h", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in "rows row_stride column_stride width".split()]
        + [(name, ctypes.c_void_p) for name in "index shift sum gram".split()]
    )


class Batch(ctypes.Structure):
    """struct MetselectMomentsBatch of csrc/cuda/moments.h"""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("n_layers", ctypes.c_int64),
        ("labels", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("classes", ctypes.c_int64),
        ("count", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
    )


class Emulated:
    """The functions of csrc/cuda/moments.h."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        self.library.emulation_error.restype = ctypes.c_char_p
        self.library.metselect_moments_workspace_bytes.restype = ctypes.c_int64

    def moments(
        self,
        layers: list[Tensor],
        labels: Tensor,
        index: list[Tensor | None],
        shifts: list[Tensor],
        *,
        blocks: int = 1,
        seed: int = 0,
        into: Result | None = None,
    ) -> Result:
        """What the op returns; or the same added to `into`. The order of threads is by `seed`."""
        count, sums, grams = into or _unwritten(shifts)
        every = zip(layers, index, shifts, sums, grams, strict=True)
        rows = (Layer * len(layers))(*(_layer(*each) for each in every))
        batch = Batch(
            *(rows, len(layers), labels.data_ptr(), len(labels), len(count), count.data_ptr()),
            *(DTYPES.index(layers[0].dtype), into is not None, blocks),
        )
        size = self.library.metselect_moments_workspace_bytes(ctypes.byref(batch))
        workspace = torch.full((size // 8,), torch.nan, dtype=torch.float64)
        self.library.emulation_start(seed)
        status = self.library.metselect_moments(
            ctypes.byref(batch), ctypes.c_void_p(workspace.data_ptr()), None
        )
        if status:
            raise RuntimeError(f"status {status}: {self.library.emulation_error().decode()}")
        return count, sums, grams


def _unwritten(shifts: list[Tensor]) -> Result:
    """NaN everywhere: an entry that is never written shows."""
    wide = [shift.new_full(shift.shape, torch.nan, dtype=torch.float64) for shift in shifts]
    grams = [each.new_full(2 * each.shape[1:], torch.nan) for each in wide]
    return wide[0].new_full(wide[0].shape[:1], torch.nan), wide, grams


def _layer(h: Tensor, index: Tensor | None, shift: Tensor, total: Tensor, gram: Tensor) -> Layer:
    assert shift.is_contiguous()
    picked = None if index is None else index.data_ptr()
    pointers = shift.data_ptr(), total.data_ptr(), gram.data_ptr()
    return Layer(h.data_ptr(), len(h), *h.stride(), h.shape[1], picked, *pointers)
