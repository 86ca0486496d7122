"""The model: a source gives layers, a head selects one per node. Start reading here."""

from dataclasses import replace

import torch
from torch import nn

from .head import Selection, evaluating, lock_of, select_in_full
from .source import BATCH, LayerSource, layer_source


class LayerSelect(nn.Module):
    """A backbone that returns its layers, and a head over them; subclasses name the head."""

    head_class: type

    def __init__(self, backbone: nn.Module, n_classes: int, **options) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = self.head_class(backbone.layer_feats, n_classes, **options)

    def source(self, graph, feat, batch_size: int | None = None) -> LayerSource:
        """Return the source of the layers of a graph and its features, or of blocks."""
        return layer_source(self.backbone, graph, feat, batch_size)

    def forward(self, graph, feat, labels=None, index=None, logits: bool = True) -> Selection:
        """Select for the nodes `index` (all without it) of a graph, or for the seeds of blocks;
        with labels, also the loss. In training, ``logits=False`` leaves the logits out."""
        with lock_of(self):
            source = self.source(graph, feat)
            labels, index = self.head.check_targets(labels, index, source.n_rows)
            if labels is None and index is None and not (self.training or torch.is_grad_enabled()):
                return self.head.predict(source)
            stack = source.stack(index)  # L layers, the n rows of each that are asked for
            guided = labels is not None and self.training
            if not guided:
                stack = stack.stored().checked(index)
            selection = select_in_full(self.head, stack, labels, logits or not guided)
            if selection.loss is not None and not torch.isfinite(selection.loss):
                stack.checked(index)  # cheaper than to look before
            return replace(selection, index=index)

    @torch.no_grad()
    def predict(
        self, graph, feat, batch_size=None, exit_at: float = 1.0, progress: bool = False
    ) -> Selection:
        """Select for all nodes, in evaluation mode without gradients; with a `batch_size`, layer by
        layer in batches: the same result, two layers in memory. With `exit_at` below 1 (early
        exit), deeper layers are computed only for nodes below that probability and for those that
        they need; each node is compared in the layers computed for it."""
        if batch_size is not None and not self.head.layerwise:
            raise ValueError(f"{type(self.head).__name__} needs all layers; leave out batch_size")
        batch_size = BATCH if batch_size is None and exit_at < 1 else batch_size
        with evaluating(self):
            source = self.source(graph, feat, batch_size)
            return self.head.predict(source, exit_at, progress)

    @torch.no_grad()
    def calibrate(
        self, graph, feat, labels, train_index, val_index=None, batch_size=None
    ) -> Selection | None:
        """Estimate the class moments with the present weights; fit temperatures and gate on
        validation nodes and return their selection, by gates fitted on other nodes."""
        with evaluating(self):
            source = self.source(graph, feat, batch_size)
            train_labels, nodes = self.head.check_targets(labels, train_index, source.n_rows)
            if val_index is not None:
                val_labels, val = self.head.check_targets(labels, val_index, source.n_rows)
                self.head.check_calibration(len(val))
                nodes = torch.cat([nodes, val])
            train, rest = source.stack(nodes).stored().checked(nodes).split(len(train_labels))
            self.head.estimate(train, train_labels)
            if val_index is None:
                return None
            return replace(self.head.compare(rest, val_labels), index=val)

    def renew_moments(self, merge=None) -> None:
        """At the end of an epoch of mini-batches, use the moments that its calls gathered."""
        if self.head.prototypes is not None:
            self.head.prototypes.renew(merge)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and forget what was estimated."""
        self.backbone.reset_parameters()
        self.head.reset_parameters()
