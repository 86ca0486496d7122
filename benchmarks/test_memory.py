"""Peak memory of each provider in a process of its own, and how that of the head grows with N."""

import json
from pathlib import Path

import pytest

from metselect_dgl.ops import NATIVE

from .models import PROVIDERS
from .race import enter
from .test_startup import new_process

HEADS = ("native", "careful-torch", "paper-formula", "sklearn-LDA")
EPOCHS = [name for name in PROVIDERS if not name.startswith("AttnSelect")]
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process"
)


def report(benchmark, at: dict, provider: str, *arguments: str) -> None:
    found = json.loads(new_process("-m", "benchmarks.memory", at["what"], provider, *arguments))
    last = list(found.values())[-1]
    peaks = {nodes: each["bytes"] for nodes, each in found.items()}
    group = " ".join(["memory", *at.values()])
    facts = {"kind": "memory", "provider": provider, "at": at, "peaks": peaks}
    enter(benchmark, group, [last["seconds"]], **facts)


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
