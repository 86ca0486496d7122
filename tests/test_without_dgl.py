"""Functions, heads, the PyG adapter, `--help` and `doctor` work where DGL is not installed, and
what needs DGL names the command that installs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REMEDY = "needs DGL: pip install 'metselect-dgl[dgl]'"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", ["without_dgl"])
def test_tests_that_need_no_dgl(elsewhere, run):
    """In another process, where DGL is hidden."""
    status, output = elsewhere(run)
    assert status == 0, output[-3000:]
    assert int(re.search(r"(\d+) passed", output)[1]) > 100
    assert "dgl was imported: False" in output


def without_dgl(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Run code in a new process where DGL is hidden, in a folder of its own."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.hidden_dgl\n{code}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_head_on_layers_of_your_own(tmp_path):
    """Train, calibrate and predict with the head alone."""
    code = (
        "import torch, metselect_dgl\n"
        "from metselect_dgl.nn import MetSelectHead\n"
        "torch.manual_seed(0)\n"
        "labels = torch.arange(90) % 3\n"
        "layers = [torch.randn(90, 8), torch.eye(4)[labels] + 0.1 * torch.randn(90, 4)]\n"
        "head = MetSelectHead([8, 4], 3)\n"
        "optimizer = torch.optim.Adam(head.parameters(), lr=0.1)\n"
        "for _ in range(30):\n"
        "    optimizer.zero_grad()\n"
        "    head(layers, labels=labels, index=torch.arange(45)).loss.backward()\n"
        "    optimizer.step()\n"
        "head.calibrate(layers, labels, torch.arange(45, 60))\n"
        "out = head.eval()(layers)\n"
        "print((out.logits.argmax(1) == labels)[60:].all(), 'dgl' in sys.modules)\n"
    )
    assert without_dgl(code, tmp_path).stdout == "tensor(True) False\n"


def test_what_needs_dgl_says_so(tmp_path):
    """Every public name either works or raises this error."""
    code = (
        "import metselect_dgl.nn as nn\n"
        "for name in nn.__all__:\n"
        "    try:\n"
        "        getattr(nn, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "for module in ('data', 'train', 'train.distdgl', 'train.launch'):\n"
        "    try:\n"
        "        __import__('metselect_dgl.' + module)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    lines = without_dgl(code, tmp_path).stdout.splitlines()
    assert all(line.endswith(REMEDY) for line in lines), lines
    names = {line.removesuffix(REMEDY).strip().removeprefix("metselect_dgl.") for line in lines}
    assert {"nn.GCN", "nn.FinalSelect", "nn.NDLSelect", "nn.DegreeSampler", "data"} <= names
    assert not {"nn.MetSelect", "nn.MetSelectHead", "nn.StoredLayers"} & names


def run_command(arguments: list[str], tmp_path: Path) -> subprocess.CompletedProcess:
    return without_dgl(f"from metselect_dgl import cli\nsys.exit(cli.main({arguments}))", tmp_path)


def test_help(tmp_path):
    done = run_command(["--help"], tmp_path)
    assert done.returncode == 0
    assert "doctor" in done.stdout


def test_doctor(tmp_path):
    (row,) = (
        line
        for line in run_command(["doctor"], tmp_path).stdout.splitlines()
        if line.startswith("dgl ")
    )
    assert row.split()[:2] == ["dgl", "off"]


COMMANDS = {
    "train": ["train"],
    "demo": ["demo"],
    "compare": ["compare"],
    "partition": ["partition"],
    "reproduce": ["reproduce", "--quick"],
    "explain": ["explain", "1", "--run", "."],
    "launch": ["launch", "--hosts", "hosts", "--partitions", "parts"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_commands_end_with_one_line(arguments, tmp_path):
    done = run_command(arguments, tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("metselect: metselect_dgl.")
    assert line.endswith(REMEDY)
