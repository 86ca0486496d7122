"""Time of the head's ops, each against its definition and against its bare products."""

import pytest

from metselect_dgl.ops import NATIVE

from .inputs import Inputs, Rows
from .ops import PROVIDERS, contestants
from .race import Race

WIDTHS = (64, 128, 256)


def mark(width: int, provider: str) -> list:
    """scipy takes 15 s at the least width, and minutes at the others."""
    if provider == "scipy.cdist":
        return [pytest.mark.full if width == 64 else pytest.mark.all]
    return [pytest.mark.full] if width > 64 else []


def entries() -> list:
    """((op, width), provider)"""
    return [
        pytest.param(
            (op, width),
            provider,
            id=f"{op}-{width}-{provider}",
            marks=mark(width, provider),
        )
        for width in WIDTHS
        for op, providers in PROVIDERS.items()
        for provider in providers
    ]


@pytest.fixture(scope="module")
def inputs():
    """By width; those of one width are kept."""
    kept = {}

    def of(width: int) -> Inputs:
        if width not in kept:
            kept.clear()
            kept[width] = Inputs(Rows(D=width))
        return kept[width]

    return of


@pytest.fixture(scope="module")
def race(request, inputs):
    op, width = request.param
    x = inputs(width)
    listed = contestants(op, x)
    if not NATIVE:
        listed["native"] = "the extension is not built"
    return Race.of(request, "head", {"op": op} | vars(x.rows), listed)


@pytest.mark.parametrize(("race", "provider"), entries(), indirect=["race"], scope="module")
def test_head(race, provider, benchmark):
    race.report(provider, benchmark)
