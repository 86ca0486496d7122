"""The CUDA moments, emulated on the CPU, against the float64 reference; detection of a missing
barrier or mask by the emulation; registers of the kernels compiled by nvcc."""

import os
import subprocess
import sys
from pathlib import Path

import cuda_emulation as cuda
import pytest
import torch

from benchmarks.kernel_report_cuda import nvcc, rows
from benchmarks.op_cases import assert_close, make_case
from metselect_dgl import functional as MF
from metselect_dgl import reference

WIDTHS = 5, 37, 64, 130
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1".split()

pytestmark = pytest.mark.skipif(cuda.compiler() is None, reason="there is no C++ compiler")


def runtime() -> str | None:
    """Return the libraries to preload for a sanitized library, as in `make sanitize`."""
    if cuda.compiler() is None:
        return None
    ask = [[cuda.compiler(), f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    paths = [subprocess.run(command, capture_output=True, text=True).stdout for command in ask]
    paths = [path.strip() for path in paths]
    return " ".join(paths) if all(map(os.path.exists, paths)) else None


sanitizer = pytest.mark.skipif(runtime() is None, reason="the C++ compiler brings no libasan.so")


def python(*arguments, **environment) -> subprocess.CompletedProcess:
    """Run Python with these arguments in a new process."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(cuda.ROOT)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def sanitized(*arguments) -> subprocess.CompletedProcess:
    """Run Python as `python` does, with the libraries of the sanitizer preloaded."""
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    return python(
        *arguments, LD_PRELOAD=runtime(), ASAN_OPTIONS=options, METSELECT_BACKEND="reference"
    )


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    flags = SANITIZED if "ASAN_OPTIONS" in os.environ else ()
    return cuda.Emulated(cuda.build(tmp_path_factory.mktemp("emulated") / "cuda", *flags))


def wide(tensors):
    return [tensor.double() for tensor in tensors]


def check(result, inputs, unit=1.0):
    """Assert that `result`, in units of the features, is as close to float64 as float32 torch."""
    layers, labels, index, shifts = inputs
    exact = reference.moments(wide(layers), labels, index, wide(shifts))
    plain = reference.moments(*inputs)
    assert torch.equal(result[0], exact[0])
    for kind, power in ((1, 1), (2, 2)):
        for values in zip(result[kind], exact[kind], plain[kind], strict=True):
            ours, right, yardstick = (value / unit**power for value in values)
            assert_close(ours.float(), right, yardstick.float())
    for gram in result[2]:
        assert torch.equal(gram, gram.T)


def inputs_of(case, shifts=None):
    """Return the arguments of the op, with shifts far from the class means."""
    if shifts is None:
        shifts = [torch.zeros(4, h.shape[1]).copy_(h[:1] / 2) for h in case.layers]
    return case.layers, case.labels, len(case.layers) * [case.index], shifts


class TestKernel:
    """Run once in this process and once with AddressSanitizer."""

    @pytest.mark.parametrize("blocks", [1, 20, 1000])
    @pytest.mark.parametrize("picked", [None, 150, 0], ids=["all", "picked", "none"])
    @pytest.mark.parametrize("n", [1, 63, 130, 600])
    def test_against_the_reference(self, emulated, n, picked, blocks):
        case = make_case(n, WIDTHS, picked=picked, empty_class=2, dtype=torch.float32)
        inputs = inputs_of(case)
        check(emulated.moments(*inputs, blocks=blocks), inputs)

    @pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
    def test_whole_numbers_are_exact(self, emulated, dtype):
        """Sums of small integers are exact in any order and dtype."""
        draw = torch.Generator().manual_seed(0)
        layers = [torch.randint(-8, 9, (300, width), generator=draw) for width in WIDTHS]
        labels = torch.randint(3, (300,), generator=draw)
        shifts = [torch.randint(-8, 9, (3, width), generator=draw).double() for width in WIDTHS]
        exact = reference.moments(wide(layers), labels, 4 * [None], shifts)
        layers = [h.to(dtype) for h in layers]
        shifts = [shift.to(torch.promote_types(dtype, torch.float32)) for shift in shifts]
        assert cuda.same(emulated.moments(layers, labels, 4 * [None], shifts, blocks=20), exact)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half(self, emulated, dtype):
        case = make_case(200, WIDTHS, dtype=torch.float32)
        case.layers = [h.to(dtype) for h in case.layers]
        inputs = inputs_of(case)
        check(emulated.moments(*inputs, blocks=20), inputs)

    @pytest.mark.parametrize("value", [2.0**-24, 1000 * 2.0**-24, 65504.0, -1.5])
    def test_half_at_its_ends(self, emulated, value):
        h = torch.tensor([[value]], dtype=torch.float16)
        _, (total,), _ = emulated.moments(
            [h], torch.zeros(1, dtype=torch.long), [None], [torch.zeros(1, 1)]
        )
        assert total.item() == value

    @pytest.mark.parametrize("layout", ["columns", "every-second", "expanded"])
    def test_strides(self, emulated, layout):
        case = make_case(150, (70,), dtype=torch.float32)
        (h,) = case.layers
        case.layers = {
            "columns": lambda: [torch.empty(70, 150).T.copy_(h)],
            "every-second": lambda: [torch.empty(150, 141)[:, 1::2].copy_(h)],
            "expanded": lambda: [h[:1].expand(150, 70)],
        }[layout]()
        assert not case.layers[0].is_contiguous()
        inputs = inputs_of(case)
        check(emulated.moments(*inputs, blocks=6), inputs)

    @pytest.mark.parametrize("mean", [0.0, 1e4])
    def test_far_from_zero(self, emulated, mean):
        case = make_case(300, (9, 70), dtype=torch.float32)
        case.layers = [h + mean for h in case.layers]
        shifts = MF.moments(case.layers, case.labels, 4).shifts
        inputs = inputs_of(case, shifts)
        check(emulated.moments(*inputs, blocks=20), inputs)

    @pytest.mark.parametrize("scale", [1e20, 1e-20, 1e-30, 1e38, 1e-43])
    def test_scale(self, emulated, scale):
        """Squares overflow or underflow in float32."""
        case = make_case(200, (9, 130), dtype=torch.float32)
        case.layers = [h / h.abs().max() * scale for h in case.layers]
        inputs = inputs_of(case)
        check(emulated.moments(*inputs, blocks=20), inputs, scale)

    @pytest.mark.parametrize("first", [0, 64], ids=["left", "right"])
    def test_columns_of_other_scale(self, emulated, first):
        """A tile of tiny columns beside one of huge columns is as accurate as alone; one scale for
        both would lose its digits."""
        scale = torch.full((128,), 1e-20)
        scale[first : first + 64] = 1e20
        case = make_case(100, (128,), dtype=torch.float32)
        shifts, (h,) = [torch.zeros(4, 128)], case.layers
        ours = emulated.moments([h * scale], case.labels, [None], shifts)
        exact = reference.moments([(h * scale).double()], case.labels, [None], wide(shifts))
        plain = reference.moments([h], case.labels, [None], shifts)
        unit = scale.double()
        for kind, units in ((1, unit), (2, unit * unit[:, None])):
            relative = [result[kind][0] / units for result in (ours, exact)]
            assert_close(relative[0].float(), relative[1], plain[kind][0].float())

    def test_many_classes_and_columns(self, emulated):
        case = make_case(300, (520,), n_classes=1030, dtype=torch.float32)
        inputs = inputs_of(case, [torch.zeros(1030, 520)])
        check(emulated.moments(*inputs, blocks=45), inputs)

    def test_more_layers_than_a_launch_takes(self, emulated):
        case = make_case(20, 35 * (3,), dtype=torch.float32)
        inputs = inputs_of(case)
        check(emulated.moments(*inputs, blocks=6), inputs)

    @pytest.mark.parametrize("name", ["usual", "huge", "label 4"])
    def test_the_order_of_threads_does_not_matter(self, emulated, name):
        first, *others = (
            emulated.moments(*cuda.scenarios()[name], blocks=40, seed=seed) for seed in range(4)
        )
        assert all(cuda.same(first, other) for other in others)

    def test_batch_by_batch(self, emulated):
        """Batches are added to the same buffers, without a copy."""
        case = make_case(300, WIDTHS, picked=280, dtype=torch.float32)
        layers, labels, index, shifts = inputs_of(case)
        into = None
        for some in (slice(0, 130), slice(130, 131), slice(131, 131), slice(131, 280)):
            picked = [rows[some].contiguous() for rows in index]
            batch = layers, labels[some].contiguous(), picked, shifts
            into = emulated.moments(*batch, blocks=20, into=into)
        check(into, (layers, labels, index, shifts))

    @pytest.mark.parametrize("number", [-1, 300])
    def test_index_out_of_range(self, emulated, number):
        """All results of the layer are NaN; those of the other layer and the counts are not."""
        inputs = cuda.scenarios()[f"index {number}"]
        count, sums, grams = emulated.moments(*inputs, blocks=40)
        layers, labels, index, shifts = inputs
        check((count, sums[:1], grams[:1]), (layers[:1], labels, index[:1], shifts[:1]))
        assert sums[1].isnan().all()
        assert grams[1].isnan().all()

    @pytest.mark.parametrize("number", [-1, 4])
    def test_label_out_of_range(self, emulated, number):
        count, sums, grams = emulated.moments(*cuda.scenarios()[f"label {number}"], blocks=40)
        assert all(result.isnan().all() for result in (count, *sums, *grams))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_nan_and_infinity_propagate(self, emulated, value):
        case = make_case(100, (70,), dtype=torch.float32)
        case.layers[0][50, 3] = value
        layers, labels, index, shifts = inputs_of(case)
        _, (total,), (gram,) = emulated.moments(layers, labels, index, shifts)
        r = layers[0].double() - shifts[0].double()[labels]
        assert torch.equal(gram.isfinite(), (r.T @ r).isfinite())
        expected = torch.ones(4, 70, dtype=torch.bool)
        expected[labels[50], 3] = False
        assert torch.equal(total.isfinite(), expected)


@sanitizer
def test_with_address_sanitizer():
    pytest_alone = "-m pytest -q --noconftest -p no:cacheprovider".split()
    done = sanitized(*pytest_alone, f"{__file__}::TestKernel")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def detected(folder, edits, seeds=4, flags=(), run=python) -> dict[str, str]:
    """Return the faults detected in the kernel with each of the edits (a replacement of texts, and
    the number of the occurrence to replace)."""
    libraries = {
        name: cuda.build(folder / name, *flags, edits=edit, at=at)
        for name, (edit, at) in edits.items()
    }
    done = run(cuda.__file__, seeds, *libraries.values())
    assert done.returncode == 0, done.stderr
    return {name: Path(f"{library}.log").read_text() for name, library in libraries.items()}


def test_a_missing_barrier_is_detected(tmp_path):
    """For each barrier; the unchanged kernel passes."""
    barrier = "__syncthreads();"
    barriers = (cuda.ROOT / "csrc/cuda/moments.cuh").read_text().count(barrier)
    edits = {str(number): ({barrier: ";"}, number) for number in range(barriers)}
    diverging = {barrier: f"if (threadIdx.x != 3) {barrier}"}
    faults = detected(tmp_path, {"none": ({}, 0), "diverging": (diverging, 0), **edits})
    assert faults.pop("none") == "no fault\n"
    assert "divergent barrier: thread" in faults.pop("diverging")
    assert len(faults) == barriers == 6
    for number, log in faults.items():
        assert "the order of threads matters" in log or "ended by signal" in log, (number, log)


MASKS = {
    "rows": {"i < plan.n": "true"},
    "columns": {" && column < layer.width": ""},
    "index": {" || row >= layer.rows": ""},
    "label": {" || label >= plan.classes": ""},
    "output": {"row >= layer.width || column >= layer.width": "false"},
}


@sanitizer
def test_a_missing_mask_is_detected(tmp_path):
    edits = {name: (edit, 0) for name, edit in {"none": {}, **MASKS}.items()}
    faults = detected(tmp_path, edits, 1, ("-fsanitize=address", "-g1"), sanitized)
    assert faults.pop("none").endswith("no fault\n")
    for name, log in faults.items():
        assert "AddressSanitizer: heap-buffer-overflow" in log, (name, log)


@pytest.mark.skipif(nvcc() is None, reason="there is no nvcc")
def test_registers():
    resources = rows()
    assert {row["target"] for row in resources} == {"sm_80", "sm_90"}
    assert len(resources) == 2 * (len(cuda.DTYPES) + 1)
    for row in resources:
        assert row["stack"] == row["spills"] == 0, row
        assert row["shared"] <= 48 * 1024, row
        three_blocks = 65536 // (3 * 256)
        assert row["registers"] <= (128 if "double" in row["config"] else three_blocks), row
