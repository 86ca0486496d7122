"""`metselect build`: what is compiled, where it is stored, when it is loaded, and its errors."""

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from metselect_dgl import backends, build, cli

compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """Sources that compile in a second, an empty cache, and no extension in this process."""
    folder = tmp_path / "csrc"
    (folder / "cpu").mkdir(parents=True)
    (folder / "cuda").mkdir()
    shutil.copy(build.SOURCES / "cpu/module.cpp", folder / "cpu")
    (folder / "cpu/other.cpp").write_text("int metselect_other() { return 1; }\n")
    (folder / "cuda/kernel.cu").write_text("int metselect_kernel() { return 2; }\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("METSELECT_CXXFLAGS", "-O0")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("METSELECT_BACKEND", raising=False)
    monkeypatch.delitem(sys.modules, build.NAME, raising=False)
    return folder


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@compiled
def test_a_build_is_found_and_loaded(capsys):
    assert build.built() is None
    assert not backends.native_built()
    assert "not built for torch" in backends.native_unavailable()
    assert cli.main(["build"]) == 0
    path = build.built()
    assert files(path.parent) == ["_C.so", "build.log"]
    assert files(path.parents[1]) == [path.parent.name]
    first, *progress, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"compiling the C++ operators for torch {torch.__version__} with ")
    assert sorted(line[-9:] for line in progress) == ["odule.cpp", "other.cpp"]
    assert [line[:9] for line in progress] == ["  1 of 2:", "  2 of 2:"]
    assert last == f"built: {path}"
    assert backends.native_built()
    assert backends.native_unavailable() == ""
    assert sys.modules[build.NAME].__file__ == str(path)


@compiled
def test_a_second_build_compiles_nothing(capsys):
    path = build.build()
    capsys.readouterr()
    assert build.build() == path
    assert capsys.readouterr().out == ""


@compiled
@pytest.mark.parametrize("what", ["torch", "gpu", "python", "sources", "name"])
def test_a_build_for_something_else_is_not_loaded(monkeypatch, sources, what):
    build.build()
    assert build.built() is not None
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.2.1")
    elif what == "gpu":
        monkeypatch.setattr(torch.version, "cuda", "99.1")
    elif what == "python":
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "cpython-310")
    elif what == "sources":
        (sources / "cpu/other.cpp").write_text("int metselect_other() { return 3; }\n")
    else:
        (sources / "cpu/other.cpp").rename(sources / "cpu/others.cpp")
    assert build.built() is None
    assert "not built" in backends.native_unavailable()


@compiled
def test_another_compiler_builds_anew_and_the_newest_is_loaded(tmp_path, monkeypatch):
    first = build.build()
    os.utime(first, (0, 0))
    wrapper = 'case "$*" in --version) echo mine 1.0;; *) exec c++ "$@";; esac'
    monkeypatch.setenv("CXX", str(script(tmp_path / "mine", wrapper)))
    second = build.build()
    assert second != first and second.parents[1] == first.parents[1]
    assert build.built() == second
    os.utime(first)
    os.utime(second, (0, 0))
    assert build.built() == first


@compiled
def test_builds_at_the_same_time(capsys):
    with ThreadPoolExecutor(3) as pool:
        paths = {done.result() for done in [pool.submit(build.build) for _ in range(3)]}
    (path,) = paths
    assert files(path.parents[1]) == [path.parent.name]
    build.load(path)


@compiled
def test_an_error_of_the_compiler_is_shown_and_the_log_is_kept(sources, capsys):
    (sources / "cpu/other.cpp").write_text("int metselect_other() { return nothing; }\n")
    assert cli.main(["build"]) == 1
    *_, first, second, last = capsys.readouterr().err.splitlines()
    assert first == "metselect: cpu/other.cpp does not compile"
    assert "error: 'nothing' was not declared" in second
    log = Path(last.removeprefix("log: "))
    assert "other.cpp" in log.read_text() and "'nothing' was not" in log.read_text()
    assert files(log.parent) == [log.name]  # the temporary folder is removed
    assert build.built() is None


@compiled
def test_an_error_of_the_linker(sources):
    (sources / "cpu/other.cpp").write_text('extern "C" int PyInit__C() { return 0; }\n')
    with pytest.raises(RuntimeError, match=r"cannot be linked\n(.|\n)*PyInit__C(.|\n)*log: "):
        build.build()


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("/nonexistent", r"no C\+\+ compiler '/nonexistent'; install one .* CXX"),
        ("false", r"'false' is not a C\+\+ compiler: --version fails"),
    ],
)
def test_without_a_compiler(monkeypatch, cxx, message):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(RuntimeError, match=message):
        build.build()


@compiled
def test_without_the_headers_of_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"Python.h is not in .* python3-dev"):
        build.build()


def toolkit(folder: Path, release: str, compiles: bool) -> Path:
    """Create a CUDA toolkit whose nvcc compiles C++, or fails."""
    what = 'for last; do :; done; exec c++ -x c++ -fPIC -c "$source" -o "$last"'
    what = f'while [ "$1" != -c ]; do shift; done; source=$2; {what}' if compiles else "exit 1"
    version = f'[ "$1" != --version ] || {{ echo "Cuda, release {release}, V1"; exit; }}'
    script(folder / "bin/nvcc", f"{version}\n{what}")
    (folder / "include").mkdir()
    (folder / "lib64").mkdir()
    for name in ("cudart", "c10_cuda", "torch_cuda"):
        command = ["c++", "-shared", "-x", "c++", "/dev/null", "-o", folder / f"lib64/lib{name}.so"]
        subprocess.run(command, check=True)
    return folder


@compiled
@pytest.mark.parametrize(
    ("release", "compiles", "reason"),
    [
        ("13.0", True, "is CUDA 13.0, torch was built with 12.1"),
        ("12.4", False, "cuda/kernel.cu does not compile"),
        (None, False, "has no working nvcc"),
    ],
    ids=["other-version", "failing", "missing"],
)
def test_the_cpu_extension_is_built_where_cuda_cannot_be(
    tmp_path, monkeypatch, capsys, release, compiles, reason
):
    home = toolkit(tmp_path / "toolkit", release, compiles) if release else tmp_path / "none"
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.setenv("CUDA_HOME", str(home))
    path = build.build()
    out, err = capsys.readouterr()
    assert err.startswith("the CUDA operators are not built: ")
    assert reason in err
    assert "compiling the C++ operators" in out
    build.load(path)


@compiled
def test_cuda_sources_are_compiled_where_the_toolkit_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "toolkit", "12.4", True)))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0+PTX")
    path = build.build()
    out, err = capsys.readouterr()
    assert "3 of 3: " in out and "cuda/kernel.cu" in out and err == ""
    log = (path.parent / "build.log").read_text()
    assert "arch=compute_86,code=[sm_86]" in log
    assert "arch=compute_90,code=[sm_90,compute_90]" in log
    assert "-ltorch_cuda" in log


@compiled
def test_a_build_that_cannot_be_imported(monkeypatch):
    path = build.build()
    path.write_bytes(b"not a library")
    assert "cannot be imported" in backends.native_unavailable()
    assert f"delete {path.parent}" in backends.native_unavailable()
    monkeypatch.setenv("METSELECT_BACKEND", "native")
    with pytest.raises(ImportError, match="build it with `metselect build`"):
        backends.check_requested()
