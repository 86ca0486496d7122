"""Resources of the CUDA kernels (registers, shared memory, stack, spills), compiled by nvcc."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "csrc/cuda"
TARGETS = "sm_80", "sm_90"
KERNEL = re.compile(
    r"entry function '(?:void )?metselect::(?P<kernel>\w+)(?:<(?P<config>[^>]*)>)?\([^']*'"
    r" for '(?P<target>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes"
    r".*?Used (?P<registers>\d+) registers(?P<memory>[^\n]*)",
    re.DOTALL,
)


def nvcc() -> str | None:
    return shutil.which("nvcc")


def rows() -> list[dict]:
    """Return a row for each kernel and target; none without nvcc. `shared` and `stack` are bytes
    per block and per thread, `spills` the bytes stored and loaded."""
    if nvcc() is None:
        return []
    found = []
    for source in sorted(SOURCES.glob("*.cu")):
        found += [_row(match) for match in KERNEL.finditer(_ptxas_report(source))]
    return sorted(found, key=lambda row: (row["kernel"], row["target"], row["config"]))


def _ptxas_report(source: Path) -> str:
    """Compile a source and return the report of ptxas with demangled names."""
    targets = [f"-gencode=arch=compute_{name[3:]},code={name}" for name in TARGETS]
    with tempfile.TemporaryDirectory() as folder:
        options = ["-std=c++17", "-O3", "-Xptxas=-v", "-c", str(source), "-o", f"{folder}/out.o"]
        done = subprocess.run([nvcc(), *targets, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc could not compile {source}:\n{done.stderr}")
    filtered = subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True)
    return filtered.stdout


def _row(match: re.Match) -> dict:
    memory = re.search(r"(\d+) bytes smem", match["memory"])
    return {
        "kernel": match["kernel"],
        "target": match["target"],
        "config": match["config"] or "",
        "registers": int(match["registers"]),
        "shared": int(memory[1]) if memory else 0,
        "stack": int(match["stack"]),
        "spills": int(match["stores"]) + int(match["loads"]),
    }


if __name__ == "__main__":
    for row in rows():
        print(*row.values(), sep="\t")
