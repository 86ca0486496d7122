"""What works on this machine, what does not, and the remedy: `metselect doctor`.

Needs nothing but the standard library, so that it can also speak where torch or DGL cannot be
imported: `python -P metselect_dgl/doctor.py`.
"""

import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

TORCH = "2.13.0"
REQUIRED = ("python", "torch", "dgl")
BACKENDS = ("auto", "native", "reference", "triton")


@dataclass(frozen=True)
class Check:
    """One row; `status` is "ok", "off" (optional and absent) or "bad" (broken, or required)."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def _python() -> tuple[str, str]:
    fits = sys.version_info[:2] == (3, 11)
    return "ok" if fits else "bad", f"{platform.python_version()} at {sys.executable}"


def _torch() -> tuple[str, str]:
    version = import_module("torch").__version__
    fits = version.split("+")[0] == TORCH
    return ("ok", version) if fits else ("bad", f"{version}, but {TORCH} is pinned")


def _dgl() -> tuple[str, str]:
    os.environ.setdefault("DGLBACKEND", "pytorch")
    dgl, torch = import_module("dgl"), import_module("torch")
    chain = dgl.add_self_loop(dgl.graph(([0, 1], [1, 2])))
    out = import_module("dgl.nn").GraphConv(2, 2)(chain, torch.ones(3, 2))
    if not torch.isfinite(out).all():
        return "bad", f"{dgl.__version__}, but GraphConv on 3 nodes gives {out.tolist()}"
    return "ok", f"{dgl.__version__}, GraphConv runs"


def _extension() -> tuple[str, ...]:
    """Which engine serves the ops on a CPU, and why; the rule is that of ops.py."""
    wish = os.environ.get("METSELECT_BACKEND", "auto")
    if wish not in BACKENDS:
        return "bad", f"METSELECT_BACKEND is {wish!r}", f"unset it or use {', '.join(BACKENDS)}"
    status, fault = _fault(wish)
    if fault and wish == "native":
        return "bad", f"{fault}; METSELECT_BACKEND=native insists on it, so the ops raise"
    threads = f"threads: {import_module('torch').get_num_threads()}"
    plain = f"the pure PyTorch reference serves, {threads}"
    if wish in ("reference", "triton"):
        instead = plain if wish == "reference" else "not used"
        detail = f"{fault or 'built'}; METSELECT_BACKEND={wish}: {instead}"
        return "off", detail, "unset METSELECT_BACKEND"
    if fault:
        return status, f"{fault}; {plain} (METSELECT_BACKEND=native would raise)"
    return "ok", f"built and serving, {threads}, from {import_module('metselect_dgl._C').__file__}"


def _fault(wish: str) -> tuple[str, str]:
    """(status, why the extension cannot serve), which is empty if it can. It is not imported where
    it is not to serve, since importing it is what makes it serve."""
    if find_spec("metselect_dgl._C") is None:
        return "off", "not built"
    if wish not in ("auto", "native"):
        return "off", ""
    try:
        import_module("metselect_dgl._C")
    except ImportError as error:
        return "bad", f"built, but {error}"
    return "ok", ""


def _triton() -> tuple[str, ...]:
    # Not imported: the first import fixes for the whole process whether kernels are interpreted.
    wish, interpreted = os.environ.get("METSELECT_BACKEND"), os.environ.get("TRITON_INTERPRET")
    if find_spec("triton") is None:
        return "bad" if wish == "triton" else "off", "not installed; its kernels are not used"
    version = metadata.version("triton")
    if import_module("torch").cuda.is_available() or (interpreted == "1" and wish == "triton"):
        return "ok", version
    if wish == "triton":
        detail = f"{version}, but METSELECT_BACKEND=triton and no GPU is seen, so the ops raise"
        return "bad", detail, "unset METSELECT_BACKEND, or set TRITON_INTERPRET=1 to try kernels"
    return "ok", f"{version}; no GPU is seen, so only tests use it"


def _cuda() -> tuple[str, str]:
    torch = import_module("torch")
    if torch.version.cuda is None:
        return "off", f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "off", f"torch is built for CUDA {torch.version.cuda}, but no device is seen"
    device = torch.cuda.get_device_name()
    import_module("dgl")
    names = import_module("dgl._ffi.function").list_global_func_names()
    if "device_api.cuda" not in names:
        return "off", f"{device} is seen by torch, but dgl is a CPU-only build"
    return "ok", f"{device}, CUDA {torch.version.cuda}"


def _data(folder: str | os.PathLike | None) -> tuple[str, str]:
    folder = folder or os.environ.get("METSELECT_DATA")
    if not folder:
        return "off", "METSELECT_DATA is not set; the embedded hop_chain and downloads serve"
    if not Path(folder).is_dir():
        return "bad", f"{folder} is not a folder"
    found = sorted(path.stem for path in Path(folder).glob("*.npz"))
    return ("ok", f"{folder}: {', '.join(found)}") if found else ("bad", f"{folder} holds no .npz")


def _ogb() -> tuple[str, str]:
    if find_spec("ogb") is None:
        return "off", "not installed; only the ogbn data sets need it"
    return "ok", metadata.version("ogb")


def _cache() -> tuple[str, str]:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metselect_dgl"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return "ok", f"{folder} can be written"


def _probe(name: str, look: Callable[[], tuple[str, ...]], remedy: str) -> Check:
    """Run one probe, which may know a better remedy; whatever it raises becomes a row."""
    try:
        status, detail, *better = look()
        remedy = better[0] if better else remedy
    except Exception as error:  # a broken wheel raises OSError, AttributeError, ... on import
        absent = isinstance(error, ModuleNotFoundError) and name not in REQUIRED
        status = "off" if absent else "bad"
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
    return Check(name, status, detail, "" if status == "ok" else remedy)


def checks(data_dir: str | os.PathLike | None = None) -> list[Check]:
    """Look at everything the package can use; never raises.

    Parameters
    ----------
    data_dir : path, optional
        The folder of .npz data sets; by default `METSELECT_DATA`.
    """
    again = "delete .venv and run `make setup`, or `pip install"
    return [
        _probe("python", _python, "use Python 3.11: dgl 1.1.3 has no build for later ones"),
        _probe("torch", _torch, f"{again} torch=={TORCH}`"),
        _probe("dgl", _dgl, f"{again} dgl==1.1.3 packaging`"),
        _probe(
            "extension",
            _extension,
            "results are the same without it; with a C++ compiler, in a checkout, "
            "`METSELECT_BACKEND=native pip install --no-build-isolation --no-deps -e .` "
            "builds it or says why not",
        ),
        _probe("triton", _triton, "it comes with the CUDA build of torch, on Linux"),
        _probe(
            "cuda",
            _cuda,
            f"for a GPU, install the CUDA builds of torch {TORCH} and of dgl 1.1.3; the CPU serves",
        ),
        _probe(
            "data",
            lambda: _data(data_dir),
            "set METSELECT_DATA, or pass --data-dir, to a folder of .npz data sets",
        ),
        _probe("ogb", _ogb, "pip install 'metselect-dgl[ogb]'"),
        _probe("cache", _cache, "set XDG_CACHE_HOME to a folder that can be written"),
    ]


def table(rows: list[Check]) -> str:
    """The rows as aligned text, a remedy on an indented line of its own."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.name:<{width}}  {row.status:<3}  {row.detail}")
        if row.remedy:
            lines.append(f"{'':<{width + 7}}remedy: {row.remedy}")
    return "\n".join(lines)


def exit_status(rows: list[Check]) -> int:
    """1 if something required is broken, else 0."""
    return int(any(row.status == "bad" for row in rows if row.name in REQUIRED))


def served() -> str:
    """Which implementation serves each op on each device, and why not another."""
    try:
        ops = import_module("metselect_dgl.ops")
    except Exception as error:  # what is broken has a row above
        return f"no op is served: {type(error).__name__}: {error}".splitlines()[0]
    devices = "cpu", "cuda"
    width = max(map(len, ops.OPS))
    lines = [f"{'op':<{width}}  {'cpu':<9}  cuda"]
    for name in ops.OPS:
        cpu, cuda = (ops.serving(name, device) for device in devices)
        lines.append(f"{name:<{width}}  {cpu:<9}  {cuda}")
    for device in devices:
        absent = ops.not_serving(device)
        for engine in ("native", "triton"):
            without = [name for name in ops.OPS if not ops.has(engine, name, device)]
            if engine in absent:
                lines.append(f"not {engine} on {device}: {absent[engine]}")
            elif without:
                lines.append(f"not {engine} on {device}: it has no {', '.join(without)}")
    lines.append(f"METSELECT_BACKEND chooses: {', '.join(BACKENDS)}")
    return "\n".join(lines)


def report(rows: list[Check]) -> str:
    """What works, and who serves the ops."""
    return f"{table(rows)}\n\n{served()}"


def main(data_dir: str | os.PathLike | None = None) -> int:
    """Print the report; return the exit status."""
    rows = checks(data_dir)
    print(report(rows))
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
