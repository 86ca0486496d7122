"""`make compat`: run the tests with several versions of Python, torch and dgl, each in a virtual
environment that is deleted afterwards, and write docs/compatibility.md.

    python tests/compatibility.py [PAIR ...]    a pair is python-torch-dgl, e.g. 3.11-2.2.1-2.1.0

Every pair downloads up to 5 GB. Rows of pairs that are not run again stay as they are.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "metselect_dgl/compatibility.json"
PAGE = ROOT / "docs/compatibility.md"
LOGS = ROOT / "build/compatibility"
# Tests of this repository's pages, benchmarks, packaging and pinned versions, and of CUDA sources
# compiled for a CPU: they do not depend on the versions that are installed.
LEFT_OUT = (
    "benchmarks cuda_moments hosts packaging readme reproduce roofline run_configs scaling speed "
    "tf32 without_dgl"
).split()
TEST_PACKAGES = ["pytest", "pytest-timeout", "pytest-benchmark", "hypothesis", "scikit-learn"]
TEST_PACKAGES += ["setuptools>=77,<81", "wheel", "torch_geometric", "ogb"]
# What a dgl needs beside its own requirements: 1.1.3 was built for NumPy 1 and 2, 2.1.0 for 1.
DGL_PACKAGES = {
    "1.1.3": ["dgl==1.1.3", "packaging"],
    "2.1.0": ["dgl==2.1.0", "numpy<2", "packaging", "pandas", "pydantic", "torchdata<0.8"],
    "none": [],
}
FACTS = """
import json, os
from importlib import metadata
os.environ.setdefault("DGLBACKEND", "pytorch")
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
from metselect_dgl import ops
print(json.dumps({"triton": version("triton"), "numpy": version("numpy"), "built": ops.NATIVE,
                  "torch": version("torch").partition("+")[0]}))
"""
HEAD = """# Compatibility

Written by `make compat`, which installs each row into an empty virtual environment, compiles the
C++ operators and runs the tests (without those of this repository's pages, benchmarks, packaging
and hosts, which do not depend on these versions). Tests that need what a version lacks are skipped
with the reason. `metselect doctor` names the row of your environment.

| Python | torch | dgl | Triton | NumPy | C++ engine | passed | skipped | failed | date | remark |
|---|---|---|---|---|---|---:|---:|---:|---|---|
"""


def python_of(version: str) -> str:
    """Return a Python interpreter of this version: on the PATH or of pyenv."""
    roots = sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/*"))
    candidates = [f"python{version}", *(str(root / "bin/python") for root in reversed(roots))]
    for name in candidates:
        ask = [name, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        try:
            if subprocess.run(ask, capture_output=True, text=True).stdout.strip() == version:
                return name
        except OSError:
            continue
    raise RuntimeError(f"Python {version} is not installed")


def run(log, *command: str | Path, **environment: str) -> int:
    """Run a command with its output in the log; return its exit status."""
    command = list(map(str, command))
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    merged = os.environ | {"DGLBACKEND": "pytorch"} | environment
    return subprocess.run(
        command, stdout=log, stderr=subprocess.STDOUT, env=merged, cwd=ROOT
    ).returncode


def test_pair(row: dict) -> dict:
    """Return the row with what was found; the log is in build/compatibility."""
    name = "-".join((row["python"], row["torch"], row["dgl"]))
    folder, path = LOGS / name, LOGS / f"{name}.log"
    python, row = folder / "bin/python", {**row, "date": str(datetime.date.today())}
    shutil.rmtree(folder, ignore_errors=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as log:
        try:
            failed = run(log, python_of(row["python"]), "-m", "venv", folder)
            torch = "torch" if row["torch"] == "newest" else f"torch=={row['torch']}"
            wanted = [torch, *DGL_PACKAGES[row["dgl"]], *TEST_PACKAGES]
            if row["torch"] == "2.4.1":
                wanted.append("numpy<2")  # for the interpreter of Triton 3.0
            if "2.13" in torch:
                wanted.append("triton==3.7.1")  # torch's CPU build has none
            failed = failed or run(log, python, "-m", "pip", "install", "-q", *wanted)
            own = ["--no-build-isolation", "-e", "."]
            failed = failed or run(log, python, "-m", "pip", "install", "-q", *own)
            if failed:
                return {**row, "result": f"cannot be installed: {last_error(path)}"}
            facts = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, cwd=ROOT)
            log.write(facts.stderr)
            log.flush()
            if facts.returncode:
                return {**row, "result": f"cannot be imported: {last_error(path)}"}
            ignored = [f"--ignore=tests/test_{name}.py" for name in LEFT_OUT]
            options = ["-q", "-rs", "--tb=short", "-p", "no:cacheprovider", *ignored]
            run(log, python, "-m", "pytest", *options)
        except RuntimeError as error:
            return {**row, "result": str(error)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    summary = re.findall(
        r"^=* ?(\d+ (?:passed|failed|error|skipped).*) in ", path.read_text(), re.M
    )
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    for number, kind in re.findall(r"(\d+) (\w+)", summary[-1] if summary else ""):
        kind = "failed" if kind.startswith("error") else kind
        if kind in counts:
            counts[kind] += int(number)
    result = "passed" if counts["passed"] and not counts["failed"] else "tests fail"
    return {**row, **json.loads(facts.stdout), **counts, "result": result}


def last_error(path: Path) -> str:
    """Return the last line of a log that mentions an error."""
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line] or lines
    return errors[-1][:150]


def write(rows: list[dict]) -> None:
    """Write the rows and the page."""
    ROWS.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
    lines = []
    for row in rows:
        built = {True: "yes", False: "no"}.get(row.get("built"), "")
        remark = "" if row["result"] == "passed" else row["result"]
        remark = "; ".join(filter(None, (remark, row.get("remark", ""))))
        names = ("triton", "numpy"), ("passed", "skipped", "failed", "date")
        first, last = ([str(row.get(name, "")) for name in part] for part in names)
        cells = [row["python"], row["torch"], row["dgl"], *first, built, *last, remark]
        lines.append(f"| {' | '.join(cells)} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


def main(names: list[str]) -> None:
    rows = json.loads(ROWS.read_text())
    for number, row in enumerate(rows):
        name = "-".join((row["python"], row["torch"], row["dgl"]))
        if names and name not in names:
            continue
        print(f"{name}: running, log: {LOGS / name}.log", flush=True)
        rows[number] = test_pair({key: row[key] for key in ("python", "torch", "dgl")})
        write(rows)
        print(f"{name}: {rows[number]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
