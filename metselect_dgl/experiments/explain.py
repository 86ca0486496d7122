"""Why one node was given its layer: distances, posteriors and log-odds of every layer."""

from pathlib import Path

import torch

from ..plots import plot_explanation
from ..train import load_run
from .tables import text_table

MOST_CLASSES = 8


@torch.no_grad()
def explain(run: Path, node: int, data_dir: str | None = None) -> str:
    """A table and a picture (beside the run) of what every layer thinks of `node`."""
    config, model, data = load_run(run, data_dir)
    if not 0 <= node < len(data.labels):
        raise ValueError(f"node {node}: {data.name} has nodes 0 to {len(data.labels) - 1}")
    if not hasattr(model.head, "explain"):
        raise ValueError(
            f"{run} is a run of {config.selector!r}; only MetSelect measures distances"
        )
    index = torch.tensor([node], device=data.feat.device)
    layers = model.backbone(data.graph, data.feat)
    what = model.head.explain(layers, index)
    said = model.head(layers, index=index)
    chosen, predicted = said.layer.item(), said.logits.argmax(1).item()
    true = data.labels[node].item()
    kind = "" if data.node_type is None else f", type {data.node_type[node].item()}"
    title = (
        f"node {node} of {data.name}{kind}: true class {true if true >= 0 else 'unknown'}, "
        f"predicted {predicted} at layer {chosen}"
    )
    picture = Path(run) / f"explain_{node}.png"
    plot_explanation(
        what["posterior"].cpu().numpy(), what["score"].cpu().numpy(), title, chosen, true, picture
    )
    return f"{title}\n\n{_table(what, chosen, true)}\n\npicture: {picture}"


def _table(what: dict, chosen: int, true: int) -> str:
    """A row a layer; of many classes only the nearest and the true one."""
    nearest = what["dist2"].amin(0).argsort()[:MOST_CLASSES].tolist()
    classes = sorted({*nearest, *([true] if true >= 0 else [])})
    header = ["squared distance (posterior %)", *(f"class {c}" for c in classes)]
    header += ["T", "log-odds", "score", "decoder"]
    rows = []
    for depth, posterior in enumerate(what["posterior"]):
        cells = [f"{what['dist2'][depth, c]:.3g} ({100 * posterior[c]:.0f})" for c in classes]
        figures = [what[name][depth].item() for name in ("temperature", "log_odds", "score")]
        mark = "* " if depth == chosen else "  "
        decoder = what["decoder"][depth].item()
        rows.append([f"{mark}layer {depth}", *cells, *(f"{f:.2f}" for f in figures), decoder])
    score = "the gate's log-odds that the decoder is right" if what["gated"] else "the rule's"
    return f"{text_table(header, rows)}\n* the chosen layer: the largest score ({score})"
