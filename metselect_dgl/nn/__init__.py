"""Modules: backbones that return every layer (with DGL), and heads that select one per node."""

from importlib import import_module

from ..optional import needs_dgl
from .head import LayerHead, LayerwiseHead, Selection
from .layer_rows import LayerStack
from .losses import distance_loss, posterior_loss
from .metselect import MetSelect, MetSelectHead
from .model import LayerSelect
from .prototypes import Prototypes
from .source import BatchedSource, GraphSource, LayerSource, StoredLayers, layer_source

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "AttentionHead",
    "AttnSelect",
    "Backbone",
    "BatchedSource",
    "Convolution",
    "DegreeSampler",
    "FinalHead",
    "FinalSelect",
    "GivenHead",
    "GraphSource",
    "JKNet",
    "JKNetMetSelect",
    "JumpingHead",
    "JumpingMetSelectHead",
    "LayerHead",
    "LayerSelect",
    "LayerSource",
    "LayerStack",
    "LayerwiseHead",
    "MetSelect",
    "MetSelectHead",
    "NDLSelect",
    "Prototypes",
    "Selection",
    "StoredLayers",
    "distance_loss",
    "layer_source",
    "posterior_loss",
    "sampling_graph",
]

# Names whose files import DGL; they are imported on first use.
_WITH_DGL = {
    "GAT": "conv.gat",
    "GCN": "conv.gcn",
    "GIN": "conv.gin",
    "AttentionHead": "baselines",
    "AttnSelect": "baselines",
    "Backbone": "backbone",
    "Convolution": "conv.base",
    "DegreeSampler": "sampler",
    "FinalHead": "baselines",
    "FinalSelect": "baselines",
    "GivenHead": "ndls",
    "JKNet": "baselines",
    "JKNetMetSelect": "baselines",
    "JumpingHead": "baselines",
    "JumpingMetSelectHead": "baselines",
    "NDLSelect": "ndls",
    "sampling_graph": "sampler",
}


def __getattr__(name: str):
    """Import a name that needs DGL on first use."""
    if name not in _WITH_DGL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_dgl(f"{__name__}.{name}"):
        return getattr(import_module(f".{_WITH_DGL[name]}", __name__), name)
