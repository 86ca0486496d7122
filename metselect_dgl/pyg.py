"""MetSelect for PyG: node features and `edge_index` instead of a DGL graph. Needs no DGL."""

from torch import Tensor, nn

from .nn import MetSelect as GraphMetSelect
from .nn import Selection, StoredLayers

__all__ = ["AllLayers", "MetSelect"]


class AllLayers(nn.Module):
    r"""A model of :mod:`torch_geometric.nn.models` that returns [x_0, ..., x_depth].

    x_0 is a linear map of the features; the others are the layers that the model would pass to
    jumping knowledge, after normalisation, activation and dropout.

    Parameters
    ----------
    gnn : class of the model: GCN, GAT, GIN, GraphSAGE or another BasicGNN
    in_channels : width of the node features
    hidden_channels : width of every layer
    num_layers : depth; there is one layer more, x_0
    options : further options of the model, such as dropout or norm

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.nn import GCN
    >>> edge_index = torch.randint(30, (2, 99))
    >>> layers = AllLayers(GCN, 8, 16, num_layers=2)(torch.randn(30, 8), edge_index)
    >>> [tuple(h.shape) for h in layers]
    [(30, 16), (30, 16), (30, 16)]
    """

    def __init__(
        self, gnn: type, in_channels: int, hidden_channels: int, num_layers: int, **options
    ) -> None:
        super().__init__()
        self.layer_feats = [hidden_channels] * (num_layers + 1)
        self.input = nn.Linear(in_channels, hidden_channels)
        self.gnn = gnn(in_channels, hidden_channels, num_layers, jk="cat", **options)
        self.gnn.jk = _Unmerged()
        del self.gnn.lin  # it would decode the merged layers

    def forward(self, x: Tensor, edge_index: Tensor) -> list[Tensor]:
        """Return the layers; `edge_index` may also be a sparse tensor, as PyG takes it."""
        return [self.input(x), *self.gnn(x, edge_index)]

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        self.input.reset_parameters()
        self.gnn.reset_parameters()


class _Unmerged(nn.Module):
    """Jumping knowledge that leaves the layers as they are."""

    def forward(self, layers: list[Tensor]) -> list[Tensor]:
        return layers

    def reset_parameters(self) -> None:
        """There is nothing to draw."""


class MetSelect(GraphMetSelect):
    """MetSelect on a PyG model that returns its layers and has their widths as `layer_feats`.

    The model is called with (x, edge_index) and returns a list of [N, D_l] tensors, as
    :class:`AllLayers` does. Options are those of :class:`metselect_dgl.nn.MetSelectHead`.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.nn import GCN
    >>> x, edge_index = torch.randn(30, 8), torch.randint(30, (2, 99))
    >>> model = MetSelect(AllLayers(GCN, 8, 16, num_layers=2), 3)
    >>> y, train = torch.arange(30) % 3, torch.arange(20)
    >>> model(x, edge_index, labels=y, index=train).loss.backward()
    >>> model.predict(x, edge_index).layer.shape
    torch.Size([30])
    """

    def source(self, edge_index, x, batch_size=None):
        return StoredLayers(lambda: self.backbone(x, edge_index), self.backbone.layer_feats)

    def forward(self, x, edge_index, labels=None, index=None, logits: bool = True) -> Selection:
        """Select for the nodes `index` (all without it); with labels, also the loss. In training,
        ``logits=False`` leaves the logits out."""
        return super().forward(edge_index, x, labels, index, logits)

    def predict(self, x, edge_index) -> Selection:
        """Select for all nodes, in evaluation mode without gradients."""
        return super().predict(edge_index, x)

    def calibrate(self, x, edge_index, labels, train_index, val_index=None) -> Selection | None:
        """Estimate the class moments with the present weights; fit temperatures and gate on
        validation nodes and return their selection, by gates fitted on other nodes."""
        return super().calibrate(edge_index, x, labels, train_index, val_index)
