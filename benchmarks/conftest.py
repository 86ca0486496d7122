"""`pytest benchmarks`: options, the dataset, what is stamped into the JSON, and the tables."""

import os

os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL prints, and writes a file at home

import dgl
import numpy
import pytest
import scipy
import sklearn
import torch

import metselect_dgl
from metselect_dgl import ops
from metselect_dgl.data import arxiv_on_disk, load_dataset
from metselect_dgl.experiments.bench import Run, summary

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
    if config.option.threads:
        torch.set_num_threads(config.option.threads)
    if config.option.keep_memory and not ops.keep_freed_memory():
        raise pytest.UsageError("--keep-memory needs the compiled extension, and glibc")


@pytest.hookimpl(trylast=True)  # pytest sorts them by all their parameters
def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what the set does not have; back to the order in which races are listed."""
    beyond = SETS[SETS.index(config.option.set) + 1 :]
    out = [item for item in items if any(item.get_closest_marker(name) for name in beyond)]
    config.hook.pytest_deselected(items=out)
    items[:] = sorted(
        (item for item in items if item not in out),
        key=lambda item: (item.location[:2], item.callspec.indices["provider"]),
    )
    for item in items:
        item.add_marker(pytest.mark.timeout(0))  # the first of a race waits for all


@pytest.fixture(scope="session")
def dataset(pytestconfig):
    """ogbn-arxiv, its twin, or what was asked for."""
    folder = pytestconfig.option.data_dir
    real = arxiv_on_disk(folder)
    name = pytestconfig.option.dataset or ("ogbn-arxiv" if real else "arxiv-twin")
    data = load_dataset(name, folder)
    pytestconfig.stash[DATASET] = {
        "name": name,
        "real": name != "arxiv-twin",
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
    machine_info["served_by"] = {name: ops.serving(name, "cpu") for name in ops.OPS}
    machine_info["keep_memory"] = config.option.keep_memory


def pytest_benchmark_update_json(config, benchmarks, output_json) -> None:
    """The dataset, and the set; without the options that every entry repeats."""
    output_json["dataset"] = config.stash.get(DATASET, None)
    output_json["set"] = config.option.set
    for entry in output_json["benchmarks"]:
        del entry["options"]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config) -> None:
    session = config._benchmarksession
    entries = [bench.as_dict() for bench in session.benchmarks if bench]
    if entries:
        known = config.stash.get(DATASET, None)
        run = Run(entries, session.get_machine_info(), known, config.option.set)
        terminalreporter.write_line("")
        terminalreporter.write(summary(run) + "\n")
