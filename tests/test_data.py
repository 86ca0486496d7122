"""Datasets: files and their errors, the laws of the generators, public loaders on small copies."""

from __future__ import annotations

import doctest
import io
import os
import pickle
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import dgl
import dgl.function as fn
import numpy as np
import pytest
import scipy.sparse
import torch
from ogb_files import write_ogb

import metselect_dgl.data as data
from metselect_dgl.data import (
    DATASETS,
    NodeDataset,
    arxiv_twin,
    contextual_sbm,
    edge_homophily,
    hop_chain,
    load_dataset,
    load_npz,
    npz,
    public,
    random_draws,
    save_npz,
    synthetic,
    undirected_graph,
)

SMALL_TWIN = 0.02
TEN_SPLITS = ("chameleon", "squirrel", "actor", "cornell", "texas", "wisconsin")


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Every test has an empty home; only file:// can be fetched."""
    real = urllib.request.urlopen

    def urlopen(url, **options):
        if not url.startswith("file://"):
            raise urllib.error.URLError("no network")
        return real(url, **options)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path / "dgl"))


@pytest.fixture
def no_data_dir(monkeypatch):
    monkeypatch.delenv("METSELECT_DATA", raising=False)


@pytest.fixture
def real_data():
    folder = os.environ.get("METSELECT_DATA")
    if not folder:
        pytest.skip("METSELECT_DATA does not name a folder of datasets")

    def load(name: str) -> NodeDataset:
        if not Path(folder, f"{name}.npz").exists():
            pytest.skip(f"METSELECT_DATA has no {name}.npz")
        return load_dataset(name)

    return load


def edge_set(graph: dgl.DGLGraph) -> set[tuple[int, int]]:
    return set(zip(*(end.tolist() for end in graph.edges()), strict=True))


def toy(**changes) -> NodeDataset:
    """Four nodes on a path, two classes, two splits."""
    masks = torch.eye(4, dtype=torch.bool)
    fields = {
        "name": "toy",
        "graph": undirected_graph(torch.tensor([[0, 1], [1, 2], [2, 3]]), 4),
        "feat": torch.arange(12.0).reshape(4, 3),
        "labels": torch.tensor([0, 1, -1, 0]),
        "n_classes": 3,
        "train_masks": masks[[0, 1]],
        "val_masks": masks[[1, 2]],
        "test_masks": masks[[2, 3]],
    }
    return NodeDataset(**fields | changes)


def arrays(**changes) -> dict[str, np.ndarray]:
    """The contents of a valid file; a change to None leaves the array out."""
    masks = np.eye(4, dtype=bool)
    contents = {
        "node_features": np.arange(12, dtype=np.float32).reshape(4, 3),
        "node_labels": np.array([0, 1, -1, 1]),
        "edges": np.array([[0, 1], [2, 1], [2, 3]]),
        "train_masks": masks[:2],
        "val_masks": masks[1:3],
        "test_masks": masks[2:],
    } | changes
    return {key: value for key, value in contents.items() if value is not None}


def ridge_accuracy(feat, labels, train, test) -> float:
    """Test accuracy of a linear least-squares classifier."""
    x = torch.cat([feat, torch.ones(len(feat), 1)], dim=1).double()
    target = torch.nn.functional.one_hot(labels).double()
    gram = x[train].T @ x[train] + torch.eye(x.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, x[train].T @ target[train])
    return ((x[test] @ weight).argmax(1) == labels[test]).double().mean().item()


def hop_means(graph: dgl.DGLGraph, feat: torch.Tensor, hops: int) -> list[torch.Tensor]:
    layers = [feat]
    with graph.local_scope():
        for _ in range(hops):
            graph.ndata["h"] = layers[-1]
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
            layers.append(graph.ndata["h"])
    return layers


# NodeDataset


def test_split_gives_the_indices_of_its_masks():
    train, val, test = toy().split(1)
    assert (train.tolist(), val.tolist(), test.tolist()) == ([1], [2], [3])
    assert train.dtype == torch.int64


@pytest.mark.parametrize("i", [2, -1])
def test_split_out_of_range(i):
    with pytest.raises(ValueError, match=rf"split {i} of toy: it has splits 0 to 1"):
        toy().split(i)


def test_row_normalized_keeps_zero_rows_and_the_original():
    feat = torch.tensor([[1.0, -3.0], [0.0, 0.0], [2.0, 2.0], [0.0, 5.0]])
    dataset = toy(feat=feat)
    expected = torch.tensor([[0.25, -0.75], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    assert torch.equal(dataset.row_normalized().feat, expected)
    assert torch.equal(dataset.feat, feat)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"feat": torch.zeros(4, 3, dtype=torch.int64)}, TypeError, "feat is torch.int64"),
        ({"feat": torch.zeros(5, 3)}, ValueError, r"\(5, 3\), expected \(4, n_feats\)"),
        ({"feat": torch.zeros(4)}, ValueError, r"\(4,\), expected \(4, n_feats\)"),
        ({"labels": torch.zeros(4)}, TypeError, "labels is torch.float32"),
        ({"labels": torch.zeros(4, 1).long()}, ValueError, r"\(4, 1\), expected \(4,\)"),
        ({"labels": torch.tensor([0, 3, 0, 0])}, ValueError, "label 3 of node 1 is outside 0 to 2"),
        ({"labels": torch.tensor([0, 0, 0, -2])}, ValueError, "label -2 of node 3"),
        ({"val_masks": torch.zeros(4, 2).bool()}, ValueError, r"\(4, 2\), expected \(S, 4\)"),
        ({"val_masks": torch.zeros(1, 4).bool()}, ValueError, "2 train, 1 val and 2 test"),
        ({"val_masks": torch.zeros(2, 4)}, TypeError, "val_masks is torch.float32"),
        ({"test_masks": torch.ones(2, 4).bool()}, ValueError, "split 0 has node 0 in two of"),
        ({"node_type": torch.zeros(3).long()}, ValueError, r"node_type has shape \(3,\)"),
        ({"node_type": torch.full((4,), 10**9)}, ValueError, "node_type has values outside 0 to 3"),
        ({"n_classes": 3_000_001}, ValueError, "3000001 classes for 4 nodes"),
    ],
)
def test_bad_fields_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        toy(**changes)


def test_dataset_is_frozen_and_its_repr_is_one_line():
    dataset = toy()
    with pytest.raises(FrozenInstanceError):
        dataset.name = "other"
    assert repr(dataset) == "NodeDataset(toy: 4 nodes, 6 edges, 3 features, 3 classes, 2 splits)"


@pytest.mark.parametrize("module", [data.dataset, synthetic])
def test_examples_run(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


# .npz files


def test_load_makes_edges_undirected_once_and_adds_no_loops(tmp_path):
    edges = np.array([[0, 1], [1, 0], [2, 1], [2, 1], [3, 3]])
    np.savez(tmp_path / "mine.npz", **arrays(edges=edges))
    dataset = load_npz(tmp_path / "mine.npz")
    assert edge_set(dataset.graph) == {(0, 1), (1, 0), (2, 1), (1, 2), (3, 3)}
    assert dataset.graph.num_edges() == 5
    assert (dataset.name, dataset.n_classes, dataset.n_splits) == ("mine", 2, 2)
    assert dataset.feat.dtype == torch.float32


def test_load_chooses_the_edge_array_and_reads_indices_as_one_split(tmp_path):
    index = {
        "train_masks": None,
        "val_masks": None,
        "test_masks": None,
        "train_idx": np.array([3, 0]),
        "val_idx": np.array([1]),
        "test_idx": np.array([2]),
    }
    path = tmp_path / "mettack_toy.npz"
    np.savez(path, **arrays(edges_mettack_20=np.array([[0, 3]]), **index))
    attacked = load_npz(path, edges="edges_mettack_20")
    assert edge_set(attacked.graph) == {(0, 3), (3, 0)}
    assert load_npz(path).graph.num_edges() == 6
    assert [part.tolist() for part in attacked.split(0)] == [[0, 3], [1], [2]]


@pytest.mark.parametrize(
    "dataset",
    [
        toy(note="by hand"),
        hop_chain(200, seed=3, n_splits=2),
        toy(graph=dgl.add_self_loop(toy().graph), labels=torch.tensor([0, 0, 0, -1])),
    ],
    ids=["undirected", "directed", "loops"],
)
def test_round_trip(tmp_path, dataset):
    path = tmp_path / f"{dataset.name}.npz"
    save_npz(dataset, path)
    again = load_npz(path)
    for field in ("feat", "labels", "train_masks", "val_masks", "test_masks"):
        assert torch.equal(getattr(again, field), getattr(dataset, field)), field
    assert (again.name, again.n_classes, again.note) == (
        dataset.name,
        dataset.n_classes,
        dataset.note,
    )
    assert edge_set(again.graph) == edge_set(dataset.graph)
    assert again.graph.num_edges() == dataset.graph.num_edges()
    if dataset.node_type is None:
        assert again.node_type is None
    else:
        assert torch.equal(again.node_type, dataset.node_type)


def test_interrupted_save_keeps_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "toy.npz"
    save_npz(toy(), path)
    before = path.read_bytes()

    def die(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", die)
    with pytest.raises(KeyboardInterrupt):
        save_npz(toy(note="new"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*toy*")) == [path] and not list(tmp_path.glob(".*toy*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_labels": None}, "'node_labels' is missing; the file has edges, node_features"),
        ({"val_masks": None}, "'val_masks' is missing"),
        ({"edges": np.array([[0, 1], [2, 4]])}, "row 1 of edges joins nodes 2 and 4.* 0 to 3"),
        ({"edges": np.array([[-1, 1]])}, "joins nodes -1 and 1"),
        ({"edges": np.array([[0, 1, 2]])}, r"edges has shape \(1, 3\), expected \(E, 2\)"),
        ({"edges": np.array([[0.0, 1.0]])}, "edges is float64, expected integers"),
        ({"node_labels": np.eye(4)}, "node_labels is float64"),
        ({"node_labels": np.eye(4, dtype=int)}, r"labels has shape \(4, 4\), expected \(4,\)"),
        ({"node_labels": np.zeros(3, dtype=int)}, r"labels has shape \(3,\), expected \(4,\)"),
        ({"train_idx": np.array([7])}, "train_idx has 7, but the nodes are 0 to 3"),
        ({"train_idx": np.array([2, -1])}, "train_idx has -1"),
        ({"node_labels": np.array([0, 1, 0, 3_000_000])}, "3000001 classes for 4 nodes"),
        ({"n_classes": np.array(1)}, "label 1 of node 1 is outside 0 to 0"),
        ({"note": np.array([{}], dtype=object)}, "allow_pickle=False"),
        ({"directed": np.array("False")}, "directed is False, expected True or False"),
        ({"node_features": np.ones((4, 3), dtype=complex)}, "expected real numbers"),
        ({"node_features": np.ones((4, 3, 1))}, r"of shape \(4, 3, 1\), expected"),
        ({"node_features": np.full((4, 3), 1e300)}, "1e.300, which float32 cannot hold"),
        ({"n_classes": np.array(3.7)}, "n_classes is 3.7, expected an integer"),
        ({"node_labels": np.full(4, -1)}, "n_classes is 0, expected an integer of at least 1"),
        ({"train_masks": np.full((2, 4), 0.5)}, "train_masks has other values than"),
        ({"train_masks": np.full((2, 4), 2)}, "train_masks has other values than"),
    ],
)
def test_wrong_file_is_named_with_what_is_wrong(tmp_path, changes, message):
    path = tmp_path / "wrong.npz"
    np.savez(path, **arrays(**changes))
    with pytest.raises(ValueError, match=rf"wrong\.npz.*{message}"):
        load_npz(path)


def test_arrays_that_are_not_used_are_not_read(tmp_path, monkeypatch):
    np.savez(tmp_path / "toy.npz", **arrays(), huge=np.zeros(10), edges_other=np.zeros(10))
    read, original = [], np.lib.npyio.NpzFile.__getitem__

    def record(archive, key):
        read.append(key)
        return original(archive, key)

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", record)
    load_npz(tmp_path / "toy.npz")
    assert "edges" in read and not {"huge", "edges_other"} & set(read)
    with pytest.raises(ValueError, match="'edges_b' is missing; the file has edges, edges_other"):
        load_npz(tmp_path / "toy.npz", edges="edges_b")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.95], ids=str)
def test_truncated_file(tmp_path, keep):
    path = tmp_path / "cut.npz"
    save_npz(toy(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(ValueError, match=r"cut\.npz is broken or no \.npz file"):
        load_npz(path)


def test_absent_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz"):
        load_npz(tmp_path / "nowhere.npz")


# hop_chain


@pytest.fixture(scope="module")
def chain() -> NodeDataset:
    return hop_chain()


def test_hop_chain_figures(chain):
    assert repr(chain) == (
        "NodeDataset(hop_chain: 3000 nodes, 18000 edges, 32 features, 5 classes, 10 splits)"
    )
    assert (chain.graph.in_degrees() == 6).all()
    assert [len(part) for part in chain.split(9)] == [1200, 600, 1200]
    assert len({tuple(mask.tolist()) for mask in chain.train_masks}) == 10


def test_hop_chain_neighbours_are_one_type_upstream_and_mostly_of_the_class(chain):
    src, dst = chain.graph.edges()
    t = chain.node_type
    deep = t[dst] > 0
    assert torch.equal(t[src][deep], t[dst][deep] - 1)
    same = (chain.labels[src] == chain.labels[dst]).float()
    assert same[deep].mean().item() == pytest.approx(0.8 + 0.2 / 5, abs=0.015)  # 4 sigma
    assert same[~deep].mean().item() == pytest.approx(1 / 5, abs=0.025)
    assert (t[src][~deep].bincount() / (~deep).sum()).tolist() == pytest.approx(
        [1 / 3] * 3, abs=0.05
    )


def test_hop_chain_class_is_at_the_own_hop_only(chain):
    train, _, test = chain.split(0)
    layers = hop_means(chain.graph, chain.feat, hops=2)
    for t in range(3):
        nodes = [index[chain.node_type[index] == t] for index in (train, test)]
        right = [ridge_accuracy(feat, chain.labels, *nodes) for feat in layers]
        assert right[t] > 0.9
        assert max(right[:t] + right[t + 1 :]) < 0.5


def test_hop_chain_types_above_zero_are_pure_noise(chain):
    noise = chain.node_type > 0
    labels = chain.labels[noise]
    means = torch.stack([chain.feat[noise][labels == c].mean(0) for c in range(5)])
    # 5 x 32 means of n unit normals: sum n mean^2 is chi-square with 160 degrees of freedom.
    chi2 = (labels.bincount()[:, None] * means**2).sum().item()
    assert 160 - 4 * 320**0.5 < chi2 < 160 + 4 * 320**0.5


def test_hop_chain_seed_decides_everything():
    one, same, other = hop_chain(300, seed=1), hop_chain(300, seed=1), hop_chain(300, seed=2)
    assert torch.equal(one.feat, same.feat) and torch.equal(one.train_masks, same.train_masks)
    assert edge_set(one.graph) == edge_set(same.graph) != edge_set(other.graph)


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"n_nodes": 12}, "has no node: take more nodes or fewer classes"),
        ({"n_feats": 4}, "4 features cannot keep 5 class means orthogonal"),
        ({"homophily": 1.5}, "homophily is 1.5"),
        ({"depth": 0}, "depth is 0, expected at least 1"),
        ({"n_splits": 0}, "n_splits is 0"),
    ],
)
def test_hop_chain_refuses(dials, message):
    with pytest.raises(ValueError, match=message):
        hop_chain(**dials)


# contextual_sbm


@pytest.mark.parametrize("homophily", [0.0, 0.3, 0.9, 1.0])
def test_csbm_homophily_is_what_was_asked(homophily):
    dataset = contextual_sbm(600, degree=8, homophily=homophily, seed=4)
    edges = edge_set(dataset.graph)
    assert edge_homophily(dataset.graph, dataset.labels) == pytest.approx(homophily, abs=1e-3)
    assert len(edges) == dataset.graph.num_edges() == 600 * 8
    assert all((v, u) in edges and u != v for u, v in edges)


def test_csbm_signal_is_in_the_features():
    def accuracy(signal: float) -> float:
        dataset = contextual_sbm(1000, signal=signal, seed=1)
        train, _, test = dataset.split(0)
        return ridge_accuracy(dataset.feat, dataset.labels, train, test)

    assert accuracy(0.0) < 0.3 and accuracy(4.0) > 0.9


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"n_nodes": 50, "degree": 20, "homophily": 0.9}, "450 edges within classes are too many"),
        ({"n_classes": 1, "homophily": 0.5}, "2500 edges between classes are too many for 0 pairs"),
    ],
)
def test_csbm_too_dense(dials, message):
    with pytest.raises(ValueError, match=message):
        contextual_sbm(**dials)


def test_edge_homophily_ignores_loops_and_unlabelled_nodes():
    graph = dgl.graph(([0, 0, 1, 2, 3], [1, 2, 1, 3, 0]))
    assert edge_homophily(graph, torch.tensor([0, 0, 1, -1])) == 0.5


def test_apportion_sums_and_rounds_to_the_largest_remainders():
    assert random_draws.apportion(np.array([1, 1, 2]), 7).tolist() == [2, 2, 3]
    assert random_draws.apportion(np.array([5, 3, 2]), 10).tolist() == [5, 3, 2]


def test_draw_members_follows_the_weights_within_the_group():
    group = np.array([1, 0, 1, 1, 0])
    weight = np.array([1.0, 5.0, 0.0, 3.0, 5.0])
    drawn = random_draws.draw_members(np.random.default_rng(0), group, np.ones(8000, int), weight)
    shares = np.bincount(drawn, minlength=5) / 8000
    assert shares.tolist() == pytest.approx([0.25, 0, 0, 0.75, 0], abs=0.02)


def test_draw_members_stays_in_the_group_when_the_draw_rounds_up():
    class Highest:
        def random(self, size: int) -> np.ndarray:
            return np.full(size, np.nextafter(1, 0))

    group, weight = np.array([0, 1, 2]), np.array([2.0**53, 2.0, 2.0])
    assert random_draws.draw_members(Highest(), group, np.array([1, 2]), weight).tolist() == [1, 2]


# arxiv_twin


def test_full_twin_has_the_figures_of_arxiv(tmp_path):
    start = time.perf_counter()
    twin = arxiv_twin(cache_dir=tmp_path)
    assert time.perf_counter() - start < 20
    with np.load(next(tmp_path.glob("*.npz"))) as file:
        edges = file["edges"]
    assert edges.shape == (1_166_243, 2) and len(np.unique(edges @ [169_343, 1])) == 1_166_243
    assert (edges[:, 0] != edges[:, 1]).all()
    assert twin.feat.shape == (169_343, 128) and twin.n_classes == 40
    parts = twin.split(0)
    assert [len(part) for part in parts] == [90_941, 29_799, 48_603]
    train, val, test = (twin.labels[part].bincount(minlength=40) for part in parts)
    assert train.tolist() == synthetic.ARXIV_TRAIN_PER_CLASS.tolist()
    for counts in (val, test):
        assert (counts - train * (counts.sum() / train.sum())).abs().max() <= 1
    assert edge_homophily(twin.graph, twin.labels) == pytest.approx(0.65, abs=0.005)
    degrees = np.sort(np.bincount(edges[:, 1], minlength=169_343))[::-1]
    assert degrees[:1693].sum() > 0.15 * len(edges)  # one node in a hundred; 0.02 if Poisson
    assert degrees[0] > 1000


def test_small_twin_is_bidirected_with_one_loop_a_node(tmp_path):
    twin = arxiv_twin(cache_dir=tmp_path, scale=SMALL_TWIN)
    edges = edge_set(twin.graph)
    assert len(edges) == twin.graph.num_edges()
    assert all((v, u) in edges for u, v in edges)
    assert sum(u == v for u, v in edges) == twin.graph.num_nodes() == len(twin.labels)


def test_twin_is_easier_with_its_neighbours(tmp_path):
    twin = arxiv_twin(cache_dir=tmp_path, scale=0.05)
    train, _, test = twin.split(0)
    layers = hop_means(twin.graph, twin.feat, hops=2)
    alone, _, two_hops = (ridge_accuracy(feat, twin.labels, train, test) for feat in layers)
    assert two_hops > alone + 0.2


def test_twin_is_read_from_its_cache_and_a_broken_cache_is_made_again(tmp_path, monkeypatch):
    made = []
    generate = synthetic._twin_arrays
    monkeypatch.setattr(synthetic, "_twin_arrays", lambda *a: made.append(a) or generate(*a))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (arxiv_twin(seed=1, scale=SMALL_TWIN) for _ in range(2))
    assert len(made) == 1
    (path,) = (tmp_path / "metselect_dgl").glob("*.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    third = arxiv_twin(seed=1, scale=SMALL_TWIN)
    assert len(made) == 2 and path.read_bytes()[:1000] == whole[:1000]
    for twin in (second, third):
        assert torch.equal(twin.feat, first.feat)
        assert torch.equal(torch.stack(twin.graph.edges()), torch.stack(first.graph.edges()))
    arxiv_twin(seed=2, scale=SMALL_TWIN)
    assert len(made) == 3


def test_twin_without_a_writable_cache_warns_and_goes_on(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="not cached"):
        twin = arxiv_twin(cache_dir=blocked, scale=SMALL_TWIN)
    assert twin.n_classes == 40


@pytest.mark.parametrize("scale", [0, -1, 0.0005])
def test_twin_refuses_scales_without_room(tmp_path, scale):
    with pytest.raises(ValueError, match=r"scale is|edges within classes are too many"):
        arxiv_twin(cache_dir=tmp_path, scale=scale)


# dgl.data


def fake_dgl_class(masks: torch.Tensor) -> type:
    """A dgl.data class on four nodes: one edge twice, one both ways, one loop."""

    class FakeDataset:
        num_classes = 3

        def __init__(self, raw_dir: str, verbose: bool = True):
            assert not verbose

        def __getitem__(self, i: int) -> dgl.DGLGraph:
            graph = dgl.graph(([0, 0, 1, 1, 3, 2], [1, 1, 2, 3, 1, 2]), num_nodes=4)
            graph.ndata["feat"] = torch.eye(4)
            graph.ndata["label"] = torch.tensor([0, 1, 1, 0])
            for key, shift in (("train_mask", 0), ("val_mask", 1), ("test_mask", 2)):
                graph.ndata[key] = masks.roll(shift, dims=0)
            return graph

    return FakeDataset


@pytest.mark.parametrize("name", [*TEN_SPLITS, "cora", "citeseer", "pubmed"])
def test_dgl_graphs_become_undirected_and_simple_with_their_splits(name, monkeypatch, no_data_dir):
    n_splits = 10 if name in TEN_SPLITS else 1
    one = torch.tensor([True, False, False, False])
    masks = one[:, None].repeat(1, 10) if n_splits == 10 else one
    monkeypatch.setattr(dgl.data, public.DGL_CLASSES[name], fake_dgl_class(masks))
    dataset = load_dataset(name)
    assert edge_set(dataset.graph) == {(0, 1), (1, 0), (1, 2), (2, 1), (1, 3), (3, 1)}
    assert dataset.graph.num_edges() == 6
    assert dataset.train_masks.shape == (n_splits, 4)
    assert [part.tolist() for part in dataset.split(n_splits - 1)] == [[0], [1], [2]]
    assert (dataset.name, dataset.n_classes) == (name, 3)


def planetoid_zip(path: Path) -> None:
    """pubmed.zip as the server has it: a ring of 507 nodes, 500 of them to validate."""
    one_hot = np.eye(3, dtype=np.int32)[np.arange(503) % 3]
    rows = scipy.sparse.csr_matrix(np.ones((503, 5), dtype=np.float32))
    contents = {
        "x": rows[:3],
        "y": one_hot[:3],
        "allx": rows,
        "ally": one_hot,
        "tx": scipy.sparse.csr_matrix(np.eye(4, 5, dtype=np.float32)),
        "ty": np.eye(3, dtype=np.int32)[[0, 1, 1, 2]],
        "graph": {i: [(i - 1) % 507, (i + 1) % 507] for i in range(507)},
    }
    with zipfile.ZipFile(path, "w") as archive:
        for key, value in contents.items():
            archive.writestr(f"ind.pubmed.{key}", pickle.dumps(value))
        archive.writestr("ind.pubmed.test.index", "506\n503\n504\n505\n")


def geom_gcn_zip(path: Path) -> None:
    """texas.zip as the server has it: 3 nodes, a loop, ten splits that turn."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "out1_node_feature_label.txt", "node\tfeat\tlabel\n0\t1,0\t0\n1\t0,1\t1\n2\t1,1\t0\n"
        )
        archive.writestr("out1_graph_edges.txt", "a\tb\n0\t1\n1\t0\n1\t2\n2\t2\n")
        for i in range(10):
            masks = {f"{p}_mask": np.eye(3)[(i + k) % 3] for k, p in enumerate(npz.PARTS)}
            file = io.BytesIO()
            np.savez(file, **masks)
            archive.writestr(f"texas_split_0.6_0.2_{i}.npz", file.getvalue())


@pytest.fixture
def dgl_server(tmp_path, monkeypatch, no_data_dir) -> Path:
    """A folder in the place of DGL's server."""
    folder = tmp_path / "server" / "dataset"
    folder.mkdir(parents=True)
    monkeypatch.setenv("DGL_REPO", folder.parent.as_uri())
    return folder


def test_pubmed_from_a_zip_in_its_format(dgl_server, capfd):
    planetoid_zip(dgl_server / "pubmed.zip")
    dataset = load_dataset("pubmed")
    assert repr(dataset) == (
        "NodeDataset(pubmed: 507 nodes, 1014 edges, 5 features, 3 classes, 1 splits)"
    )
    train, val, test = dataset.split(0)
    assert (train.tolist(), len(val), test.tolist()) == ([0, 1, 2], 500, [503, 504, 505, 506])
    assert dataset.labels[[506, 503]].tolist() == [0, 1]
    printed = capfd.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1


def test_texas_from_a_zip_in_its_format_is_fetched_once(dgl_server):
    geom_gcn_zip(dgl_server / "texas.zip")
    first = load_dataset("texas")
    (dgl_server / "texas.zip").unlink()
    again = load_dataset("texas")
    for dataset in (first, again):
        assert edge_set(dataset.graph) == {(0, 1), (1, 0), (1, 2), (2, 1)}
        assert [part.tolist() for part in dataset.split(1)] == [[1], [2], [0]]
        assert dataset.n_splits == 10 and dataset.labels.tolist() == [0, 1, 0]


def test_only_what_was_downloaded_is_unpickled(dgl_server, tmp_path):
    """Neither a changed file nor a folder of other origin reaches dgl.data's pickle.load."""

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    planetoid_zip(dgl_server / "pubmed.zip")
    load_dataset("pubmed")
    (file,) = (tmp_path / "cache").rglob("ind.pubmed.graph")
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RuntimeError, match="was changed after it was downloaded"):
        load_dataset("pubmed")
    (file.parent / public.MANIFEST).unlink()
    with pytest.raises(RuntimeError, match="delete the folder to download it again"):
        load_dataset("pubmed")
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(file.parent)
    assert load_dataset("pubmed").graph.num_nodes() == 507


def test_broken_download_is_reported_and_tried_afresh(dgl_server):
    (dgl_server / "texas.zip").write_bytes(b"<html>sign in to this network</html>")
    with pytest.raises(RuntimeError, match=r"texas cannot be loaded.*not a zip file"):
        load_dataset("texas")
    geom_gcn_zip(dgl_server / "texas.zip")
    assert load_dataset("texas").n_splits == 10


# ogb


def write_five(folder: Path) -> None:
    """ogbn-arxiv's folder on five nodes: an edge both ways, a loop, a node without edges."""
    write_ogb(
        folder,
        edges=[[0, 1], [1, 0], [2, 1], [3, 3]],
        feat=np.arange(10).reshape(5, 2) / 4,
        labels=[0, 39, 7, 0, 3],
        parts={"train": [4, 0], "valid": [1], "test": [2, 3]},
    )


def check_ogb(dataset: NodeDataset) -> None:
    loops = {(i, i) for i in range(5)}
    assert edge_set(dataset.graph) == {(0, 1), (1, 0), (1, 2), (2, 1)} | loops
    assert dataset.graph.num_edges() == 9
    assert dataset.labels.tolist() == [0, 39, 7, 0, 3] and dataset.n_classes == 40
    assert dataset.feat[3].tolist() == [1.5, 1.75] and dataset.feat.dtype == torch.float32
    assert [part.tolist() for part in dataset.split(0)] == [[0, 4], [1], [2, 3]]


@pytest.mark.parametrize("folder", ["ogbn_arxiv", "ogbn_arxiv_dgl"])
def test_arxiv_from_ogbs_folder_without_network(tmp_path, folder, capfd):
    write_five(tmp_path / folder)
    check_ogb(load_dataset("ogbn-arxiv", tmp_path))  # raw csv
    check_ogb(load_dataset("ogbn-arxiv", tmp_path))  # what ogb kept of it
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(torch.__version__ < "2.6", reason="refused before torch 2.6")
@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arxiv_with_a_pickled_split(tmp_path, convert):
    write_five(tmp_path / "ogbn_arxiv")
    split = {"train": convert([0, 4]), "valid": convert([1]), "test": convert([2, 3])}
    torch.save(split, tmp_path / "ogbn_arxiv/split/time/split_dict.pt")
    for part in ("train", "valid", "test"):
        (tmp_path / f"ogbn_arxiv/split/time/{part}.csv.gz").unlink()
    check_ogb(load_dataset("ogbn-arxiv", tmp_path))


def test_arxiv_split_file_runs_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    write_five(tmp_path / "ogbn_arxiv")
    torch.save({"train": Bomb()}, tmp_path / "ogbn_arxiv/split/time/split_dict.pt")
    with pytest.raises((pickle.UnpicklingError, ValueError), match=r"Weights only|would run code"):
        load_dataset("ogbn-arxiv", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_arxiv_asks_no_question_of_an_unversioned_folder(tmp_path, monkeypatch):
    write_five(tmp_path / "ogbn_arxiv")
    (tmp_path / "ogbn_arxiv/RELEASE_v1.txt").unlink()
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    check_ogb(load_dataset("ogbn-arxiv", tmp_path))


def test_arxiv_is_fetched_into_the_cache(tmp_path, monkeypatch, no_data_dir):
    write_five(tmp_path / "server/arxiv")
    with zipfile.ZipFile(tmp_path / "arxiv.zip", "w") as archive:
        for path in (tmp_path / "server").rglob("*.*"):
            archive.write(path, path.relative_to(tmp_path / "server"))
    monkeypatch.setattr(public, "ARXIV_URL", (tmp_path / "arxiv.zip").as_uri())
    check_ogb(load_dataset("ogbn-arxiv"))
    assert [path.name for path in (tmp_path / "cache/metselect_dgl").iterdir()] == ["ogbn_arxiv"]


def test_ogb_missing_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred.dataset_dgl", None)
    with pytest.raises(ImportError, match=r"pip install ogb==1\.3\.6"):
        load_dataset("ogbn-arxiv", tmp_path)


@pytest.mark.skipif(dgl.__version__ >= "2", reason="DGL 2 imports ogb itself")
def test_importing_the_package_does_not_import_ogb_and_ogb_starts_no_check():
    code = (
        "import sys, threading, metselect_dgl.data as data\n"
        "assert 'ogb' not in sys.modules\n"
        "data.public._import_ogb()\n"
        "assert sys.modules['ogb.version'].check_outdated is None\n"
        "assert 'outdated' not in sys.modules and threading.active_count() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"DGLBACKEND": "pytorch"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# load_dataset


@pytest.mark.parametrize("name", ["hop_chain", "csbm"])
def test_synthetic_names_take_the_seed(name):
    one, same, other = (load_dataset(name, seed=seed) for seed in (1, 1, 2))
    assert one.name == name
    assert torch.equal(one.feat, same.feat) and not torch.equal(one.feat, other.feat)


def test_own_file_is_found_in_the_folder_or_the_environment(tmp_path, monkeypatch):
    np.savez(tmp_path / "mine.npz", **arrays())
    np.savez(tmp_path / "cora.npz", **arrays())
    assert load_dataset("mine", tmp_path).graph.num_nodes() == 4
    monkeypatch.setenv("METSELECT_DATA", str(tmp_path))
    assert load_dataset("cora").graph.num_nodes() == 4


def test_attacked_names_choose_their_edges(tmp_path):
    np.savez(tmp_path / "mettack_cora.npz", **arrays(edges_mettack_20=np.array([[0, 3]])))
    clean, attacked = (load_dataset(n, tmp_path) for n in ("mettack_cora", "mettack_cora_20"))
    assert clean.graph.num_edges() == 6 and edge_set(attacked.graph) == {(0, 3), (3, 0)}
    assert attacked.name == "mettack_cora_20"
    with pytest.raises(
        ValueError, match="'edges_mettack_25' is missing; the file has edges, edges_"
    ):
        load_dataset("mettack_cora_25", tmp_path)


@pytest.mark.parametrize("name", ["cora", "texas", "pubmed", "ogbn-arxiv"])
def test_offline_says_what_was_tried_and_what_to_do_at_once(name, no_data_dir, capfd):
    start = time.perf_counter()
    with pytest.raises(RuntimeError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert message.startswith(f"{name} cannot be loaded: no data folder is set, and ")
    assert "no network" in message and f"put {name}.npz" in message
    assert message.endswith(
        "into --data-dir or METSELECT_DATA, or use hop_chain, which needs no download"
    )
    assert "\n" not in message
    assert time.perf_counter() - start < 10
    assert capfd.readouterr() == ("", "")


def test_offline_names_the_folder_it_searched(tmp_path):
    with pytest.raises(RuntimeError, match=rf"{tmp_path} has no cora.npz, and dgl.data could not"):
        load_dataset("cora", tmp_path)
    with pytest.raises(RuntimeError, match=r"no download; put mettack_cora\.npz into"):
        load_dataset("mettack_cora_20", tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("CORA", "did you mean cora"), ("hopchain", "did you mean hop_chain"), ("qqq", "actor, ")],
)
def test_unknown_name(name, hint, no_data_dir):
    with pytest.raises(ValueError, match=f"dataset '{name}' is unknown.*{hint}"):
        load_dataset(name)


def test_data_folder_must_exist(tmp_path):
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        load_dataset("cora", tmp_path / "nowhere")


def test_names_are_sorted():
    assert list(data.__all__) == sorted(data.__all__)
    assert list(DATASETS) == sorted(DATASETS)
    assert {"hop_chain", "csbm", "arxiv-twin", "ogbn-arxiv", "cora", "mettack_cora_20"} <= set(
        DATASETS
    )


# The real files


def test_real_cora(real_data):
    cora = real_data("cora")
    assert (cora.graph.num_nodes(), cora.graph.num_edges()) == (2708, 2 * 5278)
    assert (cora.feat.shape[1], cora.n_classes, cora.n_splits) == (1433, 7, 10)
    assert edge_homophily(cora.graph, cora.labels) == pytest.approx(0.81, abs=0.005)


def test_real_texas_has_classes_without_training_node(real_data):
    texas = real_data("texas")
    missing = [
        len(texas.labels[texas.split(i).train].unique()) < texas.n_classes for i in range(10)
    ]
    assert sum(missing) == 4


def test_real_mettack_adds_edges(real_data):
    clean = real_data("mettack_cora")
    attacked = load_dataset("mettack_cora_20")
    assert clean.graph.num_edges() == 2 * 5069 and attacked.graph.num_edges() == 2 * 6040
    assert torch.equal(clean.feat, attacked.feat) and clean.n_splits == 1
