"""ogbn-arxiv's folder as ogb unpacks it, with a graph of your own."""

import gzip
from pathlib import Path

import numpy as np


def write_ogb(folder: Path, edges, feat, labels, parts: dict[str, list[int]]) -> None:
    """`edges` are pairs of nodes; `parts` are the nodes of train, valid and test."""

    def csv(name: str, rows) -> None:
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (",".join(map(str, np.atleast_1d(row))) for row in rows)
        path.write_bytes(gzip.compress("\n".join(lines).encode()))

    csv("raw/edge", edges)
    csv("raw/num-node-list", [len(labels)])
    csv("raw/num-edge-list", [len(edges)])
    csv("raw/node-feat", feat)
    csv("raw/node_year", [2015] * len(labels))
    csv("raw/node-label", labels)
    for name, index in parts.items():
        csv(f"split/time/{name}", index)
    (folder / "RELEASE_v1.txt").write_text("")
