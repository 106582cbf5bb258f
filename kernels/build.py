"""Compiling kernels for GPUs that are not here: what one build needs of a multiprocessor, and what stands in its code.

A `Build` is one kernel as one configuration launches it. Each kernel's file lists those of the served models in
`builds()`. triton compiles them to real machine code without a GPU; its own `cuobjdump` tells registers, stack and
shared memory, and the disassembly tells whether registers were spilled and which tensor-core instructions it has.
Compilation needs real `@triton.jit` functions: not in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
# What one block of threads can have of a multiprocessor's memory, bytes (CUDA C programming guide, table of technical
# specifications). A launch that asks for more fails, compilation does not. Capabilities 8.6, 8.9 and 12.0 run what
# is built for 8.0, where a block could have 163 KiB: they have 99.
SHARED_MAX = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
DUMP_SECONDS_MAX = 120
# Fused multiply-adds are asked for by name: triton 3.10 leaves them out unless told. Launchers pass these too.
NUMERICS: Mapping[str, Any] = {"enable_fp_fusion": True}

_ELEMENTS = {"i1", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "fp16", "bf16", "fp32", "fp64"}
_ELEMENTS |= {"fp8e4nv", "fp8e5"}
_TENSOR_CORE = re.compile(r"\b(UTC\w*MMA|[HIQBD]?GMMA|[HIQD]MMA)\b")
_SPILL = re.compile(r"\b(?:STL|LDL)\b")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_TENSOR_MEMORY = re.compile(r"tensor_memory_encoding<blockM = (\d+), blockN = (\d+)")


@dataclass(frozen=True)
class Build:
    """One kernel as one configuration launches it.

    `signature`: the type of each argument that is no constexpr: `*bf16` is a pointer, taken as aligned to 16 bytes as
    torch's memory is; `*bf16:1` one that is not; `i32:16` a number that 16 divides (the launcher's specialisation).
    `constexprs`: the others; a None stands for a pointer that is not there, a 1 for a stride of one.
    `dot`: tensor-core instructions are expected. `sweep`: left to the long sweep. `maxnreg`: registers that a thread
    may have; without it ptxas may spill a few rather than pass a number that lets a multiprocessor hold one block more.
    `capabilities`: where it is launched at all.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    dot: bool = False
    sweep: bool = False
    maxnreg: int | None = None
    capabilities: tuple[int, ...] = CAPABILITIES


@dataclass(frozen=True)
class Resources:
    """What a build takes. `registers` of a thread; `spills`: instructions that store or load a spilled register;
    `stack` of a thread and `shared` of a block in bytes; `tensor_core`: the instruction's name, empty if none."""

    registers: int
    spills: int
    stack: int
    shared: int
    tensor_core: str


def compile_for(build: Build, capability: int) -> Resources:
    """Compiles `build` for a GPU of compute capability 10 * major + minor. Raises what triton raises, and ValueError
    for a product that the instructions do not have."""
    assert capability in build.capabilities, (build.name, capability)
    compiled = triton.compile(
        source(build),
        target=GPUTarget("cuda", capability, 32),
        options=options(build),
    )
    if wrong := impossible(compiled.asm["ttgir"]):
        raise ValueError(f"{build.name} on sm_{capability}: {'; '.join(wrong)}")
    text = _dump(compiled.asm["cubin"])
    usage = _USAGE.search(text)
    assert usage, f"cuobjdump printed no usage for {build.name}"
    found = set(_TENSOR_CORE.findall(text))
    # The widest of them: the tensor memory of sm_100, the warp group of sm_90, the warp.
    best = max(found, key=lambda name: (name.startswith("UTC"), "GMMA" in name, name), default="")
    return Resources(
        registers=int(usage[1]),
        spills=len(_SPILL.findall(text)),
        stack=int(usage[2]),
        shared=int(compiled.metadata.shared),
        tensor_core=best,
    )


def impossible(ttgir: str) -> list[str]:
    """The products of tensor memory in triton's GPU dialect that tcgen05.mma does not have: 128 rows take multiples of
    16 columns, 64 rows multiples of 8 (PTX ISA, shapes of tcgen05.mma). triton emits others, and ptxas passes them,
    since the shape is a number in a register: on the card it is an illegal instruction."""
    shapes = sorted({(int(rows), int(columns)) for rows, columns in _TENSOR_MEMORY.findall(ttgir)})
    step = {64: 8, 128: 16}
    return [f"tcgen05.mma has no {m} x {n}" for m, n in shapes if m not in step or n % step[m] or not 0 < n <= 256]


def options(build: Build) -> dict[str, Any]:
    """What a launcher of this build passes besides the arguments."""
    return {"num_warps": build.num_warps, "num_stages": build.num_stages, "maxnreg": build.maxnreg, **NUMERICS}


def source(build: Build) -> ASTSource:
    """What triton compiles. Every argument must be named once, in the signature or among the constexprs."""
    names = list(build.kernel.arg_names)
    both = set(build.signature) & set(build.constexprs)
    assert not both and set(names) == set(build.signature) | set(build.constexprs), (
        f"{build.name}: arguments {names}, signature {sorted(build.signature)}, constexprs {sorted(build.constexprs)}"
    )
    types, attributes = {}, {}
    for at, name in enumerate(names):
        if name in build.constexprs:
            types[name] = "constexpr"
            continue
        kind, _, factor = build.signature[name].partition(":")
        assert kind.lstrip("*") in _ELEMENTS and factor in ("", "1", "16"), f"{build.name}: {name} is {kind}:{factor}"
        types[name] = kind
        if factor == "16" or (kind.startswith("*") and not factor):
            attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(build.kernel, types, dict(build.constexprs), attributes)


def kernel_modules(only: str = "") -> Iterator[Any]:
    """The modules beside this one that have kernels: each has a function `builds`. `only`: those whose name has it."""
    package = __package__ or "zjournal.kernels"
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if found.ispkg or found.name == "build" or only not in found.name:
            continue
        module = importlib.import_module(f"{package}.{found.name}")
        if hasattr(module, "builds"):
            yield module


def all_builds(only: str = "") -> dict[str, Build]:
    """Every build of every kernel, by name. `only`: of the files whose name has it."""
    builds: dict[str, Build] = {}
    for module in kernel_modules(only):
        for build in module.builds():
            assert build.name not in builds, f"two builds are called {build.name}"
            builds[build.name] = build
    return builds


def _dump(cubin: bytes) -> str:
    """Usage and disassembly of one cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run(
            [tool, "-res-usage", "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=DUMP_SECONDS_MAX,
        )
    return done.stdout
