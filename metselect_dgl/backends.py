"""Which backend implements an operator on a device, and why a backend is not available.

- ``reference``: plain torch (`metselect_dgl.reference`), every operator on every device;
- ``native``: the compiled extension `metselect_dgl._C` (see `metselect_dgl.build`), every operator
  on a CPU and, if it was built with CUDA, `moments` on a GPU;
- ``triton``: the kernels of `metselect_dgl.kernels`, some operators on a GPU, or on a CPU under
  Triton's interpreter (for tests).

The environment variable METSELECT_BACKEND restricts the choice. Only the standard library is
imported with this file, so that `metselect doctor` can read it where torch cannot be imported.
"""

import os
import re
import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from . import build

CHOICES = ("auto", "native", "reference", "triton")
DEVICES = ("cpu", "cuda")
TRITON_RANGE = ("3.0", "3.9")  # the oldest version that has what the kernels use, the newest tested
TRITON_OPS = (
    "class_distances",
    "class_distances_backward",
    "select_layer",
    "selected_logits",
    "selected_cross_entropy",
)


def requested() -> str:
    """Return METSELECT_BACKEND, "auto" if it is not set."""
    return os.environ.get("METSELECT_BACKEND", "auto")


def has_op(backend: str, name: str, device: str) -> bool:
    """Return whether an available backend has a kernel for the operator on the device."""
    if backend == "triton":
        return name in TRITON_OPS
    return backend == "reference" or device == "cpu" or name == "moments"


def native_built() -> bool:
    """Return whether the extension is built for this torch; it is not imported."""
    return bool(sys.modules.get(build.NAME) or build.built())


def native_unavailable() -> str:
    """Return why the extension is not available, "" if it is.

    The extension is imported, which registers its kernels, unless another backend is requested.
    """
    if requested() not in ("auto", "native"):
        return f"METSELECT_BACKEND={requested()}"
    if sys.modules.get(build.NAME):
        return ""
    path = build.built()
    if path is None:
        return f"the extension is not built for torch {import_module('torch').__version__}"
    try:
        build.load(path)
    except ImportError as error:
        return f"the extension cannot be imported ({error}); delete {path.parent}"
    return ""


def triton_version() -> str:
    """Return the version of the installed Triton, of whatever package; it is not imported."""
    text = Path(find_spec("triton").origin).read_text()
    return re.search(r"""__version__ = ["'](.+?)["']""", text)[1]


def triton_has_float64() -> bool:
    """Return whether Triton has products in float64."""
    major, minor = triton_version().split(".")[:2]
    return (int(major), int(minor)) >= (3, 2)


def triton_unavailable(device: str) -> str:
    """Return why Triton's kernels are not available on a device, "" if they are.

    Triton is not imported: its first import fixes for the whole process whether kernels are
    interpreted. The GPU is not looked at either; see :func:`gpu_too_old`.
    """
    if requested() not in ("auto", "triton"):
        return f"METSELECT_BACKEND={requested()}"
    if find_spec("triton") is None:
        return "triton is not installed"
    version = triton_version()
    if int(version.partition(".")[0]) < 3:
        return f"triton {version} is older than {TRITON_RANGE[0]}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cpu":
        if interpreted and requested() == "triton":
            return ""
        return "kernels run on a CPU only in Triton's interpreter, for tests"
    built_for = import_module("torch").version
    if not (built_for.cuda or built_for.hip):
        return "torch is built without CUDA"
    return "TRITON_INTERPRET=1 cannot read the memory of a GPU" if interpreted else ""


@lru_cache
def gpu_too_old() -> str:
    """Return why Triton does not support the visible GPU, "" if it does or there is none."""
    torch = import_module("torch")
    if torch.version.hip or not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 8 else f"the GPU has compute capability {major}.{minor}, Triton needs 8.0"


def check_requested() -> None:
    """Raise ValueError for an unknown METSELECT_BACKEND, ImportError for one without a device."""
    choice = requested()
    if choice not in CHOICES:
        raise ValueError(f"METSELECT_BACKEND is {choice!r}; use one of {', '.join(CHOICES)}")
    if choice == "native" and native_unavailable():
        raise ImportError(
            f"METSELECT_BACKEND=native, but {native_unavailable()}; build it with `metselect build`"
        )
    if choice == "triton" and triton_unavailable("cpu"):
        no_gpu = "" if import_module("torch").cuda.is_available() else "no GPU is visible"
        reason = triton_unavailable("cuda") or no_gpu or gpu_too_old()
        if reason:
            raise ImportError(
                f"METSELECT_BACKEND=triton, but {reason}; TRITON_INTERPRET=1 runs its kernels on "
                "a CPU, slowly"
            )
