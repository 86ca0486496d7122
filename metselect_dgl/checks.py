"""Checks of the arguments of public functions; errors name the value and how to correct it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else type(value).__name__


def _is_whole(value: object) -> bool:
    """Whether it is a tensor of whole numbers or bools."""
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def in_autocast(device: torch.device) -> bool:
    """Return whether autocast is enabled for the type of the device."""
    if torch.__version__ >= "2.4":
        return torch.is_autocast_enabled(device.type)
    cpu = device.type == "cpu"
    return torch.is_autocast_cpu_enabled() if cpu else torch.is_autocast_enabled()


def check_feat(feat: Tensor, rows: int, width: int, like: Tensor, what: str = "feat") -> None:
    """Raise unless `feat` is [rows, width] with dtype and device of the parameter `like`."""
    if not isinstance(feat, Tensor) or not feat.is_floating_point():
        kind = f"a {like.dtype} tensor, for instance feat.float()"
        raise TypeError(f"{what} is {_kind(feat)}; pass {kind}")
    if feat.layout != torch.strided:
        raise TypeError(f"{what} is a sparse tensor; pass {what}.to_dense()")
    if feat.device != like.device:
        raise ValueError(f"{what} is on {feat.device}, the model on {like.device}; use .to()")
    if feat.dtype in (torch.float16, torch.bfloat16) and feat.device.type == "cpu":
        raise TypeError(f"{what} is {feat.dtype}, which DGL refuses on a CPU; use feat.float()")
    if feat.dtype != like.dtype and not in_autocast(feat.device):
        raise TypeError(f"{what} is {feat.dtype}, the model is {like.dtype}; convert one of them")
    if feat.dim() != 2 or feat.shape[1] != width:
        raise ValueError(f"{what} has shape {tuple(feat.shape)}, expected [{rows}, {width}]")
    if feat.shape[0] != rows:
        raise ValueError(f"{what} has {feat.shape[0]} rows for {rows} nodes")


class NotFiniteError(ValueError):
    """A layer has a NaN or an infinity."""


def check_finite(layers: Sequence[Tensor], first: int = 0, nodes: Tensor | None = None) -> None:
    """Raise NotFiniteError with layer and node of the first NaN or infinity; layers are counted
    from `first`, and rows are the nodes `nodes` if given."""
    for depth, h in enumerate(layers, first):
        if torch.isfinite(h.detach().sum()):
            continue
        bad = (~torch.isfinite(h.detach()).all(1)).nonzero()  # the sum alone may overflow
        if len(bad):
            row = bad[0].item()
            raise NotFiniteError(
                f"layer {depth} of node {row if nodes is None else nodes[row]} is not finite; "
                "check the features for NaN or inf, or lower the learning rate"
            )


def check_layers(layers: Sequence[Tensor], in_feats: Sequence[int], like: Tensor) -> list[Tensor]:
    """Return the layers as [N, D_l] tensors; in layers of blocks, the first rows are the seeds."""
    if len(layers) != len(in_feats):
        raise ValueError(f"got {len(layers)} layers, the head was made for {len(in_feats)}")
    rows = layers[-1].shape[0]
    # not always a slice: its gradient is a copy
    layers = [h if len(h) == rows else h[:rows] for h in layers]
    for depth, (h, width) in enumerate(zip(layers, in_feats, strict=True)):
        check_feat(h, rows, width, like, f"layer {depth}")
    check_finite(layers)
    return layers


def check_labels(labels: Tensor, rows: int, n_classes: int) -> Tensor:
    """Return the labels as int64 [rows], each -1 (not labelled) or below `n_classes`."""
    if not _is_whole(labels) or labels.dtype == torch.bool:
        raise TypeError(f"labels are {_kind(labels)}; pass class numbers (int64), one per node")
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.dim() != 1:
        raise TypeError(
            f"labels have shape {tuple(labels.shape)}; pass class numbers, not one-hot rows: "
            "labels.argmax(1)"
        )
    if len(labels) != rows:
        raise ValueError(f"got {len(labels)} labels for {rows} nodes")
    labels = labels.long().contiguous()  # before comparing: -1 is 255 among uint8
    wrong = ((labels < -1) | (labels >= n_classes)).nonzero()
    if len(wrong):
        node = wrong[0].item()
        raise ValueError(
            f"label {labels[node].item()} of node {node} is not a class: "
            f"there are {n_classes} (0 to {n_classes - 1}), and -1 for not labelled"
        )
    return labels


def check_index(index: Tensor, rows: int, device: torch.device) -> Tensor:
    """Return node numbers, int64 below `rows`, on `device`, from numbers or a mask of all rows."""
    if not _is_whole(index):
        raise TypeError(f"index is {_kind(index)}; pass node numbers (int64) or a bool mask")
    if index.dim() != 1:
        raise ValueError(
            f"index has shape {tuple(index.shape)}; pass one split of it, for instance mask[:, 0]"
        )
    if index.dtype == torch.bool:
        if len(index) != rows:
            raise ValueError(f"the mask has {len(index)} entries for {rows} nodes")
        return index.nonzero().squeeze(1).to(device)
    index = index.long().contiguous()
    check_not_mask(index, rows)
    wrong = ((index < 0) | (index >= rows)).nonzero()
    if len(wrong):
        raise ValueError(f"index contains node {index[wrong[0, 0]].item()}, there are {rows} nodes")
    return index.to(device)


def check_not_mask(index: Tensor, rows: int) -> None:
    """Raise if integers are a mask of all rows: read as node numbers, they would be nodes 0, 1."""
    if len(index) == rows > 2 and ((index == 0) | (index == 1)).all():
        raise ValueError(f"index has {rows} entries of 0 and 1 for {rows} nodes; pass index.bool()")


def labelled(
    labels: Tensor, index: Tensor | None, n_classes: int, rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (labels, index) of the labelled nodes among `index`, or among all rows."""
    if isinstance(labels, Tensor) and labels.device != device:
        raise ValueError(f"labels are on {labels.device}, the model on {device}; use .to()")
    labels = check_labels(labels, rows, n_classes)
    nodes = torch.arange(rows, device=device)
    index = nodes if index is None else check_index(index, rows, device)
    keep = labels[index] >= 0
    if not keep.any():
        why = "index is empty" if len(index) == 0 else f"all {len(index)} labels are -1"
        raise ValueError(f"no labelled node to learn from: {why}")
    index = index if keep.all() else index[keep]
    return labels[index], index
