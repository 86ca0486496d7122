"""Checkpoints: written whole or not at all, with a checksum; loading one runs no code."""

import hashlib
import io
from contextlib import contextmanager
from pathlib import Path

import torch

from ..atomic_file import write_atomic


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


_MAGIC = b"metselect checkpoint 1\n"  # then the SHA-256 of the rest, and what torch.save writes


def save(state: dict, path: Path) -> None:
    """Write tensors, numbers, strings and containers of them."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).digest()
    write_atomic(path, lambda file: file.write(_MAGIC + digest + content))


def load(path: Path, keys: set[str]) -> dict:
    """Read what `save` wrote, to the CPU; it must hold exactly `keys`."""
    try:
        content = Path(path).read_bytes()
        if not content.startswith(b"PK"):  # else of a former version, without a checksum
            start = len(_MAGIC) + hashlib.sha256().digest_size
            magic, digest, content = (
                content[: len(_MAGIC)],
                content[len(_MAGIC) : start],
                content[start:],
            )
            if magic != _MAGIC or digest != hashlib.sha256(content).digest():
                raise ValueError("its checksum is wrong")
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; train first") from None
    except Exception as error:
        raise _damaged(path, "damaged or not a checkpoint", error) from error
    if not isinstance(state, dict) or set(state) != keys:
        raise CheckpointError(f"{path} is not a checkpoint of this program")
    return state


@contextmanager
def reading(path: Path):
    """Turn whatever goes wrong with the parts of a checkpoint into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise _damaged(path, "damaged", error) from error


def _damaged(path: Path, how: str, error: Exception) -> CheckpointError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(f"{path} is {how} ({reason}); delete it and train again")


def load_weights(model: torch.nn.Module, state: dict, path: Path) -> None:
    """Load the tensors into the model; if they are another model's, raise and change nothing."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        model.load_state_dict(before)
        lines = [line.strip() for line in str(error).splitlines()]
        reason = "; ".join(lines[1:3] or lines)
        raise CheckpointError(f"{path} is of another model: {reason}") from error
