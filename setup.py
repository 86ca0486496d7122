"""The packages of metselect-dgl; everything else is in pyproject.toml.

Where torch can be imported (`pip install --no-build-isolation`), the operators are compiled, too.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# kernels/ and csrc/ are top-level folders, but are installed below the package.
FOLDERS = ("kernels", "csrc", "csrc.cpu", "csrc.cuda")


class BuildPython(build_py):
    """Collect the Python files, then compile the operators into the user's cache."""

    def run(self) -> None:
        super().run()
        if find_spec("torch") is None:
            print("metselect-dgl: `metselect build` compiles the operators for your torch")
            return
        sys.path.insert(0, str(Path(__file__).absolute().parent))
        from metselect_dgl import build

        try:
            print(f"metselect-dgl: built {build.build()}")
        except (OSError, RuntimeError) as error:
            if os.environ.get("METSELECT_BACKEND") == "native":
                sys.exit(f"metselect-dgl: METSELECT_BACKEND=native, but {error}")
            print(f"metselect-dgl: {error}", file=sys.stderr)
            print("metselect-dgl: the operators will run in plain torch", file=sys.stderr)


setup(
    packages=[
        *find_packages(include=["metselect_dgl", "metselect_dgl.*"]),
        *(f"metselect_dgl.{folder}" for folder in FOLDERS),
    ],
    package_dir={f"metselect_dgl.{folder}": folder.replace(".", "/") for folder in FOLDERS},
    package_data={
        "metselect_dgl": ["*.json"],
        "metselect_dgl.experiments": ["paper.yaml"],
        "metselect_dgl.csrc": ["*.h"],
        "metselect_dgl.csrc.cpu": ["*.cpp"],
        "metselect_dgl.csrc.cuda": ["*.cpp", "*.cu", "*.cuh", "*.h"],
    },
    include_package_data=False,
    cmdclass={"build_py": BuildPython},
)
