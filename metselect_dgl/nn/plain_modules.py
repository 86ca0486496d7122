"""Modules whose parameters say all that they compute, so that kernels may use these alone."""

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = set(vars(nn.Module()))


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling the module, or a part of it, runs a hook."""
    return any(vars(part)[name] for part in module.modules() for name in _HOOKS)


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether it is x W^T + b and nothing else: no subclass (such as LoRA's), no
    parametrization, no hook (such as pruning's)."""
    return type(module) is nn.Linear and not is_hooked(module)


def settings_of(module: nn.Module) -> list:
    """Return the types of a module and its parts, and their attributes that are not parameters: two
    modules with equal settings compute the same with the same parameters."""
    settings = []
    for part in module.modules():
        settings.append(type(part))
        settings += [item for item in vars(part).items() if item[0] not in _INTERNAL]
    return settings
