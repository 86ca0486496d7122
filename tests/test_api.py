"""The public face: frozen names, docstrings, examples that run, and a light import."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import dgl
import pytest
import torch

import metselect_dgl

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "metselect_dgl": ["__version__", "data", "functional", "nn", "pyg"],
    "metselect_dgl.data": [
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
    ],
    "metselect_dgl.functional": [
        "Moments",
        "class_distances",
        "fourth_moments",
        "log_odds",
        "metric_logits",
        "moments",
        "select_and_decode",
        "select_layer",
        "selected_cross_entropy",
        "selected_logits",
        "whitening",
    ],
    "metselect_dgl.nn": [
        "GAT",
        "GCN",
        "GIN",
        "AttentionHead",
        "AttnSelect",
        "Backbone",
        "BatchedSource",
        "Convolution",
        "DegreeSampler",
        "FinalHead",
        "FinalSelect",
        "GivenHead",
        "GraphSource",
        "JKNet",
        "JKNetMetSelect",
        "JumpingHead",
        "JumpingMetSelectHead",
        "LayerHead",
        "LayerSelect",
        "LayerSource",
        "LayerStack",
        "LayerwiseHead",
        "MetSelect",
        "MetSelectHead",
        "NDLSelect",
        "Prototypes",
        "Selection",
        "StoredLayers",
        "distance_loss",
        "layer_source",
        "posterior_loss",
        "sampling_graph",
    ],
    "metselect_dgl.pyg": ["AllLayers", "MetSelect"],
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items(), ids=PUBLIC)
def test_public_names_are_frozen(module, names):
    """A name that is added or lost is a decision: change it here, and in CHANGELOG.md."""
    assert importlib.import_module(module).__all__ == names


@pytest.mark.parametrize(("module", "names"), PUBLIC.items(), ids=PUBLIC)
def test_public_names_exist(module, names):
    for name in names:
        assert getattr(importlib.import_module(module), name) is not None


def test_public_names_are_sorted():
    """As ruff sorts them: CONSTANTS, Classes, functions."""
    for names in PUBLIC.values():
        ranks = [(not name.isupper(), not name[0].isupper(), name) for name in names]
        assert ranks == sorted(ranks)


def test_a_name_that_the_package_does_not_have():
    with pytest.raises(AttributeError, match="module 'metselect_dgl' has no attribute 'colour'"):
        metselect_dgl.colour  # noqa: B018


def undocumented(source: str) -> list[str]:
    """The public classes and functions of a file that have no docstring of their own."""
    tree = ast.parse(source)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        *(["the file"] if tree.body and not ast.get_docstring(tree) else []),
        *(
            node.name
            for node in tree.body
            if isinstance(node, kinds) and node.name[0] != "_" and not ast.get_docstring(node)
        ),
    ]


FILES = [
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("metselect_dgl/**/*.py"), *ROOT.glob("kernels/**/*.py")])
]


@pytest.mark.parametrize("path", FILES)
def test_what_is_public_has_a_docstring(path):
    assert undocumented((ROOT / path).read_text()) == []


def test_a_missing_docstring_is_seen():
    source = "@dataclass\nclass A:\n    x: int\ndef f(): ...\ndef _g(): ...\n"
    assert undocumented(source) == ["the file", "A", "f"]


def modules(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return [package, *(f"{package}.{found.name}" for found in pkgutil.iter_modules(path))]


EXAMPLES = [
    *modules("metselect_dgl.functional"),
    *modules("metselect_dgl.nn"),
    *modules("metselect_dgl.nn.conv"),
    *modules("metselect_dgl.data"),
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_run(module):
    """Whatever the reader's random numbers are."""
    for seed in range(40):
        torch.manual_seed(seed)
        dgl.seed(seed)
        assert doctest.testmod(importlib.import_module(module)).failed == 0, f"seed {seed}"


def test_examples_of_pyg_run():
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    results = doctest.testmod(importlib.import_module("metselect_dgl.pyg"))
    assert results.attempted > 0
    assert results.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    shown = {
        test.name
        for module in EXAMPLES
        for test in finder.find(importlib.import_module(module))
        if test.examples
    }
    assert {
        "metselect_dgl.functional.moments.Moments",
        "metselect_dgl.functional.head.class_distances",
        "metselect_dgl.nn.conv.gat.GAT",
        "metselect_dgl.nn.conv.gcn.GCN",
        "metselect_dgl.nn.conv.gin.GIN",
        "metselect_dgl.nn.metselect.MetSelect",
        "metselect_dgl.nn.baselines.FinalSelect",
        "metselect_dgl.nn.ndls.NDLSelect",
        "metselect_dgl.nn.metselect.MetSelectHead",
        "metselect_dgl.data.synthetic.hop_chain",
    } <= shown


def test_importing_the_package_is_light():
    code = (
        "import sys, metselect_dgl\n"
        "heavy = 'dgl triton torch metselect_dgl.kernels metselect_dgl.ops'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "print(metselect_dgl.functional.__name__, 'dgl' in sys.modules)\n"
        "print([name for name in sys.modules if name.startswith('metselect_dgl.kernels')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "metselect_dgl.functional False", "[]"]
