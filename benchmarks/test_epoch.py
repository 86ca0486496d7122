"""Time of an epoch: forward pass on the training nodes, backward pass, step of Adam."""

import pytest

from .comparison import Comparison, Implementation
from .models import BACKBONES, PROVIDERS, Epochs, Size, denominators, why_unavailable

FULL_SET = "plain-DGL FinalSelect NDLSelect MetSelect-paper MetSelect".split()
FULL_SET += ["FinalSelect-once", "MetSelect-once"]


def mark(size: Size, name: str) -> list:
    """Return the markers of a test.

    Quick: depth 2, hidden 64, with AttnSelect, which takes ten times as long as the others, on GCN
    only. Full: depth or hidden varies, for FULL_SET. All: both vary, for all providers.
    """
    if size == Size(size.backbone):
        slow = name == "AttnSelect" and size.backbone != "gcn"
        return [pytest.mark.all] * (name == "AttnSelect-once") + [pytest.mark.full] * slow
    varied = (size.depth > 2) + (size.hidden > 64)
    return [pytest.mark.full if varied == 1 and name in FULL_SET else pytest.mark.all]


ENTRIES = [
    pytest.param(
        size, name, id="-".join(map(str, [*vars(size).values(), name])), marks=mark(size, name)
    )
    for backbone in BACKBONES
    for depth in (2, 4, 8)
    for hidden in (64, 128, 256)
    for name in PROVIDERS
    for size in [Size(backbone, depth, hidden)]
]


@pytest.fixture(scope="module")
def comparison(request, dataset):
    size = request.param
    listed = {}
    for name, provider in PROVIDERS.items():
        listed[name] = why_unavailable(name, size, dataset)
        if not listed[name]:
            epochs = Epochs(provider, size, dataset)
            listed[name] = Implementation(epochs, denominators(name), epochs.check)
    parameters = vars(size) | {"dataset": dataset.name}
    return Comparison.from_request(request, "epoch", parameters, listed)


@pytest.mark.parametrize(
    ("comparison", "provider"), ENTRIES, indirect=["comparison"], scope="module"
)
def test_epoch(comparison, provider, benchmark):
    comparison.report(provider, benchmark)
