"""Imports point down. They are read from the source, so lazy imports count as well."""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "metselect_dgl"
# From bottom to top; a part may import its own row and the rows below it.
LAYERS = (
    ("_C", "atomic_file", "kernels", "optional", "reference"),
    ("ops",),
    ("checks", "functional"),
    ("nn",),
    ("config", "data", "plots", "pyg"),
    ("train",),
    ("experiments",),
    ("__main__", "cli"),
)
# Import the standard library only, so that the doctor runs where nothing else can be imported.
STANDALONE = ("__init__", "backends", "build", "doctor")
HEIGHT = {part: height for height, parts in enumerate(LAYERS) for part in parts}
HEIGHT |= dict.fromkeys(STANDALONE, -1)
BACKENDS = {"_C", "kernels", "reference"}
REEXPORTED = {"log_odds"}  # that functional may import from reference


def part_of(path: str) -> str:
    """Return `nn` for `metselect_dgl/nn/model.py`; kernels/ is installed below the package."""
    first, *rest = path.removesuffix(".py").split("/")
    return first if first != PACKAGE else rest[0]


def imports(path: str, source: str) -> list[tuple[str, str]]:
    """Return (module, name) of every import in a file, relative ones resolved; name "" for a
    module."""
    package = path.removesuffix(".py").split("/")[:-1]
    package = package if package[0] == PACKAGE else [PACKAGE, *package]
    pairs = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            pairs += [(module, alias.name) for alias in node.names]
    return pairs


def inner(module: str, name: str) -> str | None:
    """Return the part of the package that an import reaches, None outside the package."""
    first, *rest = module.split(".")
    if first != PACKAGE:
        return None
    return rest[0] if rest else (name if name in HEIGHT else "__init__")


def violations(path: str, source: str) -> list[str]:
    """Return the imports of a file that the layering forbids."""
    part = part_of(path)
    if part not in HEIGHT:
        return [f"{path}: {part} has no place in LAYERS"]
    faults = []
    for module, name in imports(path, source):
        target, outer = inner(module, name), module.split(".")[0]
        what = f"{path}: {module} {name}".rstrip()
        if target is not None and target not in HEIGHT:
            faults.append(f"{what} has no place in LAYERS")
        elif target is not None and target != part:
            if HEIGHT[target] > HEIGHT[part] or (part in STANDALONE and target not in STANDALONE):
                faults.append(f"{what} is above it")
            reexported = (part, target) == ("functional", "reference") and name in REEXPORTED
            if target in BACKENDS and part != "ops" and not reexported:
                faults.append(f"{what} is a backend")
        if target is None and part in STANDALONE and outer not in sys.stdlib_module_names:
            faults.append(f"{what} is not in the standard library")
        if outer == "dgl" and HEIGHT[part] < HEIGHT["nn"]:
            faults.append(f"{what} is for nn and above")
        if outer == "dgl" and part == "pyg":
            faults.append(f"{what} is not for users of PyG")
        if outer == "triton" and part != "kernels":
            faults.append(f"{what} is for kernels")
        if part == "reference" and outer != "torch":
            faults.append(f"{what} is not torch")
    return faults


def sources() -> dict[str, str]:
    files = [*ROOT.glob(f"{PACKAGE}/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


@pytest.mark.parametrize(("path", "source"), sources().items(), ids=sources())
def test_imports_point_down(path, source):
    assert violations(path, source) == []


def check_no_cycle(files: dict[str, str]) -> None:
    """Raise CycleError if parts import each other."""
    graph = {part: set() for part in HEIGHT}
    for path, source in files.items():
        part = part_of(path)
        graph[part] |= {inner(*pair) for pair in imports(path, source)} - {None, part}
    TopologicalSorter(graph).prepare()


def test_no_two_parts_import_each_other():
    check_no_cycle(sources())


def test_a_cycle_is_reported():
    with pytest.raises(CycleError):
        check_no_cycle(
            {
                "metselect_dgl/plots.py": "from .data import NodeDataset",
                "metselect_dgl/data/npz.py": "def f():\n    from .. import plots",
            }
        )


BAD = {
    "up": ("metselect_dgl/nn/model.py", "from ..train import train", "above"),
    "up-by-name": ("metselect_dgl/functional/head.py", "from .. import nn", "above"),
    "up-absolute": ("metselect_dgl/ops/moments.py", "import metselect_dgl.functional", "above"),
    "up-absolute-from": ("metselect_dgl/data/npz.py", "from metselect_dgl import cli", "above"),
    "up-lazily": (
        "metselect_dgl/train/run.py",
        "def f():\n    from ..experiments.tables import percent",
        "above",
    ),
    "up-from-kernels": ("kernels/moments.py", "from ..ops import OPS", "above"),
    "up-from-registry": (
        "metselect_dgl/ops/registry.py",
        "from ..functional import graph",
        "above",
    ),
    "doctor": ("metselect_dgl/doctor.py", "from .config import Config", "above"),
    "backends": ("metselect_dgl/backends.py", "from .ops import OPS", "above"),
    "backends-with-torch": ("metselect_dgl/backends.py", "import torch", "standard library"),
    "doctor-with-dgl": ("metselect_dgl/doctor.py", "def f():\n    import dgl", "standard library"),
    "package": ("metselect_dgl/__init__.py", "from . import nn", "above"),
    "dgl-below": ("metselect_dgl/functional/graph.py", "import dgl.function as fn", "nn and above"),
    "dgl-in-checks": ("metselect_dgl/checks.py", "from dgl import DGLGraph", "nn and above"),
    "dgl-in-pyg": ("metselect_dgl/pyg.py", "def f():\n    import dgl", "not for users of PyG"),
    "triton": ("metselect_dgl/ops/__init__.py", "import triton.language as tl", "kernels"),
    "backend-in-nn": ("metselect_dgl/nn/losses.py", "from ..reference import log_odds", "backend"),
    "backend-lazily": (
        "metselect_dgl/functional/head.py",
        "def f():\n    from .. import kernels",
        "backend",
    ),
    "backend-binary": ("metselect_dgl/train/run.py", "from .. import _C", "backend"),
    "backend-deep": ("metselect_dgl/nn/a.py", "from ..kernels.moments import m", "backend"),
    "more-than-reexported": (
        "metselect_dgl/functional/moments.py",
        "from ..reference import TILE, moments",
        "backend",
    ),
    "all-of-reference": (
        "metselect_dgl/functional/__init__.py",
        "from .. import reference",
        "backend",
    ),
    "reference-with-numpy": ("metselect_dgl/reference.py", "import numpy", "not torch"),
    "reference-with-os": ("metselect_dgl/reference.py", "from os import path", "not torch"),
    "reference-with-checks": ("metselect_dgl/reference.py", "from . import checks", "above"),
    "new-file": ("metselect_dgl/extra.py", "", "no place"),
    "unknown-target": ("metselect_dgl/cli.py", "from .extra import thing", "no place"),
}


@pytest.mark.parametrize(("path", "source", "message"), BAD.values(), ids=BAD)
def test_a_violation_is_reported(path, source, message):
    (fault, *_) = violations(path, source)
    assert path in fault
    assert message in fault


GOOD = {
    "own-row": ("metselect_dgl/train/run.py", "from ..data import NodeDataset"),
    "own-part": ("metselect_dgl/nn/model.py", "from .heads import Selection"),
    "down": ("metselect_dgl/experiments/grid.py", "from ..config import Config"),
    "far-down": ("metselect_dgl/nn/heads.py", "from .. import functional as MF"),
    "backends-in-ops": (
        "metselect_dgl/ops/__init__.py",
        "from .. import _C, backends, kernels, reference",
    ),
    "own-package": ("metselect_dgl/ops/moments.py", "from .registry import Op"),
    "standalone": ("metselect_dgl/doctor.py", "def f():\n    from . import backends"),
    "reexported": ("metselect_dgl/functional/__init__.py", "from ..reference import log_odds"),
    "dgl": ("metselect_dgl/nn/ndls.py", "import dgl"),
    "dgl-above": ("metselect_dgl/train/evaluate.py", "import dgl"),
    "triton": ("kernels/moments.py", "import triton\nfrom .tiles import load"),
    "version": ("metselect_dgl/cli.py", "from . import __version__, doctor"),
    "torch": ("metselect_dgl/reference.py", "import torch.nn.functional as F"),
}


@pytest.mark.parametrize(("path", "source"), GOOD.values(), ids=GOOD)
def test_allowed_imports(path, source):
    assert violations(path, source) == []


def test_functional_and_doctor_need_no_dgl():
    """In a new process, where importing DGL is an error."""
    code = (
        "import sys; sys.modules['dgl'] = None\n"
        "import torch, metselect_dgl.cli, metselect_dgl.functional as MF\n"
        "metselect_dgl.cli._parser().parse_args(['doctor'])\n"
        "print(MF.moments([torch.ones(2, 3)], torch.tensor([0, 1]), 2).count.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1.0, 1.0]\n"


def test_backends_need_no_torch():
    """In a new process, where importing torch is an error."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from metselect_dgl import backends\n"
        "print(backends.requested(), backends.triton_unavailable('cpu') != '')"
    )
    environment = os.environ | {"METSELECT_BACKEND": "reference"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reference True\n"
