"""The README's code runs as it stands, and its table of options is the truth."""

import inspect
import re
from pathlib import Path

import pytest

from metselect_dgl.nn import GCN, MetSelectHead

README = Path(__file__).parents[1] / "README.md"


def test_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks
    for block in blocks:
        names = {}
        exec(block.replace("range(50)", "range(3)"), names)
        assert names["out"].logits.shape == (3000, 5)


@pytest.mark.parametrize("owner", [MetSelectHead, GCN.__mro__[1]], ids=["metselect", "backbone"])
def test_options_and_defaults(owner):
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`?(?: \(OAS\))? \|", README.read_text(), re.M))
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = parameter.default
            shown = f'"{default}"' if isinstance(default, str) else str(default)
            assert rows[name].rstrip("`") == shown, name


def test_named_files_exist():
    text = README.read_text()
    for name in re.findall(r"\((docs/[^)]+)\)|`(metselect_dgl/[\w/]+\.py)`", text):
        assert (README.parent / "".join(name)).exists(), name
