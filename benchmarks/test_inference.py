"""Time of classifying all nodes with a model whose moments, temperatures and gate are fitted."""

from functools import cache, lru_cache, partial

import pytest
from torch import Tensor

from .models import BACKBONES, PROVIDERS, ByReference, Provider, Size, absent, against, classifier
from .race import Contestant, Race

CLASSIFIERS = [name for name in PROVIDERS if name != "plain-DGL-classes-last"]


def mark(backbone: str, name: str) -> list:
    """Quick: a GCN, without AttnSelect, which takes twenty times as long as the others."""
    if name.startswith("AttnSelect"):
        return [pytest.mark.full if (backbone, name) == ("gcn", "AttnSelect") else pytest.mark.all]
    return [pytest.mark.full] if backbone != "gcn" else []


ENTRIES = [
    pytest.param(
        Size(backbone),
        name,
        id=f"{backbone}-{name}",
        marks=mark(backbone, name),
    )
    for backbone in BACKBONES
    for name in CLASSIFIERS
]


@lru_cache(maxsize=4)
def expected(provider: Provider, size: Size, dataset) -> Tensor:
    with ByReference():
        return classifier(provider, size, dataset)().argmax(1)


def same_classes(provider: Provider, size: Size, dataset, made) -> None:
    """As the reference has it, for all but one node in a thousand."""
    right = made()().argmax(1) == expected(provider.reference(), size, dataset)
    agree = right.double().mean().item()
    assert agree >= 0.999, f"{agree:.4f} of the predictions agree with the reference"


@pytest.fixture(scope="module")
def race(request, dataset):
    size = request.param
    listed = {}
    for name in CLASSIFIERS:
        listed[name] = absent(name, size, dataset)
        if not listed[name]:
            provider = PROVIDERS[name]
            made = cache(partial(classifier, provider, size, dataset))  # if it is picked
            check = partial(same_classes, provider, size, dataset, made)
            listed[name] = Contestant(lambda made=made: made()(), against(name), check)
    return Race.of(request, "inference", vars(size) | {"dataset": dataset.name}, listed)


@pytest.mark.parametrize(("race", "provider"), ENTRIES, indirect=["race"], scope="module")
def test_inference(race, provider, benchmark):
    race.report(provider, benchmark)
