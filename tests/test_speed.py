"""The compiled ops are as fast as they were: paired ratios, within wide bounds."""

import os

import pytest

from benchmarks.guard import BOUNDS, measure
from metselect_dgl.ops import NATIVE

pytestmark = [
    pytest.mark.skipif(not NATIVE, reason="the extension is not built"),
    pytest.mark.skipif(
        "METSELECT_GUARD" not in os.environ,
        reason="the bounds are of one kind of CPU, that of CI, which sets METSELECT_GUARD",
    ),
]


@pytest.mark.parametrize("what", BOUNDS)
def test_guard(what):
    assert measure(what)["native"] < BOUNDS[what]
