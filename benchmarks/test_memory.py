"""Peak memory of each provider in a new process, and its growth with the number of rows."""

import json
from pathlib import Path

import pytest

from metselect_dgl.ops import NATIVE

from .comparison import enter
from .models import PROVIDERS
from .test_startup import new_process

HEADS = ("native", "careful-torch", "paper-formula", "sklearn-LDA")
EPOCHS = [name for name in PROVIDERS if not name.startswith("AttnSelect")]
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak is read from /proc",
)


def report(benchmark, parameters: dict, provider: str, *arguments: str) -> None:
    command = ("-m", "benchmarks.memory", parameters["what"], provider, *arguments)
    measured = json.loads(new_process(*command))
    *_, last = measured.values()
    peaks = {size: result["bytes"] for size, result in measured.items()}
    group = " ".join(["memory", *parameters.values()])
    extra = {"kind": "memory", "provider": provider, "at": parameters, "peaks": peaks}
    enter(benchmark, group, [last["seconds"]], **extra)


@pytest.mark.parametrize("provider", HEADS)
def test_memory_of_head(provider, benchmark, pytestconfig):
    if provider == "native" and not NATIVE:
        benchmark.skipped = True
        pytest.skip("the extension is not built")
    quick = pytestconfig.getoption("set") == "quick"
    sizes = ("10000", "100000") if quick else ("10000", "30000", "100000", "300000", "1000000")
    report(benchmark, {"what": "head"}, provider, *sizes)


@pytest.mark.full
@pytest.mark.parametrize("provider", EPOCHS)
def test_memory_of_epoch(provider, benchmark, dataset, pytestconfig):
    where = [dataset.name, *filter(None, [pytestconfig.getoption("data_dir")])]
    report(benchmark, {"what": "epoch", "dataset": dataset.name}, provider, *where)
