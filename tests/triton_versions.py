"""`make triton-versions`: compile every Triton kernel for two GPUs that are not here, and run the
kernels' tests in the interpreter, with each version of Triton; write docs/appendix/triton.md.

    python tests/triton_versions.py [VERSION ...]
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/appendix/triton.md"
FOLDER = ROOT / "build/triton"
VERSIONS = "3.0.0 3.1.0 3.2.0 3.3.1 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0 3.9.0".split()
HEAD = """# Triton versions

Written by `make triton-versions`, beside the pinned torch and NumPy. Compiled: launches of all
kernels (width 64; float32, bfloat16 and, from Triton 3.2 on, float64; first config) whose machine
code was made for sm_80 and sm_90, without a GPU. Interpreted: the tests in `tests/kernels`, passed
and failed. With Triton 3.0 and 3.1, which have no products in float64, the operators use plain
PyTorch for float64.

| Triton | compiled | interpreted |
|---|---:|---|
"""


def compile_kernels() -> int:
    """Compile the launches of all kernels and return their number."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from benchmarks.kernel_report import calls
    from metselect_dgl.backends import triton_has_float64
    from metselect_dgl.kernels import tiles

    class Driver:
        """Triton's view of a GPU that is not here."""

        def __init__(self, capability: int) -> None:
            self.capability = capability

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

        def get_current_device(self) -> int:
            return self.capability

        def get_current_stream(self, device) -> int:
            return 0

    compiled = []

    def compile_one(kernel, grid, config, **arguments) -> None:
        options = tiles.tile_of(kernel, config) | config.options
        compiled.append(kernel.warmup(**arguments, **options, grid=grid).asm["cubin"])

    for capability in (80, 90):
        driver.set_active(Driver(capability))
        with mock.patch.object(tiles, "launch", compile_one):
            for dtype in ("float32", "bfloat16", "float64"):
                if dtype != "float64" or triton_has_float64():
                    for call in calls(64, dtype).values():
                        call()
    return len(compiled)


def last_line(done: subprocess.CompletedProcess) -> str:
    """Return the result of a process, or its last line about an error."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (lines if done.returncode == 0 or not errors else errors)[-1].strip()[:120]


def test_version(version: str) -> str:
    """Return the row of one version, installed into a folder of its own."""
    folder = FOLDER / version
    if not (folder / "triton").exists():
        wanted = ["--no-deps", "--target", folder, f"triton=={version}"]
        command = [sys.executable, "-m", "pip", "install", "-q", *wanted]
        if subprocess.run(command).returncode:
            return f"| {version} | not available here | |"
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(folder / "cache")}
    options = {"cwd": ROOT, "capture_output": True, "text": True}
    command = [sys.executable, __file__, "--compile"]
    compiled = last_line(subprocess.run(command, env=os.environ | paths, **options))
    command = [sys.executable, "-m", "pytest", "-q", "tests/kernels"]
    interpreted = os.environ | paths | {"TRITON_INTERPRET": "1", "METSELECT_BACKEND": "triton"}
    done = subprocess.run(command, env=interpreted, **options)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout)
    return f"| {version} | {compiled} | {', '.join(counts) or last_line(done)} |"


def main(versions: list[str]) -> None:
    rows = []
    for version in versions or VERSIONS:
        rows.append(test_version(version))
        print(rows[-1], flush=True)
        PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--compile"]:
        print(compile_kernels())
    else:
        main(sys.argv[1:])
