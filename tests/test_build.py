"""The build files: contents of sdist and wheels, agreement of the pins, failures of `make`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import metselect_dgl
from metselect_dgl import doctor

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
    env = os.environ | {"CXX": "/nonexistent", "METSELECT_BACKEND": "auto"}
    subprocess.run(command, cwd=copied(folder / "checkout"), env=env, check=True)
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
    subprocess.run([sys.executable, *command], cwd=sources, env=os.environ | env, check=True)
    (wheel,) = sources.glob("wheels/*.whl")
    assert wheel.name.startswith(f"metselect_dgl-{VERSION}-")
    shutil.unpack_archive(wheel, sources / "site", "zip")
    return sources / "site"


def python(site, *arguments, backend="auto"):
    """Run Python on the package in `site`; -S hides an editable install and its extension."""
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": path, "METSELECT_BACKEND": backend}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


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
    site = installed(sources, CXX="c++", METSELECT_CXXFLAGS="-O0 -g0", METSELECT_BACKEND="native")
    files = [str(path.relative_to(site)) for path in site.rglob("*")]
    assert "metselect_dgl/kernels/__init__.py" in files
    assert "metselect_dgl/doctor.py" in files
    assert "metselect_dgl/experiments/paper.yaml" in files
    info = f"metselect_dgl-{VERSION}.dist-info"
    assert {file.split("/")[0] for file in files} == {"metselect_dgl", info}
    assert f"{info}/licenses/LICENSE" in files
    assert len(list(site.glob("metselect_dgl/_C.*.so"))) == 1
    done = python(site, "-c", MOMENTS, backend="native")
    assert done.stdout == "True\n", done.stderr
    assert "built and used" in python(site, "-m", "metselect_dgl", "doctor").stdout


@NO_COMPILER
def test_wheel_without_compiler(sources, cxx):
    site = installed(sources, CXX=cxx, METSELECT_BACKEND="auto")
    assert not list(site.rglob("*.so"))
    assert (site / "metselect_dgl/experiments/paper.yaml").exists()
    done = python(site, "-c", MOMENTS)
    assert done.stdout == "False\n", done.stderr
    report = python(site, "-m", "metselect_dgl", "doctor").stdout
    assert report.count("extension  off  the extension is not built") == 1
    assert report.count("pip install --no-build-isolation") == 1
    assert "the ops run as plain torch" in report
    done = python(site, "-c", MOMENTS, backend="native")
    assert "METSELECT_BACKEND=native, but the extension is not built" in done.stderr


def build_in_place(sources, **env):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.run(
        command, cwd=sources, env=os.environ | env, capture_output=True, text=True
    )


@NO_COMPILER
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_build_without_compiler(sources, cxx, backend):
    done = build_in_place(sources, CXX=cxx, METSELECT_BACKEND=backend)
    assert done.returncode == (backend == "native")
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("metselect-dgl: "))
    assert cxx in message
    assert ("the ops will run in plain torch" in message) == (backend == "auto")


def test_a_failed_build_leaves_no_outdated_extension(sources):
    outdated = sources / "metselect_dgl/_C.old.so"
    outdated.touch()
    assert build_in_place(sources, CXX="false", METSELECT_BACKEND="auto").returncode == 0
    assert not outdated.exists()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_cpu_extension_is_built_where_cuda_cannot_be(sources, tmp_path):
    """torch reports CUDA and there is an nvcc, which fails."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/nvcc").chmod(0o755)
    setup = (
        "import os, runpy, sys, torch; from torch.utils import cpp_extension;"
        "torch.version.cuda, cpp_extension.CUDA_HOME = '13.0', os.environ['CUDA_HOME'];"
        "sys.argv = 'setup.py -q build_ext --inplace'.split();"
        "runpy.run_path(os.path.abspath('setup.py'))"
    )
    env = {"CUDA_HOME": str(tmp_path), "CXX": "c++", "METSELECT_CXXFLAGS": "-O0 -g0"}
    done = subprocess.run(
        [sys.executable, "-c", setup],
        cwd=sources,
        env=os.environ | env | {"METSELECT_BACKEND": "native"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("metselect-dgl: "))
    assert "the CUDA ops could not be built" in message
    assert "nvcc" in message
    done = python(sources, "-c", MOMENTS, backend="native")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned(name):
    assert pins(name)
    for line in pins(name):
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+(; sys_platform == .linux.)?", line), line


def test_pins_agree():
    setup = (ROOT / "setup.py").read_text()
    lock = pins("requirements.txt")
    for name in ("torch", "dgl"):
        (pin,) = (line for line in lock if line.startswith(f"{name}=="))
        assert f'"{pin}"' in setup
    assert f"torch=={doctor.TORCH}" in lock
    (ogb,) = (line for line in pins("requirements-dev.txt") if line.startswith("ogb=="))
    assert f'"{ogb}"' in setup


def test_lock_satisfies_the_requirements_of_the_package():
    asked = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = re.findall(r'"([A-Za-z]+)', asked)
    assert set(names) <= {line.split("==")[0] for line in pins("requirements.txt")}


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_help_lists_every_word(checkout):
    listed = re.findall(r"^  make ([\w-]+)", make(checkout).stdout, re.MULTILINE)
    assert listed == [
        "help",
        "setup",
        "demo",
        "test",
        "sanitize",
        "kernel-report",
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
