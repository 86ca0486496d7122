"""Test the emulation of tf32 products."""

import math

import pytest
import torch

from benchmarks import tf32
from benchmarks.op_cases import make_case
from benchmarks.tf32 import product, scores, to_tf32
from metselect_dgl import functional as MF

STEP = 2.0**-10  # of tf32 at 1
ROUNDED = {  # value: (truncated, to nearest)
    1.0: (1.0, 1.0),
    1 + STEP / 2 - 2**-23: (1.0, 1.0),
    1 + STEP / 2: (1.0, 1 + STEP),  # the tie goes away from 0
    1 + STEP - 2**-23: (1.0, 1 + STEP),
    -(1 + STEP / 2): (-1.0, -(1 + STEP)),
    2 - 2**-23: (2 - STEP, 2.0),  # the carry reaches the exponent
    0.0: (0.0, 0.0),
    3.140625: (3.140625, 3.140625),  # 11.001001 in binary: nothing to round
    0.1: (0.0999755859375, 0.0999755859375),  # 0x3dcccccd -> 0x3dccc000
    0.3: (0.2998046875, 0.300048828125),  # 0x3e99999a -> 0x3e998000, 0x3e99a000
    math.inf: (math.inf, math.inf),
    -math.inf: (-math.inf, -math.inf),
}


@pytest.mark.parametrize(("value", "rounded"), ROUNDED.items(), ids=map(str, ROUNDED))
def test_rounded_by_hand(value, rounded):
    x = torch.tensor([value])
    assert to_tf32(x, "truncate").item() == rounded[0]
    assert to_tf32(x, "nearest").item() == rounded[1]


def test_nan_stays_and_the_layout_does_not_matter():
    x = torch.tensor([[math.nan, 0.3], [0.3, 0.1]])
    assert to_tf32(x, "nearest")[0, 0].isnan()
    assert torch.equal(to_tf32(x.T)[1:], to_tf32(x).T[1:])


def test_products_by_hand():
    """x = 1 + 2^-12 loses its end in tf32; its two parts keep it, and their product all but the
    square of the small one."""
    x = torch.tensor([[1 + 2.0**-12]])
    assert product(x, x, "tf32").item() == 1
    assert product(x, x, "tf32x3").item() == 1 + 2.0**-11
    assert product(x, x, "fp32").item() == 1 + 2.0**-11


def test_scores_are_those_of_select_layer():
    case = make_case(80, (9, 5), 4, empty_class=2)
    temperature = torch.tensor([1.7, 0.6], dtype=torch.float64)
    found = scores(case.layers, case.metric(), temperature, "fp32")
    layer, _, score = MF.select_layer(case.layers, **case.metric(), temperature=temperature)
    torch.testing.assert_close(found.amax(0), score)
    assert torch.equal(found.argmax(0), layer)


def test_study_runs(monkeypatch, capsys):
    """On data that every checkout has."""
    monkeypatch.setattr("sys.argv", ["tf32", "hop_chain", "--epochs", "8"])
    tf32.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "hop_chain" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == [f"hop_chain, {name}" for name in tf32.PRECISIONS]
    assert cells[0][3:5] == ["0.00", "0.00"]
    assert float(cells[1][2]) > 10 * float(cells[2][2]) > 0
