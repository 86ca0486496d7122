"""The Triton kernels: interpreted in a process of its own, compiled for GPUs that are not here,
and who serves when."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it has builds for Linux only")

HERE = Path(__file__).parent


def python(*command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, *command]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "files",
    [
        ["kernels"],
        ["test_class_distances.py", "test_select_layer.py", "test_selected_cross_entropy.py"],
    ],
    ids=["kernels", "ops"],
)
def test_interpreted(files):
    """The kernels' own tests, and those of the ops with the kernels on the CPU's dispatch key."""
    slow = "not invariance and not scale and not (gradcheck and all)"
    files = [str(HERE / name) for name in files]
    done = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", slow, *files),
        TRITON_INTERPRET="1",
        METSELECT_BACKEND="triton",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20


class TestAheadOfTime:
    """Machine code for GPUs that are not here."""

    @pytest.fixture(scope="class")
    def found(self):
        """Every config of every kernel for every target at one width, and for two GPUs where the
        width allows no wide reads; `make kernel-report` compiles the rest."""
        from benchmarks.kernel_report import TARGETS, jobs, rows

        return rows([*jobs([64], TARGETS), *jobs([37], ["sm_80", "sm_90"])])

    @pytest.mark.timeout(900)
    def test_nothing_spills(self, found):
        assert [row for row in found if row["stack"] or row["spills"]] == []

    def test_everything_was_compiled(self, found):
        from benchmarks.kernel_report import TARGETS

        assert {row["target"] for row in found} == set(TARGETS)
        assert len({row["kernel"] for row in found}) == 8
        assert all(row["registers"] > 0 for row in found)

    def test_one_of_everything(self):
        """Triton compiles arguments that are 1 in."""
        from benchmarks.kernel_report import calls
        from metselect_dgl.kernels import ahead

        for call in calls(8, n=1, n_layers=1, n_classes=1).values():
            assert ahead.resources(ahead.caught(call)[-1], "sm_90")["spills"] == 0

    def test_a_spill_is_seen(self):
        """A tile four times as large does not fit."""
        from benchmarks.kernel_report import calls
        from metselect_dgl.kernels import ahead
        from metselect_dgl.kernels.tiles import Config

        launch, *_ = ahead.caught(calls(64)["select_layer"])
        large = ahead.with_config(launch, Config(128, 64, 16, 4))
        assert ahead.resources(large, "sm_80")["spills"] > 0


def served(**variables: str) -> subprocess.CompletedProcess:
    code = (
        "from metselect_dgl import ops; import sys\n"
        "print(*(ops.serving(name, device) for name in ('select_layer', 'moments')"
        " for device in ('cpu', 'cuda')), 'triton' in sys.modules)"
    )
    return python("-c", code, **variables)


def test_interpreted_kernels_serve_the_cpu_on_request():
    done = served(METSELECT_BACKEND="triton", TRITON_INTERPRET="1")
    assert done.stdout.split() == ["triton", "reference", "reference", "reference", "False"]
    usual = served(METSELECT_BACKEND="auto", TRITON_INTERPRET="1").stdout.split()
    assert "triton" not in usual[::2]


def test_a_request_that_cannot_be_met_raises():
    done = served(METSELECT_BACKEND="triton")
    assert "METSELECT_BACKEND=triton, but" in done.stderr
    assert "TRITON_INTERPRET=1 runs its kernels on a CPU" in done.stderr
    hidden = "import sys; sys.modules['triton'] = None; import metselect_dgl.ops"
    done = python("-c", hidden, METSELECT_BACKEND="triton", TRITON_INTERPRET="1")
    assert "METSELECT_BACKEND=triton, but triton is not installed" in done.stderr


def test_kernels_serve_a_torch_with_cuda():
    """The build of torch here has none: it is told that it has."""
    code = (
        "import torch; torch.version.cuda = '13.0'\n"
        "from metselect_dgl import ops; import sys\n"
        "print(ops.serving('class_distances', 'cuda'), ops.serving('whitening', 'cuda'),"
        " ops.not_serving('cuda'), 'triton' in sys.modules)"
    )
    done = python("-c", code, METSELECT_BACKEND="auto")
    assert done.stdout.startswith("triton reference {'native':"), done.stderr
    assert done.stdout.endswith(" False\n"), "imported before its first use"
