"""Datasets by name: synthetic, from .npz files, or downloaded through dgl.data and ogb."""

import os
import re
from dataclasses import replace
from difflib import get_close_matches
from http.client import HTTPException
from os import PathLike
from pathlib import Path
from zipfile import BadZipFile

from ..optional import needs_dgl

with needs_dgl(__name__):
    from .dataset import NodeDataset, Split, edge_homophily, undirected_graph
    from .npz import load_npz, save_npz
    from .public import DGL_CLASSES, has_arxiv, load_arxiv, load_dgl
    from .synthetic import arxiv_twin, contextual_sbm, hop_chain

__all__ = [
    "DATASETS",
    "NodeDataset",
    "Split",
    "arxiv_on_disk",
    "arxiv_twin",
    "contextual_sbm",
    "edge_homophily",
    "hop_chain",
    "load_dataset",
    "load_npz",
    "save_npz",
    "undirected_graph",
]

SYNTHETIC = {"arxiv-twin": arxiv_twin, "csbm": contextual_sbm, "hop_chain": hop_chain}
RATES = ("", "_05", "_10", "_15", "_20")
ATTACKED = tuple(f"mettack_{base}{rate}" for base in ("citeseer", "cora") for rate in RATES)
DATASETS = tuple(sorted((*SYNTHETIC, *DGL_CLASSES, *ATTACKED, "ogbn-arxiv")))


def load_dataset(name: str, data_dir: str | PathLike | None = None, seed: int = 0) -> NodeDataset:
    """Load a dataset by name: generated, read from ``data_dir`` or downloaded, in this order.

    Parameters
    ----------
    name : str
        One of ``DATASETS``, or NAME for your own file NAME.npz. ``mettack_cora`` is the clean
        graph of mettack_cora.npz, ``mettack_cora_20`` the graph with 20 % of its edges attacked.
    data_dir : str or PathLike, optional
        Folder of .npz files (see ``load_npz``) and of ogb's folders; default: the environment
        variable METSELECT_DATA.
    seed : int
        Seed of a synthetic dataset; the others have fixed splits.
    """
    if name in SYNTHETIC:
        return SYNTHETIC[name](seed=seed)
    folder = _data_folder(data_dir)
    file = _find_npz(name, folder) if folder else None
    if file:
        return replace(load_npz(*file), name=name)
    if name not in DATASETS:
        close = get_close_matches(name.lower(), DATASETS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        hint += f" and {folder} has no {name}.npz" if folder else ""
        raise ValueError(f"dataset {name!r} is unknown{hint}; known are {', '.join(DATASETS)}")
    return _download(name, folder)


def arxiv_on_disk(data_dir: str | PathLike | None = None) -> bool:
    """Return whether ``load_dataset("ogbn-arxiv", data_dir)`` needs no download."""
    folder = _data_folder(data_dir)
    return bool(folder and _find_npz("ogbn-arxiv", folder)) or has_arxiv(folder)


def _data_folder(data_dir: str | PathLike | None) -> Path | None:
    data_dir = data_dir or os.environ.get("METSELECT_DATA")
    if not data_dir:
        return None
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data folder {str(folder)!r} does not exist")
    return folder


def _find_npz(name: str, folder: Path) -> tuple[Path, str] | None:
    """Return the file of a dataset and the name of its array of edges."""
    path = folder / f"{name}.npz"
    if path.exists():
        return path, "edges"
    attacked = re.fullmatch(r"(mettack_.+)_(\d+)", name)
    if attacked and (folder / f"{attacked[1]}.npz").exists():
        return folder / f"{attacked[1]}.npz", f"edges_mettack_{attacked[2]}"
    return None


def _download(name: str, folder: Path | None) -> NodeDataset:
    """Load a public dataset; an error names what was tried and what to do."""
    file = re.sub(r"^(mettack_.+)_\d+$", r"\1", name) + ".npz"
    remedy, source, cause = file, "dgl.data", None
    if name == "ogbn-arxiv":
        remedy, source = f"{file} or ogb's folder ogbn_arxiv", "ogb"
    try:
        if name not in ATTACKED:
            return load_arxiv(folder) if source == "ogb" else load_dgl(name)
        reason = "it has no download"
    except (OSError, RuntimeError, HTTPException, BadZipFile) as error:
        reason, cause = f"{source} could not fetch or read it ({error})", error
    tried = f"{folder} has no {file}" if folder else "no data folder is set"
    raise RuntimeError(
        f"{name} cannot be loaded: {tried}, and {reason}; put {remedy} into --data-dir or "
        "METSELECT_DATA, or use hop_chain, which needs no download"
    ) from cause
