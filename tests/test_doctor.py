"""The doctor lists every part, never raises, and gives a remedy for each row that is not ok."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from metselect_dgl import backends, build, doctor, ops

NAMES = "python torch dgl versions extension triton cuda data ogb cache".split()
CACHE = os.environ.get("XDG_CACHE_HOME", "")  # which has the extension


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("METSELECT_DATA", raising=False)
    monkeypatch.delenv("METSELECT_BACKEND", raising=False)


def row(name, **kwargs):
    return next(check for check in doctor.checks(**kwargs) if check.name == name)


def test_all_rows_are_listed_and_rows_not_ok_have_a_remedy():
    rows = doctor.checks()
    assert [check.name for check in rows] == NAMES
    for check in rows:
        assert check.status in ("ok", "off", "bad")
        assert check.detail
        assert bool(check.remedy) == (check.status != "ok")


@pytest.mark.parametrize("name", ["python", "torch", "cache"])
def test_required_rows_are_ok_here(name):
    assert row(name).status == "ok"


def test_dgl_is_ok_here():
    pytest.importorskip("dgl", reason="DGL is not installed")
    assert row("dgl").status == "ok"


@pytest.mark.parametrize(
    ("module", "name", "status", "code"),
    [
        ("torch", "torch", "bad", 1),
        ("dgl", "dgl", "off", 0),
        ("torch", "versions", "off", 1),
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
    ("choice", "built", "status", "detail"),
    [
        ("auto", True, "ok", "built and used, threads: 1, from _C.so"),
        ("native", True, "ok", "built and used, threads: 1, from _C.so"),
        ("reference", True, "off", "built; METSELECT_BACKEND=reference"),
        ("reference", False, "off", "not built; METSELECT_BACKEND=reference"),
        (
            "auto",
            False,
            "off",
            "the extension is not built for torch 2.",
        ),
        (
            "native",
            False,
            "bad",
            "the extension is not built for torch 2.",
        ),
        ("triton", True, "off", "built; METSELECT_BACKEND=triton"),
        ("gpu", True, "bad", "METSELECT_BACKEND is 'gpu'"),
    ],
)
def test_extension(monkeypatch, choice, built, status, detail):
    module = SimpleNamespace(__file__="_C.so") if built else None
    monkeypatch.setitem(sys.modules, build.NAME, module)
    monkeypatch.setenv("METSELECT_BACKEND", choice)
    found = row("extension")
    assert found.status == status
    assert found.detail.startswith(detail)
    assert ("unset" in found.remedy) == (choice in ("reference", "triton", "gpu"))
    assert ("`metselect build`" in found.remedy) == (detail.startswith("the extension is not"))


def test_extension_that_cannot_be_imported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, build.NAME, None)
    (tmp_path / "_C.so").write_text("not a library")
    monkeypatch.setattr(build, "built", lambda: tmp_path / "_C.so")
    found = row("extension")
    assert found.status == "bad"
    assert found.detail.startswith("the extension cannot be imported (")
    assert f"delete {tmp_path}; the ops run as plain torch" in found.detail
    assert "`metselect build`" in found.remedy


def test_broken_module(monkeypatch):
    def broken(name):
        raise OSError("libdgl.so: cannot open shared object file\nand a long story")

    monkeypatch.setattr(doctor, "import_module", broken)
    rows = {check.name: check for check in doctor.checks()}
    assert rows["dgl"].status == rows["torch"].status == "bad"
    assert rows["dgl"].detail == "OSError: libdgl.so: cannot open shared object file"
    assert doctor.exit_status([rows["dgl"]]) == 1


@pytest.mark.parametrize(
    ("version", "status"), [("2.13.0+cu130", "ok"), ("2.2.0", "ok"), ("2.1.2", "bad")]
)
def test_oldest_torch(monkeypatch, version, status):
    monkeypatch.setattr(doctor, "import_module", lambda _: SimpleNamespace(__version__=version))
    assert doctor._torch()[0] == status


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9), "bad"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "bad")]
)
def test_python_versions(monkeypatch, version, status):
    monkeypatch.setattr(sys, "version_info", version)
    assert doctor._python()[0] == status


def test_python_versions_are_those_of_the_package():
    oldest, newest = doctor.PYTHON
    wanted = metadata.metadata("metselect-dgl")["Requires-Python"]
    assert set(wanted.split(",")) == {f">=3.{oldest[1]}", f"<3.{newest[1] + 1}"}


def test_dgl_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    assert row("dgl").remedy == "pip install 'metselect-dgl[dgl]'"
    assert row("versions").detail.endswith("dgl none: not tested together")


@pytest.mark.parametrize(
    ("result", "status", "detail"),
    [
        ("passed", "ok", "tested"),
        ("not run", "off", "not tested together"),
        ("import dgl fails", "off", "import dgl fails"),
    ],
)
def test_versions(monkeypatch, tmp_path, result, status, detail):
    found = {"python": "3.11", "torch": "2.4.1", "dgl": "1.1.3"}
    others = [{**found, "torch": "2.4.0", "result": "passed"}, {**found, "result": result}]
    (tmp_path / "table.json").write_text(json.dumps(others))
    monkeypatch.setattr(doctor, "TESTED", tmp_path / "table.json")
    monkeypatch.setattr(sys, "version_info", (3, 11))
    monkeypatch.setattr(metadata, "version", lambda name: "1.1.3")
    torch = SimpleNamespace(__version__="2.4.1+cu121")
    monkeypatch.setattr(doctor, "import_module", lambda name: torch)
    text = f"Python 3.11, torch 2.4.1, dgl 1.1.3: {detail}"
    assert doctor._versions() == (status, text)


def test_the_pinned_versions_are_tested():
    lines = (Path(__file__).parents[1] / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    wanted = {"python": "3.11", "torch": pins["torch"], "dgl": pins["dgl"], "result": "passed"}
    assert wanted.items() in [row.items() for row in json.loads(doctor.TESTED.read_text())]


def gpu(functions, adapter=True):
    modules = {
        "torch": SimpleNamespace(
            __version__="2.4.1",
            version=SimpleNamespace(cuda="12.1"),
            cuda=SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "H100"),
        ),
        "dgl": None,
        "dgl._ffi.function": SimpleNamespace(list_global_func_names=lambda: functions),
        "dgl._ffi.base": SimpleNamespace(is_tensor_adaptor_enabled=lambda: adapter),
    }
    return modules.__getitem__


def test_gpu_with_cpu_only_dgl(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", gpu(["device_api.cpu"]))
    assert doctor._cuda() == ("off", "torch sees H100, but dgl is a CPU-only build")


def test_gpu_without_dgl(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", gpu([]))
    monkeypatch.setitem(sys.modules, "dgl", None)
    assert doctor._cuda() == ("ok", "H100, CUDA 12.1; dgl is not installed")


def test_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", gpu(["device_api.cuda"]))
    assert doctor._cuda() == ("ok", "H100, CUDA 12.1; dgl's memory adapter is loaded")


def test_gpu_without_memory_adapter(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", gpu(["device_api.cuda"], adapter=False))
    status, detail, remedy = doctor._cuda()
    assert status == "off"
    assert "no memory adapter for torch 2.4.1" in detail and "null stream" in detail
    assert "default stream" in remedy


def test_data(monkeypatch, tmp_path):
    assert row("data").status == "off"
    assert row("data", data_dir=tmp_path / "none").status == "bad"
    assert row("data", data_dir=tmp_path).detail.endswith("has no .npz")
    (tmp_path / "texas.npz").touch()
    (tmp_path / "cora.npz").touch()
    assert row("data", data_dir=tmp_path).detail == f"{tmp_path}: cora, texas"
    monkeypatch.setenv("METSELECT_DATA", str(tmp_path))
    assert row("data").status == "ok"


def test_cache_that_is_not_writable(monkeypatch, tmp_path):
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


def test_report_begins_with_the_table(capsys):
    doctor.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python     ok   3.1")
    assert lines[-1] == f"METSELECT_BACKEND chooses: {', '.join(backends.CHOICES)}"


@pytest.mark.parametrize(
    ("choice", "interpreted", "status"),
    [("auto", "0", "ok"), ("triton", "1", "ok"), ("triton", "0", "bad")],
)
def test_triton(monkeypatch, choice, interpreted, status):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(backends, "triton_version", lambda: "3.0.0")
    monkeypatch.setenv("METSELECT_BACKEND", choice)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert row("triton").status == status


@pytest.mark.parametrize(("choice", "status"), [("auto", "off"), ("triton", "bad")])
def test_old_triton(monkeypatch, choice, status):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(backends, "triton_version", lambda: "2.2.0")
    monkeypatch.setenv("METSELECT_BACKEND", choice)
    found = row("triton")
    assert found.status == status
    assert found.detail == "2.2.0 (supported: 3.0 to 3.9), too old: not used"
    assert "the reference runs" in found.remedy
    for device in backends.DEVICES:
        assert backends.triton_unavailable(device) == "triton 2.2.0 is older than 3.0"


def test_ops_that_a_backend_has_no_kernel_for_are_listed(monkeypatch):
    monkeypatch.setattr(ops, "unavailable", lambda device: {})
    lines = doctor.ops_table().splitlines()
    (triton,) = (line for line in lines if line.startswith("not triton on cuda: no kernel for "))
    (native,) = (line for line in lines if line.startswith("not native on cuda: no kernel for "))
    assert "moments" in triton and "whitening" in triton and "select_layer" not in triton
    assert "whitening" in native and "moments" not in native
    assert not any(line.startswith("not native on cpu") for line in lines)


def ops_lines(**variables: str) -> list[str]:
    """Return the lines about the ops from a new process."""
    command = [sys.executable, "-m", "metselect_dgl.doctor"]
    environment = {**os.environ, "DGLBACKEND": "pytorch", "XDG_CACHE_HOME": CACHE, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.partition("\n\n")[2].splitlines()


def test_backend_of_each_op():
    lines = ops_lines(METSELECT_BACKEND="reference")
    table, reasons = lines[1 : 1 + len(ops.OPS)], lines[1 + len(ops.OPS) : -1]
    assert [line.split() for line in table] == [[op, "reference", "reference"] for op in ops.OPS]
    assert reasons == [
        f"not {backend} on {device}: METSELECT_BACKEND=reference"
        for device in ("cpu", "cuda")
        for backend in ("native", "triton")
    ]
    expected = ["moments", "native" if ops.NATIVE else "reference", "reference"]
    assert expected in [line.split() for line in ops_lines(METSELECT_BACKEND="auto")]
    (line,) = ops_lines(METSELECT_BACKEND="gpu")
    assert line.startswith("no op is available: ValueError: METSELECT_BACKEND is 'gpu'")


def test_runs_without_any_package(tmp_path):
    """Isolated from site-packages, as on a machine where nothing is installed."""
    command = [sys.executable, "-I", "-S", doctor.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "torch      bad" in done.stdout
    assert done.stderr == ""
