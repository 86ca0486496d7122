"""Figures of a run: accuracy and F1, every fixed layer, the oracle and how much of it is chance."""

import torch
from torch import Tensor

from ..data import NodeDataset
from ..nn import LayerSelect, Selection

SHUFFLES = 20


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of equal entries; NaN of none."""
    return (predicted == labels).double().mean().item()


def scores(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, and macro and weighted F1 over the classes that occur, as scikit-learn
    counts them."""
    classes = torch.unique(torch.cat([predicted, labels]))
    answered, true = predicted == classes[:, None], labels == classes[:, None]  # [C, n]
    both = (answered & true).sum(1).double()
    f1 = 2 * both / (answered.sum(1) + true.sum(1))
    weight = true.sum(1).double() / max(len(labels), 1)
    return {
        "accuracy": accuracy(predicted, labels),
        "macro_f1": f1.mean().item(),
        "weighted_f1": (f1 * weight).sum().item(),
    }


@torch.no_grad()
def layer_report(
    model: LayerSelect, selection: Selection, data: NodeDataset, index: Tensor, layers: list[Tensor]
) -> dict:
    """Return what selecting per node is worth on the nodes `index`, with the rows `layers`.

    `fixed`: accuracy of each layer's decoder for all nodes. `oracle`: a node counts if any layer
    is right. `lucky_oracle`: the same when all but the best layer answer for another node, the
    part of the oracle that is chance. `realised`: the share of the way from the best fixed layer
    to the oracle that the selection goes. `layer_share`: how many nodes choose each layer, and
    the same for each hidden type of node where the dataset has them.
    """
    n_layers = model.head.n_choices
    report = {"layer_share": _shares(selection.layer[index], n_layers)}
    if data.node_type is not None:
        report["layer_share_by_type"] = []
        for kind in range(data.node_type.max() + 1):
            nodes = index[data.node_type[index] == kind]
            report["layer_share_by_type"].append(_shares(selection.layer[nodes], n_layers))
    logits = model.head.layer_logits(layers)
    if logits is None:
        return report
    labels = data.labels[index]
    answers = logits.argmax(-1)  # [L, n]
    right = answers == labels
    fixed = right.double().mean(1).tolist()
    best = fixed.index(max(fixed))
    oracle = right.any(0).double().mean().item()
    gained = accuracy(selection.logits[index].argmax(1), labels) - fixed[best]
    gap = oracle - fixed[best]
    return report | {
        "fixed": fixed,
        "oracle": oracle,
        "lucky_oracle": _lucky_oracle(answers, labels, best),
        "realised": gained / gap if gap > 0 else None,
    }


def _shares(layer: Tensor, n_layers: int) -> list[float]:
    count = torch.bincount(layer, minlength=n_layers).double()
    return (count / max(len(layer), 1)).tolist()


def _lucky_oracle(answers: Tensor, labels: Tensor, best: int) -> float:
    generator = torch.Generator().manual_seed(0)
    hits = []
    for _ in range(SHUFFLES):
        right = answers[best] == labels
        for depth, answer in enumerate(answers):
            order = torch.randperm(len(labels), generator=generator).to(labels.device)
            right = right if depth == best else right | (answer[order] == labels)
        hits.append(right.double().mean())
    return torch.stack(hits).mean().item()
