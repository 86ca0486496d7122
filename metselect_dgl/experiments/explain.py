"""Explain the layer of one node: distances, posteriors and log-odds at every layer."""

from pathlib import Path

import torch

from ..plots import plot_explanation
from ..train import load_run
from .tables import text_table

MAX_CLASSES = 8


@torch.no_grad()
def explain(run: Path, node: int, data_dir: str | None = None) -> str:
    """Return a table of a node's distances at every layer and draw a figure beside the run."""
    config, model, data = load_run(run, data_dir)
    if not 0 <= node < len(data.labels):
        raise ValueError(f"node {node}: {data.name} has nodes 0 to {len(data.labels) - 1}")
    index = torch.tensor([node], device=data.feat.device)
    layers = model.backbone(data.graph, data.feat)
    explanation = model.head.explain(layers, index)
    if explanation is None:
        reason = f"is a run of {config.selector!r}, which measures no distances"
        raise ValueError(f"{run} {reason}; explain a run of a MetSelect selector")
    selection = model.head(layers, index=index)
    layer, predicted = selection.layer.item(), selection.logits.argmax(1).item()
    label = data.labels[node].item()
    node_type = "" if data.node_type is None else f", type {data.node_type[node].item()}"
    title = (
        f"node {node} of {data.name}{node_type}: true class {label if label >= 0 else 'unknown'}, "
        f"predicted {predicted} at layer {layer}"
    )
    figure = Path(run) / f"explain_{node}.png"
    posterior, score = explanation["posterior"].cpu().numpy(), explanation["score"].cpu().numpy()
    plot_explanation(posterior, score, title, layer, label, figure)
    return f"{title}\n\n{explanation_table(explanation, layer, label)}\n\nfigure: {figure}"


def explanation_table(explanation: dict, layer: int, label: int) -> str:
    """Return a table with one row per layer; of many classes, the nearest and the true one."""
    nearest = explanation["dist2"].amin(0).argsort()[:MAX_CLASSES].tolist()
    classes = sorted({*nearest, label} - {-1})
    header = ["squared distance (posterior %)", *(f"class {c}" for c in classes)]
    header += ["T", "log-odds", "score", "decoder"]
    rows = []
    for depth, posterior in enumerate(explanation["posterior"]):
        row = [f"{'*' if depth == layer else ' '} layer {depth}"]
        for c in classes:
            row.append(f"{explanation['dist2'][depth, c]:.3g} ({100 * posterior[c]:.0f})")
        for name in ("temperature", "log_odds", "score"):
            row.append(f"{explanation[name][depth].item():.2f}")
        rows.append([*row, explanation["decoder"][depth].item()])
    gate = "the gate's log-odds that the decoder is right"
    score = gate if explanation["gated"] else "computed by the rule"
    return f"{text_table(header, rows)}\n* the selected layer: the largest score ({score})"
