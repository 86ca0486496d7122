"""The CUDA streams on which DGL can be used."""

import torch
from dgl import DGLGraph
from dgl._ffi.base import is_tensor_adaptor_enabled


def check_stream(graph: object) -> None:
    """Raise RuntimeError if DGL's kernels would not run on torch's current stream.

    DGL learns of torch's stream from a library (tensoradapter) that it has for some versions of
    torch. Without it, its kernels run on the null stream, which is torch's default stream.
    """
    graph = graph[0] if isinstance(graph, list | tuple) and graph else graph
    if not isinstance(graph, DGLGraph) or graph.device.type != "cuda":
        return
    if is_tensor_adaptor_enabled():
        return
    if torch.cuda.current_stream(graph.device) != torch.cuda.default_stream(graph.device):
        raise RuntimeError(
            f"this dgl has no memory adapter for torch {torch.__version__}: its kernels run on the "
            "null stream and would not wait for the current CUDA stream; call the model on torch's "
            "default stream, outside torch.cuda.stream(...)"
        )
