"""A fault in a copy of the kernels fails the comparison that passes without the fault."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import test_interpreted as net

from metselect_dgl import kernels

SOURCE = Path(kernels.__file__).parent


def class_distances():
    net.test_layers_of_any_layout(net.surrounded)


def empty_class():
    case = net.TestSizes()
    case.case = net.make_case(63, net.WIDTHS, empty_class=2, dtype=net.torch.float32)
    case.index, case.rows = [None] * 3, 63
    case.test_select_layer("confidence", False)


def cross_entropy():
    case = net.make_case(40, (5,), picked=130, dtype=net.torch.float32)
    rest = case.labels, [case.index], 1.0, [True], True
    net.check("selected_cross_entropy", *net.decoders(case), *rest)


FAULTS = {
    "mask of the features": (
        "class_distances.py",
        "mask=inside[:, None] & within[None, :]",
        "mask=inside[:, None]",
        class_distances,
    ),
    "mask of the classes without nodes": (
        "select_layer.py",
        'a = tl.where(seen[None, :], a / t, float("-inf"))',
        "a = a / t",
        empty_class,
    ),
    "mask of the padded classes": (
        "selected_cross_entropy.py",
        'return tl.where(known[None, :], a + bias[None, :], float("-inf"))',
        "return a + bias[None, :]",
        cross_entropy,
    ),
    "sum over rows that are picked twice": (
        "selected_cross_entropy.py",
        "if ADD:",
        "if False:",
        cross_entropy,
    ),
    "upper half of a dense factor": (
        "class_distances.py",
        "tl.where(dense, width, tl.minimum(width, low + BK))",
        "tl.minimum(width, low + BK)",
        lambda: net.test_factors_that_are_not_triangular((20, 20)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_detected(fault, tmp_path, monkeypatch):
    file, text, instead, comparison = FAULTS[fault]
    comparison()
    package = "planted_" + fault.replace(" ", "_")
    shutil.copytree(SOURCE, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / package / file).read_text()
    assert text in source
    (tmp_path / package / file).write_text(source.replace(text, instead))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(net, "kernels", importlib.import_module(package))
    with pytest.raises(AssertionError):
        comparison()
    sys.modules.pop(package)
