"""Public datasets through dgl.data and ogb, with one download attempt and without prompts."""

import codecs
import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
import urllib.request
import warnings
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType

import dgl
import numpy as np
import torch

from ..build import cache_home
from .dataset import NodeDataset, undirected_graph

DGL_CLASSES = {
    "actor": "ActorDataset",
    "chameleon": "ChameleonDataset",
    "citeseer": "CiteseerGraphDataset",
    "cora": "CoraGraphDataset",
    "cornell": "CornellDataset",
    "pubmed": "PubmedGraphDataset",
    "squirrel": "SquirrelDataset",
    "texas": "TexasDataset",
    "wisconsin": "WisconsinDataset",
}
TIMEOUT_SECONDS = 20
MANIFEST = "metselect-sha256.json"  # hashes of what was downloaded
ARXIV_URL = "https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"


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
        hashes = _hashes(unpacked / inside)
        (unpacked / inside / MANIFEST).write_text(json.dumps(hashes, indent=1))
        os.replace(unpacked / inside, folder)


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by its path there."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            hashes[path.relative_to(folder).as_posix()] = digest
    return hashes


def check_fetched(folder: Path) -> None:
    """Raise RuntimeError unless a folder holds exactly what `fetch_zip` unpacked there: dgl.data
    unpickles its files, which may run code."""
    manifest = folder / MANIFEST
    if not manifest.exists() or json.loads(manifest.read_text()) != _hashes(folder):
        raise RuntimeError(
            f"{folder} was changed after it was downloaded, and dgl.data would unpickle its files; "
            "delete the folder to download it again"
        )


def load_dgl(name: str) -> NodeDataset:
    """Load a dataset of dgl.data as an undirected simple graph, with DGL's splits.

    dgl.data unpickles files, so it is given a folder of its own, with what was downloaded here.
    """
    base = getattr(dgl.data, DGL_CLASSES[name])
    changes = {"_download": _download_once, "has_cache": lambda _: False, "save": lambda _: None}
    folder = cache_home() / "dgl"
    source = type(base.__name__, (base,), changes)(raw_dir=str(folder), verbose=False)
    graph = source[0]
    edges = torch.stack(graph.edges(), dim=1)
    masks = []
    for part in ("train", "val", "test"):  # [N] or [N, S]
        mask = graph.ndata[f"{part}_mask"].bool().reshape(graph.num_nodes(), -1)
        masks.append(mask.t().contiguous())
    return NodeDataset(
        name,
        undirected_graph(edges[edges[:, 0] != edges[:, 1]], graph.num_nodes()),
        graph.ndata["feat"].float(),
        graph.ndata["label"].long(),
        source.num_classes,
        *masks,
        note=f"dgl.data.{base.__name__}",
    )


def _download_once(self: dgl.data.DGLDataset) -> None:
    """Replace DGL's download, whose retries end in an AttributeError that hides the cause."""
    if not os.path.exists(self.raw_path):
        fetch_zip(self.url, Path(self.raw_path))
    check_fetched(Path(self.raw_path))


def load_arxiv(data_dir: Path | None = None) -> NodeDataset:
    """Load ogbn-arxiv, bidirected and with self-loops; download it unless ``data_dir`` has it."""
    root = Path(data_dir or cache_home())
    module = _import_ogb()
    if not has_arxiv(root):
        fetch_zip(ARXIV_URL, _ogb_folder(root), inside="arxiv")
    module.input = lambda prompt: "n"  # to the prompt to update the folder
    try:
        with (
            redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
            _running_no_code(_ogb_folder(root) / "split/time/split_dict.pt"),
        ):
            warnings.simplefilter("ignore")
            source = module.DglNodePropPredDataset("ogbn-arxiv", root=str(root))
            index = source.get_idx_split()
    finally:
        del module.input
    graph, labels = source[0]
    n_nodes = graph.num_nodes()
    masks = torch.zeros(3, 1, n_nodes, dtype=torch.bool)
    for i, part in enumerate(("train", "valid", "test")):
        masks[i, 0, torch.as_tensor(index[part])] = True
    bidirected = undirected_graph(torch.stack(graph.edges(), dim=1), n_nodes)
    return NodeDataset(
        "ogbn-arxiv",
        dgl.add_self_loop(dgl.remove_self_loop(bidirected)),
        graph.ndata["feat"],
        labels.squeeze(1),
        source.num_classes,
        *masks,
        note="ogb, made bidirected, with self-loops",
    )


def _running_no_code(pickled: Path) -> AbstractContextManager:
    """Let torch.load, as ogb calls it, read arrays and nothing else from a pickled split."""
    if torch.__version__ < "2.6":  # it would run what the file says
        if pickled.exists():
            raise ValueError(
                f"torch {torch.__version__} would run code from {pickled}; delete it where the "
                "split is also in .csv.gz files beside it, or use torch 2.6 or later"
            )
        return nullcontext()
    rebuild = np.arange(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    int64 = type(np.dtype(np.int64))
    safe = [*((rebuild, name) for name in names), np.ndarray, np.dtype, int64, codecs.encode]
    return torch.serialization.safe_globals(safe)


def has_arxiv(data_dir: Path | None = None) -> bool:
    """Return whether ogb's folder exists, so that no download is needed."""
    folder = _ogb_folder(Path(data_dir or cache_home()))
    files = ("raw/edge.csv.gz", "processed/dgl_data_processed")
    return any((folder / file).exists() for file in files)


def _ogb_folder(root: Path) -> Path:
    older = root / "ogbn_arxiv_dgl"  # its name in older releases of ogb
    return older if older.exists() else root / "ogbn_arxiv"


def _import_ogb() -> ModuleType:
    """Import ogb's DGL module without its thread that looks for a newer release."""
    outdated = sys.modules.get("outdated")
    sys.modules["outdated"] = None  # its import fails, which ogb takes as "do not check"
    try:
        return importlib.import_module("ogb.nodeproppred.dataset_dgl")
    except ImportError as error:
        raise ImportError(f"ogbn-arxiv needs ogb ({error}): pip install ogb==1.3.6") from error
    finally:
        del sys.modules["outdated"]
        if outdated is not None:
            sys.modules["outdated"] = outdated
