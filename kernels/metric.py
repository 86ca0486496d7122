"""The constants of each layer's metric, from its class means and whitening factor.

    center = mean of the valid class means,   middle = R (mu - center) [C, K],
    slope = K^-1 (mu - center) [C, D],        offset = (mu - center) K^-1 (mu - center) / 2 [C]

computed in float64 and rounded once. No function here waits for the device.
"""

from collections import defaultdict

import torch
from torch import Tensor

DEAD, TRIANGULAR, DENSE = 0, 1, 2  # kinds of factors; DEAD: R = 0, of a layer without spread


def metrics(means: list[Tensor], factors: list[Tensor], valid: Tensor) -> list[dict[str, Tensor]]:
    """Return the constants of each layer by name.

    Layers of one width are computed together, so that a network of 64 layers takes as many
    launches as one of 2.
    """
    groups = defaultdict(list)
    for depth, factor in enumerate(factors):
        groups[factor.shape].append(depth)
    constants: list[dict[str, Tensor]] = [{} for _ in means]
    for depths in groups.values():
        mean = torch.stack([means[depth] for depth in depths])
        factor = torch.stack([factors[depth] for depth in depths])
        for name, value in _constants(mean, factor, valid).items():
            for depth, part in zip(depths, value.contiguous().unbind(), strict=True):
                constants[depth][name] = part
    return constants


def _constants(mean: Tensor, factor: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Return the constants of layers of one width: mean [G, C, D], factor [G, K, D]."""
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
