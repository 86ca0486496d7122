"""Read this first: a backbone gives every layer, a head chooses one for each node."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from dgl import DGLGraph
from torch import Tensor, nn

from ..checks import check_dtype, check_finite, check_layers
from .backbone import Backbone, is_blocks, n_seeds
from .heads import Selection
from .layers import Layer
from .selectors import MetSelectHead


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class LayerSelect(nn.Module):
    """A backbone that returns its layers, and a head over them; subclasses name the head."""

    head_class: type

    def __init__(self, backbone: nn.Module, n_classes: int, **options) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = self.head_class(backbone.layer_feats, n_classes, **options)

    def forward(
        self,
        graph: DGLGraph | list[DGLGraph],
        feat: Tensor,
        labels: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Selection:
        """Classify the nodes `index` (all without it) of a graph, or the seeds of blocks."""
        labels, index = self.head.check_targets(labels, index, n_seeds(graph))
        if labels is None and index is None and self._streams(graph):
            return self.head.stream(self.backbone.stream(graph, feat))
        layers = self.layers(graph, feat, index)  # L of them, the n rows of each that are asked for
        if labels is None or not self.training:
            layers = [layer.stored() for layer in layers]
            for depth, layer in enumerate(layers):
                nodes = index if layer.index is None else None
                check_finite([layer.source], first=depth, nodes=nodes)
        said = self.choose(layers, graph, feat, labels, index)
        if said.loss is not None and not torch.isfinite(said.loss):  # cheaper than to look before
            check_finite([layer.rows() for layer in layers], nodes=index)
        return said

    def _streams(self, graph) -> bool:
        """Whether nothing but the answers for a whole graph is asked for."""
        return (
            isinstance(self.backbone, Backbone)
            and not is_blocks(graph)
            and self.head.streams
            and not self.training
            and not torch.is_grad_enabled()
        )

    def layers(self, graph, feat, index=None) -> list[Layer]:
        """The rows `index` of every layer."""
        like = next(self.head.parameters())
        if isinstance(self.backbone, Backbone):
            layers = self.backbone.stack(graph, feat, index)
            for depth, layer in enumerate(layers):
                check_dtype(layer.source, like, f"layer {depth}")
            return layers
        layers = check_layers(self.backbone(graph, feat), self.head.in_feats, like)
        return [Layer(h, index) for h in layers]

    def choose(self, layers, graph, feat, labels=None, index=None) -> Selection:
        """The head's answer to the layers of this graph."""
        return replace(self.head.forward_rows(layers, labels), index=index)

    @torch.no_grad()
    def calibrate(self, graph, feat, labels, train_index, val_index=None) -> Selection | None:
        """Estimate the moments with the present weights and, on validation nodes, what compares
        layers. Returns what is said of those, judged by a gate that has not seen their labels."""
        for part in (train_index, val_index):
            if part is not None:
                rows, _ = self.head.check_targets(labels, part, n_seeds(graph))
        if val_index is not None:
            self.head.check_calibration(len(rows))
        with evaluating(self):
            layers = self.backbone(graph, feat)
            self.head.fit(layers, labels, train_index)
            if val_index is None:
                return None
            said = self.head.calibrate(layers, labels, val_index)
            _, index = self.head.check_targets(None, val_index, n_seeds(graph))
            rows = [Layer(h, index) for h in layers]
            return said or self.choose(rows, graph, feat, index=index)

    def renew_moments(self, merge=None) -> None:
        """At the end of an epoch of mini-batches: use what its calls gathered (``moments="epoch"``
        or ``"ema"``), added up over processes by `merge`."""
        self.head.renew_moments(merge)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and forget what was estimated."""
        self.backbone.reset_parameters()
        self.head.reset_parameters()


class MetSelect(LayerSelect):
    """MetSelect on any backbone that returns its layers and knows their `layer_feats`.

    Options are those of :class:`metselect_dgl.nn.MetSelectHead`.

    Examples
    --------
    >>> import dgl, torch
    >>> from metselect_dgl.nn import GCN
    >>> graph, feat, labels = dgl.rand_graph(30, 99), torch.randn(30, 8), torch.arange(30) % 3
    >>> model = MetSelect(GCN(8, 16, num_layers=2, self_loop=True), 3)
    >>> model(graph, feat, labels=labels, index=torch.arange(20)).loss.backward()
    >>> model.eval()(graph, feat).layer.shape
    torch.Size([30])
    """

    head_class = MetSelectHead

    @classmethod
    def paper(cls, backbone: nn.Module, n_classes: int, **options) -> "MetSelect":
        """The paper's plain setting: no deep supervision, no calibration between layers."""
        return cls(backbone, n_classes, **{"deep_supervision": 0.0, "select": "plain", **options})
