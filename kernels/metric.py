"""The constants of every layer's metric, from its class means and whitening factor: all are tiny.

    center = mean of the valid class means,   middle = R (mu - center) [C, K],
    slope = K^-1 (mu - center) [C, D],        offset = (mu - center) K^-1 (mu - center) / 2 [C]

worked out in float64 and rounded once. Nothing here waits for the device.
"""

from collections import defaultdict

import torch
from torch import Tensor

DEAD, TRIANGULAR, DENSE = 0, 1, 2  # kinds of factors: of a layer without spread, and others


def metrics(means: list[Tensor], factors: list[Tensor], valid: Tensor) -> list[dict[str, Tensor]]:
    """The constants of every layer by name.

    Layers of the same widths are worked out together, so that a network of 64 layers takes as
    many small launches as one of 2.
    """
    groups = defaultdict(list)
    for depth, factor in enumerate(factors):
        groups[factor.shape].append(depth)
    found: list[dict[str, Tensor]] = [{} for _ in means]
    for depths in groups.values():
        mean, factor = (torch.stack([each[d] for d in depths]) for each in (means, factors))
        for name, value in _constants(mean, factor, valid).items():
            for depth, part in zip(depths, value.contiguous().unbind(), strict=True):
                found[depth][name] = part
    return found


def _constants(mean: Tensor, factor: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Of layers of one width: mean [G, C, D], factor [G, K, D]."""
    narrow = torch.promote_types(mean.dtype, torch.float32)
    mean, factor = mean.to(narrow), factor.to(narrow)
    seen = valid.unsqueeze(1)
    center = mean.where(seen, 0).sum(1) / seen.sum().clamp(min=1)
    wide = factor.double()
    middle = (mean.double() - center.double().unsqueeze(1)) @ wide.mT
    alive = factor.flatten(1).any(1)
    dense = alive & factor.triu(1).flatten(1).any(1)
    return {
        "mean": mean,
        "factor": factor,
        "center": center,
        "middle": middle.to(narrow),
        "slope": (middle @ wide).to(narrow),
        "offset": (middle.square().sum(2) / 2).to(narrow),
        "kind": alive.int() + dense.int(),
    }
