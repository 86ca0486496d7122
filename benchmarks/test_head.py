"""Time of the head's ops, relative to their reference and to their bare matrix products."""

import pytest

from metselect_dgl.ops import NATIVE

from .comparison import Comparison
from .head_ops import PROVIDERS, implementations
from .inputs import Inputs, Rows

WIDTHS = (64, 128, 256)


def mark(width: int, provider: str) -> list:
    """Return the markers of a test; scipy takes 15 s at the smallest width, minutes at others."""
    if provider == "scipy.cdist":
        return [pytest.mark.full if width == 64 else pytest.mark.all]
    return [pytest.mark.full] if width > 64 else []


def entries() -> list:
    """Return the parameters ((op, width), provider)."""
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
    """Return a function that draws the inputs of a width and keeps the latest."""
    kept = {}

    def of(width: int) -> Inputs:
        if width not in kept:
            kept.clear()
            kept[width] = Inputs(Rows(D=width))
        return kept[width]

    return of


@pytest.fixture(scope="module")
def comparison(request, inputs):
    op, width = request.param
    x = inputs(width)
    listed = implementations(op, x)
    if not NATIVE:
        listed["native"] = "the extension is not built"
    return Comparison.from_request(request, "head", {"op": op} | vars(x.rows), listed)


@pytest.mark.parametrize(
    ("comparison", "provider"), entries(), indirect=["comparison"], scope="module"
)
def test_head(comparison, provider, benchmark):
    comparison.report(provider, benchmark)
