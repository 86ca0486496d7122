"""The CUDA sources compiled by g++ over tests/emulation, and called from torch through ctypes.

As a program, with a number of thread orders and libraries: tests each library in a new process,
because a faulty one may crash or not terminate, and writes the result to <library>.log.
"""

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.op_cases import make_case

ROOT = Path(__file__).parents[1]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]  # enum MetselectDtype
CPU_SECONDS = 10  # a correct kernel takes one or two
Result = tuple[Tensor, list[Tensor], list[Tensor]]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def build(folder: Path, *flags: str, edits: dict[str, str] | None = None, at: int = 0) -> Path:
    """Build a library from a copy of csrc/cuda with `edits`: in moments.cuh the occurrence number
    `at` of each text is replaced. A library with edits supports only float32, to save time."""
    shutil.copytree(ROOT / "csrc/cuda", folder)
    kernel, launcher = folder / "moments.cuh", folder / "moments.cu"
    if edits:
        other_dtypes = r" *case kMetselect(?!Float).*?break;"
        launcher.write_text(re.sub(other_dtypes, "", launcher.read_text(), flags=re.DOTALL))
    source = kernel.read_text()
    for old, new in (edits or {}).items():
        parts = source.split(old)
        assert len(parts) > at + 1, f"moments.cuh has no occurrence {at} of {old!r}"
        source = old.join(parts[: at + 1]) + new + old.join(parts[at + 1 :])
    kernel.write_text(source)
    library = folder / "moments.so"
    command = [compiler(), *"-x c++ -std=c++17 -O1 -shared -fPIC -Wno-unknown-pragmas".split()]
    command += [*flags, f"-I{ROOT / 'tests/emulation'}", str(launcher)]
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
        """Return the result of the op, or add it to `into`. `seed` fixes the order of threads."""
        count, sums, grams = into or _unwritten(shifts)
        per_layer = zip(layers, index, shifts, sums, grams, strict=True)
        rows = (Layer * len(layers))(*(_layer(*tensors) for tensors in per_layer))
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


def scenarios() -> dict[str, tuple]:
    """Return inputs that reach every line of the kernel: several tiles, shares and pieces, scaled
    tiles, labels and indices out of range, and no rows."""
    case = make_case(300, (5, 130), empty_class=2, dtype=torch.float32)
    shifts = [h[:4].clone() for h in case.layers]
    index = torch.arange(300).flip(0).contiguous()
    huge = [[1e20 * tensor for tensor in tensors] for tensors in (case.layers, shifts)]
    usual = case.layers, case.labels, [None, index], shifts
    inputs = {"usual": usual, "huge": (huge[0], case.labels, [None, None], huge[1])}
    inputs["none"] = case.layers, case.labels[:0], [index[:0], index[:0]], shifts
    for number in (-1, 300):
        wrong = index.index_fill(0, torch.tensor([70]), number)
        inputs[f"index {number}"] = (case.layers, case.labels, [index, wrong], shifts)
    for number in (-1, 4):
        wrong = case.labels.index_fill(0, torch.tensor([70]), number)
        inputs[f"label {number}"] = (case.layers, wrong, [None, index], shifts)
    return inputs


def _unwritten(shifts: list[Tensor]) -> Result:
    """Return results filled with NaN, so that an entry that is not written is detected."""
    wide = [shift.new_full(shift.shape, torch.nan, dtype=torch.float64) for shift in shifts]
    grams = [total.new_full(2 * total.shape[1:], torch.nan) for total in wide]
    return wide[0].new_full(wide[0].shape[:1], torch.nan), wide, grams


def _layer(h: Tensor, index: Tensor | None, shift: Tensor, total: Tensor, gram: Tensor) -> Layer:
    assert shift.is_contiguous()
    picked = None if index is None else index.data_ptr()
    pointers = shift.data_ptr(), total.data_ptr(), gram.data_ptr()
    return Layer(h.data_ptr(), len(h), *h.stride(), h.shape[1], picked, *pointers)


def same(a: Result, b: Result) -> bool:
    """Return whether two results are bitwise equal."""
    flat = [[count, *sums, *grams] for count, sums, grams in (a, b)]
    pairs = zip(*flat, strict=True)
    return all(torch.equal(x.view(torch.int64), y.view(torch.int64)) for x, y in pairs)


def fault(emulated: Emulated, seeds: int) -> str:
    """Return the fault that the scenarios detect in a kernel."""
    for name, inputs in scenarios().items():
        try:
            first, *others = (
                emulated.moments(*inputs, blocks=40, seed=seed) for seed in range(seeds)
            )
        except RuntimeError as error:
            return str(error)
        if not all(same(first, other) for other in others):
            return f"{name}: the order of threads matters"
    return "no fault"


def _main(seeds: str, *libraries: str) -> None:
    for library in libraries:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(f"{library}.log", os.O_CREAT | os.O_WRONLY), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            print(fault(Emulated(library), int(seeds)), file=sys.stderr, flush=True)
            os._exit(0)
        if os.WIFSIGNALED(status := os.waitpid(child, 0)[1]):
            with open(f"{library}.log", "a") as log:
                print("ended by signal", os.WTERMSIG(status), file=log)


if __name__ == "__main__":
    _main(*sys.argv[1:])
