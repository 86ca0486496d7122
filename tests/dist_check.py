"""`make dist`: build a wheel and an sdist in dist/ and try both in an empty environment with
torch and dgl: `metselect demo` without and with a C++ compiler, and versions that stay as they are.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
BACKEND = "import setuptools.build_meta as b; print(b.build_sdist({0!r}), b.build_wheel({0!r}))"


def run(*command: str | Path, fails: bool = False, **options) -> str:
    """Return the output of a command that must succeed, or with `fails` must fail."""
    command = list(map(str, command))
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if bool(done.returncode) != fails:
        sys.exit(f"dist: unexpected exit status of {' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def check(condition: bool, what: str) -> None:
    """Print a fact that must hold."""
    if not condition:
        sys.exit(f"dist: this does not hold: {what}")
    print(f"ok: {what}", flush=True)


def environment(folder: Path, *packages: str) -> Path:
    """Return the Python of a new virtual environment with these packages."""
    run(sys.executable, "-m", "venv", folder)
    print(f"installing {', '.join(packages)}", flush=True)
    run(folder / "bin/python", "-m", "pip", "install", "-q", *packages)
    return folder / "bin/python"


def pins(*names: str) -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def path_without_compiler(folder: Path) -> Path:
    """Return a folder with links to the programs of the PATH, except compilers."""
    folder.mkdir()
    for entry in os.environ["PATH"].split(os.pathsep):
        for program in Path(entry).glob("*"):
            link = folder / program.name
            if not any(name in program.name for name in ("++", "gcc", "cc", "clang", "nvcc")):
                link.exists() or link.is_symlink() or link.symlink_to(program)
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.rmtree(DIST, ignore_errors=True)
        builder = environment(folder / "builder", *pins("setuptools", "wheel"))
        run(builder, "-c", BACKEND.format(str(DIST)), cwd=ROOT)
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        check(wheel.name.endswith("-py3-none-any.whl"), f"{wheel.name} fits every Python 3")

        python = environment(folder / "user", *pins("torch", "dgl", "packaging", "numpy"))
        pip = python, "-m", "pip"
        before = run(*pip, "freeze").splitlines()
        run(*pip, "install", "-q", ROOT)
        check(set(before) <= set(run(*pip, "freeze").splitlines()), "pip install . changes nothing")
        empty = folder / "empty"
        empty.mkdir()
        where = {"cwd": empty, "env": os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}}
        where["env"].pop("METSELECT_BACKEND", None)
        bare = str(path_without_compiler(folder / "bin"))
        without = {**where, "env": where["env"] | {"PATH": bare, "CXX": "c++"}}
        metselect = python.with_name("metselect")
        for file in (wheel, sdist):
            run(*pip, "uninstall", "-q", "-y", "metselect-dgl")
            run(*pip, "install", "-q", file)
            if file == wheel:
                check("layer" in run(metselect, "demo", **without), "demo runs without a compiler")
                error = run(metselect, "build", fails=True, **without)
                check("no C++ compiler" in error, "metselect build names the missing compiler")
                doctor = run(metselect, "doctor", **without)
                check("metselect build" in doctor, "doctor names metselect build")
                run(metselect, "build", **where)
            check(
                "built and used" in run(metselect, "doctor", **where), f"{file.name}: engine used"
            )
            print(run(metselect, "demo", **where))


if __name__ == "__main__":
    main()
