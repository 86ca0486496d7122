"""Files that are written whole or not at all, and folders with one writer at a time."""

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write(file)` on a new file that replaces `path` once it is on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:  # fails on a link or file that is there already
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"{path} cannot be written: the disk is full; make room and run it again"
            raise OSError(error.errno, text) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create a folder and refuse to share it with another process that writes there; remove what
    killed processes left unfinished. The lock ends with the process, however it ends."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} is no folder; choose another --out") from None
    path = folder / ".lock"
    with open(path, "ab") as lock:
        try:
            _lock(path, lock)
        except (BlockingIOError, FileNotFoundError):
            raise RuntimeError(
                f"another process writes to {folder}; wait for it, or choose another --out"
            ) from None
        for leftover in folder.iterdir():
            if _LEFTOVER.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
        try:
            yield
        finally:
            if fcntl is not None:
                path.unlink(missing_ok=True)


def _lock(path: Path, file: BinaryIO) -> None:
    """Lock an open file, unless another process has locked or just removed it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            raise BlockingIOError
