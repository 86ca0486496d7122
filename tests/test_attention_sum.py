"""attention_sum: against dgl.nn.GATConv, the float64 reference, and its gradient."""

from itertools import pairwise

import dgl
import pytest
import torch
from dgl.nn import GATConv

from benchmarks.op_cases import assert_close, compressed_edges, gradients
from metselect_dgl import ops, reference

OPS = ops.functions
SLOPE = 0.2
native = pytest.mark.skipif(
    not ops.NATIVE, reason="the extension is not built, or METSELECT_BACKEND is reference"
)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_ends(n_src: int, n_dst: int, n_edges: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ends of edges: low node numbers have most of them, the last target none."""
    draw = torch.Generator().manual_seed(n_src + n_dst)
    src, dst = torch.rand(2, n_edges, generator=draw, dtype=torch.float64) ** 3
    return (src * n_src).long(), (dst * max(1, n_dst - 1)).long()


def make_inputs(n_src=6, n_dst=5, n_edges=15, heads=2, width=3, dtype=torch.float64):
    """Return (edges, (feat, source, target))."""
    draw = torch.Generator().manual_seed(n_edges)
    sizes = ((n_src, heads, width), (n_src, heads), (n_dst, heads))
    values = [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in sizes]
    edges = compressed_edges(*random_ends(n_src, n_dst, n_edges), n_src, n_dst)
    return edges, values


def wide(values):
    return [value.double() for value in values]


@pytest.mark.parametrize("bipartite", [False, True], ids=["graph", "bipartite"])
@pytest.mark.parametrize("heads", [1, 4])
def test_gat_conv(heads, bipartite, threads):
    """The same layer, forward and all gradients, with nodes without in-edges."""
    n_src, n_dst = (63, 40) if bipartite else (63, 63)
    ends = random_ends(n_src, n_dst, 400)
    if bipartite:
        graph = dgl.heterograph({("a", "to", "b"): ends}, num_nodes_dict={"a": n_src, "b": n_dst})
    else:
        graph = dgl.graph(ends, num_nodes=n_src)
    assert (graph.in_degrees() == 0).any()
    torch.manual_seed(0)
    conv = GATConv(7, 16, heads, negative_slope=SLOPE, allow_zero_in_degree=True).double()
    a, b = (torch.randn(n, 7, dtype=torch.float64) for n in (n_src, n_dst))
    edges = compressed_edges(*ends, n_src, n_dst)
    weight, left, right = (conv.fc.weight, conv.attn_l, conv.attn_r)

    def by_dgl(a, b, *parameters):
        names = ("fc.weight", "attn_l", "attn_r")
        feat = (a, b) if bipartite else a
        replaced = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(conv, replaced, (graph, feat)) + 0 * b.sum()

    def by_us(a, b, weight, left, right):
        b = b if bipartite else a + 0 * b
        feat = (a @ weight.T).view(n_src, heads, 16)
        source = (feat * left).sum(-1)
        target = ((b @ weight.T).view(n_dst, heads, 16) * right).sum(-1)
        return OPS.attention_sum(*edges, feat, source, target, SLOPE)[0] + conv.bias.view(heads, 16)

    inputs = (a, b, weight, left, right)
    torch.testing.assert_close(by_us(*inputs), by_dgl(*inputs))
    for ours, theirs in zip(gradients(by_us, inputs), gradients(by_dgl, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("heads", "width"), [(1, 5), (3, 37), (4, 16)], ids=str)
@pytest.mark.parametrize("n", [1, 63, 130])
def test_float32_is_as_good_as_plain_torch(n, heads, width, threads):
    edges, values = make_inputs(n, n + 7, 20 * n, heads, width, torch.float32)
    ours = OPS.attention_sum(*edges, *values, SLOPE)
    plain = reference.attention_sum(*edges, *values, SLOPE)
    exact = reference.attention_sum(*edges, *wide(values), SLOPE)
    for results in zip(ours, exact, plain, strict=True):
        assert_close(*results)


@pytest.mark.parametrize(("heads", "width"), [(1, 5), (3, 37), (4, 16)], ids=str)
@pytest.mark.parametrize("n", [1, 63, 130])
def test_float32_gradients_are_as_good_as_plain_torch(n, heads, width, threads):
    """Over 16 draws, because one draw may round a gradient of 0 to exactly 0."""
    edges, values = make_inputs(n, n + 7, 20 * n, heads, width, torch.float32)
    attention = OPS.attention_sum(*edges, *values, SLOPE)[1]
    _, exact = reference.attention_sum(*edges, *wide(values), SLOPE)
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(n + 7, heads, width, generator=draw) for _ in range(16)]

    def stacked(backward, grads, values, attention):
        results = [backward(grad, *edges, *values, attention, SLOPE) for grad in grads]
        return [torch.stack(kind) for kind in zip(*results, strict=True)]

    ours, again = (stacked(OPS.attention_sum_backward, grads, values, attention) for _ in range(2))
    plain = stacked(reference.attention_sum_backward, grads, values, attention)
    exact = stacked(reference.attention_sum_backward, wide(grads), wide(values), exact)
    for results in zip(ours, exact, plain, strict=True):
        assert_close(*results)
    torch.testing.assert_close(ours, again, rtol=0, atol=0)


@pytest.mark.parametrize(("heads", "width"), [(3, 37), (4, 16)], ids=str)
def test_a_single_in_edge_has_no_gradient(heads, width):
    """Its attention is 1 for any logit, so the gradients to source and target are exactly 0."""
    nodes = torch.arange(63)
    edges = compressed_edges(nodes, nodes, 63, 63)
    _, values = make_inputs(63, 63, 63, heads, width, torch.float32)
    out, attention = OPS.attention_sum(*edges, *values, SLOPE)
    assert torch.equal(out, values[0]) and (attention == 1).all()
    grad = torch.randn(63, heads, width, generator=torch.Generator().manual_seed(1))
    to_feat, *to_logits = OPS.attention_sum_backward(grad, *edges, *values, attention, SLOPE)
    assert torch.equal(to_feat, grad)
    assert not any(value.any() for value in to_logits)


def test_gradcheck():
    edges, values = make_inputs()
    values = [value.requires_grad_() for value in values]
    assert torch.autograd.gradcheck(lambda *v: OPS.attention_sum(*edges, *v, SLOPE)[0], values)


def test_gradient_is_that_of_autograd_through_the_formula(threads):
    """Nodes with 300 edges beside nodes with 1."""
    hub, nodes = torch.zeros(299, dtype=torch.long), torch.arange(300)
    src, dst = torch.cat([hub, nodes, nodes[1:]]), torch.cat([nodes[1:], nodes, hub])
    edges = compressed_edges(src, dst, 300, 300)
    _, values = make_inputs(300, 300, heads=4, width=16)
    ours = gradients(lambda *v: OPS.attention_sum(*edges, *v, SLOPE)[0], values)
    formula = gradients(lambda *v: reference.attention_sum(*edges, *v, SLOPE)[0], values)
    for a, b in zip(ours, formula, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_is_a_distribution_without_a_gradient():
    edges, values = make_inputs()
    values = [value.requires_grad_() for value in values]
    out, attention = OPS.attention_sum(*edges, *values, SLOPE)
    assert out.requires_grad and not attention.requires_grad
    for first, last in pairwise(edges[0]):
        if first < last:
            torch.testing.assert_close(attention[first:last].sum(0), torch.ones(2).double())


def test_a_target_without_edges_is_zero():
    edges, values = make_inputs()
    out, _ = OPS.attention_sum(*edges, *values, SLOPE)
    assert (out[-1] == 0).all() and (out[0] != 0).all()


@pytest.mark.parametrize("sizes", [(4, 3), (0, 0), (0, 3), (4, 0)], ids=str)
def test_no_edges(sizes):
    edges, values = make_inputs(*sizes, n_edges=0)
    out, attention = OPS.attention_sum(*edges, *values, SLOPE)
    assert out.shape == (sizes[1], 2, 3) and attention.shape == (0, 2)
    assert not out.any()
    for grad in gradients(lambda *v: OPS.attention_sum(*edges, *v, SLOPE)[0], values):
        assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_logits(dtype):
    edges, (feat, source, target) = make_inputs(63, 63, 600, 4, 16, dtype)
    out, attention = OPS.attention_sum(*edges, feat, 1e4 * source, 1e4 * target, SLOPE)
    assert torch.isfinite(out).all() and torch.isfinite(attention).all()
    values = (feat, 1e4 * source, 1e4 * target)
    for grad in gradients(lambda *v: OPS.attention_sum(*edges, *v, SLOPE)[0], values):
        assert torch.isfinite(grad).all()


def test_strided_inputs():
    edges, values = make_inputs(63, 40, 400, 4, 16)
    strided = [value.transpose(0, 1).contiguous().transpose(0, 1) for value in values]
    assert not strided[0].is_contiguous()
    plain, attention = OPS.attention_sum(*edges, *values, SLOPE)
    torch.testing.assert_close(OPS.attention_sum(*edges, *strided, SLOPE), (plain, attention))
    grad = torch.randn(4, 40, 16, dtype=torch.float64).transpose(0, 1)
    ours = OPS.attention_sum_backward(grad, *edges, *strided, attention.T.contiguous().T, SLOPE)
    expected = reference.attention_sum_backward(grad, *edges, *values, attention, SLOPE)
    torch.testing.assert_close(ours, expected)
    assert all(value.is_contiguous() for value in ours)


@native
@pytest.mark.parametrize("number", [-1, 99])
@pytest.mark.parametrize("which", [1, 3, 4], ids=["indices", "back_indices", "back_edges"])
def test_numbers_out_of_range_raise(which, number):
    """An error instead of a read outside the tensor."""
    edges, values = make_inputs()
    attention = torch.rand(15, 2, dtype=torch.float64)
    grad = torch.zeros(5, 2, 3, dtype=torch.float64)
    edges[which][2] = number
    with pytest.raises(IndexError, match=rf"\[2\] is {number}, expected 0 to"):
        OPS.attention_sum_backward(grad, *edges, *values, attention, SLOPE)
    if which == 1:
        with pytest.raises(IndexError, match=rf"indices\[2\] is {number}, expected 0 to 5"):
            OPS.attention_sum(*edges, *values, SLOPE)


@native
def test_edges_of_wrong_shape_raise():
    (indptr, *rest), (feat, source, target) = make_inputs()

    def call(indptr, indices=rest[0], feat=feat, target=target):
        return OPS.attention_sum(indptr, indices, *rest[1:], feat, source, target, SLOPE)

    with pytest.raises(RuntimeError, match="contiguous int64 vector of 6 entries"):
        call(indptr[1:])
    with pytest.raises(RuntimeError, match="from 0 to the 15 edges, got 1 to 16"):
        call(indptr + 1)
    back = torch.tensor([0, 9, 7, 9, 9, 15])
    with pytest.raises(RuntimeError, match=r"indptr\[2\] is 7, less than the 9 before it"):
        call(back)
    with pytest.raises(RuntimeError, match="indices must be a contiguous int32 vector"):
        call(indptr, rest[0].long())
    with pytest.raises(RuntimeError, match=r"feat \[N, H, F\], source \[N, H\] and target"):
        call(indptr, feat=feat[1:])
    with pytest.raises(RuntimeError, match="have dtypes"):
        call(indptr, target=target.float())
