"""Time of an epoch whose `index` is created anew in every epoch, relative to one index object. The
ratio should be at most 1.1: the speed of a step may not depend on object identity."""

import pytest

from .comparison import Comparison, Implementation
from .models import SAME_INDEX, FreshIndexEpochs, Size

ENTRIES = [
    pytest.param(
        Size(backbone),
        kind,
        id=f"{backbone}-{kind}",
        marks=[] if backbone == "gcn" else [pytest.mark.full],
    )
    for backbone in ("gcn", "gat", "gin")
    for kind in (SAME_INDEX, "fresh-index", "fresh-mask")
]


@pytest.fixture(scope="module")
def comparison(request, dataset):
    size = request.param
    listed = {}
    for kind in (SAME_INDEX, "fresh-index", "fresh-mask"):
        epochs = FreshIndexEpochs(kind, size, dataset)
        against = () if kind == SAME_INDEX else (SAME_INDEX,)
        listed[kind] = Implementation(epochs, against, epochs.check)
    parameters = vars(size) | {"dataset": dataset.name}
    return Comparison.from_request(request, "fresh-index", parameters, listed)


@pytest.mark.parametrize(
    ("comparison", "provider"), ENTRIES, indirect=["comparison"], scope="module"
)
def test_fresh_index(comparison, provider, benchmark):
    comparison.report(provider, benchmark)
