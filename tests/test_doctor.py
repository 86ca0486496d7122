"""The doctor names every part, never crashes, and gives a remedy for whatever is not ok."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from metselect_dgl import doctor, ops

NAMES = ["python", "torch", "dgl", "extension", "triton", "cuda", "data", "ogb", "cache"]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("METSELECT_DATA", raising=False)
    monkeypatch.delenv("METSELECT_BACKEND", raising=False)


def row(name, **kwargs):
    return next(check for check in doctor.checks(**kwargs) if check.name == name)


def test_every_row_is_there_and_what_is_not_ok_has_a_remedy():
    rows = doctor.checks()
    assert [check.name for check in rows] == NAMES
    for check in rows:
        assert check.status in ("ok", "off", "bad")
        assert check.detail
        assert bool(check.remedy) == (check.status != "ok")


@pytest.mark.parametrize("name", ["python", "torch", "dgl", "cache"])
def test_works_where_the_tests_run(name):
    assert row(name).status == "ok"


@pytest.mark.parametrize(
    ("module", "name", "status", "code"),
    [
        ("torch", "torch", "bad", 1),
        ("dgl", "dgl", "bad", 1),
        ("torch", "cuda", "off", 1),
        ("metselect_dgl._C", "extension", "off", 0),
        ("triton", "triton", "off", 0),
        ("ogb", "ogb", "off", 0),
    ],
)
def test_missing_module(monkeypatch, module, name, status, code):
    monkeypatch.setitem(sys.modules, module, None)
    rows = doctor.checks()
    found = next(check for check in rows if check.name == name)
    assert found.status == status
    assert found.remedy
    assert doctor.exit_status(rows) == code


@pytest.mark.parametrize(
    ("wish", "built", "status", "words"),
    [
        ("auto", True, "ok", "built and serving, threads: 1, from "),
        ("native", True, "ok", "built and serving"),
        ("reference", True, "off", "built; METSELECT_BACKEND=reference: the pure PyTorch refer"),
        ("reference", False, "off", "not built; METSELECT_BACKEND=reference: the pure PyTorch"),
        ("auto", False, "off", "not built; the pure PyTorch reference serves, threads: 1 (METS"),
        ("native", False, "bad", "not built; METSELECT_BACKEND=native insists on it, so the ops"),
        ("triton", True, "off", "built; METSELECT_BACKEND=triton: not used"),
        ("gpu", True, "bad", "METSELECT_BACKEND is 'gpu'"),
    ],
)
def test_engine(monkeypatch, wish, built, status, words):
    module = SimpleNamespace(__file__="_C.so", __spec__="found") if built else None
    monkeypatch.setitem(sys.modules, "metselect_dgl._C", module)
    monkeypatch.setenv("METSELECT_BACKEND", wish)
    found = row("extension")
    assert found.status == status
    assert found.detail.startswith(words)
    assert ("unset" in found.remedy) == (wish in ("reference", "triton", "gpu"))


def test_engine_that_cannot_be_imported(monkeypatch):
    def broken(name):
        if name == "metselect_dgl._C":
            raise ImportError("_C.so: undefined symbol: f")
        return SimpleNamespace(get_num_threads=lambda: 2)

    monkeypatch.setitem(sys.modules, "metselect_dgl._C", SimpleNamespace(__spec__="found"))
    monkeypatch.setattr(doctor, "import_module", broken)
    found = row("extension")
    assert found.status == "bad"
    assert found.detail.startswith("built, but _C.so: undefined symbol: f; the pure PyTorch refer")
    assert "pip install" in found.remedy


def test_broken_module(monkeypatch):
    def broken(name):
        raise OSError("libdgl.so: cannot open shared object file\nand a long story")

    monkeypatch.setattr(doctor, "import_module", broken)
    rows = {check.name: check for check in doctor.checks()}
    assert rows["dgl"].status == rows["torch"].status == "bad"
    assert rows["dgl"].detail == "OSError: libdgl.so: cannot open shared object file"


@pytest.mark.parametrize(
    ("version", "status"), [("2.13.0", "ok"), ("2.13.0+cu130", "ok"), ("2.13.1", "bad")]
)
def test_torch_pin(monkeypatch, version, status):
    monkeypatch.setattr(doctor, "import_module", lambda _: SimpleNamespace(__version__=version))
    assert doctor._torch()[0] == status


def gpu(functions):
    modules = {
        "torch": SimpleNamespace(
            version=SimpleNamespace(cuda="13.0"),
            cuda=SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "H100"),
        ),
        "dgl": None,
        "dgl._ffi.function": SimpleNamespace(list_global_func_names=lambda: functions),
    }
    return modules.__getitem__


def test_gpu_with_cpu_only_dgl(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", gpu(["device_api.cpu"]))
    assert doctor._cuda() == ("off", "H100 is seen by torch, but dgl is a CPU-only build")


def test_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", gpu(["device_api.cpu", "device_api.cuda"]))
    assert doctor._cuda() == ("ok", "H100, CUDA 13.0")


def test_data(monkeypatch, tmp_path):
    assert row("data").status == "off"
    assert row("data", data_dir=tmp_path / "none").status == "bad"
    assert row("data", data_dir=tmp_path).detail.endswith("holds no .npz")
    (tmp_path / "texas.npz").touch()
    (tmp_path / "cora.npz").touch()
    assert row("data", data_dir=tmp_path).detail == f"{tmp_path}: cora, texas"
    monkeypatch.setenv("METSELECT_DATA", str(tmp_path))
    assert row("data").status == "ok"


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    rows = doctor.checks()
    assert rows[-1].status == "bad"
    assert "XDG_CACHE_HOME" in rows[-1].remedy
    assert doctor.exit_status(rows) == 0


def test_table_is_aligned():
    rows = [doctor.Check("dgl", "ok", "1.1.3"), doctor.Check("triton", "off", "absent", "get it")]
    assert doctor.table(rows).splitlines() == [
        "dgl     ok   1.1.3",
        "triton  off  absent",
        "             remedy: get it",
    ]


def test_report_begins_with_the_table():
    lines = doctor.report(doctor.checks()).splitlines()
    assert lines[0].startswith("python     ok   3.11")
    assert lines[-1] == f"METSELECT_BACKEND chooses: {', '.join(ops.BACKENDS)}"


@pytest.mark.parametrize(
    ("wish", "interpreted", "status"),
    [("auto", "0", "ok"), ("triton", "1", "ok"), ("triton", "0", "bad")],
)
def test_triton(monkeypatch, wish, interpreted, status):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("METSELECT_BACKEND", wish)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert row("triton").status == status


def test_what_an_engine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(ops, "not_serving", lambda device: {})
    lines = doctor.served().splitlines()
    assert any(line.startswith("not triton on cuda: it has no moments, white") for line in lines)
    assert any(line.startswith("not native on cuda: it has no whitening, ") for line in lines)
    assert not any(line.startswith("not native on cpu") for line in lines)


def said(**variables: str) -> list[str]:
    """The lines about the ops, in a process of its own."""
    command = [sys.executable, "-P", doctor.__file__]
    environment = {**os.environ, "DGLBACKEND": "pytorch", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.partition("\n\n")[2].splitlines()


def test_says_who_serves_each_op():
    lines = said(METSELECT_BACKEND="reference")
    table, reasons = lines[1 : 1 + len(ops.OPS)], lines[1 + len(ops.OPS) : -1]
    assert [line.split() for line in table] == [[op, "reference", "reference"] for op in ops.OPS]
    assert reasons == [
        f"not {engine} on {device}: METSELECT_BACKEND=reference"
        for device in ("cpu", "cuda")
        for engine in ("native", "triton")
    ]
    expected = ["moments", "native" if ops.NATIVE else "reference", "reference"]
    assert said(METSELECT_BACKEND="auto")[1].split() == expected
    (line,) = said(METSELECT_BACKEND="gpu")
    assert line.startswith("no op is served: ValueError: METSELECT_BACKEND is 'gpu'")


def test_speaks_without_any_package(tmp_path):
    """Isolated from site-packages, as on a machine where nothing is installed."""
    command = [sys.executable, "-I", "-S", doctor.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "torch      bad" in done.stdout
    assert done.stderr == ""
