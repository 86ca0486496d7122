"""Compile Triton kernels ahead of time, without a GPU, and read the resources of the machine code.

An op is called on small tensors and its launches are recorded instead of executed: each kernel,
with the same types, constants and config, is compiled for the target. (At run time Triton may also
specialise on integers that are multiples of 16.)
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from metselect_dgl.kernels import tiles
from metselect_dgl.kernels.tiles import Config

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTER = {
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Launch:
    """A recorded launch: kernel, types of its arguments, constants, and config."""

    kernel: triton.JITFunction
    config: Config
    signature: dict[str, str] = field(hash=False)
    constants: dict[str, object] = field(hash=False)


def recorded_launches(call: Callable[[], object]) -> list[Launch]:
    """Return the launches of `call`, its kernels with every config that the tuning may choose."""
    launches = []

    def record(kernel, grid, config, **arguments):
        values = arguments | tiles.tile_of(kernel, config)
        types = {name: _type(values[name], name) for name in kernel.arg_names}
        constants = {name: values[name] for name, kind in types.items() if kind == "constexpr"}
        launches.append(Launch(kernel, config, types, constants))

    def every_config(name, given, layers, configs, run):
        results = [run(one) for one in tiles.fitting(configs, given, layers)]
        return results[0]

    with mock.patch.multiple(tiles, launch=record, tuned=every_config):
        call()
    return launches


def _type(value, name: str) -> str:
    if isinstance(value, Tensor):
        return _POINTER[value.dtype]
    if name.isupper() or value is None or value == 1:  # Triton makes 1 and None constants
        return "constexpr"
    return "i32"


def with_config(launch: Launch, config: Config) -> Launch:
    """Return the same launch with another config."""
    return replace(
        launch,
        config=config,
        constants=launch.constants | tiles.tile_of(launch.kernel, config),
    )


def compiled(launch: Launch, target: str) -> triton.compiler.CompiledKernel:
    """Compile the launch for the target; pointers are aligned as torch aligns them."""
    names = launch.kernel.arg_names
    pointers = (at for at, name in enumerate(names) if launch.signature[name].startswith("*"))
    aligned = {(at,): [["tt.divisibility", 16]] for at in pointers}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, aligned)
    options = launch.config.options
    if target.startswith("gfx"):
        options.pop("maxnreg", None)
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(launch: Launch, target: str) -> dict[str, int]:
    """Return registers per thread, bytes of shared memory and stack, and the number of spills."""
    kernel = compiled(launch, target)
    read = _amd_resources if target.startswith("gfx") else _nvidia_resources
    return {"shared": kernel.metadata.shared, **read(kernel)}


def _nvidia_resources(kernel) -> dict[str, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [tool, "-res-usage", binary], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [triton.knobs.nvidia.nvdisasm.path, binary], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]), "spills": spills}


def _amd_resources(kernel) -> dict[str, int]:
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),  # scalar registers spill to lanes of vector registers
    }
