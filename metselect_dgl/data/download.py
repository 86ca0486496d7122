"""The cache folder, and downloaded archives."""

import os
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 20


def cache_home() -> Path:
    """Return ``$XDG_CACHE_HOME/metselect_dgl``, or ``~/.cache/metselect_dgl``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metselect_dgl"


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
