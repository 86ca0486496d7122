"""Start-up time: imports and the first epoch, each in a new process."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from .comparison import Comparison, Implementation

IMPORTS = {
    "torch": "import torch",
    "torch-and-dgl": "import torch, dgl",
    "metselect_dgl": "import metselect_dgl",
    "metselect_dgl.nn": "import metselect_dgl.nn",
}
FIRST = ("plain-DGL", "MetSelect")


def new_process(*arguments: str) -> str:
    """Return the output of a Python process with as many threads as this one."""
    root, command = Path(__file__).parents[1], [sys.executable, *arguments]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=os.environ | threads
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


def imports() -> dict[str, Implementation]:
    listed = {}
    for name, code in IMPORTS.items():
        against = () if name == "torch-and-dgl" else ("torch-and-dgl",)
        listed[name] = Implementation(partial(new_process, "-c", code), against)
    return listed


def first_epochs(*dataset: str) -> dict[str, Implementation]:
    def seconds(name: str) -> float:
        return float(new_process("-m", "benchmarks.first_epoch", name, *dataset))

    listed = {}
    for name in FIRST:
        against = () if name == "plain-DGL" else ("plain-DGL",)
        listed[name] = Implementation(partial(seconds, name), against, self_timed=True)
    return listed


@pytest.fixture(scope="module")
def comparison(request, pytestconfig):
    what = request.param
    if what == "import":
        return Comparison.from_request(request, "startup", {"what": what}, imports())
    data = request.getfixturevalue("dataset")
    listed = first_epochs(data.name, *filter(None, [pytestconfig.getoption("data_dir")]))
    parameters = {"what": what, "dataset": data.name}
    return Comparison.from_request(request, "startup", parameters, listed, time_share=0.3)


@pytest.mark.parametrize(
    ("comparison", "provider"),
    [
        *(("import", name) for name in IMPORTS),
        *(pytest.param("first-epoch", name, marks=pytest.mark.full) for name in FIRST),
    ],
    indirect=["comparison"],
    scope="module",
)
def test_startup(comparison, provider, benchmark):
    comparison.report(provider, benchmark)
