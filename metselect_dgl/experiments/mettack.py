r"""Mettack (Zügner and Günnemann, 2019): poison a graph, guided by the gradient through training.

The surrogate is the linear two-layer GCN :math:`Z = M W, M = \hat A^2 X`, trained from W = 0 by
gradient descent with momentum on the training nodes. Its updates stay in the span of the training
rows, W = M_t' B, so that the whole training needs the Gram matrix K = M M_t' alone. The attack
(Meta-Self) raises the cross entropy of the other nodes against the labels that the surrogate of the
clean graph gives them: it differentiates through all steps of the training down to every entry of
A, flips the pair with the largest gain, and repeats. No node loses its last edge, no pair is
flipped twice. The original differs: its surrogate has two weight matrices with random start values,
and it also tests that the distribution of degrees stays likely.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..atomic_file import write_atomic
from ..data import NodeDataset, load_dataset

STEPS, RATE, MOMENTUM = 100, 0.1, 0.9


class Mettack:
    """State of an attack: a dense A [N, N], of which `flip` changes one pair at a time."""

    def __init__(self, data: NodeDataset, split: int = 0) -> None:
        self.feat, self.train = data.feat, data.split(split).train
        self.target = F.one_hot(data.labels[self.train], data.n_classes).to(self.feat.dtype)
        self.clean = _dense(data.graph.edges(), self.feat)
        self.adjacency = self.clean.clone()
        nodes = torch.arange(len(self.feat))
        self.others = nodes[~torch.isin(nodes, self.train)]
        _, normal = self._normal()
        gram = self._gram(normal @ (normal @ self.feat))
        self.guess = (gram @ self._fit(gram[self.train]))[self.others].argmax(1)

    def _normal(self) -> tuple[Tensor, Tensor]:
        """Return degrees with self-loops [N] and the sparse normalised A."""
        looped = self.adjacency.clone().fill_diagonal_(1)
        degree, index = looped.sum(1), looped.nonzero().T
        values = degree[index].prod(0).rsqrt()
        return degree, torch.sparse_coo_tensor(index, values, looped.shape, check_invariants=False)

    def _gram(self, twice: Tensor) -> Tensor:
        return twice @ twice[self.train].T  # [N, T]

    def _fit(self, gram: Tensor) -> Tensor:
        """Train the surrogate on K_t [T, T] and return B [T, C], differentiably."""
        solution = speed = torch.zeros_like(self.target)
        for _ in range(STEPS):
            error = (gram @ solution).softmax(1) - self.target
            speed = MOMENTUM * speed + error / len(error)
            solution = solution - RATE * speed
        return solution

    def loss(self, gram: Tensor) -> Tensor:
        """Return the loss that the attack raises, from K [N, T]."""
        return F.cross_entropy(gram[self.others] @ self._fit(gram[self.train]), self.guess)

    def gradient(self) -> Tensor:
        """Return the derivative of the loss by both entries of each pair in A, [N, N]."""
        degree, normal = self._normal()
        once = normal @ self.feat
        twice = normal @ once
        gram = self._gram(twice).requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(gram), gram)  # [N, T]
        # dL/dM = slope M_t, plus slope' M at the rows of the training nodes; M = A (A X).
        own, mixed = twice[self.train], slope.T @ twice  # [T, F] each
        entries = slope @ (own @ once.T)
        entries.addmm_(normal @ slope, own @ self.feat.T)
        entries[self.train] += mixed @ once.T
        entries += normal.index_select(1, self.train) @ (mixed @ self.feat.T)
        entries = entries + entries.T
        index = normal._indices()
        through_degree = torch.zeros_like(degree).index_add_(
            0, index[0], entries[index[0], index[1]] * normal._values()
        )
        by_degree = -0.5 * through_degree / degree
        scale = degree.rsqrt()
        return entries.mul_(scale).mul_(scale[:, None]).add_(by_degree).add_(by_degree[:, None])

    def flip(self) -> tuple[int, int]:
        """Flip the pair that raises the loss most and return it."""
        gain = self.gradient() * (1 - 2 * self.adjacency)
        leaf = self.adjacency.sum(1) <= 1
        last = (self.adjacency > 0) & (leaf | leaf[:, None])
        gain[last | (self.adjacency != self.clean)] = -torch.inf
        gain.fill_diagonal_(-torch.inf)
        if gain.isneginf().all():
            raise ValueError("no pair is left that may be flipped; use a smaller rate")
        row, col = divmod(gain.argmax().item(), len(gain))
        self.adjacency[row, col] = self.adjacency[col, row] = 1 - self.adjacency[row, col]
        return row, col

    def edges(self) -> np.ndarray:
        """Return the present edges, each pair once [E, 2]."""
        return self.adjacency.triu().nonzero().numpy()


def _dense(ends: tuple[Tensor, Tensor], feat: Tensor) -> Tensor:
    """Return the symmetric A without loops, in the dtype of the features."""
    adjacency = feat.new_zeros(len(feat), len(feat))
    adjacency[ends] = 1
    return adjacency.maximum(adjacency.T).fill_diagonal_(0)


def poison(name: str, rates: Sequence[int], data_dir: str | None, folder: Path) -> Path:
    """Attack the graph of `mettack_NAME` and write `folder`/mettack_NAME.npz with the edges of each
    rate (per cent). Rates that the file already holds are read from it."""
    path = folder / f"mettack_{name}.npz"
    data = load_dataset(f"mettack_{name}", data_dir)
    attack = Mettack(data)
    if path.exists():
        arrays = dict(np.load(path))
    else:
        arrays = {"node_features": data.feat.numpy(), "node_labels": data.labels.numpy()}
        arrays["edges"] = attack.edges()
        for part, index in data.split(0)._asdict().items():
            arrays[f"{part}_idx"] = index.numpy()
    total, flips = len(arrays["edges"]), 0
    with tqdm(
        total=round(max(rates) / 100 * total), desc=f"poison {name}", unit="flip"
    ) as progress:
        for rate in sorted(set(rates) - {0}):
            key, new_flips = f"edges_mettack_{rate:02}", round(rate / 100 * total) - flips
            flips += new_flips
            if key in arrays:
                attack.adjacency = _dense(torch.from_numpy(arrays[key]).unbind(1), data.feat)
                progress.update(new_flips)
                continue
            for _ in range(new_flips):
                attack.flip()
                progress.update()
            arrays[key] = attack.edges()
            write_atomic(path, lambda file: np.savez_compressed(file, **arrays))
    return path
