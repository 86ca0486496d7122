"""The model refuses a CUDA stream on which DGL's kernels would not run; torch.cuda is a fake."""

import dgl
import pytest
import torch

from metselect_dgl.nn import GCN, streams


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that sets the current stream and whether DGL has its adapter; graphs
    report a GPU."""

    def use(stream, adapter):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
        monkeypatch.setattr(streams, "is_tensor_adaptor_enabled", lambda: adapter)
        monkeypatch.setattr(dgl.DGLGraph, "device", torch.device("cuda"))

    return use


@pytest.fixture
def graph():
    return dgl.graph(([0, 1, 2], [1, 2, 0]))


@pytest.mark.parametrize("as_blocks", [False, True], ids=["graph", "blocks"])
def test_another_stream_without_adapter_is_refused(on_gpu, graph, as_blocks):
    on_gpu("mine", adapter=False)
    with pytest.raises(RuntimeError, match=r"no memory adapter for torch .* default stream"):
        streams.check_stream([graph] if as_blocks else graph)


@pytest.mark.parametrize(("stream", "adapter"), [("default", False), ("mine", True)])
def test_streams_that_work(on_gpu, graph, stream, adapter):
    on_gpu(stream, adapter)
    streams.check_stream(graph)


def test_graphs_on_a_cpu_and_other_kinds_of_graphs_are_not_checked(graph, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("asked"))
    for value in (graph, [graph], [], torch.zeros(2, 3), None):
        streams.check_stream(value)


def test_backbone(on_gpu, graph, monkeypatch):
    backbone = GCN(4, 4)
    on_gpu("mine", adapter=False)
    feat = torch.ones(3, 4)
    with pytest.raises(ValueError, match="graph is on cuda, feat on cpu"):
        backbone(graph, feat)
    monkeypatch.setattr("metselect_dgl.nn.backbone.check_feat", lambda *a: None)
    with pytest.raises(RuntimeError, match="no memory adapter"):
        backbone(graph, feat.as_subclass(OnGpu))


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU."""

    device = torch.device("cuda")
