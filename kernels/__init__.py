"""Triton kernels, installed as `metselect_dgl.kernels` and imported on first use."""

from .class_distances import class_distances, class_distances_backward
from .select_layer import select_layer
from .selected_cross_entropy import selected_cross_entropy, selected_logits

__all__ = [
    "class_distances",
    "class_distances_backward",
    "select_layer",
    "selected_cross_entropy",
    "selected_logits",
]
