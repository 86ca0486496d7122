"""neighbour_sum and linear_relu: against dense matrices and plain torch, forward and gradient."""

import pytest
import torch

from benchmarks.op_cases import assert_close, compressed_edges, gradients
from metselect_dgl import ops, reference
from metselect_dgl.functional import graph
from metselect_dgl.nn.adjacency import SparseRows
from metselect_dgl.ops import registry
from metselect_dgl.ops.neighbour_sum import NeighbourSum

OPS = ops.functions


def edges(targets: int, sources: int, n_edges: int, seed: int = 0) -> tuple:
    """Return random edges by target and by source, and the dense matrix."""
    draw = torch.Generator().manual_seed(seed)
    at = torch.randint(targets, (n_edges,), generator=draw)
    source = torch.randint(sources, (n_edges,), generator=draw)
    dense = torch.zeros(targets, sources, dtype=torch.float64)
    dense.index_put_((at, source), torch.ones(n_edges, dtype=torch.float64), accumulate=True)
    *csr, _ = compressed_edges(source, at, sources, targets)
    return (*csr, None, None), dense


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("targets", "sources", "n_edges", "width"),
    [(1, 1, 0, 3), (63, 130, 900, 5), (130, 63, 1, 37), (700, 600, 9000, 64)],
)
def test_neighbour_sum(targets, sources, n_edges, width, scaled, threads):
    csr, dense = edges(targets, sources, n_edges)
    draw = torch.Generator().manual_seed(1)
    h, s, t, more = (
        torch.randn(shape, generator=draw)
        for shape in ((sources, width), (sources,), (targets,), (targets, width))
    )
    scales = (s, t) if scaled else (None, None)
    exact = dense @ h.double()
    if scaled:
        exact = t.double()[:, None] * (dense @ (s.double()[:, None] * h.double()))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    ours, again = (OPS.neighbour_sum(*csr, *scales, h, more) for _ in range(2))
    torch.set_num_threads(before)
    assert torch.equal(ours, again)
    plain = reference.neighbour_sum(*csr, *scales, h, more)
    assert_close(ours, exact + more.double(), plain)


def test_neighbour_sum_gradient():
    csr, _ = edges(7, 9, 30)
    draw = torch.Generator().manual_seed(1)
    s, t = (torch.rand(n, generator=draw, dtype=torch.float64) for n in (9, 7))
    h = torch.randn(9, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    more = torch.randn(7, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h, more: NeighbourSum.apply(h, more, *csr, s, t), (h, more)
    )
    assert torch.autograd.gradcheck(lambda h: NeighbourSum.apply(h, None, *csr, None, None)[0], h)


def sum_and_second_use(h, csr):
    """Return two results of neighbour_sum: of the sums and of the returned features."""
    sums, again = graph.neighbour_sum(*csr[:4], h)
    return sums.square().sum(), (again * again).sum()


def test_gradient_of_a_second_use_is_merged():
    csr, dense = edges(7, 9, 30)
    h = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sum(sum_and_second_use(h, csr)), h)
    torch.testing.assert_close(gradient, 2 * dense.T @ dense @ h + 2 * h)
    assert torch.autograd.gradcheck(lambda h: sum_and_second_use(h, csr), h)
    assert torch.autograd.gradgradcheck(lambda h: sum_and_second_use(h, csr), h)


@pytest.mark.skipif(
    not registry.TORCH_2_4, reason="before torch 2.4 the operators have no fakes to trace with"
)
def test_neighbour_sum_compiles_into_one_graph():
    csr, _ = edges(7, 9, 30)
    h = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(sum_and_second_use, backend="aot_eager", fullgraph=True)
    gradients = (torch.autograd.grad(sum(f(h, csr)), h) for f in (compiled, sum_and_second_use))
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(
    not ops.NATIVE,
    reason="the extension is not built, or METSELECT_BACKEND is reference",
)
def test_edges_out_of_range_raise():
    (indptr, indices, *back), _ = edges(7, 9, 30)  # and no weights
    h = torch.zeros(9, 2)
    with pytest.raises(IndexError, match="indices"):
        OPS.neighbour_sum(indptr, indices + 9, *back, None, None, h, None)
    with pytest.raises(RuntimeError, match="indptr"):
        OPS.neighbour_sum(indptr + 1, indices, *back, None, None, h, None)
    with pytest.raises(RuntimeError, match="indptr"):
        OPS.neighbour_sum(indptr[:0], indices[:0], *back, None, None, h, None)
    with pytest.raises(RuntimeError, match="int32"):
        OPS.neighbour_sum(indptr, indices.long(), *back, None, None, h, None)
    with pytest.raises(RuntimeError, match="source_scale"):
        OPS.neighbour_sum(indptr, indices, *back, torch.ones(8), None, h, None)


def linear(n, width, out_feats, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = (n, width), (width, out_feats), (out_feats,), (n, out_feats)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "width", "out_feats"), [(0, 3, 2), (1, 5, 37), (513, 64, 5)])
def test_linear_relu(n, width, out_feats, threads):
    h, weight, bias, grad = linear(n, width, out_feats)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    out = OPS.linear_relu(h, weight, bias)
    ours = (out, *OPS.linear_relu_backward(grad, h, weight, out, True))
    torch.set_num_threads(before)

    def plain(h, weight, bias, grad):
        return (
            reference.linear_relu(h, weight, bias),
            *reference.linear_relu_backward(grad, h, weight, out, True),
        )

    exact = plain(*(value.double() for value in (h, weight, bias, grad)))
    for a, b, c in zip(ours, exact, plain(h, weight, bias, grad), strict=True):
        assert_close(a, b, c)


def test_linear_relu_gradient():
    h, weight, bias, _ = (value.requires_grad_() for value in linear(9, 4, 3, torch.float64))
    assert torch.autograd.gradcheck(OPS.linear_relu, (h, weight, bias))
    transposed = weight.detach().T.contiguous().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w, b: OPS.linear_relu(h.detach(), w.T, b), (transposed, bias)
    )


@pytest.mark.parametrize("shape", [(1, 1), (63, 130), (700, 40)])
def test_a_sparse_matrix_times_weights(shape):
    """Edge weights: a sparse matrix times a dense one."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=draw) * (torch.rand(shape, generator=draw) < 0.05)
    weight = torch.randn(shape[1], 37, generator=draw)
    sparse = SparseRows.of(matrix)
    ours = sparse.times(weight)
    assert_close(ours, matrix.double() @ weight.double(), matrix @ weight)
    wide = SparseRows.of(matrix.double())
    torch.testing.assert_close(
        *(gradients(times, [weight.double()]) for times in (wide.times, matrix.double().matmul))
    )


@pytest.mark.parametrize(("n", "width"), [(0, 3), (1, 1), (700, 13), (5000, 64)])
def test_fingerprint(n, width):
    """The compiled sum is the reference's, whatever overflows, on any number of threads."""
    draw, limits = torch.Generator().manual_seed(0), torch.iinfo(torch.int32)
    bits = torch.randint(limits.min, limits.max, (n, width), dtype=torch.int32, generator=draw)
    expected = reference.fingerprint(bits)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(OPS.fingerprint(bits), expected)
    torch.set_num_threads(before)
    if ops.NATIVE:
        with pytest.raises(RuntimeError, match="must be an int32 matrix"):
            OPS.fingerprint(bits.long())
