"""Checkpoints: written whole or not at all; loading one runs no code."""

from contextlib import contextmanager
from pathlib import Path

import torch

from ..atomic_file import write_atomic


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def save(state: dict, path: Path) -> None:
    """Tensors, numbers, strings and containers of them."""
    write_atomic(path, lambda file: torch.save(state, file))


def load(path: Path, keys: set[str]) -> dict:
    """What `save` wrote, on the CPU; it must hold exactly `keys`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; train first") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint ({reason}); delete it and train again"
        ) from error
    if not isinstance(state, dict) or set(state) != keys:
        raise CheckpointError(f"{path} is not a checkpoint of this program")
    return state


@contextmanager
def reading(path: Path):
    """Whatever goes wrong with the parts of a checkpoint is a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is damaged ({reason}); delete it and train again") from error


def load_weights(model: torch.nn.Module, state: dict, path: Path) -> None:
    """Put the tensors into the model, or say that they are another model's and change nothing."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        model.load_state_dict(before)
        lines = [line.strip() for line in str(error).splitlines()]
        reason = "; ".join(lines[1:3] or lines)
        raise CheckpointError(f"{path} is of another model: {reason}") from error
