"""Checks of this installation, with a remedy for each one that fails: `metselect doctor`.

Only the standard library is imported with this file, so that `python -m metselect_dgl.doctor` also
runs where torch or DGL cannot be imported.
"""

import json
import os
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

PYTHON = (3, 10), (3, 13)  # the oldest and the newest version that can be used
TORCH = 2, 2  # the oldest version that can be used
REQUIRED = ("python", "torch")
DGL_EXTRA = "pip install 'metselect-dgl[dgl]'"
ADAPTER = "use a torch that dgl has a file for in dgl/tensoradapter/pytorch, or the default stream"
TESTED = Path(__file__).with_name("compatibility.json")


@dataclass(frozen=True)
class Check:
    """A row of the table; `status` is "ok", "off" (optional and absent) or "bad"."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def _python() -> tuple[str, str]:
    oldest, newest = PYTHON
    status = "ok" if oldest <= sys.version_info[:2] <= newest else "bad"
    return status, f"{platform.python_version()} at {sys.executable}"


def _torch() -> tuple[str, str]:
    version = import_module("torch").__version__
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    if (int(major), int(minor)) < TORCH:
        return "bad", f"{version}, but 2.2 is the oldest version that can be used"
    return "ok", version


def _dgl() -> tuple[str, ...]:
    if find_spec("dgl") is None:
        return "off", "not installed; graphs and backbones need it", DGL_EXTRA
    os.environ.setdefault("DGLBACKEND", "pytorch")
    dgl, torch = import_module("dgl"), import_module("torch")
    chain = dgl.add_self_loop(dgl.graph(([0, 1], [1, 2])))
    out = import_module("dgl.nn").GraphConv(2, 2)(chain, torch.ones(3, 2))
    if not torch.isfinite(out).all():
        return "bad", f"{dgl.__version__}, but GraphConv on 3 nodes gives {out.tolist()}"
    return "ok", f"{dgl.__version__}, GraphConv runs"


def _versions() -> tuple[str, str]:
    torch = import_module("torch").__version__.partition("+")[0]
    dgl = "none" if find_spec("dgl") is None else metadata.version("dgl").partition("+")[0]
    found = {"python": "{}.{}".format(*sys.version_info), "torch": torch, "dgl": dgl}
    text = f"Python {found['python']}, torch {torch}, dgl {dgl}: "
    for row in json.loads(TESTED.read_text(encoding="utf-8")):
        if found.items() <= row.items() and row["result"] != "not run":
            passed = row["result"] == "passed"
            return ("ok", f"{text}tested") if passed else ("off", f"{text}{row['result']}")
    return "off", f"{text}not tested together"


def _extension() -> tuple[str, ...]:
    backends = import_module("metselect_dgl.backends")
    choice = backends.requested()
    if choice not in backends.CHOICES:
        choices = ", ".join(backends.CHOICES)
        return "bad", f"METSELECT_BACKEND is {choice!r}", f"unset it or use {choices}"
    built, reason = backends.native_built(), backends.native_unavailable()
    if reason and choice == "native":
        return "bad", f"{reason}; METSELECT_BACKEND=native requires it, so importing the ops fails"
    if choice in ("reference", "triton"):
        return "off", f"{'built' if built else 'not built'}; {reason}", "unset METSELECT_BACKEND"
    threads = f"threads: {import_module('torch').get_num_threads()}"
    if reason:
        return "bad" if built else "off", f"{reason}; the ops run as plain torch, {threads}"
    return "ok", f"built and used, {threads}, from {import_module('metselect_dgl._C').__file__}"


def _triton() -> tuple[str, ...]:
    backends = import_module("metselect_dgl.backends")
    choice = backends.requested()
    if find_spec("triton") is None:
        return "bad" if choice == "triton" else "off", "not installed; its kernels are not used"
    oldest, newest = backends.TRITON_RANGE
    version = f"{backends.triton_version()} (supported: {oldest} to {newest})"
    if int(version.partition(".")[0]) < 3:
        return "bad" if choice == "triton" else "off", f"{version}, too old: not used"
    if choice == "triton":
        try:
            backends.check_requested()
        except ImportError as error:
            remedy = "unset METSELECT_BACKEND, or set TRITON_INTERPRET=1 to try kernels"
            return "bad", f"{version}, but importing the ops fails: {error}", remedy
    elif not import_module("torch").cuda.is_available():
        return "ok", f"{version}; no GPU is visible, so only tests use it"
    return "ok", version


def _cuda() -> tuple[str, ...]:
    torch = import_module("torch")
    if torch.version.cuda is None:
        return "off", f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "off", f"torch is built for CUDA {torch.version.cuda}, but no GPU is visible"
    device = torch.cuda.get_device_name()
    if find_spec("dgl") is None:
        return "ok", f"{device}, CUDA {torch.version.cuda}; dgl is not installed"
    import_module("dgl")
    names = import_module("dgl._ffi.function").list_global_func_names()
    if "device_api.cuda" not in names:
        return "off", f"torch sees {device}, but dgl is a CPU-only build"
    if not import_module("dgl._ffi.base").is_tensor_adaptor_enabled():
        why = f"dgl has no memory adapter for torch {torch.__version__}"
        safe = "its kernels run on the null stream, so only torch's default stream can be used"
        return "off", f"{device}, CUDA {torch.version.cuda}; {why}: {safe}", ADAPTER
    return "ok", f"{device}, CUDA {torch.version.cuda}; dgl's memory adapter is loaded"


def _data(folder: str | os.PathLike | None) -> tuple[str, str]:
    folder = folder or os.environ.get("METSELECT_DATA")
    if not folder:
        return "off", "METSELECT_DATA is not set; hop_chain and downloads are available"
    if not Path(folder).is_dir():
        return "bad", f"{folder} is not a folder"
    names = sorted(path.stem for path in Path(folder).glob("*.npz"))
    return ("ok", f"{folder}: {', '.join(names)}") if names else ("bad", f"{folder} has no .npz")


def _ogb() -> tuple[str, str]:
    if find_spec("ogb") is None:
        return "off", "not installed; only the ogbn data sets need it"
    return "ok", metadata.version("ogb")


def _cache() -> tuple[str, str]:
    folder = import_module("metselect_dgl.build").cache_home()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return "ok", f"{folder} is writable"


def checks(data_dir: str | os.PathLike | None = None) -> list[Check]:
    """Check everything the package can use, with .npz data sets in `data_dir` (by default
    METSELECT_DATA); never raises."""
    build = "results are the same without it; with a C++ compiler, `metselect build` builds it"
    dgl = f"{DGL_EXTRA}; dgl 2.1.0 needs torch 2.2.1 or older; beside a newer one dgl==1.1.3"
    folder = "set METSELECT_DATA, or pass --data-dir, to a folder of .npz data sets"
    probes = {
        "python": (_python, "use Python 3.10 to 3.13"),
        "torch": (_torch, "pip install 'torch>=2.2'"),
        "dgl": (_dgl, dgl),
        "versions": (_versions, "docs/compatibility.md lists the versions that were tested"),
        "extension": (_extension, build),
        "triton": (_triton, "without it the reference runs; it comes with torch's CUDA build"),
        "cuda": (_cuda, "for a GPU, install CUDA builds of torch and dgl"),
        "data": (lambda: _data(data_dir), folder),
        "ogb": (_ogb, "pip install 'metselect-dgl[ogb]'"),
        "cache": (_cache, "set XDG_CACHE_HOME to a folder that can be written"),
    }
    rows = []
    for name, (probe, remedy) in probes.items():
        try:  # a probe may return its own remedy
            status, detail, *own_remedy = probe()
            remedy = own_remedy[0] if own_remedy else remedy
        except Exception as error:  # a broken wheel raises OSError, AttributeError, ... on import
            absent = isinstance(error, ModuleNotFoundError) and name not in REQUIRED
            status = "off" if absent else "bad"
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(Check(name, status, detail, "" if status == "ok" else remedy))
    return rows


def table(rows: list[Check]) -> str:
    """Return the rows as aligned text, each remedy on an indented line of its own."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.name:<{width}}  {row.status:<3}  {row.detail}")
        if row.remedy:
            lines.append(f"{'':<{width + 7}}remedy: {row.remedy}")
    return "\n".join(lines)


def exit_status(rows: list[Check]) -> int:
    """Return 1 if a required row is bad, or DGL is installed but does not run, else 0."""
    return int(any(row.status == "bad" for row in rows if row.name in (*REQUIRED, "dgl")))


def ops_table() -> str:
    """Return the backend of each op on each device, and why other backends are not used."""
    try:
        backends, ops = map(import_module, ("metselect_dgl.backends", "metselect_dgl.ops"))
    except Exception as error:  # the cause has a row in the table of checks
        return f"no op is available: {type(error).__name__}: {error}".splitlines()[0]
    width = max(map(len, ops.OPS))
    lines = [f"{'op':<{width}}  {'cpu':<9}  cuda"]
    for name in ops.OPS:
        cpu, cuda = (ops.backend_of(name, device) for device in backends.DEVICES)
        lines.append(f"{name:<{width}}  {cpu:<9}  {cuda}")
    for device in backends.DEVICES:
        unavailable = ops.unavailable(device)
        for backend in ("native", "triton"):
            missing = [name for name in ops.OPS if not backends.has_op(backend, name, device)]
            if backend in unavailable:
                lines.append(f"not {backend} on {device}: {unavailable[backend]}")
            elif missing:
                lines.append(f"not {backend} on {device}: no kernel for {', '.join(missing)}")
    lines.append(f"METSELECT_BACKEND chooses: {', '.join(backends.CHOICES)}")
    return "\n".join(lines)


def main(data_dir: str | os.PathLike | None = None) -> int:
    """Print the tables of checks and of ops; return the exit status."""
    rows = checks(data_dir)
    print(f"{table(rows)}\n\n{ops_table()}")
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
