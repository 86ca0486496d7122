"""Graphs from edge lists, and edge homophily."""

import dgl
import torch
from torch import Tensor


def undirected_graph(edges: Tensor, n_nodes: int) -> dgl.DGLGraph:
    """Return a graph with both directions of every edge [E, 2], each once; self-loops stay."""
    src, dst = edges.unbind(dim=1)
    keys = torch.cat([src * n_nodes + dst, dst * n_nodes + src]).unique()
    return dgl.graph((keys // n_nodes, keys % n_nodes), num_nodes=n_nodes)


def edge_homophily(graph: dgl.DGLGraph, labels: Tensor) -> float:
    """Return the share of edges within a class, among edges of two different labelled nodes."""
    src, dst = graph.edges()
    counted = (src != dst) & (labels[src] >= 0) & (labels[dst] >= 0)
    return (labels[src] == labels[dst])[counted].float().mean().item()
