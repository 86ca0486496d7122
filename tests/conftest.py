"""Fixtures that several test files share."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The tensors of the tests are small: threads would mostly wait for each other, and where cores
# are shared, for seconds. New processes read the variable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples at every run: a red test is the change's, not the draw's.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def data_dir() -> Path:
    """The folder of public .npz datasets, which are not part of the repository."""
    folder = os.environ.get("METSELECT_DATA")
    if not folder:
        pytest.skip("METSELECT_DATA is not set; it names the folder of public .npz datasets")
    return Path(folder)


@pytest.fixture(scope="session")
def small():
    """A hop_chain of 300 nodes; nobody changes it."""
    from metselect_dgl.data import hop_chain  # needs DGL, which not every test does

    return hop_chain(n_nodes=300)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A data folder with tiny.npz, a hop_chain of 200 nodes and 2 splits."""
    from metselect_dgl.data import hop_chain, save_npz

    folder = tmp_path_factory.mktemp("data")
    save_npz(hop_chain(n_nodes=200, n_splits=2), folder / "tiny.npz")
    return folder


HERE = Path(__file__).parent
OPS = ["class_distances", "select_layer", "selected_cross_entropy"]
MORE = "moments whitening attention_sum graph_ops fused ops metselect backbones alternatives"
# Files that need no DGL: those that are quick enough to run twice, and the others.
WITHOUT_DGL = "calibration class_distances graph_ops moments pyg select_layer"
WITHOUT_DGL += " selected_cross_entropy whitening"
SLOW_WITHOUT_DGL = "compile cuda_moments doctor int32 layering native ops triton without_dgl"
INTERPRETED = {"TRITON_INTERPRET": "1", "METSELECT_BACKEND": "triton"}
# Tests that need a process of their own: what to run, and the environment.
ELSEWHERE = {
    "kernels": (["kernels"], INTERPRETED),
    # many examples of what the kernels' own tests cover would take minutes
    "ops": ([*OPS, "-k", "not invariance and not scale and not (gradcheck and all)"], INTERPRETED),
    "reference": (
        [*OPS, *MORE.split(), "calibration", "bad_input"],
        {"METSELECT_BACKEND": "reference"},
    ),
    "without_dgl": (["-p", "tests.hidden_dgl", *WITHOUT_DGL.split()], {}),
}
collect_ignore = []
if find_spec("dgl") is None:
    collected = {f"test_{name}.py" for name in f"{WITHOUT_DGL} {SLOW_WITHOUT_DGL}".split()}
    collect_ignore += [file.name for file in HERE.glob("test_*.py") if file.name not in collected]


def pytest_report_header():
    if collect_ignore:
        return f"left out, since DGL is not installed: {' '.join(sorted(collect_ignore))}"


class Elsewhere:
    """Runs of pytest in other processes, one after the other, while the tests here go on: these
    keep one core busy, and they another."""

    def __init__(self) -> None:
        self.pool, self.runs, self.process = ThreadPoolExecutor(1), {}, None

    def start(self, name: str) -> Future:
        if name not in self.runs:
            self.runs[name] = self.pool.submit(self._run, *ELSEWHERE[name])
        return self.runs[name]

    def _run(self, what: list[str], environment: dict[str, str]) -> tuple[int, str]:
        files = [
            f"test_{each}.py" if (HERE / f"test_{each}.py").exists() else each for each in what
        ]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent)} | environment
        self.process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True
        )
        output, _ = self.process.communicate()
        return self.process.returncode, output

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.process is not None:
            self.process.kill()


_elsewhere = Elsewhere()


@pytest.fixture
def elsewhere():
    """(exit status, output) of a run of pytest by its name in ELSEWHERE."""
    return lambda name: _elsewhere.start(name).result()


def pytest_collection_finish(session):
    if not session.config.option.collectonly:
        for item in session.items:
            skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
            if "elsewhere" in getattr(item, "fixturenames", ()) and not skipped:
                _elsewhere.start(item.callspec.params["run"])


def pytest_sessionfinish(session):
    _elsewhere.stop()
