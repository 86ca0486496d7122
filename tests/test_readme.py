"""README and documentation: the code runs, figures are the stored ones, links and options exist."""

import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

import metselect_dgl
from metselect_dgl.cli import main
from metselect_dgl.nn import Backbone, MetSelectHead

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md")])
WRITTEN_BY_HAND = [page for page in PAGES if page.name != "results.md"]


def run_code(page: Path) -> dict:
    """Run the Python blocks of a page from top to bottom in one namespace, and return it."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks, f"{page.name} has no code"
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    return names


def accuracy_of(names: dict) -> float:
    """Return the accuracy of `out` on the test nodes."""
    right = names["out"].logits.argmax(1) == names["labels"]
    return right[names["split"].test].double().mean().item()


def test_readme_code_runs():
    torch.manual_seed(0)
    names = run_code(README)
    assert names["out"].logits.shape == (3000, 5)  # of the head alone, the last block
    names["out"] = names["model"].predict(names["graph"], names["feat"])
    assert accuracy_of(names) > 0.85  # no fixed layer is above 0.52
    assert len(names["out"].layer.unique()) == 3


def test_scaling_code_runs():
    torch.manual_seed(0)
    names = run_code(ROOT / "docs/scaling.md")
    assert accuracy_of(names) > 0.8
    whole = names["model"].predict(names["graph"], names["feat"])
    assert torch.equal(whole.layer, names["out"].layer)


def test_tutorial_code_runs(tmp_path, monkeypatch, capsys):
    folder = os.environ.get("METSELECT_DATA")
    if not folder or not (Path(folder) / "cora.npz").exists():
        pytest.skip("METSELECT_DATA does not name a folder with cora.npz")
    monkeypatch.chdir(tmp_path)  # the tutorial writes files
    names = run_code(ROOT / "docs/tutorial.md")
    assert accuracy_of(names) > 0.8
    assert names["share"].sum().item() == pytest.approx(1)
    assert names["why"]["score"].argmax() == names["out"].layer[17]
    assert (tmp_path / "cora-layers.png").exists()
    assert "FinalSelect: test accuracy" in capsys.readouterr().out


def test_pyg_code_runs():
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    names = run_code(ROOT / "docs/pyg.md")
    for out in (names["out"], names["selection"]):
        right = out.logits.argmax(1) == names["y"]
        assert right[names["test"]].double().mean() > 0.45  # by chance 0.33
    assert names["out"].layer.bincount().argmax() == 0


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of every table row by its first cell; of equal first cells the first row."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("|"):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows.setdefault(name, cells)
    return rows


@pytest.mark.parametrize(
    ("shown", "stored"),
    [
        ("GCN, FinalSelect", "FinalSelect"),
        ("GCN, MetSelect", "**MetSelect** (our default)"),
        ("GCN, `MetSelect.paper`", "MetSelect as in the paper"),
    ],
)
def test_accuracies_are_the_stored_ones(shown, stored):
    page = (ROOT / "docs/results.md").read_text()
    table = rows_of(page[page.index("## Table 2") : page.index("### GAT")])
    datasets = next(line for line in page.splitlines() if line.startswith("|  | cora |"))
    datasets = [cell.strip() for cell in datasets.strip("|").split("|")][1:]
    stored_cells = dict(zip(datasets, table[stored], strict=True))
    readme = rows_of(README.read_text())
    for dataset, value in zip(readme["%"], readme[shown], strict=True):
        assert stored_cells[dataset].startswith(f"{value} ±"), dataset


def test_ratios_are_the_stored_ones():
    text, page = " ".join(README.read_text().split()), (ROOT / "benchmarks/RESULTS.md").read_text()
    ratios = re.findall(r"\d[\d.]* \[[\d.]+, [\d.]+\]", text)
    assert len(ratios) == 10
    assert [ratio for ratio in ratios if ratio not in page] == []


def test_commands_exist(capsys):
    """Every command of the program that a page shows exists and has the options shown."""
    shown = []
    for page in WRITTEN_BY_HAND:
        shown += re.findall(r"\.venv/bin/metselect ([^`#\n]+)", page.read_text())
    assert len(shown) > 8
    for command in shown:
        with pytest.raises(SystemExit) as ended:
            main([command.split()[0], "--help"])
        assert ended.value.code == 0, command
        options = re.findall(r"--[\w-]+", capsys.readouterr().out)
        own = command.split(" -- ")[0]  # behind it: options of another program
        assert set(re.findall(r"--[\w-]+", own)) <= set(options), command


@pytest.mark.parametrize("owner", [MetSelectHead, Backbone], ids=["metselect", "backbone"])
def test_options_and_defaults(owner):
    text = (ROOT / "docs/method.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.M))
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = parameter.default
            shown = f'"{default}"' if isinstance(default, str) else str(default)
            assert rows[name] == shown, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=lambda page: page.name)
def test_anchors_lead_to_headings(page):
    for link, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        if not link.startswith("http"):
            target = page.parent / link if link else page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert anchor in slugs, f"{link}#{anchor}"


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=lambda page: page.name)
def test_named_files_exist(page):
    package = Path(metselect_dgl.__file__).parent
    for name in re.findall(r"`((?:[a-z]\w*/)+[a-z_]\w*\.(?:py|cpp))`", page.read_text()):
        assert (ROOT / name).exists() or (package / name).exists(), name


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == metselect_dgl.__version__
    assert citation["preferred-citation"]["title"] in README.read_text()
    for author in citation["preferred-citation"]["authors"]:
        assert f"{author['family-names']}, {author['given-names']}" in README.read_text()
