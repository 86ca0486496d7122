"""`make cuda-build-check`: build the extension against torch's CUDA build in a temporary folder,
import it and list the CUDA kernels that it registers. Needs nvcc, but no GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LIST = """
import torch
from metselect_dgl import ops
assert ops.NATIVE, "the extension cannot be imported"
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPUs: {torch.cuda.device_count()}")
for name in ops.OPS:
    if ops.compiled(name, torch.device("cuda")):
        print(f"metselect::{name} has a CUDA kernel: {ops.backend_of(name, 'cuda')}")
built = ops.backend_of("moments", "cuda") == "native"
raise SystemExit(None if built else "moments has no CUDA kernel: the CUDA part was not built")
"""


def stop(reason: str) -> None:
    sys.exit(f"cuda-build-check: {reason}")


def run(*command, **environment) -> str:
    """Return the standard output of a command that must succeed."""
    done = subprocess.run(
        list(map(str, command)), env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        stop(f"this failed, see above: {' '.join(map(str, command))[:300]}")
    return done.stdout


def pinned(*names: str) -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with torch's CUDA build."""
    python = folder / "bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    (torch,) = pinned("torch")
    # === is the version without a local part: ==2.13.0 would also take 2.13.0+cpu.
    wanted = torch.replace("==", "==="), *pinned("numpy")
    constraints = "-c", ROOT / "requirements.txt"
    print(f"installing {wanted[0]} into {folder} (gigabytes)", flush=True)
    run(python, "-m", "pip", "install", "--quiet", "--no-input", *constraints, *wanted)
    return python


def toolkit(python: Path) -> Path:
    """Return CUDA_HOME, the folder that the nvcc in PATH (perhaps a wrapper) reports, or a toolkit
    installed from packages."""
    version = run(python, "-c", "import torch; print(torch.version.cuda or '')").strip()
    if not version:
        stop("torch came without CUDA: the package index offers no CUDA build for this machine")
    home = os.environ.get("CUDA_HOME")
    if not home and (nvcc := shutil.which("nvcc")):
        asked = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True)
        top = re.search(r"TOP=(.+)", asked.stderr)
        home = os.path.realpath(top[1].strip()) if top else None
    if not home:
        return from_packages(python, version)
    release = re.search(r"release (\d+)\.", run(Path(home, "bin/nvcc"), "--version"))[1]
    if release != version.partition(".")[0]:
        stop(f"{home} is CUDA {release}, torch was built with {version}; set CUDA_HOME to one")
    return Path(home)


def from_packages(python: Path, version: str) -> Path:
    """Install a toolkit of torch's CUDA version from packages, beside torch's CUDA libraries."""
    names = "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"
    wanted = [f"{name}=={version}.*" for name in names]
    print(f"no CUDA_HOME and no nvcc; installing {' '.join(wanted)}", flush=True)
    run(python, "-m", "pip", "install", "--quiet", "--no-input", *wanted)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    home = Path(run(python, "-c", where).strip(), f"nvidia/cu{version.partition('.')[0]}")
    if not (home / "bin/nvcc").exists():
        stop(f"{' '.join(wanted)} brought no nvcc; install CUDA {version} and set CUDA_HOME")
    for library in home.glob("lib/libcudart.so.*"):  # packages lack the name to link with
        (home / "lib/libcudart.so").unlink(missing_ok=True)
        (home / "lib/libcudart.so").symlink_to(library.name)
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    return home


def main() -> None:
    folder = ROOT / "build/cuda-check"
    python = environment(folder)
    home = toolkit(python)
    print(f"building with {home} (minutes)", flush=True)
    settings = {
        "CUDA_HOME": str(home),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        # Only compiling, linking and loading are checked; -O3 would take much longer.
        "METSELECT_CXXFLAGS": os.environ.get("METSELECT_CXXFLAGS", "-O0 -g0"),
    }
    shutil.rmtree(folder / "cache", ignore_errors=True)
    print(run(python, "-m", "metselect_dgl.build", **settings), end="")
    print(run(python, "-c", LIST, **settings, METSELECT_BACKEND="auto"), end="")


if __name__ == "__main__":
    main()
