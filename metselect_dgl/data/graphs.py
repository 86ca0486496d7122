"""Graphs from edge lists, and the share of edges that join nodes of one class."""

from __future__ import annotations

import dgl
import torch
from torch import Tensor


def undirected_graph(edges: Tensor, n_nodes: int) -> dgl.DGLGraph:
    """Both directions of every edge [E, 2], each once; self-loops are neither added nor dropped."""
    src, dst = edges.unbind(dim=1)
    keys = torch.cat([src * n_nodes + dst, dst * n_nodes + src]).unique()
    return dgl.graph((keys // n_nodes, keys % n_nodes), num_nodes=n_nodes)


def edge_homophily(graph: dgl.DGLGraph, labels: Tensor) -> float:
    """Share of the edges between two different labelled nodes that stay within a class."""
    src, dst = graph.edges()
    counted = (src != dst) & (labels[src] >= 0) & (labels[dst] >= 0)
    return (labels[src] == labels[dst])[counted].float().mean().item()
