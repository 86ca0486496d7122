"""The public functions of MetSelect: moments, whitening, distances, layer selection, decoding.

Equations 2 to 7 of the paper as functions of lists of layers. Shapes: N nodes, L layers (layer 0
holds the features), C classes, D features of a layer, n picked nodes. `index` picks nodes: node
numbers [n] for all layers, or a list with node numbers or None (all rows) for each layer.
"""

from ..reference import log_odds
from .head import RULES as RULES
from .head import (
    class_distances,
    metric_logits,
    select_and_decode,
    select_layer,
    selected_cross_entropy,
    selected_logits,
)
from .moments import Moments, fourth_moments, moments, whitening
from .moments import check_shrinkage as check_shrinkage

__all__ = [
    "Moments",
    "class_distances",
    "fourth_moments",
    "log_odds",
    "metric_logits",
    "moments",
    "select_and_decode",
    "select_layer",
    "selected_cross_entropy",
    "selected_logits",
    "whitening",
]
