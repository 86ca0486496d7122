"""Compile the C++ and CUDA operators for the installed torch: `metselect build`.

A compiled extension fits one build of torch and one Python. It is stored as ``_C.so`` in the user's
cache, in a folder named after both and after the content of the sources, and in it one folder per
compiler; `built` returns the newest one that fits. The compiler is called directly:
`torch.utils.cpp_extension` would need setuptools, and ninja to compile files in parallel.

METSELECT_CXXFLAGS replaces -O3, CXX names the compiler, MAX_JOBS is the number of files compiled at
a time, TORCH_CUDA_ARCH_LIST names the GPUs to build for. Only the standard library is imported with
this file, so that `metselect doctor` can read it where torch cannot be imported.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).absolute().parent
NAME = "metselect_dgl._C"
# In a checkout the sources are beside the package, in a wheel inside.
SOURCES = HERE / "csrc" if (HERE / "csrc").exists() else HERE.parent / "csrc"


def cache_home() -> Path:
    """Return ``$XDG_CACHE_HOME/metselect_dgl``, or ``~/.cache/metselect_dgl``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metselect_dgl"


def _folder() -> Path:
    """Return the folder of the builds that fit this torch, this Python and these sources."""
    content = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.*")):
        content.update(f"{path.relative_to(SOURCES).as_posix()}\n".encode() + path.read_bytes())
    torch = import_module("torch")
    gpu = torch.version.cuda or torch.version.hip or "none"
    python = sysconfig.get_config_var("SOABI")
    name = f"torch-{torch.__version__}-gpu-{gpu}-{python}-{content.hexdigest()[:16]}"
    return cache_home() / "extension" / name


def built() -> Path | None:
    """Return the newest build that fits this torch, this Python and these sources."""
    paths = _folder().glob("[!.]*/_C.so")
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def load(path: Path) -> ModuleType:
    """Import a build as `metselect_dgl._C`, which registers its operators."""
    spec = util.spec_from_file_location(NAME, path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def _run(command: list[str], log: Path) -> None:
    """Run a command and append it and its output to the log; RuntimeError with the first lines
    about errors if it fails."""
    environment = os.environ | {"LC_ALL": "C"}  # "error" in English
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{shlex.join(command)}\n{done.stdout}")
    if done.returncode:
        lines = done.stdout.splitlines()
        pattern = r"\berror\b|undefined|multiple definition|cannot find"
        errors = [line for line in lines if re.search(pattern, line)]
        shown = (errors or lines or [f"exit status {done.returncode}, no output"])[:5]
        raise RuntimeError("\n".join(f"  {line[:200]}" for line in shown))


def _first_line(command: list[str], pattern: str = ".+") -> str:
    """Return what `command --version` prints that matches the pattern, "" if it fails."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    found = re.search(pattern, done.stdout)
    return found[0] if found and done.returncode == 0 else ""


def _compiler() -> tuple[list[str], str]:
    """Return the command of the C++ compiler and its version; RuntimeError if there is none."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(command[0]) is None:
        raise RuntimeError(
            f"there is no C++ compiler {command[0]!r}; install one (on Debian: apt install g++), "
            "or name yours in the environment variable CXX"
        )
    version = _first_line(command)
    if not version:
        raise RuntimeError(f"{shlex.join(command)!r} is not a C++ compiler: --version fails")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise RuntimeError(
            f"Python.h is not in {sysconfig.get_path('include')}; install the headers of this "
            "Python (on Debian: apt install python3-dev)"
        )
    return command, version


def _cuda_home() -> tuple[Path | None, str]:
    """Return the CUDA toolkit for this torch, or None and why csrc/cuda cannot be compiled, ""
    where torch has no CUDA."""
    wanted = import_module("torch").version.cuda
    if wanted is None:
        return None, ""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    home = Path(os.environ.get("CUDA_HOME") or Path(nvcc).parents[1])
    release = _first_line([str(home / "bin/nvcc")], r"release \d+\.\d+").removeprefix("release ")
    if not release:
        return None, f"{home} has no working nvcc; set CUDA_HOME to a CUDA {wanted} toolkit"
    if release.partition(".")[0] != wanted.partition(".")[0]:
        return None, f"{home} is CUDA {release}, torch was built with {wanted}; set CUDA_HOME"
    return home, ""


def _gpu_flags() -> list[str]:
    """Return nvcc's flags for TORCH_CUDA_ARCH_LIST, by default the visible GPUs."""
    cuda = import_module("torch").cuda
    visible = {cuda.get_device_capability(gpu) for gpu in range(cuda.device_count())}
    names = [f"{major}.{minor}+PTX" for major, minor in sorted(visible)] or ["8.0", "9.0+PTX"]
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    flags = []
    for name in asked or names:
        number = name.removesuffix("+PTX").replace(".", "")
        codes = [f"sm_{number}", f"compute_{number}"] if name.endswith("+PTX") else [f"sm_{number}"]
        flags.append(f"-gencode=arch=compute_{number},code=[{','.join(codes)}]")
    return flags


def _commands(
    compiler: list[str], cuda: Path | None, folder: Path, target: Path
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the command that compiles each source into an object file in the folder, and the one
    that links the target."""
    torch = import_module("torch")
    root = Path(torch.__file__).parent
    flags = shlex.split(os.environ.get("METSELECT_CXXFLAGS", "-O3"))
    include = [SOURCES, root / "include", root / "include/torch/csrc/api/include"]
    include.append(Path(sysconfig.get_path("include")))
    libraries, folders = ["c10", "torch", "torch_cpu"], [root / "lib"]
    if cuda is not None:
        include.append(cuda / "include")
        libraries += ["cudart", "c10_cuda", "torch_cuda"]
        folders += [cuda / "lib64" if (cuda / "lib64").exists() else cuda / "lib"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    common = ["-std=c++20", "-fPIC", "-DNDEBUG", abi, "-fopenmp", "-fno-trapping-math"]
    cpp = [*compiler, *flags, *common, *(f"-I{path}" for path in include)]
    # csrc/cuda/*.cu use no header of torch, so C++17 is enough, which every nvcc has.
    nvcc = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", f"-I{SOURCES}", "-ccbin", compiler[0]]
    compiling, objects = {}, []
    for source in sorted(SOURCES.glob("cpu/*.cpp" if cuda is None else "c*/*.c[pu]*")):
        if source.suffix == ".cuh":
            continue
        name = source.relative_to(SOURCES).as_posix()
        objects.append(str(folder / f"{name.replace('/', '-')}.o"))
        start = cpp if source.suffix == ".cpp" else [f"{cuda}/bin/nvcc", *nvcc, *_gpu_flags()]
        compiling[name] = [*start, "-c", str(source), "-o", objects[-1]]
    link = [*compiler, *flags, "-shared", "-fopenmp", *objects, "-o", str(target)]
    link += [f"-L{path}" for path in folders] + [f"-l{library}" for library in libraries]
    return compiling, link


def _compile(compiling: dict[str, list[str]], link: list[str], log: Path) -> None:
    """Compile the sources, several at a time, and link them; print the progress."""
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_run, command, log): name for name, command in compiling.items()}
        try:
            for number, done in enumerate(as_completed(running), 1):
                try:
                    done.result()
                except RuntimeError as error:
                    raise RuntimeError(f"{running[done]} does not compile\n{error}") from None
                print(f"  {number} of {len(running)}: {running[done]}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    try:
        _run(link, log)
    except RuntimeError as error:
        raise RuntimeError(f"the object files cannot be linked\n{error}") from None


def _build(compiler: list[str], version: str, cuda: Path | None) -> Path:
    """Compile into a temporary folder, which is renamed at the end; return the path of _C.so."""
    torch = import_module("torch")
    flags = [os.environ.get(name, "") for name in ("METSELECT_CXXFLAGS", "TORCH_CUDA_ARCH_LIST")]
    key = hashlib.sha256(repr((compiler, version, cuda, flags)).encode()).hexdigest()[:16]
    final = _folder() / key
    if (final / "_C.so").exists():
        return final / "_C.so"
    what = "C++ and CUDA" if cuda else "C++"
    print(f"compiling the {what} operators for torch {torch.__version__} with {version}")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=final.parent) as folder:
        out = Path(folder, "out")
        out.mkdir()
        try:
            commands = _commands(compiler, cuda, Path(folder), out / "_C.so")
            _compile(*commands, out / "build.log")
        except RuntimeError as error:
            log = (out / "build.log").replace(final.with_suffix(".log"))
            raise RuntimeError(f"{error}\nlog: {log}") from None
        try:
            out.rename(final)
        except OSError:
            if not (final / "_C.so").exists():  # else another process was first
                raise
    return final / "_C.so"


def build() -> Path:
    """Compile the extension for this torch, unless it is there, and return its path.

    Without a CUDA toolkit that fits torch, or if csrc/cuda does not compile, the operators are
    built for the CPU and the reason is printed. RuntimeError if that is impossible, too.
    """
    compiler, version = _compiler()
    cuda, reason = _cuda_home()
    if cuda is not None:
        try:
            return _build(compiler, version, cuda)
        except RuntimeError as error:
            reason = str(error)
    if reason:
        print(f"the CUDA operators are not built: {reason}", file=sys.stderr)
    return _build(compiler, version, None)


def main() -> int:
    """Build the extension and print its path."""
    print(f"built: {build()}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"metselect build: {error}")
