"""Time of an epoch: forward pass on the training nodes, backward pass, step of Adam."""

import pytest

from .models import BACKBONES, PROVIDERS, Epochs, Size, absent, against
from .race import Contestant, Race

EVERYWHERE = "plain-DGL FinalSelect NDLSelect MetSelect-paper MetSelect".split()
EVERYWHERE += ["FinalSelect-once", "MetSelect-once"]


def mark(size: Size, name: str) -> list:
    """Quick: depth 2, hidden 64, and AttnSelect, which takes ten times as long as the others, only
    once. Full: depth or hidden varies, for the most important. All: both, and for all."""
    if size == Size(size.backbone):
        slow = name == "AttnSelect" and size.backbone != "gcn"
        return [pytest.mark.all] * (name == "AttnSelect-once") + [pytest.mark.full] * slow
    varied = (size.depth > 2) + (size.hidden > 64)
    return [pytest.mark.full if varied == 1 and name in EVERYWHERE else pytest.mark.all]


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
def race(request, dataset):
    size = request.param
    listed = {}
    for name, provider in PROVIDERS.items():
        listed[name] = absent(name, size, dataset)
        if not listed[name]:
            epochs = Epochs(provider, size, dataset)
            listed[name] = Contestant(epochs, against(name), epochs.check)
    return Race.of(request, "epoch", vars(size) | {"dataset": dataset.name}, listed)


@pytest.mark.parametrize(("race", "provider"), ENTRIES, indirect=["race"], scope="module")
def test_epoch(race, provider, benchmark):
    race.report(provider, benchmark)
