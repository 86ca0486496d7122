"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from metselect_dgl.data import NodeDataset, hop_chain, save_npz

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
def small() -> NodeDataset:
    """A hop_chain of 300 nodes; nobody changes it."""
    return hop_chain(n_nodes=300)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A data folder with tiny.npz, a hop_chain of 200 nodes and 2 splits."""
    folder = tmp_path_factory.mktemp("data")
    save_npz(hop_chain(n_nodes=200, n_splits=2), folder / "tiny.npz")
    return folder
