"""The compiled extension against the reference, and when it is used."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.op_cases import assert_close, make_case
from metselect_dgl import ops, reference

native = pytest.mark.skipif(
    not ops.NATIVE, reason="the extension is not built, or METSELECT_BACKEND is reference"
)
unsanitized = pytest.mark.skipif(
    "ASAN_OPTIONS" in os.environ,
    reason="a sanitizer brings its own allocator, and looks at nothing in the reference",
)
OPS = ops.functions


def python(code: str, backend: str) -> subprocess.CompletedProcess:
    """Run `code` in a new process with METSELECT_BACKEND=`backend`."""
    environment = os.environ | {"METSELECT_BACKEND": backend}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def registered(backend: str) -> str:
    code = (
        "import torch, metselect_dgl.ops as ops;"
        "print(ops.NATIVE, ops.compiled('moments', torch.device('cpu')))"
    )
    done = python(code, backend)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_reference_on_request():
    assert registered("reference") == "False False"


@native
def test_native_by_default_and_on_request():
    assert registered("auto") == registered("native") == "True True"


def test_a_request_that_cannot_be_met_raises():
    hidden = "import os; os.environ['XDG_CACHE_HOME'] = '/nonexistent'; import metselect_dgl.ops"
    done = python(hidden, "native")
    assert done.returncode != 0
    assert "METSELECT_BACKEND=native, but the extension is not built" in done.stderr
    assert python(hidden, "auto").returncode == 0
    assert (
        "use one of auto, native, reference, triton"
        in python("import metselect_dgl.ops", "gpu").stderr
    )


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@pytest.mark.parametrize("n_classes", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 600])
def test_class_distances_around_the_blocks(n, n_classes, dtype):
    """Sizes around blocks of 4 rows and 16 classes and tiles of 512 rows."""
    draw = torch.Generator().manual_seed(n)
    h, mean, factor = (
        torch.randn(size, generator=draw, dtype=torch.float64)
        for size in ((n, 7), (n_classes, 7), (7, 7))
    )
    valid = torch.arange(n_classes) != n_classes - 2
    exact = reference.class_distances([h], [mean], [factor], valid, [None])
    given = [[tensor.to(dtype)] for tensor in (h, mean, factor)]
    actual = OPS.class_distances(*given, valid, [None])
    if dtype == torch.float64:
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=0)
    else:
        assert_close(actual, exact, reference.class_distances(*given, valid, [None]))


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("picked", [None, 1500, 0], ids=["all", "picked", "none"])
@pytest.mark.parametrize("n", [1, 511, 513, 2100])
class TestAgainstTheReference:
    """Sizes around the tile of 512 rows; ragged widths; a class without nodes."""

    @pytest.fixture(autouse=True)
    def case(self, n, picked, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self.case = make_case(n, (5, 37, 64), picked=picked, empty_class=2, dtype=torch.float32)
        self.index = [self.case.index] * 3
        yield
        torch.set_num_threads(before)

    def both(self, name, *inputs):
        """Return (native float32, reference float64, reference float32); two native calls agree
        bitwise."""

        def wide(value):
            if isinstance(value, list):
                return [wide(entry) for entry in value]
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.double() if floating else value

        plain = getattr(reference, name)
        ours, again = (getattr(OPS, name)(*inputs) for _ in range(2))
        torch.testing.assert_close(ours, again, rtol=0, atol=0, equal_nan=True)
        return ours, plain(*map(wide, inputs)), plain(*inputs)

    def metric(self):
        known = make_case(400, (5, 37, 64), empty_class=2, dtype=torch.float32).metric()
        return self.case.layers, known["means"], known["factors"], known["valid"]

    def test_moments(self):
        shifts = [h[:4].repeat(4, 1)[:4].contiguous() for h in self.case.layers]
        results = self.both("moments", self.case.layers, self.case.labels, self.index, shifts)
        (count, *ours), (exact_count, *exact), (_, *plain) = results
        assert torch.equal(count, exact_count)
        for kind in range(2):
            for a, b, c in zip(ours[kind], exact[kind], plain[kind], strict=True):
                assert_close(a.float(), b, c.float())

    def test_class_distances(self):
        assert_close(*self.both("class_distances", *self.metric(), self.index))

    def test_class_distances_backward(self):
        rows = len(self.case.labels)
        grad = torch.randn(3, rows, 4, generator=torch.Generator().manual_seed(1))
        results = self.both("class_distances_backward", grad, *self.metric(), self.index)
        for a, b, c in zip(*results, strict=True):
            assert_close(a, b, c)

    @pytest.mark.parametrize("rule", ["confidence", "distance", "opposite"])
    @pytest.mark.parametrize("phase", ["training", "inference"])
    def test_select_layer(self, rule, phase):
        labels = self.case.labels if phase == "training" else None
        t = torch.tensor([1.0, 2.0, 0.5])
        ours, exact, plain = self.both("select_layer", *self.metric(), t, self.index, labels, rule)
        same = ours[0] == exact[0]
        assert same.sum() >= (plain[0] == exact[0]).sum() - 1e-3 * len(same)
        assert torch.equal(ours[1][same], exact[1][same])
        if same.any():
            assert_close(ours[2][same], exact[2][same], plain[2][same])

    def test_metric_logits(self):
        t = torch.tensor([1.0, 2.0, 0.5])
        assert_close(*self.both("metric_logits", *self.metric(), t, self.index))

    def choice(self):
        return torch.arange(len(self.case.labels)) % 3

    def test_selected_logits(self):
        decoders = self.case.layers, self.case.weights, self.case.biases, self.choice()
        assert_close(*self.both("selected_logits", *decoders, self.index))

    def test_selected_logits_backward(self):
        rows = len(self.case.labels)
        grad = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
        inputs = grad, self.case.layers, self.case.weights, self.choice(), self.index
        results = self.both("selected_logits_backward", *inputs)
        for parts in zip(*results, strict=True):
            for a, b, c in zip(*parts, strict=True):
                assert_close(a, b, c)

    @pytest.mark.parametrize("keep", [True, False], ids=["logits", "no-logits"])
    @pytest.mark.parametrize("deep", [0.0, 0.5])
    def test_selected_cross_entropy(self, deep, keep):
        decoders = self.case.layers, self.case.weights, self.case.biases, self.choice()
        results = self.both(
            "selected_cross_entropy",
            *decoders,
            self.case.labels,
            self.index,
            deep,
            [True, False, True],
            keep,
        )
        ours, exact, plain = (
            [loss, logits, *(g for part in grads for g in part)] for loss, logits, *grads in results
        )
        for a, b, c in zip(ours, exact, plain, strict=True):
            assert_close(a, b, c)
        assert ours[3].shape == (0,), "the gradient that was not wanted"

    def test_layers_with_different_rows(self):
        """The first layer has all rows and an index, the others only the picked rows."""
        rows = [self.case.picked(h) for h in self.case.layers]
        layers, index = [self.case.layers[0], *rows[1:]], [self.case.index, None, None]
        mean, factor, valid = self.metric()[1:]
        mixed, plain = (
            OPS.select_layer(h, mean, factor, valid, torch.ones(3), i, None, "confidence")
            for h, i in ((layers, index), (rows, 3 * [None]))
        )
        torch.testing.assert_close(mixed, plain, rtol=0, atol=0)


LAYOUTS = {
    "columns": lambda h: torch.empty(6, len(h)).T.copy_(h),
    "wide": lambda h: torch.empty(len(h), 9)[:, :6].copy_(h),
    "expanded": lambda h: h[:1].expand(len(h), 6),
    "one-row": lambda h: torch.empty(6, 1).T.copy_(h[:1]),
}


@native
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layers_of_any_layout(layout):
    case = make_case(700, (6,), dtype=torch.float32)
    metric, layer = tuple(case.metric().values()), layout(case.layers[0])
    plain, labels, one = (
        layer.clone(memory_format=torch.contiguous_format),
        case.labels[: len(layer)],
        torch.ones(1),
    )
    choice, weights = torch.zeros(len(layer), dtype=torch.long), torch.randn(6, 5)
    decoders = case.weights, case.biases, choice
    for call in (
        lambda h: OPS.moments([h], labels, [None], metric[0]),
        lambda h: OPS.class_distances([h], *metric, [None]),
        lambda h: OPS.metric_logits([h], *metric, one, [None]),
        lambda h: OPS.select_layer([h], *metric, one, [None], labels, "distance"),
        lambda h: OPS.selected_logits([h], *decoders, [None]),
        lambda h: OPS.selected_cross_entropy([h], *decoders, labels, [None], 1.0, [True], True),
        lambda h: OPS.linear_relu(h, weights, torch.zeros(5)),
    ):
        torch.testing.assert_close(call(layer), call(plain))


@native
def test_wrong_labels_raise():
    case = make_case(20, (3,))
    shifts = [torch.zeros(4, 3, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match="labels must be a contiguous int64 vector"):
        OPS.moments(case.layers, case.labels.int(), [None], shifts)
    with pytest.raises(RuntimeError, match="got 19 labels for 20 rows"):
        OPS.moments(case.layers, case.labels[1:], [None], shifts)
    with pytest.raises(IndexError, match="expected 0 to 3"):
        OPS.moments(case.layers, case.labels + 1, [None], shifts)


@native
@pytest.mark.parametrize("number", [-1, 20])
def test_numbers_out_of_range_raise(number):
    """An error instead of a read outside the tensor."""
    case = make_case(20, (3,))
    metric, t = tuple(case.metric().values()), torch.ones(1, dtype=torch.float64)
    index, one = torch.tensor([0, number]), torch.tensor([0, 0])
    shifts = [torch.zeros(4, 3, dtype=torch.float64)]
    grad = torch.zeros(1, 2, 4, dtype=torch.float64)
    for call in (
        lambda: OPS.moments(case.layers, one, [index], shifts),
        lambda: OPS.class_distances(case.layers, *metric, [index]),
        lambda: OPS.class_distances_backward(grad, case.layers, *metric, [index]),
        lambda: OPS.select_layer(case.layers, *metric, t, [index], None, "confidence"),
        lambda: OPS.select_layer(case.layers, *metric, t, [one], index, "confidence"),
    ):
        with pytest.raises(IndexError, match=rf"\[1\] is {number}, expected 0 to"):
            call()


@native
def test_wrong_shapes_raise():
    case = make_case(20, (3,))
    means, factors, valid = case.metric().values()
    with pytest.raises(RuntimeError, match="layer 0 has shape"):
        OPS.class_distances([case.layers[0][:, :2]], means, factors, valid, [None])
    with pytest.raises(RuntimeError, match="2 layers, constants of 1"):
        OPS.class_distances(2 * case.layers, means, factors, valid, [None, None])
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.float64)
    for wrong, match in (
        ((means, factors, valid[:2]), "valid is Bool of shape .2. for 4 classes"),
        ((means, [], valid), "1 means and 0 factors"),
        ((means, [factors[0][:, :2]], valid), "factor 0 is Double of shape .3, 2."),
        ((means, [factors[0].float()], valid), "factor 0 is Float"),
        (([means[0].float()], factors, valid), "layer 0 is Double, its constants Float"),
        (([none], factors, valid[:0]), "its constants .0, 3."),
    ):
        for call in (
            lambda *metric: OPS.class_distances(case.layers, *metric, [None]),
            lambda *metric: OPS.metric_logits(case.layers, *metric, one, [None]),
            lambda *metric: OPS.select_layer(case.layers, *metric, one, [None], None, "confidence"),
        ):
            with pytest.raises(RuntimeError, match=match):
                call(*wrong)
    with pytest.raises(RuntimeError, match=r"temperature has shape .2. for 1 layers"):
        OPS.metric_logits(case.layers, means, factors, valid, one.repeat(2), [None])


@native
def test_nan_propagates():
    """A NaN must not become a confident score."""
    case = make_case(20, (3,))
    case.layers[0][0, 0] = torch.inf
    metric, t = make_case(20, (3,)).metric().values(), torch.ones(1, dtype=torch.float64)
    _, _, score = OPS.select_layer(case.layers, *metric, t, [None], case.labels, "confidence")
    assert torch.isnan(score[0])
    assert torch.isfinite(score[1:]).all()


@native
@unsanitized
def test_freed_memory_is_kept():
    """The pages of a freed tensor are reused by the next one of its size."""
    code = """
import resource, torch
from metselect_dgl import ops

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(12_000_000)  # 48 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
usual = faults()
print(ops.keep_freed_memory(), [faults() for _ in range(5)][-1] < usual / 4)
print(ops.keep_freed_memory(False))
"""
    done = python(code, "native")
    assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr


def test_nothing_is_kept_without_the_extension():
    done = python("from metselect_dgl import ops; print(ops.keep_freed_memory())", "reference")
    assert done.stdout.strip() == "False"


@unsanitized
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", ["reference"])
def test_the_ops_pass_their_tests_on_the_reference(elsewhere, run):
    """Where the extension is built, the other tests use it; this run uses the reference."""
    status, output = elsewhere(run)
    assert status == 0, output[-3000:]
