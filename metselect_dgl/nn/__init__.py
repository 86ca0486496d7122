"""DGL modules: backbones that return every layer, and heads that select one per node."""

from .backbone import Backbone
from .baselines import (
    AttentionHead,
    AttnSelect,
    FinalHead,
    FinalSelect,
    JKNet,
    JKNetMetSelect,
    JumpingHead,
    JumpingMetSelectHead,
)
from .conv.base import Convolution
from .conv.gat import GAT
from .conv.gcn import GCN
from .conv.gin import GIN
from .head import LayerHead, LayerwiseHead, Selection
from .layer_rows import LayerStack
from .losses import distance_loss, posterior_loss
from .metselect import MetSelect, MetSelectHead
from .model import LayerSelect
from .ndls import GivenHead, NDLSelect
from .prototypes import Prototypes
from .sampler import DegreeSampler, sampling_graph
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
