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
    """Continue without the extension and print the reason; with METSELECT_BACKEND=native, exit."""
    if os.environ.get("METSELECT_BACKEND") == "native":
        sys.exit(f"metselect-dgl: METSELECT_BACKEND=native, but {reason}")
    print(f"metselect-dgl: {reason}; the ops will run in plain torch", file=sys.stderr)


def cuda_toolkit() -> bool:
    """Return whether csrc/cuda can be built: torch has CUDA, and CUDA_HOME has nvcc."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None or not CUDA_HOME or not Path(CUDA_HOME, "bin/nvcc").exists():
        return False
    if torch.cuda.device_count() == 0:  # torch would detect the GPUs to build for
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return True


def module(cuda: bool):
    """Return `metselect_dgl._C` from csrc/cpu and, with `cuda`, csrc/cuda."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    flags = os.environ.get("METSELECT_CXXFLAGS", "-O3").split()
    folders = ["csrc/cpu", "csrc/cuda"] if cuda else ["csrc/cpu"]
    sources = sorted(
        file for at in folders for kind in ("cpp", "cu") for file in glob(f"{at}/*.{kind}")
    )
    return (CUDAExtension if cuda else CppExtension)(
        "metselect_dgl._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        depends=[*glob("csrc/*.h"), *glob("csrc/cuda/*.*h")],
        extra_compile_args={"cxx": [*flags, "-fopenmp", "-fno-trapping-math"], "nvcc": ["-O3"]},
        extra_link_args=[*flags, "-fopenmp"],
    )


def extension() -> dict:
    """Return the arguments of `setup` that build the ops; none without sources or a compiler.

    METSELECT_CXXFLAGS replaces -O3 when compiling and linking. TORCH_CUDA_ARCH_LIST names the GPUs
    to build for.
    """
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    if not glob("csrc/cpu/*.cpp") or shutil.which(compiler) is None:
        there = Path("csrc/cpu").exists()
        do_without(f"no C++ compiler {compiler!r}" if there else "there is no csrc/cpu")
        return {}
    from torch.utils.cpp_extension import BuildExtension

    cuda = cuda_toolkit()

    class OptionalBuild(BuildExtension):
        """Install without the CUDA ops, or without the extension, if they do not compile."""

        def run(self) -> None:
            before = self.compiler, self.inplace  # a failing run changes them
            try:
                super().run()
            except Exception as error:  # torch raises RuntimeError for a failed compiler
                if not cuda:
                    return self.give_up(error, before[1])
                print(f"metselect-dgl: the CUDA ops could not be built ({error})", file=sys.stderr)
                self.compiler, self.inplace = before
                vars(self.extensions[0]).update(vars(module(cuda=False)))
                try:
                    super().run()
                except Exception as error:
                    self.give_up(error, before[1])

        def give_up(self, error: Exception, inplace: bool) -> None:
            do_without(f"the compiled ops could not be built with {compiler!r} ({error})")
            self.extensions = []
            for outdated in glob(f"{'.' if inplace else self.build_lib}/metselect_dgl/_C*.so"):
                os.remove(outdated)

    return {"ext_modules": [module(cuda)], "cmdclass": {"build_ext": OptionalBuild}}


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
    package_data={"metselect_dgl.experiments": ["paper.yaml"]},
    install_requires=[
        "torch==2.13.0",
        "numpy>=1.26",
        "scipy>=1.11",
        "PyYAML>=6.0",
        "tqdm>=4.60",
        "matplotlib>=3.8",
    ],
    extras_require={
        # packaging is imported by dgl, but not among its requirements
        "dgl": ["dgl==1.1.3", "packaging"],
        "pyg": ["torch_geometric>=2.5"],
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
