"""Time of classifying all nodes with a calibrated model."""

from functools import cache, lru_cache, partial

import pytest
from torch import Tensor

from .comparison import Comparison, Implementation
from .models import (
    BACKBONES,
    PROVIDERS,
    ByReference,
    Provider,
    Size,
    classifier,
    denominators,
    why_unavailable,
)

CLASSIFIERS = [name for name in PROVIDERS if name != "plain-DGL-classes-last"]


def mark(backbone: str, name: str) -> list:
    """Return the markers of a test. Quick: a GCN, without AttnSelect, which takes twenty times as
    long as the others."""
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


def check_classes(provider: Provider, size: Size, dataset, build) -> None:
    """Raise AssertionError unless 99.9 % of the predicted classes are those of the reference."""
    same = build()().argmax(1) == expected(provider.reference(), size, dataset)
    agree = same.double().mean().item()
    assert agree >= 0.999, f"{agree:.4f} of the predictions agree with the reference"


def _build_and_call(build) -> Tensor:
    return build()()


@pytest.fixture(scope="module")
def comparison(request, dataset):
    size = request.param
    listed = {}
    for name in CLASSIFIERS:
        listed[name] = why_unavailable(name, size, dataset)
        if not listed[name]:
            provider = PROVIDERS[name]
            build = cache(partial(classifier, provider, size, dataset))  # only if selected
            check = partial(check_classes, provider, size, dataset, build)
            classify = partial(_build_and_call, build)
            listed[name] = Implementation(classify, denominators(name), check)
    parameters = vars(size) | {"dataset": dataset.name}
    return Comparison.from_request(request, "inference", parameters, listed)


@pytest.mark.parametrize(
    ("comparison", "provider"), ENTRIES, indirect=["comparison"], scope="module"
)
def test_inference(comparison, provider, benchmark):
    comparison.report(provider, benchmark)
