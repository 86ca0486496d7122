"""Mettack: its gradient against autograd through everything, and what a flip may do."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from metselect_dgl.data import (
    NodeDataset,
    contextual_sbm,
    load_dataset,
    save_npz,
    undirected_graph,
)
from metselect_dgl.experiments import mettack
from metselect_dgl.experiments.mettack import Mettack, poison


@pytest.fixture(scope="module")
def data():
    """Five classes, 60 nodes, in double precision."""
    drawn = contextual_sbm(n_nodes=60, degree=4, seed=0)
    return replace(drawn, feat=drawn.feat.double())


def loss_of(attack: Mettack, adjacency: torch.Tensor) -> torch.Tensor:
    """The same from the definition: every product dense."""
    looped = adjacency + torch.eye(len(adjacency), dtype=adjacency.dtype)
    degree = looped.sum(1)
    normal = looped / (degree[:, None] * degree).sqrt()
    twice = normal @ normal @ attack.feat
    weight = torch.zeros(twice.shape[1], attack.target.shape[1], dtype=twice.dtype)
    speed = torch.zeros_like(weight)
    rows = twice[attack.train]
    for _ in range(mettack.STEPS):
        error = (rows @ weight).softmax(1) - attack.target
        speed = mettack.MOMENTUM * speed + rows.T @ error / len(rows)
        weight = weight - mettack.RATE * speed
    logits = twice[attack.others] @ weight
    return torch.nn.functional.cross_entropy(logits, attack.guess)


def test_gradient_is_that_of_the_whole_training(data):
    attack = Mettack(data)
    adjacency = attack.adjacency.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(attack, adjacency), adjacency)
    expected = (slope + slope.T).fill_diagonal_(0)
    torch.testing.assert_close(attack.gradient().fill_diagonal_(0), expected, rtol=1e-9, atol=1e-12)


def test_flips_raise_the_loss(data):
    attack = Mettack(data)
    losses = [loss_of(attack, attack.adjacency).item()]
    for _ in range(10):
        attack.flip()
        losses.append(loss_of(attack, attack.adjacency).item())
    assert losses == sorted(losses)
    assert losses[-1] > 1.2 * losses[0]


@pytest.fixture
def path_of_four(monkeypatch):
    """0 - 1 - 2 - 3, and a gradient that says how much every pair is wanted to change."""
    pairs = torch.tensor([[0, 1], [1, 2], [2, 3]])
    masks = [torch.tensor([row]).bool() for row in ([1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])]
    graph, labels = undirected_graph(pairs, 4), torch.tensor([0, 1, 0, 1])
    data = NodeDataset("path", graph, torch.eye(4), labels, 2, *masks)
    attack, wanted = Mettack(data), torch.zeros(4, 4)
    monkeypatch.setattr(attack, "gradient", lambda: wanted * (1 - 2 * attack.adjacency))

    def want(**pairs: float) -> Mettack:
        wanted.zero_()
        for name, value in pairs.items():
            i, j = int(name[1]), int(name[2])
            wanted[i, j] = wanted[j, i] = value
        return attack

    return want


def test_no_node_loses_its_last_edge(path_of_four):
    """To cut off the leaf 0 is wanted most; 1 - 2 is the edge that may go."""
    assert sorted(path_of_four(p01=9, p12=5, p03=3).flip()) == [1, 2]
    assert sorted(path_of_four(p01=9, p23=8, p03=3).flip()) == [0, 3]  # now all are leaves


def test_no_pair_is_flipped_twice(path_of_four):
    assert sorted(path_of_four(p03=9, p02=5).flip()) == [0, 3]
    assert sorted(path_of_four(p03=9, p02=5).flip()) == [0, 2]


def test_no_loops_and_symmetric(path_of_four):
    attack = path_of_four(p00=9, p03=1)
    assert sorted(attack.flip()) == [0, 3]
    assert torch.equal(attack.adjacency, attack.adjacency.T)
    assert attack.edges().tolist() == [[0, 1], [0, 3], [1, 2], [2, 3]]


def test_nothing_left_to_flip(path_of_four):
    attack = path_of_four()
    with pytest.raises(ValueError, match="no pair is left"):
        for _ in range(7):
            attack.flip()


def test_poisoned_file_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Rate by rate, each from the one before; a file that has them is left alone."""
    save_npz(contextual_sbm(n_nodes=60, degree=4, seed=1), tmp_path / "mettack_small.npz")
    path = poison("small", (0, 5, 10), tmp_path, tmp_path / "new")
    whole = dict(np.load(path))
    flips = {
        rate: len(_pairs(whole[f"edges_mettack_{rate:02}"]) ^ _pairs(whole["edges"]))
        for rate in (5, 10)
    }
    assert flips == {rate: round(rate / 100 * len(whole["edges"])) for rate in (5, 10)}

    first = poison("small", (0, 5), tmp_path, tmp_path / "stopped")
    assert "edges_mettack_10" not in np.load(first).files
    poison("small", (0, 5, 10), tmp_path, tmp_path / "stopped")
    assert _pairs(np.load(first)["edges_mettack_10"]) == _pairs(whole["edges_mettack_10"])

    monkeypatch.setattr(Mettack, "flip", None)  # it would fail
    poison("small", (0, 5, 10), tmp_path, tmp_path / "new")
    attacked = load_dataset("mettack_small_10", tmp_path / "new")
    assert attacked.graph.num_edges() == 2 * len(whole["edges_mettack_10"])


def _pairs(edges: np.ndarray) -> set:
    return {tuple(sorted(pair)) for pair in edges.tolist()}
