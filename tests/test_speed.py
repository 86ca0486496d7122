"""The compiled ops are as fast as they were: ratios to their bare products, within wide bounds."""

import pytest

from benchmarks.guard import BOUNDS, ROWS, measure
from benchmarks.ops import Inputs
from metselect_dgl.ops import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the extension is not built")


@pytest.fixture(scope="module")
def inputs():
    return Inputs(ROWS)


@pytest.mark.parametrize("op", BOUNDS)
def test_guard(op, inputs):
    found = measure(op, inputs)
    assert found["native"] < BOUNDS[op]
    assert found["twice"] > BOUNDS[op], "the guard would not notice an op that does its work twice"
