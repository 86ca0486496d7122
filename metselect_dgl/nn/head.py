"""The base classes of heads: a stack of layers comes in, a Selection goes out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock, RLock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import functional as MF
from ..checks import check_index, check_layers, in_autocast, labelled
from .layer_rows import LayerStack
from .source import LayerSource


@dataclass
class Selection:
    """The result of a head for the rows it was asked about."""

    logits: Tensor | None  # [n, C]; None in training if they were left out
    layer: Tensor  # [n], the selected layer
    selected_by: Tensor | None = None  # [n], the score of that layer where layers were compared
    index: Tensor | None = None  # [n], the rows; None: all of them
    loss: Tensor | None = None  # if labels were given
    edges: int | None = None  # the number of edges aggregated, where they were counted

    @property
    def score(self) -> Tensor:
        """The score by which the layer was selected, or the confidence of the prediction, as
        log-odds, where layers are not compared, [n]."""
        if self.selected_by is not None:
            return self.selected_by
        if self.logits is None:
            raise RuntimeError("no logits were kept to derive the score from; pass logits=True")
        return MF.log_odds(self.logits.detach()).amax(-1)


class LayerHead(nn.Module):
    """A head that sees all layers together; subclasses implement `select`.

    Called with labels it also returns the loss over the labelled nodes among `index`; in training
    mode the labels may guide the selection of the layer, in evaluation mode they never do.
    """

    layerwise = False  # whether layers can be scored one at a time
    decodes_layers = False  # whether every layer has logits of its own

    def __init__(self, in_feats: Sequence[int], n_classes: int) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes is {n_classes}; there is at least one class")
        self.in_feats, self.n_classes = list(in_feats), n_classes
        self.n_choices = len(self.in_feats)
        self.prototypes = None  # the class moments, of a head that has them

    def forward(
        self,
        layers: Sequence[Tensor],
        *,
        labels: Tensor | None = None,
        index: Tensor | None = None,
        logits: bool = True,
    ) -> Selection:
        """Select for the rows `index` of a list of layers; see :meth:`select`."""
        stack, labels, index = self.check(layers, labels, index)
        return replace(select_in_full(self, stack, labels, logits), index=index)

    def check(self, layers, labels, index) -> tuple[LayerStack, Tensor | None, Tensor | None]:
        """Return stack, labels and index after checking them, each for the rows in question."""
        layers = check_layers(layers, self.in_feats, next(self.parameters()))
        labels, index = self.check_targets(labels, index, len(layers[0]))
        return LayerStack.of(layers, index), labels, index

    def check_targets(self, labels, index, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Return checked labels and index; with labels, those of the labelled rows."""
        device = next(self.parameters()).device
        if labels is not None:
            return labelled(labels, index, self.n_classes, rows, device)
        return None, None if index is None else check_index(index, rows, device)

    def select(self, stack: LayerStack, labels: Tensor | None, logits: bool = True) -> Selection:
        """Return the selection for the rows of a stack, with the loss if there are labels; logits
        may be left out if they are not wanted."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it selects")

    def predict(self, source: LayerSource, exit_at: float = 1.0, progress: bool = False):
        """Return the selection for all rows of a source, without gradients."""
        if exit_at != 1:
            raise ValueError("exit_at needs a MetSelect head with rule='confidence'")
        return self.select(source.stack().stored().checked(), None)

    def estimate(
        self, stack: LayerStack, labels: Tensor, merge: Callable[[Tensor], None] | None = None
    ) -> None:
        """Estimate from training rows what is not learned; nothing by default. `merge` adds a
        vector up over processes, in place."""

    def compare(self, stack: LayerStack, labels: Tensor) -> Selection:
        """Fit on validation rows what makes layers comparable, and return their selection."""
        return self.select(stack.stored(), None)

    def check_calibration(self, nodes: int) -> None:
        """Raise an error if `compare` cannot use so few validation rows."""

    @torch.no_grad()
    def calibrate(
        self, layers: Sequence[Tensor], labels: Tensor, index: Tensor | None = None
    ) -> Selection:
        """Call `compare` for the validation rows `index` of a list of layers."""
        stack, labels, index = self.check(layers, labels, index)
        self.check_calibration(len(labels))
        return replace(self.compare(stack, labels), index=index)

    def decode_layer(self, depth: int, h: Tensor) -> Tensor:
        """Return the logits of layer `depth` at rows of it, [n, C]."""
        return self.decoders[depth](h)

    def layer_logits(self, layers: Sequence[Tensor], index: Tensor | None = None) -> Tensor | None:
        """Return the logits of every layer's own decoder, [L, n, C]; None if there are none."""
        if not self.decodes_layers:
            return None
        rows = LayerStack.of(layers, index).rows()
        return torch.stack([self.decode_layer(depth, h) for depth, h in enumerate(rows)])

    def explain(self, layers: Sequence[Tensor], index: Tensor) -> dict | None:
        """Return what every layer measures at one row; None for a head that measures nothing."""

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and forget what was estimated."""
        for part in self.children():
            part.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.in_feats}, n_classes={self.n_classes}"


class LayerwiseHead(LayerHead):
    """A head that scores one layer at a time, so that a layer can be released before the next one
    is computed; subclasses implement `score_layer` and `decode_layer`."""

    layerwise = decodes_layers = True
    lowest_wins = False  # whether the layer with the lowest score is selected
    sees_all_layers = False  # whether scores depend on the answers of other layers
    first_scored = 0  # layers before are never selected
    compares_layers = True  # whether the score says more than the logits
    scores_are_log_odds = False  # of the most likely class, as early exit needs them

    def score_layer(self, depth: int, h: Tensor) -> Tensor:
        """Return the scores of layer `depth` at rows of it, [n]."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it scores a layer")

    def decode_layer(self, depth: int, h: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how it decodes a layer")

    def predict(self, source: LayerSource, exit_at: float = 1.0, progress: bool = False):
        from .inference import predict_layer_by_layer

        return predict_layer_by_layer(self, source, exit_at=exit_at, progress=progress)


def select_in_full(
    head: LayerHead, stack: LayerStack, labels: Tensor | None, logits: bool
) -> Selection:
    """Call `select` in the precision of the parameters, also under autocast."""
    like = next(head.parameters())
    if not in_autocast(like.device):
        return head.select(stack, labels, logits)
    with torch.autocast(like.device.type, enabled=False):
        stack = LayerStack.of([h.to(like.dtype) for h in stack.rows()])
        return head.select(stack, labels, logits)


_LOCKS = WeakKeyDictionary()  # one for every model; not attributes, since they cannot be copied
_NEW_LOCK = Lock()


def lock_of(model: nn.Module) -> RLock:
    """Return the lock under which a model is called: its mode is that of one call at a time."""
    with _NEW_LOCK:
        return _LOCKS.setdefault(model, RLock())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode in full precision, and every module back to its own mode
    afterwards; calls of the model in other threads wait."""
    with lock_of(model), torch.autocast(next(model.parameters()).device.type, enabled=False):
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
