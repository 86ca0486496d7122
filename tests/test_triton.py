"""The Triton kernels: interpreted in a new process, compiled for GPUs that are not present, and
when they are used."""

import os
import re
import subprocess
import sys

import pytest

from metselect_dgl.backends import triton_version

pytest.importorskip("triton", reason="triton is not installed; it has builds for Linux only")
VERSION = tuple(map(int, triton_version().split(".")[:2]))
if VERSION < (3, 0):
    pytest.skip("the kernels need Triton 3.0", allow_module_level=True)


def python(*command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, *command]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", ["kernels", "ops"])
def test_interpreted(elsewhere, run):
    """The kernels' own tests, and those of the ops with the kernels on the CPU's dispatch key."""
    status, output = elsewhere(run)
    assert status == 0, output[-3000:]
    assert int(re.search(r"(\d+) passed", output)[1]) > 20


@pytest.mark.skipif(
    VERSION < (3, 4),
    reason="the machine code is read with Triton 3.4 or later; see tests/triton_versions.py",
)
class TestAheadOfTime:
    """Machine code for GPUs that are not here."""

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls):
        """Every config of every kernel for every target; for one, also where the width allows no
        wide reads, and in other precisions and dtypes. `make kernel-report` compiles the rest."""
        from benchmarks.kernel_report import TARGETS, jobs, rows

        others = jobs([64], ["sm_80"], ["bfloat16", "float64"])
        precise = jobs([64], ["sm_80"], precisions=["tf32", "tf32x3"])
        return rows([*jobs([64], TARGETS), *jobs([37], ["sm_80"]), *others, *precise])

    @pytest.mark.timeout(900)
    def test_nothing_spills(self, found):
        assert [row for row in found if row["stack"] or row["spills"]] == []

    def test_everything_was_compiled(self, found):
        from benchmarks.kernel_report import TARGETS

        assert {row["target"] for row in found} == set(TARGETS)
        assert len({row["kernel"] for row in found}) == 12
        assert all(row["registers"] > 0 for row in found)

    @pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
    def test_precision_reaches_the_products(self, monkeypatch, precision):
        from benchmarks import compile_ahead
        from benchmarks.kernel_report import calls

        monkeypatch.setenv("METSELECT_PRECISION", precision)
        for dtype, expected in (("float32", precision), ("float64", "ieee")):
            for call in calls(16, dtype).values():
                for launch in compile_ahead.recorded_launches(call):
                    assert launch.constants["PRECISION"] == expected

    def test_slots_are_behind_a_barrier(self):
        """The interpreter has one thread, so it cannot detect a missing barrier."""
        from benchmarks import compile_ahead
        from benchmarks.kernel_report import calls

        launch, *_ = compile_ahead.recorded_launches(calls(16)["selected_cross_entropy"])
        assert "barrier" in compile_ahead.compiled(launch, "sm_90").asm["ttir"]

    def test_one_of_everything(self):
        """Triton specialises kernels for arguments equal to 1."""
        from benchmarks import compile_ahead
        from benchmarks.kernel_report import calls

        for call in calls(8, n=1, n_layers=1, n_classes=1).values():
            *_, launch = compile_ahead.recorded_launches(call)
            assert compile_ahead.resources(launch, "sm_90")["spills"] == 0

    def test_a_spill_is_reported(self):
        """A tile four times as large does not fit."""
        from benchmarks import compile_ahead
        from benchmarks.kernel_report import calls
        from metselect_dgl.kernels.tiles import Config

        launch, *_ = compile_ahead.recorded_launches(calls(64)["select_layer"])
        large = compile_ahead.with_config(launch, Config(128, 64, 16, 4))
        assert compile_ahead.resources(large, "sm_80")["spills"] > 0


def backends_of_two_ops(**variables: str) -> subprocess.CompletedProcess:
    """Print the backends of select_layer and moments on cpu and cuda, and if triton is imported."""
    code = (
        "from metselect_dgl import ops; import sys\n"
        "print(*(ops.backend_of(name, device) for name in ('select_layer', 'moments')"
        " for device in ('cpu', 'cuda')), 'triton' in sys.modules)"
    )
    return python("-c", code, **variables)


def test_interpreted_kernels_are_used_on_the_cpu_on_request():
    done = backends_of_two_ops(METSELECT_BACKEND="triton", TRITON_INTERPRET="1")
    assert done.stdout.split() == ["triton", "reference", "reference", "reference", "False"]
    default = backends_of_two_ops(METSELECT_BACKEND="auto", TRITON_INTERPRET="1")
    assert "triton" not in default.stdout.split()[::2]


def test_a_request_that_cannot_be_met_raises():
    done = backends_of_two_ops(METSELECT_BACKEND="triton")
    assert "METSELECT_BACKEND=triton, but" in done.stderr
    assert "TRITON_INTERPRET=1 runs its kernels on a CPU" in done.stderr
    hidden = "import sys; sys.modules['triton'] = None; import metselect_dgl.ops"
    done = python("-c", hidden, METSELECT_BACKEND="triton", TRITON_INTERPRET="1")
    assert "METSELECT_BACKEND=triton, but triton is not installed" in done.stderr


def test_kernels_are_used_with_a_cuda_build_of_torch():
    """The build of torch here has no CUDA; its version is set as if it had."""
    code = (
        "import torch; torch.version.cuda = '13.0'\n"
        "from metselect_dgl import ops; import sys\n"
        "print(ops.backend_of('class_distances', 'cuda'), ops.backend_of('whitening', 'cuda'),"
        " ops.unavailable('cuda'), 'triton' in sys.modules)"
    )
    done = python("-c", code, METSELECT_BACKEND="auto")
    assert done.stdout.startswith("triton reference {'native':"), done.stderr
    assert done.stdout.endswith(" False\n"), "imported before its first use"


def test_the_fastest_config_is_taken_and_remembered(monkeypatch):
    """Measuring and the device are made up."""
    import torch

    from metselect_dgl.kernels import tiles

    slow, fast = tiles.Config(32, 16, 16, 8), tiles.Config(64, 16, 16, 8)
    given = {"n": 5, "n_classes": 3, "ACC": tiles.tl.float32}
    ran, measured = [], []

    def do_bench(run, **_):
        run()
        measured.append(ran[-1])
        return 2.0 if ran[-1] == slow else 1.0

    monkeypatch.setattr(tiles, "_fastest", {})
    monkeypatch.setattr(tiles.triton.testing, "do_bench", do_bench)
    layers = [torch.zeros(5, 4)]

    def run(config):
        ran.append(config)
        return config

    assert tiles.tuned("op", given, layers, (slow, fast), run) == slow, "nothing to measure with"
    monkeypatch.setattr(tiles, "_can_measure", lambda device: True)
    monkeypatch.setenv("METSELECT_TUNE", "0")
    assert tiles.tuned("op", given, layers, (slow, fast), run) == slow
    monkeypatch.delenv("METSELECT_TUNE")
    assert tiles.tuned("op", given | {"n": 0}, layers, (slow, fast), run) == slow
    assert measured == []
    for _ in range(2):
        assert tiles.tuned("op", given, layers, (slow, fast), run) == fast
    assert measured == [slow, fast]
    monkeypatch.setattr(tiles, "_can_measure", lambda device: False)  # as in a graph's capture
    assert tiles.tuned("op", given, layers, (slow, fast), run) == fast
