"""`pytest benchmarks`: options, the dataset, metadata in the JSON, and the printed tables."""

import os
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")  # without it DGL writes a file to the home folder

import dgl
import numpy
import pytest
import scipy
import sklearn
import torch
from pytest_benchmark.utils import get_commit_info

import metselect_dgl
from metselect_dgl import ops
from metselect_dgl.data import SYNTHETIC, arxiv_on_disk, load_dataset

from .runs import Run, summary

HERE = Path(__file__).parent
DATASET = pytest.StashKey[dict]()
SETS = ("quick", "full", "all")


def pytest_addoption(parser) -> None:
    group = parser.getgroup("metselect")
    group.addoption(
        "--set", choices=SETS, default="quick", help="quick: minutes; full: an hour; all: hours"
    )
    group.addoption("--data-dir", help="folder that holds ogbn_arxiv (default: $METSELECT_DATA)")
    group.addoption("--dataset", help="default: ogbn-arxiv if it is on disk, else its twin")
    group.addoption("--rounds", type=int, help="rounds of every comparison (default: by the set)")
    group.addoption("--threads", type=int, help="threads of torch (default: torch's own)")
    group.addoption(
        "--keep-memory",
        action="store_true",
        help="reuse freed memory instead of returning it, in all implementations, as the CLI does",
    )


def pytest_configure(config) -> None:
    for name in SETS[1:]:
        config.addinivalue_line("markers", f"{name}: only with --set {name}")
    if config.getoption("threads", None):
        torch.set_num_threads(config.option.threads)
    if config.getoption("keep_memory", False) and not ops.keep_freed_memory():
        raise pytest.UsageError("--keep-memory needs the compiled extension, and glibc")
    if config.getoption("data_dir", None):  # new processes run in the repository
        config.option.data_dir = str(Path(config.option.data_dir).absolute())


@pytest.hookimpl(trylast=True)  # after pytest sorted by parameters
def pytest_collection_modifyitems(config, items) -> None:
    """Deselect the tests outside of the set, and restore the order of the source."""
    larger_sets = SETS[SETS.index(config.getoption("set", "quick")) + 1 :]
    left_out = ()
    if config.getoption("keep_memory", False):  # which does not reach new processes
        left_out = ("test_memory", "test_startup")
    others, selected, deselected = [], [], []
    for item in items:
        in_larger_set = any(item.get_closest_marker(name) for name in larger_sets)
        if HERE not in item.path.parents:
            others.append(item)
        elif in_larger_set or item.path.stem in left_out:
            deselected.append(item)
        else:
            item.add_marker(pytest.mark.timeout(0))  # the first test of a comparison times all
            selected.append(item)
    config.hook.pytest_deselected(items=deselected)
    selected.sort(key=lambda item: (item.location[:2], item.callspec.indices["provider"]))
    items[:] = others + selected


@pytest.fixture(scope="session")
def dataset(pytestconfig):
    """Load the dataset of --dataset, by default ogbn-arxiv or, if it is not on disk, its twin."""
    folder = pytestconfig.getoption("data_dir", None)
    default = "ogbn-arxiv" if arxiv_on_disk(folder) else "arxiv-twin"
    name = pytestconfig.getoption("dataset", None) or default
    data = load_dataset(name, folder)
    pytestconfig.stash[DATASET] = {
        "name": name,
        "real": name not in SYNTHETIC,
        "nodes": data.graph.num_nodes(),
        "edges": data.graph.num_edges(),
    }
    return data


def pytest_benchmark_update_machine_info(config, machine_info) -> None:
    """Add versions, threads and backends; remove the name of the computer."""
    machine_info.pop("node", None)
    cpu = machine_info["cpu"]
    machine_info["cpu"] = {key: cpu[key] for key in ("brand_raw", "arch", "count") if key in cpu}
    machine_info["threads"] = torch.get_num_threads()
    modules = (torch, dgl, numpy, scipy, sklearn, metselect_dgl)
    machine_info["versions"] = {module.__name__: module.__version__ for module in modules}
    machine_info["served_by"] = {name: ops.backend_of(name, "cpu") for name in ops.OPS}
    machine_info["keep_memory"] = config.getoption("keep_memory", False)


def pytest_benchmark_update_commit_info(config, commit_info) -> None:
    """Use the commit of this repository, wherever pytest was started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        commit_info |= get_commit_info()


def pytest_benchmark_update_json(config, benchmarks, output_json) -> None:
    """Add the dataset and the set; remove the options, which every entry repeats."""
    output_json["dataset"] = config.stash.get(DATASET, None)
    output_json["set"] = config.getoption("set", "quick")
    for entry in output_json["benchmarks"]:
        del entry["options"]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config) -> None:
    session = config._benchmarksession
    entries = [bench.as_dict() for bench in session.benchmarks if bench]
    if entries and "provider" in entries[0]["extra_info"]:
        data = config.stash.get(DATASET, None)
        run = Run(entries, session.get_machine_info(), data, config.getoption("set", "quick"))
        terminalreporter.write_line("")
        terminalreporter.write(summary(run) + "\n")
