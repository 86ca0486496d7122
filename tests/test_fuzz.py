"""Fuzz the file readers and the public calls: a clear error or a right result, never a crash.

METSELECT_FUZZ_EXAMPLES sets the number of examples per test (default: 25).
"""

import io
import json
import os
import pickle
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metselect_dgl.data import hop_chain, load_npz, save_npz
from metselect_dgl.experiments.result_rows import read_rows
from metselect_dgl.nn import GAT, GCN, GIN, FinalSelect, MetSelect
from metselect_dgl.train import checkpoint
from metselect_dgl.train.distdgl import read_partitions

EXAMPLES = int(os.environ.get("METSELECT_FUZZ_EXAMPLES", "25"))
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Some bytes of a file changed, cut off, repeated or inserted; or other bytes altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "zero"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=20))
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(0, 100))]
        else:
            end = min(len(data), at + draw(st.integers(0, 100)))
            data[at:end] = bytes(end - at)
    return bytes(data)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def file_bytes(write) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def npz_bytes() -> bytes:
    data = hop_chain(40, n_classes=2, n_feats=4, depth=1, n_splits=1)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"metselect-fuzz-{os.getpid()}.npz"
    save_npz(data, path)
    content = path.read_bytes()
    path.unlink()
    return content


NPZ = npz_bytes()
STATE = {"config": {"lr": 0.1}, "model": {"w": torch.arange(30.0)}, "epoch": 3}
OLD = file_bytes(lambda file: torch.save(STATE, file))
ROWS = b'{"dataset": "cora", "test_accuracy": 0.5}\n{"dataset": "texas", "split": 1}\n'


@fuzzed
@given(content=damaged(NPZ))
def test_npz(tmp_path, content):
    (tmp_path / "data.npz").write_bytes(content)
    try:
        data = load_npz(tmp_path / "data.npz")
    except ValueError as error:
        assert "data.npz" in str(error)
    else:
        assert data.feat.shape[0] == data.graph.num_nodes() == len(data.labels)


@fuzzed
@given(content=damaged(OLD))
def test_checkpoint_without_checksum(tmp_path, content):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    try:
        assert set(checkpoint.load(tmp_path / "checkpoint.pt", set(STATE))) == set(STATE)
    except checkpoint.CheckpointError as error:
        assert "checkpoint.pt" in str(error)


@fuzzed
@given(data=st.data())
def test_checkpoint(tmp_path, data):
    """With a checksum nothing but the original is loaded."""
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(STATE, path)
    original = path.read_bytes()
    content = data.draw(damaged(original))
    path.write_bytes(content)
    try:
        loaded = checkpoint.load(path, set(STATE))
    except checkpoint.CheckpointError as error:
        assert "checkpoint.pt" in str(error)
    else:
        assert content == original and torch.equal(loaded["model"]["w"], STATE["model"]["w"])


@fuzzed
@given(content=damaged(ROWS))
def test_rows(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    try:
        rows = read_rows(tmp_path / "rows.jsonl")
    except ValueError as error:
        assert "rows.jsonl" in str(error)
    else:
        assert all(isinstance(row, dict) for row in rows)


ABOUT = {"dataset": "cora", "split": 0, "seed": 0, "n_classes": 7, "self_loops": False}
ABOUT |= {"fingerprint": "1234", "parts": ["ab12", "cd34"]}
PARTITIONS = {
    "metselect.json": json.dumps(ABOUT).encode(),
    "graph.json": json.dumps({"graph_name": "graph", "num_parts": 2}).encode(),
}


@pytest.mark.parametrize("name", PARTITIONS)
@fuzzed
@given(data=st.data())
def test_partitions(tmp_path, name, data):
    for path, content in PARTITIONS.items():
        (tmp_path / path).write_bytes(content)
    (tmp_path / name).write_bytes(data.draw(damaged(PARTITIONS[name])))
    try:
        about, n_parts = read_partitions(tmp_path)
    except ValueError as error:
        assert "metselect.json" in str(error)
    else:
        assert n_parts == len(about["parts"]) and type(about["n_classes"]) is int


@pytest.mark.parametrize("name", ["data.npz", "checkpoint.pt"])
def test_readers_run_no_code(tmp_path, name):
    bomb = np.empty(1, dtype=object)
    bomb[0] = Bomb(tmp_path / "ran")
    contents = [pickle.dumps(Bomb(tmp_path / "ran")), file_bytes(lambda f: torch.save(bomb[0], f))]
    contents.append(file_bytes(lambda f: np.savez(f, node_features=bomb)))
    for content in contents:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            if name == "data.npz":
                load_npz(tmp_path / name)
            else:
                checkpoint.load(tmp_path / name, {"epoch"})
    assert not (tmp_path / "ran").exists()


DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
DTYPES += [torch.float16, torch.complex64]


@st.composite
def tensors(draw, rows: int) -> torch.Tensor:
    """A tensor that may or may not be features, labels or an index of a graph of so many nodes."""
    shape = draw(
        st.sampled_from([(rows,), (rows, 4), (rows, 1), (4,), (0,), (), (rows - 1,), (rows, 4, 1)])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(-1, draw(st.sampled_from([2, 3, rows])), shape, generator=generator)
    special = draw(st.sampled_from([None, None, None, torch.nan, torch.inf, 1e30]))
    values = values.to(draw(st.sampled_from(DTYPES)))
    if special is not None and values.is_floating_point() and values.numel():
        values.view(-1)[0] = special
    return values


@fuzzed
@given(data=st.data())
def test_public_calls(data):
    """Whatever is passed, the answer is an error of one sentence or finite and of the right size,
    and the model is left as it was."""
    rows = data.draw(st.integers(1, 12))
    ends = torch.randint(rows, (2, data.draw(st.integers(0, 30))))
    graph = dgl.graph((ends[0], ends[1]), num_nodes=rows)
    torch.manual_seed(0)
    backbone = data.draw(st.sampled_from([GCN, GAT, GIN]))
    model = data.draw(st.sampled_from([MetSelect, FinalSelect]))(backbone(4, 8, self_loop=True), 3)
    good = torch.randn(rows, 4), torch.randint(3, (rows,)), torch.arange(rows)
    feat, labels, index = (data.draw(st.just(each) | tensors(rows)) for each in good)
    model(graph, *good)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train(data.draw(st.booleans()))
    try:
        out = model(graph, feat, labels, index)
    except (ValueError, TypeError, dgl.DGLError) as error:
        assert str(error)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        return
    assert out.logits.shape == (len(out.index), 3)
    assert not out.logits.isnan().any()
    assert torch.isfinite(out.loss) or not model.training
    assert (out.layer >= 0).all() and (out.layer < 3).all()
