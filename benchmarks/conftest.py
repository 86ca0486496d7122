"""`pytest benchmarks`: options, the dataset, what is stamped into the JSON, and the tables."""

import os
from contextlib import chdir
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL prints, and writes a file at home

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
from metselect_dgl.experiments.bench import Run, summary

HERE = Path(__file__).parent
DATASET = pytest.StashKey[dict]()
SETS = ("quick", "full", "all")


def pytest_addoption(parser) -> None:
    group = parser.getgroup("metselect")
    group.addoption(
        "--set", choices=SETS, default="quick", help="quick: minutes; full: an hour; all: hours"
    )
    group.addoption("--data-dir", help="with ogb's folder ogbn_arxiv (default: $METSELECT_DATA)")
    group.addoption("--dataset", help="default: ogbn-arxiv where it is on disk, else its twin")
    group.addoption("--rounds", type=int, help="turns of every contestant (default: by the set)")
    group.addoption("--threads", type=int, help="of torch (default: torch's own)")
    group.addoption(
        "--keep-memory", action="store_true", help="all contestants keep freed memory, as the CLI"
    )


def pytest_configure(config) -> None:
    for name in SETS[1:]:
        config.addinivalue_line("markers", f"{name}: only with --set {name}")
    if config.getoption("threads", None):
        torch.set_num_threads(config.option.threads)
    if config.getoption("keep_memory", False) and not ops.keep_freed_memory():
        raise pytest.UsageError("--keep-memory needs the compiled extension, and glibc")
    if config.getoption("data_dir", None):  # processes of their own run in the repository
        config.option.data_dir = str(Path(config.option.data_dir).absolute())


@pytest.hookimpl(trylast=True)  # pytest sorts them by all their parameters
def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what the set does not have; back to the order in which races are listed."""
    beyond = SETS[SETS.index(config.getoption("set", "quick")) + 1 :]
    ours = [item for item in items if HERE in item.path.parents]
    out = [item for item in ours if any(item.get_closest_marker(name) for name in beyond)]
    if config.getoption("keep_memory", False):  # which is not for processes of their own
        out += [item for item in ours if item.path.stem in ("test_memory", "test_startup")]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in ours] + sorted(
        (item for item in ours if item not in out),
        key=lambda item: (item.location[:2], item.callspec.indices["provider"]),
    )
    for item in ours:
        item.add_marker(pytest.mark.timeout(0))  # the first of a race waits for all


@pytest.fixture(scope="session")
def dataset(pytestconfig):
    """ogbn-arxiv, its twin, or what was asked for."""
    folder, asked = (pytestconfig.getoption(name, None) for name in ("data_dir", "dataset"))
    name = asked or ("ogbn-arxiv" if arxiv_on_disk(folder) else "arxiv-twin")
    data = load_dataset(name, folder)
    pytestconfig.stash[DATASET] = {
        "name": name,
        "real": name not in SYNTHETIC,
        "nodes": data.graph.num_nodes(),
        "edges": data.graph.num_edges(),
    }
    return data


def pytest_benchmark_update_machine_info(config, machine_info) -> None:
    """What a ratio depends on; not the name of the computer."""
    machine_info.pop("node", None)
    cpu = machine_info["cpu"]
    machine_info["cpu"] = {key: cpu[key] for key in ("brand_raw", "arch", "count") if key in cpu}
    machine_info["threads"] = torch.get_num_threads()
    modules = (torch, dgl, numpy, scipy, sklearn, metselect_dgl)
    machine_info["versions"] = {module.__name__: module.__version__ for module in modules}
    machine_info["served_by"] = {name: ops.backend_of(name, "cpu") for name in ops.OPS}
    machine_info["keep_memory"] = config.getoption("keep_memory", False)


def pytest_benchmark_update_commit_info(config, commit_info) -> None:
    """That of this repository, wherever pytest was started."""
    with chdir(HERE):
        commit_info |= get_commit_info()


def pytest_benchmark_update_json(config, benchmarks, output_json) -> None:
    """The dataset, and the set; without the options that every entry repeats."""
    output_json["dataset"] = config.stash.get(DATASET, None)
    output_json["set"] = config.getoption("set", "quick")
    for entry in output_json["benchmarks"]:
        del entry["options"]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config) -> None:
    session = config._benchmarksession
    entries = [bench.as_dict() for bench in session.benchmarks if bench]
    if entries and "provider" in entries[0]["extra_info"]:
        known = config.stash.get(DATASET, None)
        run = Run(entries, session.get_machine_info(), known, config.getoption("set", "quick"))
        terminalreporter.write_line("")
        terminalreporter.write(summary(run) + "\n")
