"""How the time of the head (moments, whitening, selection) grows with its sizes: all sizes of one
axis take turns, so that the exponent is fitted within every round."""

from dataclasses import replace
from functools import cache

import pytest

from metselect_dgl.ops import NATIVE

from .inputs import Inputs, Rows
from .ops import contestants
from .race import Race, picked

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
GROWING = ("native", "careful-torch", "paper-formula")


def entries() -> list:
    """(axis, size, provider), those of one axis together."""
    listed = []
    for axis, sizes in FULL.items():
        for name in GROWING:
            for size in sizes:
                marks = () if size in QUICK[axis] and name != GROWING[2] else pytest.mark.full
                label = f"{name}@{size}"
                listed.append(pytest.param(axis, label, id=f"{axis}-{label}", marks=marks))
    return listed


@pytest.fixture(scope="module")
def race(request):
    axis = request.param
    inputs, listed = cache(lambda size: Inputs(replace(BASE, **{axis: size}))), {}
    for label in picked(request):
        name, _, size = label.partition("@")
        if name == "native" and not NATIVE:
            listed[label] = "the extension is not built"
            continue
        each = contestants("head", inputs(int(size)))[name]
        each.against, each.facts = (), {"of": name, "size": int(size)}
        listed[label] = each
    return Race.of(request, "growth", {"axis": axis} | vars(BASE), listed, share=0.3)


@pytest.mark.parametrize(("race", "provider"), entries(), indirect=["race"], scope="module")
def test_growth(race, provider, benchmark):
    race.report(provider, benchmark)
