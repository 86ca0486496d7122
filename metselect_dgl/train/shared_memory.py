"""DistDGL's shared memory in /dev/shm, whose names do not contain the job: one job per machine."""

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
_DGL = re.compile(r"graph(_(node|edge)_.*|graph_\d.*)?|.*-kvdata-")
_WAIT_SECONDS = 2  # for another process that only removes leftovers


def lock(folder: Path = FOLDER) -> int | None:
    """Lock the folder until this process ends and return its file descriptor; None if another
    process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                return None
            time.sleep(0.05)


def reserve(folder: Path = FOLDER) -> None:
    """Reserve the names for the server in this process, or raise an error."""
    if lock(folder) is None:
        raise ValueError(
            f"another DistDGL job runs on this machine, and both would use the same names in "
            f"{folder}; wait until it has ended"
        )
    remove_leftovers(folder)


def remove_leftovers(folder: Path = FOLDER) -> None:
    """Remove what a killed server left."""
    for path in folder.iterdir():
        if _DGL.fullmatch(path.name):
            with suppress(OSError):  # somebody else's
                path.unlink()


def clean(folder: Path = FOLDER) -> None:
    """Remove what a killed server left, unless a server runs."""
    descriptor = lock(folder)
    if descriptor is not None:
        remove_leftovers(folder)
        os.close(descriptor)
