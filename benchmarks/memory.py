"""`python -m benchmarks.memory WHAT PROVIDER ...` prints, as JSON, the growth of the peak resident
memory of this process.

`head PROVIDER N...`: moments, whitening and selection at N rows of 3 layers. `epoch PROVIDER
DATASET [DATA_DIR]`: a GCN and its first three epochs, beyond the dataset.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from metselect_dgl.data import load_dataset

from .head_ops import head
from .inputs import Inputs, Rows
from .models import PROVIDERS, Epochs, Size


def status(field: str) -> int:
    """Return VmRSS (bytes in use) or VmHWM (their peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise LookupError(f"/proc/self/status has no {field}")


def peak(run: Callable) -> dict[str, float]:
    """Return seconds and peak bytes beyond those in use before the call; freed memory is returned
    to the operating system and the peak counter reset first."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - start, "bytes": status("VmHWM") - before}


def head_peaks(name: str, sizes: list[str]) -> dict[str, dict]:
    """Return the peaks of the head by number of rows."""
    head(Inputs(Rows(n=5000)))[name]()  # libraries allocate on first use
    return {size: peak(head(Inputs(Rows(n=int(size))))[name]) for size in sizes}


def epoch_peak(name: str, dataset: list[str]) -> dict[str, dict]:
    """Return the peak of three epochs by number of nodes; `dataset` is a name and a folder."""
    data = load_dataset(*dataset)
    data.split(0)

    def epochs() -> None:
        epoch = Epochs(PROVIDERS[name], Size(), data)
        for _ in range(3):
            epoch()

    return {str(data.graph.num_nodes()): peak(epochs)}


if __name__ == "__main__":
    what, name, *rest = sys.argv[1:]
    print(json.dumps(head_peaks(name, rest) if what == "head" else epoch_peak(name, rest)))
