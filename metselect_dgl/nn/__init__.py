"""DGL modules: backbones that emit their layers, and heads that choose one for every node."""

from .alternatives import (
    AttentionHead,
    AttnSelect,
    FinalHead,
    FinalSelect,
    JKNet,
    JKNetMetSelect,
    JumpingHead,
    JumpingMetSelectHead,
    MetSelectMax,
)
from .backbone import Backbone
from .backbones import GAT, GCN, GIN
from .heads import LayerHead, Selection, without_logits
from .inference import calibrate_in_batches, infer, rows_of_layers
from .losses import distance_loss, posterior_loss
from .model import LayerSelect, MetSelect
from .ndls import GivenHead, NDLSelect
from .prototypes import Prototypes
from .sampling import DegreeSampler, loops_left_to
from .selectors import MetSelectHead

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "AttentionHead",
    "AttnSelect",
    "Backbone",
    "DegreeSampler",
    "FinalHead",
    "FinalSelect",
    "GivenHead",
    "JKNet",
    "JKNetMetSelect",
    "JumpingHead",
    "JumpingMetSelectHead",
    "LayerHead",
    "LayerSelect",
    "MetSelect",
    "MetSelectHead",
    "MetSelectMax",
    "NDLSelect",
    "Prototypes",
    "Selection",
    "calibrate_in_batches",
    "distance_loss",
    "infer",
    "loops_left_to",
    "posterior_loss",
    "rows_of_layers",
    "without_logits",
]
