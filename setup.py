"""Build of metselect-dgl. Install with `pip install --no-build-isolation .`"""

import os
import re
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def do_without(reason: str) -> None:
    """Go on without the extension and say so; METSELECT_BACKEND=native insists on it."""
    if os.environ.get("METSELECT_BACKEND") == "native":
        sys.exit(f"metselect-dgl: METSELECT_BACKEND=native, but {reason}")
    print(f"metselect-dgl: {reason}; plain torch will serve", file=sys.stderr)


def extension() -> dict:
    """`metselect_dgl._C` from csrc/cpu; without sources or a compiler plain torch serves.

    METSELECT_CXXFLAGS replaces -O3, in compiling and in linking.
    """
    sources = sorted(glob("csrc/cpu/*.cpp"))
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    if not sources or shutil.which(compiler) is None:
        do_without(f"no C++ compiler {compiler!r}" if sources else "there is no csrc/cpu")
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class OptionalBuild(BuildExtension):
        """A compiler that fails leaves the package without the extension, not uninstalled."""

        def run(self) -> None:
            folder = "." if self.inplace else self.build_lib
            try:
                super().run()
            except Exception as error:  # torch makes a RuntimeError of a failed compiler
                do_without(f"the compiled engine could not be built with {compiler!r} ({error})")
                self.extensions = []
                for outdated in glob(f"{folder}/metselect_dgl/_C*.so"):
                    os.remove(outdated)

    flags = os.environ.get("METSELECT_CXXFLAGS", "-O3").split()
    module = CppExtension(
        "metselect_dgl._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        depends=glob("csrc/*.h"),
        extra_compile_args=[*flags, "-fopenmp", "-fno-trapping-math"],
        extra_link_args=[*flags, "-fopenmp"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": OptionalBuild}}


setup(
    name="metselect-dgl",
    version=re.search(
        r'^__version__ = "(.+)"$', (ROOT / "metselect_dgl/__init__.py").read_text(), re.MULTILINE
    )[1],
    description="Per-node layer selection for graph neural networks by Mahalanobis class distance",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # DGL 1.1.3 has no build for Python 3.12, the pinned NumPy none for 3.10.
    python_requires=">=3.11,<3.12",
    # kernels/ is a top-level folder, but must not install under that name, which is taken.
    packages=[
        *find_packages(include=["metselect_dgl", "metselect_dgl.*"]),
        "metselect_dgl.kernels",
    ],
    package_dir={"metselect_dgl.kernels": "kernels"},
    install_requires=[
        "torch==2.13.0",
        "dgl==1.1.3",
        "packaging",  # imported by dgl, which does not ask for it
        "numpy>=1.26",
        "scipy>=1.11",
        "PyYAML>=6.0",
        "tqdm>=4.60",
        "matplotlib>=3.8",
    ],
    extras_require={
        "ogb": ["ogb==1.3.6"],
        "dev": [
            "clang-format",
            "hypothesis",
            "pytest",
            "pytest-benchmark",
            "pytest-timeout",
            "ruff",
            "scikit-learn",
            "triton>=3.7,<3.10; sys_platform == 'linux'",
        ],
    },
    entry_points={"console_scripts": ["metselect = metselect_dgl.cli:main"]},
    **extension(),
)
