"""DistDGL: partitions on disk, one process alone, and a server with two trainers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import torch

from metselect_dgl.data import hop_chain
from metselect_dgl.train import load_run
from metselect_dgl.train.distdgl import check_clients, connect, digest, partition

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """hop_chain of 3000 nodes in one partition."""
    folder = tmp_path_factory.mktemp("parts")
    partition(hop_chain(), 1, folder)
    return folder


def python(*arguments, prefix=(), **environment):
    """DGL's distributed part keeps its state in the process: each in its own."""
    run = [*prefix, sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=240)


ALONE = """
import sys, torch
from metselect_dgl.config import Config
from metselect_dgl.data import hop_chain
from metselect_dgl.train import TrainingLoop, prepare
from metselect_dgl.train.distdgl import PartitionBatches, PartitionSource, connect

data, config = connect(sys.argv[1], None)[0], Config(batch_size=500, fanout=-1, epochs=2)
loop = TrainingLoop(config, data, None, make_batches=PartitionBatches)
for _ in range(2):
    loop.epoch()
model, here = loop.model, prepare(config, hop_chain())
assert torch.equal(data.graph.ndata["node_id"][data.nodes], torch.arange(3000))

validated, _ = loop.batches.validate(model)
predicted = model.eval().head.predict(PartitionSource(model.backbone, data, 700))
part = here.split(0)
given = here.graph, here.feat, here.labels, part.train, part.val
expected = model.calibrate(*given, batch_size=900)
order = part.val.argsort()
torch.testing.assert_close(validated.logits, expected.logits[order], rtol=1e-4, atol=1e-5)
whole = model.predict(here.graph, here.feat, batch_size=900)
assert (predicted.layer == whole.layer).float().mean() > 0.999
same = predicted.layer == whole.layer
torch.testing.assert_close(predicted.logits[same], whole.logits[same], rtol=1e-4, atol=1e-4)
print("equal")
"""


def test_one_process_alone_is_the_graph_itself(parts):
    """Calibration and inference on a partitioned graph are those on the whole graph."""
    done = python("-c", ALONE, parts, OMP_NUM_THREADS="1")
    assert done.stdout.endswith("equal\n"), done.stderr


def test_training_on_partitions_by_the_command_line(parts, tmp_path):
    flags = "--batch-size 200 --epochs 4 --out".split()
    given = ["-m", "metselect_dgl", "train", "--partitions", parts, *flags, tmp_path]
    done = python(*given, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "hop_chain, 1 trainers" in done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["test"]["accuracy"] > 0.85  # no fixed layer has more than 0.6
    config, model, data = load_run(tmp_path)  # the same checkpoint as on one machine
    assert config.dataset == data.name == "hop_chain"
    with torch.no_grad():
        answers = model(data.graph, data.feat).logits.argmax(1)
    right = (answers == data.labels)[data.split(0).test].double().mean().item()
    assert right == pytest.approx(metrics["test"]["accuracy"], abs=0.01)


def test_flags_that_partitions_need_or_refuse(parts, tmp_path):
    given = ["-m", "metselect_dgl", "train", "--partitions", parts, "--out", tmp_path]
    assert "give a --batch-size" in python(*given).stderr
    refused = python(*given, "--batch-size", 9, "--row-normalize").stderr
    assert "features as `partition` wrote them" in refused


def test_a_server_and_two_trainers(tmp_path):
    """examples/distdgl_local.py as it stands."""
    done = python(ROOT / "examples/distdgl_local.py", "--out", tmp_path, prefix=hosts.alone())
    assert done.returncode == 0, done.stderr
    assert "hop_chain, 2 trainers" in done.stdout
    assert json.loads((tmp_path / "metrics.json").read_text())["test"]["accuracy"] > 0.85


def test_a_trainer_that_fails_ends_the_job(tmp_path):
    flags = ["--out", tmp_path, "--", "--selector", "attn"]
    done = python(ROOT / "examples/distdgl_local.py", *flags, prefix=hosts.alone())
    assert done.returncode != 0
    assert "compares whole layers" in done.stderr and "failed; the others end" in done.stderr


def test_two_partitions_by_metis(tmp_path):
    partition(hop_chain(n_nodes=300), 2, tmp_path)
    about = json.loads((tmp_path / "graph.json").read_text())
    assert about["num_parts"] == 2 and about["part_method"] == "metis"
    with pytest.raises(ValueError, match="has 2 partitions; one process alone can use only 1"):
        connect(tmp_path, None)
    described = json.loads((tmp_path / "metselect.json").read_text())["parts"]
    assert described == [digest(tmp_path / "part0"), digest(tmp_path / "part1")]
    features = tmp_path / "part1" / "node_feat.dgl"
    content = bytearray(features.read_bytes())
    content[-1] ^= 1
    features.write_bytes(content)
    assert digest(tmp_path / "part1") != described[1]


def test_a_damaged_part_is_refused(tmp_path):
    partition(hop_chain(n_nodes=300), 1, tmp_path)
    graph = tmp_path / "part0" / "graph.dgl"
    graph.write_bytes(graph.read_bytes()[:200])
    with pytest.raises(ValueError, match="part0 is not the part"):
        connect(tmp_path, None)


def test_no_partitions(tmp_path):
    with pytest.raises(ValueError, match="holds no partitions; make them with"):
        connect(tmp_path, None)
    with pytest.raises(ValueError, match="parts is 0"):
        partition(hop_chain(n_nodes=300), 0, tmp_path)


CLIENTS = {
    "unset": ({}, 1, "DGL_NUM_CLIENT is not set"),
    "too-few": ({"DGL_NUM_CLIENT": "1", "WORLD_SIZE": "2"}, 1, "there are 2 clients"),
    "too-many": ({"DGL_NUM_CLIENT": "3", "WORLD_SIZE": "2"}, 1, "would wait for ever"),
    "samplers": (
        {"DGL_NUM_CLIENT": "2", "WORLD_SIZE": "2", "DGL_NUM_SAMPLER": "1"},
        1,
        "there are 4 clients",
    ),
    "no-multiple": ({"DGL_NUM_CLIENT": "3", "DGL_ROLE": "server"}, 2, "no multiple of the 2"),
}


@pytest.mark.parametrize(("environment", "parts", "message"), CLIENTS.values(), ids=CLIENTS)
def test_a_wrong_number_of_clients_is_refused(environment, parts, message):
    with pytest.raises(ValueError, match=message):
        check_clients(environment, parts)


def test_right_numbers_of_clients():
    check_clients({"DGL_NUM_CLIENT": "4", "WORLD_SIZE": "2", "DGL_NUM_SAMPLER": "1"}, 2)
    check_clients({"DGL_NUM_CLIENT": "2", "DGL_ROLE": "server"}, 1)
