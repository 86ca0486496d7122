"""Growth of the time of the head (moments, whitening, selection) with its sizes. All sizes of one
axis are timed in interleaved rounds, so that the exponent is fitted within every round."""

from dataclasses import replace
from functools import cache

import pytest

from metselect_dgl.ops import NATIVE

from .comparison import Comparison, selected_providers
from .head_ops import implementations
from .inputs import Inputs, Rows

BASE = Rows(n=10_000)
QUICK = {
    "n": (10_000, 30_000, 100_000),
    "C": (2, 32, 512),
    "D": (16, 64, 256),
    "L": (2, 8, 128),
}
FULL = {
    "n": (10_000, 30_000, 100_000, 300_000, 1_000_000),
    "C": (2, 8, 32, 128, 512),
    "D": (16, 32, 64, 128, 256),
    "L": (2, 8, 32, 128),
}
PROVIDERS = ("native", "careful-torch", "paper-formula")


def entries() -> list:
    """Return the parameters (axis, provider@size), those of one axis together."""
    listed = []
    for axis, sizes in FULL.items():
        for name in PROVIDERS:
            for size in sizes:
                marks = () if size in QUICK[axis] and name != PROVIDERS[2] else pytest.mark.full
                label = f"{name}@{size}"
                listed.append(pytest.param(axis, label, id=f"{axis}-{label}", marks=marks))
    return listed


@pytest.fixture(scope="module")
def comparison(request):
    axis = request.param
    inputs, listed = cache(lambda size: Inputs(replace(BASE, **{axis: size}))), {}
    for label in selected_providers(request):
        name, _, size = label.partition("@")
        if name == "native" and not NATIVE:
            listed[label] = "the extension is not built"
            continue
        head = implementations("head", inputs(int(size)))[name]
        head.against, head.extra = (), {"of": name, "size": int(size)}
        listed[label] = head
    parameters = {"axis": axis} | vars(BASE)
    return Comparison.from_request(request, "growth", parameters, listed, time_share=0.3)


@pytest.mark.parametrize(
    ("comparison", "provider"), entries(), indirect=["comparison"], scope="module"
)
def test_growth(comparison, provider, benchmark):
    comparison.report(provider, benchmark)
