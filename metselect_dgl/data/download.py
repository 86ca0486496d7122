"""The cache folder, and atomic writing of arrays and of downloaded archives."""

import os
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

from ..atomic_file import write_atomic

TIMEOUT_SECONDS = 20


def cache_home() -> Path:
    """Return ``$XDG_CACHE_HOME/metselect_dgl``, or ``~/.cache/metselect_dgl``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "metselect_dgl"


def write_arrays(path: Path, arrays: dict[str, np.ndarray], *, compress: bool) -> None:
    """Write an .npz file atomically."""
    save = np.savez_compressed if compress else np.savez
    write_atomic(path, lambda file: save(file, **arrays))


def fetch_zip(url: str, folder: Path, inside: str = "") -> None:
    """Download a zip in one attempt and make its subfolder ``inside`` the new ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        archive = Path(scratch, "archive.zip")
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            print(f"downloading {url}", file=sys.stderr)
            with open(archive, "wb") as file:
                shutil.copyfileobj(answer, file)
        unpacked = Path(scratch, "unpacked")
        shutil.unpack_archive(archive, unpacked)
        os.replace(unpacked / inside, folder)
