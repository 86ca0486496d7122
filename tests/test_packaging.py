"""The package: contents of sdist and wheel, metadata and pins, failures of `make`."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

import metselect_dgl

ROOT = Path(__file__).parents[1]
BUILD_FILES = (
    "setup.py pyproject.toml MANIFEST.in README.md LICENSE Makefile requirements.txt "
    "requirements-dev.txt metselect_dgl kernels csrc"
).split()


VERSION = metselect_dgl.__version__
NO_COMPILER = pytest.mark.parametrize("cxx", ["/nonexistent", "false"], ids=["missing", "failing"])


def copied(copy):
    """Return a copy without .venv; nothing is built in the checkout itself."""
    copy.mkdir()
    for name in BUILD_FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def checkout(tmp_path):
    return copied(tmp_path / "checkout")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Return the folder of the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", folder]
    subprocess.run(command, cwd=copied(folder / "checkout"), check=True)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return folder / f"metselect_dgl-{VERSION}"


@pytest.fixture
def sources(sdist, tmp_path):
    """Return a copy of the sdist with one operator only, because compiling all takes too long."""
    copy = shutil.copytree(sdist, tmp_path / "sources")
    for file in (copy / "csrc/cpu").iterdir():
        if file.stem not in ("module", "moments"):
            file.unlink()
    return copy


def installed(sources, **env):
    """Build a wheel and return the folder it is unpacked in."""
    command = "-m pip wheel --quiet --no-build-isolation --no-deps --no-index -w wheels .".split()
    env = os.environ | {"XDG_CACHE_HOME": str(sources / "cache")} | env
    subprocess.run([sys.executable, *command], cwd=sources, env=env, check=True)
    (wheel,) = sources.glob("wheels/*.whl")
    assert wheel.name == f"metselect_dgl-{VERSION}-py3-none-any.whl"
    shutil.unpack_archive(wheel, sources / "site", "zip")
    return sources / "site"


def python(site, *arguments, backend="auto"):
    """Run Python on the package in `site`; -S hides an editable install."""
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    cache = str(site.parent / "cache")
    env = os.environ | {
        "PYTHONPATH": path,
        "METSELECT_BACKEND": backend,
        "XDG_CACHE_HOME": cache,
    }
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, env=env, cwd=site, capture_output=True, text=True)


# Compares one operator with the reference, and prints whether the extension is used.
MOMENTS = """
import torch
from metselect_dgl import ops, reference
from benchmarks.op_cases import make_case
case = make_case(100, (5, 37), picked=60)
inputs = case.layers, case.labels, 2 * [case.index], [h[:4] for h in case.layers]
torch.testing.assert_close(torch.ops.metselect.moments(*inputs), reference.moments(*inputs))
print(ops.NATIVE)
"""


def make(folder, *targets, **env):
    # Under `make test`, MAKEFLAGS would hand the outer make's job server to this one.
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *targets], cwd=folder, env=outer | env, capture_output=True, text=True
    )


def sentences(done):
    """Return the messages of a failed setup without make's own last line."""
    return [line for line in done.stderr.splitlines() if not line.startswith("make")]


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def test_sdist(sdist):
    files = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    wanted = [*(ROOT / "csrc").rglob("*.[ch]*"), *ROOT.glob("kernels/*.py")]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= files
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= files
    assert "metselect_dgl/experiments/paper.yaml" in files
    assert not any(file.endswith(".so") for file in files)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_wheel(sources):
    """Without build isolation torch is there, and the operators are compiled at once."""
    site = installed(sources, CXX="c++", METSELECT_CXXFLAGS="-O0 -g0", METSELECT_BACKEND="native")
    files = [str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()]
    assert "metselect_dgl/kernels/__init__.py" in files
    assert "metselect_dgl/experiments/paper.yaml" in files
    packed = [*(sources / "csrc").rglob("*.[ch]*")]
    assert {f"metselect_dgl/{path.relative_to(sources)}" for path in packed} <= set(files)
    info = f"metselect_dgl-{VERSION}.dist-info"
    assert {file.split("/")[0] for file in files} == {"metselect_dgl", info}
    assert f"{info}/licenses/LICENSE" in files
    assert not any(file.endswith(".so") for file in files)
    done = python(site, "-c", MOMENTS, backend="native")
    assert done.stdout == "True\n", done.stderr
    assert "built and used" in python(site, "-m", "metselect_dgl", "doctor").stdout
    done = python(site, "-m", "metselect_dgl", "build")  # a compiler with other flags
    assert done.stdout.startswith("compiling the C++ operators for torch"), done.stderr


@NO_COMPILER
def test_wheel_without_compiler(sources, cxx):
    site = installed(sources, CXX=cxx, METSELECT_BACKEND="auto")
    done = python(site, "-c", MOMENTS)
    assert done.stdout == "False\n", done.stderr
    report = python(site, "-m", "metselect_dgl", "doctor").stdout
    assert report.count("extension  off  the extension is not built for torch") == 1
    assert report.count("`metselect build`") == 1
    assert "the ops run as plain torch" in report
    done = python(site, "-c", MOMENTS, backend="native")
    assert "METSELECT_BACKEND=native, but the extension is not built" in done.stderr


def test_wheel_where_torch_is_absent(sources, tmp_path):
    """As under build isolation: Python has setuptools alone."""
    (tmp_path / "site").mkdir()
    packages = Path(setuptools.__file__).parents[1]
    for folder in [packages / "_distutils_hack", *packages.glob("setuptools*")]:
        (tmp_path / "site" / folder.name).symlink_to(folder)
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "-q", "bdist_wheel", "-d", "wheels"],
        cwd=sources,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "METSELECT_BACKEND": "native"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "`metselect build` compiles the operators" in done.stdout
    assert (sources / f"wheels/metselect_dgl-{VERSION}-py3-none-any.whl").exists()


@NO_COMPILER
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_install_without_compiler(sources, cxx, backend):
    env = {"CXX": cxx, "METSELECT_BACKEND": backend, "XDG_CACHE_HOME": str(sources / "cache")}
    command = [sys.executable, "setup.py", "-q", "build"]
    done = subprocess.run(
        command, cwd=sources, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == (backend == "native")
    message, *more = (line for line in done.stderr.splitlines() if line.startswith("metselect-dgl"))
    assert repr(cxx) in message
    assert len(more) == (backend == "auto")


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned(name):
    assert pins(name)
    for line in pins(name):
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+(; sys_platform == .linux.)?", line), line


def declared() -> list[Requirement]:
    """Return the requirements of the installed package, with those of its extras."""
    return [Requirement(line) for line in metadata.requires("metselect-dgl")]


def test_pins_satisfy_the_requirements_of_the_package():
    pinned = dict(line.partition(";")[0].split("==") for line in pins("requirements.txt"))
    pinned |= dict(line.partition(";")[0].split("==") for line in pins("requirements-dev.txt"))
    for wanted in declared():
        if wanted.name in pinned:
            assert wanted.specifier.contains(pinned[wanted.name]), wanted


@pytest.mark.parametrize("name", ["torch", "dgl", "numpy"])
def test_requirements_are_ranges(name):
    """An installation beside an older torch or dgl changes neither."""
    (wanted,) = (one for one in declared() if one.name == name)
    oldest = {"torch": "2.2.0", "dgl": "1.1.0", "numpy": "1.26.0"}[name]
    assert wanted.specifier.contains(oldest) and wanted.specifier.contains("9.0")


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_help_lists_every_target(checkout):
    listed = re.findall(r"^  make ([\w-]+)", make(checkout).stdout, re.MULTILINE)
    assert listed == [
        "help",
        "setup",
        "demo",
        "test",
        "sanitize",
        "kernel-report",
        "compat",
        "triton-versions",
        "dist",
        "cuda-build-check",
        "bench",
        "bench-full",
        "results",
        "lint",
        "format",
        "doctor",
        "clean",
    ]


def test_dry_run_changes_nothing(checkout):
    before = sorted(checkout.rglob("*"))
    assert make(checkout, "-n", "-j2", "setup", "lint", "test").returncode == 0
    assert sorted(checkout.rglob("*")) == before


@pytest.mark.parametrize("python", ["/nonexistent", "false"])
def test_setup_without_python(checkout, python):
    done = make(checkout, "setup", PYTHON=python)
    assert done.returncode != 0
    (sentence,) = sentences(done)
    assert f"'{python}' is not Python 3.11; install it" in sentence


def test_setup_without_venv_module(checkout, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *venv*) exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = make(checkout, "setup", PYTHON=str(python))
    assert done.returncode != 0
    (sentence,) = sentences(done)
    assert "lacks the venv module" in sentence


def test_setup_without_network(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv/half-made").touch()
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
    }
    done = make(checkout, "setup", PYTHON=sys.executable, CXX="no-such-compiler", **offline)
    assert done.returncode != 0
    compiler, sentence = sentences(done)
    assert "no C++ compiler found" in compiler
    assert "no network" in sentence
    assert "run the same command again" in sentence
    assert len(done.stdout.splitlines()) == 1
    assert "ERROR" in (checkout / ".venv/setup.log").read_text()
    assert not (checkout / ".venv/ready").exists()


def test_sanitize_without_its_runtime(checkout, tmp_path):
    (checkout / ".venv").mkdir()
    (checkout / ".venv/ready").touch()
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho libasan.so\n")  # as GCC says when it has none
    compiler.chmod(0o755)
    done = make(checkout, "sanitize", CXX=str(compiler))
    assert done.returncode != 0
    (sentence,) = sentences(done)
    assert f"'{compiler}' has no libasan.so; use GCC" in sentence
