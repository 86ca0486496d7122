"""Blocks that know the degrees of the graph they were sampled from."""

from collections.abc import Sequence

import dgl
import dgl.ops
import torch
from torch import Tensor

IN_DEGREE, OUT_DEGREE = "in_degree", "out_degree"


class DegreeSampler(dgl.dataloading.NeighborSampler):
    """DGL's neighbour sampler, whose blocks carry the degrees of their nodes in the whole graph.

    With them GCN normalises as on the whole graph, and GCN and GIN scale the sum of the sampled
    neighbours to the number of all: exact with every neighbour (fanout -1), else an estimate
    without bias. For a backbone with ``self_loop=True``, which adds the loops itself, sample from
    ``dgl.remove_self_loop(graph)``.

    Parameters
    ----------
    fanouts : in-neighbours to sample for every convolution, the first one first; -1 for all
    graph : whose degrees; a partitioned graph has them in ``ndata["in_degree"]`` and
        ``ndata["out_degree"]``

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN, MetSelect
    >>> graph, feat, labels = dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3
    >>> loader = dgl.dataloading.DataLoader(
    ...     graph, torch.arange(20), DegreeSampler([5, 5], graph), batch_size=10)
    >>> model = MetSelect(GCN(8, 16, allow_zero_in_degree=True), 3, moments="epoch")
    >>> for sources, seeds, blocks in loader:
    ...     model(blocks, feat[sources], labels[seeds]).loss.backward()
    >>> model.renew_moments()
    """

    def __init__(self, fanouts: Sequence[int], graph, **options) -> None:
        # DGL 1.1's fused sampling makes blocks of int32 graphs that crash what reads them
        whole = isinstance(graph, dgl.DGLGraph)
        fused = whole and graph.idtype == torch.int64
        super().__init__(list(fanouts), **{"fused": fused, **options})
        self.in_degree = graph.in_degrees().float() if whole else graph.ndata[IN_DEGREE]
        self.out_degree = graph.out_degrees().float() if whole else graph.ndata[OUT_DEGREE]
        self._checked = graph._graph if whole else None  # DGL replaces it when a graph is edited

    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        if isinstance(g, dgl.DGLGraph) and g._graph is not self._checked:
            self._check_degrees(g)
        sources, seeds, blocks = super().sample_blocks(g, seed_nodes, exclude_eids)
        for block in blocks:
            for data, name, degrees in (
                (block.srcdata, OUT_DEGREE, self.out_degree),
                (block.dstdata, IN_DEGREE, self.in_degree),
            ):
                nodes = data[dgl.NID]  # the degrees stay on the device of the graph
                at = nodes.to(degrees.device) if isinstance(degrees, Tensor) else nodes
                data[name] = degrees[at].to(nodes.device)
        return sources, seeds, blocks

    def _check_degrees(self, graph: dgl.DGLGraph) -> None:
        """Raise an error if the degrees are those of another graph; a copy of it will do."""
        pairs = (graph.in_degrees(), self.in_degree), (graph.out_degrees(), self.out_degree)
        if not all(torch.equal(new.float(), old.to(new.device)) for new, old in pairs):
            raise ValueError(
                "the DegreeSampler was made for another graph; make one for this graph"
            )
        self._checked = graph._graph


def sampling_graph(backbone, graph: dgl.DGLGraph) -> dgl.DGLGraph:
    """Return the graph to sample blocks from: without loops if the backbone adds its own; a
    partitioned graph is returned as it is."""
    if not backbone.self_loop or not isinstance(graph, dgl.DGLGraph):
        return graph
    return dgl.remove_self_loop(graph) if has_loops(graph) else graph


def knows_degrees(block: dgl.DGLGraph, adds_loops: bool) -> bool:
    """Return whether a `DegreeSampler` made the block; raise an error if its degrees count loops
    and the backbone adds its own."""
    if IN_DEGREE not in block.dstdata or OUT_DEGREE not in block.srcdata:
        return False
    if adds_loops and has_loops(block):
        raise ValueError(
            "the blocks have self-loops and the backbone adds its own (self_loop=True); sample "
            "from dgl.remove_self_loop(graph)"
        )
    return True


def has_loops(graph: dgl.DGLGraph) -> bool:
    """Return whether an edge of a graph or block starts and ends at the same node."""
    source, target = graph.edges()  # in a block, equal numbers are the same node
    return bool((source == target).any())


def no_in_edges() -> dgl.DGLError:
    """Return the error for a node without in-edges."""
    return dgl.DGLError(
        "there are 0-in-degree nodes, without in-edges; add self-loops (self_loop=True), "
        "or let them pass (allow_zero_in_degree=True)"
    )


def neighbour_sum(block: dgl.DGLGraph, h: Tensor) -> Tensor:
    """Return the sum of `h` over all in-neighbours, estimated from those in the block."""
    share = block.dstdata[IN_DEGREE].to(h.dtype) / block.in_degrees().clamp(min=1)
    return dgl.ops.copy_u_sum(block, h) * share.unsqueeze(1)
