"""`python -m benchmarks.memory WHAT PROVIDER ...` prints, as JSON, the peak memory beyond what was
there before, as the system saw it, in this process of its own.

`head PROVIDER N...`: of moments, whitening and selection at N rows of 3 layers. `epoch PROVIDER
DATASET [DATA_DIR]`: of a GCN and its first three epochs, beyond the dataset.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from metselect_dgl.data import load_dataset

from .inputs import Inputs, Rows
from .models import PROVIDERS, Epochs, Size
from .ops import head


def status(field: str) -> int:
    """VmRSS, the bytes in use, or VmHWM, their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def peak(run: Callable) -> dict[str, float]:
    """Bytes beyond those in use before, after freed memory was returned and the peak forgotten."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - start, "bytes": status("VmHWM") - before}


def of_head(name: str, sizes: list[int]) -> dict[str, dict]:
    head(Inputs(Rows(n=5000)))[name]()  # what libraries allocate once
    return {str(n): peak(head(Inputs(Rows(n=n)))[name]) for n in sizes}


def of_epoch(name: str, where: list[str]) -> dict[str, dict]:
    data = load_dataset(*where)
    data.split(0)

    def epochs() -> None:
        epoch = Epochs(PROVIDERS[name], Size(), data)
        for _ in range(3):
            epoch()

    return {str(data.graph.num_nodes()): peak(epochs)}


if __name__ == "__main__":
    what, name, *rest = sys.argv[1:]
    found = of_head(name, [int(n) for n in rest]) if what == "head" else of_epoch(name, rest)
    print(json.dumps(found))
