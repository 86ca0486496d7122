"""What a new process costs: imports, and its first epoch, each in processes of its own."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from .race import Contestant, Race

IMPORTS = {
    "torch": "import torch",
    "torch-and-dgl": "import torch, dgl",
    "metselect_dgl": "import metselect_dgl",
    "metselect_dgl.nn": "import metselect_dgl.nn",
}
FIRST = ("plain-DGL", "MetSelect")


def new_process(*arguments: str) -> str:
    """What it prints, with as many threads as there are here."""
    root, command = Path(__file__).parents[1], [sys.executable, *arguments]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=os.environ | threads
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


def imports() -> dict[str, Contestant]:
    others = {name: () if name == "torch-and-dgl" else ("torch-and-dgl",) for name in IMPORTS}
    return {
        name: Contestant(partial(new_process, "-c", code), others[name])
        for name, code in IMPORTS.items()
    }


def first_epochs(*where: str) -> dict[str, Contestant]:
    def seconds(name: str) -> float:
        return float(new_process("-m", "benchmarks.first_epoch", name, *where))

    others = {"plain-DGL": (), "MetSelect": ("plain-DGL",)}
    return {
        name: Contestant(partial(seconds, name), others[name], own_clock=True) for name in FIRST
    }


@pytest.fixture(scope="module")
def race(request, pytestconfig):
    what = request.param
    if what == "import":
        return Race.of(request, "startup", {"what": what}, imports())
    data = request.getfixturevalue("dataset")
    listed = first_epochs(data.name, *filter(None, [pytestconfig.getoption("data_dir")]))
    return Race.of(request, "startup", {"what": what, "dataset": data.name}, listed, share=0.3)


@pytest.mark.parametrize(
    ("race", "provider"),
    [
        *(("import", name) for name in IMPORTS),
        *(pytest.param("first-epoch", name, marks=pytest.mark.full) for name in FIRST),
    ],
    indirect=["race"],
    scope="module",
)
def test_startup(race, provider, benchmark):
    race.report(provider, benchmark)
