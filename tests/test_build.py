"""The build files: what a wheel holds, that the pins agree, and how `make setup` fails."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import metselect_dgl
from metselect_dgl import doctor

ROOT = Path(__file__).parents[1]
BUILD_FILES = (
    "setup.py pyproject.toml MANIFEST.in README.md LICENSE Makefile requirements.txt "
    "requirements-dev.txt metselect_dgl kernels"
).split()


@pytest.fixture
def checkout(tmp_path):
    """A copy without .venv; nothing is built in the real one."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in BUILD_FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy(ROOT / name, copy)
    return copy


def make(folder, *words, **env):
    # Under `make test`, MAKEFLAGS would hand the outer make's job server to this one.
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *words], cwd=folder, env=outer | env, capture_output=True, text=True
    )


def sentences(done):
    """What a failed set-up says, apart from make's own last line."""
    return [line for line in done.stderr.splitlines() if not line.startswith("make")]


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def test_wheel(checkout, tmp_path):
    command = "-m pip wheel --quiet --no-build-isolation --no-deps --no-index -w".split()
    subprocess.run([sys.executable, *command, tmp_path, "."], cwd=checkout, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"metselect_dgl-{metselect_dgl.__version__}-")
    files = zipfile.ZipFile(wheel).namelist()
    assert "metselect_dgl/kernels/__init__.py" in files
    assert "metselect_dgl/doctor.py" in files
    info = f"metselect_dgl-{metselect_dgl.__version__}.dist-info"
    assert {file.split("/")[0] for file in files} == {"metselect_dgl", info}
    assert f"{info}/licenses/LICENSE" in files


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned(name):
    assert pins(name)
    for line in pins(name):
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+", line), line


def test_pins_agree():
    setup = (ROOT / "setup.py").read_text()
    lock = pins("requirements.txt")
    for name in ("torch", "dgl"):
        (pin,) = (line for line in lock if line.startswith(f"{name}=="))
        assert f'"{pin}"' in setup
    assert f"torch=={doctor.TORCH}" in lock
    (ogb,) = (line for line in pins("requirements-dev.txt") if line.startswith("ogb=="))
    assert f'"{ogb}"' in setup


def test_lock_serves_what_the_package_asks_for():
    asked = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = re.findall(r'"([A-Za-z]+)', asked)
    assert set(names) <= {line.split("==")[0] for line in pins("requirements.txt")}


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_help_lists_every_word(checkout):
    listed = re.findall(r"^  make (\w+)", make(checkout).stdout, re.MULTILINE)
    assert listed == ["help", "setup", "demo", "test", "lint", "format", "doctor", "clean"]


def test_dry_run_changes_nothing(checkout):
    before = sorted(checkout.rglob("*"))
    assert make(checkout, "-n", "-j2", "setup", "lint", "test").returncode == 0
    assert sorted(checkout.rglob("*")) == before


@pytest.mark.parametrize("python", ["/nonexistent", "false"])
def test_setup_without_python(checkout, python):
    done = make(checkout, "setup", PYTHON=python)
    assert done.returncode != 0
    (sentence,) = sentences(done)
    assert f"Python 3.11 is needed and '{python}' is not it" in sentence


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
