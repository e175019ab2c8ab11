"""``metagrpo bench static``: every Triton kernel compiled for every target, with no GPU, and what came out.

A kernel fails on a register spill, on more shared memory than its target has, and, if it multiplies matrices, on
machine code without a tensor-core instruction. The roofline time of a call is the longer of moving its bytes and
computing its FLOPs at the target's peak: what the kernel cannot beat, not what it takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrpo.bench import static_cases
from metagrpo.bench.disassembly import Reading, read_amdgcn, read_sass
from metagrpo.bench.static_cases import Cost

KIB = 1024


class Target(NamedTuple):
    """A GPU to compile for: the vendors' figures, dense, in bytes and FLOPs a second."""

    gpu: str
    backend: str
    arch: int | str
    warp: int
    shared: int
    """Bytes of shared memory a block may have."""
    bandwidth: float
    matrix: dict[str, float]
    """Peak of matrix products by dtype; of fp32 as the kernels compute them: three TF32 products on NVIDIA."""
    vector: float


TARGETS = {
    "sm_80": Target("A100 80 GB", "cuda", 80, 32, 163 * KIB, 2.04e12, {"bf16": 312e12, "fp32": 156e12 / 3}, 19.5e12),
    "sm_90": Target("H100 SXM", "cuda", 90, 32, 227 * KIB, 3.35e12, {"bf16": 989e12, "fp32": 494e12 / 3}, 67e12),
    "sm_100": Target("B200", "cuda", 100, 32, 227 * KIB, 8e12, {"bf16": 2250e12, "fp32": 1125e12 / 3}, 75e12),
    "gfx942": Target("MI300X", "hip", "gfx942", 64, 64 * KIB, 5.3e12, {"bf16": 1307e12, "fp32": 163e12}, 163e12),
}

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
}


@dataclass
class Row:
    """A kernel on a target."""

    kernel: str
    target: str
    dtype: str
    config: dict[str, Any]
    registers: int
    stack: int
    spills: int
    shared: int
    tensor: dict[str, int]
    flops: int
    bytes: int
    roofline_us: float
    faults: list[str]


@dataclass
class Report:
    """All rows, and the targets that could not be compiled for here with the reason."""

    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        return [f"{r.kernel} {r.dtype} on {r.target}: {fault}" for r in self.rows for fault in r.faults]


def report() -> Report:
    """Compile everything, in processes of their own, since Triton's interpreter may be on in this one.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    result = Report({name: version(name) for name in ("triton", "torch")})
    context = get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=_compile_for_real) as pool:
        for target, reason in zip(TARGETS, pool.map(_unusable, TARGETS), strict=True):
            if reason is not None:
                result.unusable[target] = reason
        jobs = [
            (operator, dtype, target)
            for operator in static_cases.OPERATORS
            for dtype in static_cases.DTYPES
            for target in TARGETS
            if target not in result.unusable
        ]
        for rows in pool.map(_rows, *zip(*jobs, strict=True)) if jobs else ():
            result.rows += rows
    return result


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")


def _unusable(target: str) -> str | None:
    """Why this installation cannot compile for the target, tried on a kernel that does nothing."""
    from metagrpo.bench.static_probe import probe_kernel
    from metagrpo.kernels.triton.launch import Launch

    try:
        examine(Launch(probe_kernel, 1, (torch.empty(1, device="meta"),), {}), target)
    except Exception as error:  # whatever a missing or too old assembler raises
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _rows(operator: str, dtype: str, target: str) -> list[Row]:
    """Rows of the different launches that an operator makes."""
    from metagrpo.kernels.triton.launch import recording

    with recording(target) as launches:
        static_cases.OPERATORS[operator](static_cases.DTYPES[dtype])
    rows: dict[str, Row] = {}
    for launch in launches:
        signature, constants, _ = _specialised(launch)
        key = f"{launch.kernel.__name__} {signature} {constants} {launch.constants}"
        if key not in rows:
            name = launch.kernel.__name__.removesuffix("_kernel")
            arguments = dict(zip(_runtime(launch.kernel), launch.arguments, strict=True))
            rows[key] = row(name, dtype, target, launch, static_cases.cost(name, launch.programs, arguments))
    return list(rows.values())


def row(name: str, dtype: str, target: str, launch: Any, cost: Cost) -> Row:
    """Compile a launch and judge it."""
    reading, shared = examine(launch, target)
    goal = TARGETS[target]
    peak = goal.matrix[dtype] if cost.matrix else goal.vector
    return Row(
        kernel=name,
        target=target,
        dtype=dtype,
        config=launch.constants,
        registers=reading.registers,
        stack=reading.stack,
        spills=reading.spills,
        shared=shared,
        tensor=reading.tensor,
        flops=cost.flops,
        bytes=cost.bytes,
        roofline_us=1e6 * max(cost.bytes / goal.bandwidth, cost.flops / peak),
        faults=faults(reading, shared, goal.shared, cost.matrix),
    )


def faults(reading: Reading, shared: int, limit: int, matrix: bool) -> list[str]:
    """What is wrong with a kernel."""
    found = []
    if reading.spills or reading.stack:
        found.append(f"spills registers: {reading.spills} loads and stores, {reading.stack} bytes a thread")
    if shared > limit:
        found.append(f"takes {shared} bytes of shared memory, the target has {limit}")
    if matrix and not reading.tensor:
        found.append("multiplies matrices without a tensor-core instruction")
    return found


def examine(launch: Any, target: str) -> tuple[Reading, int]:
    """What the machine code of a launch says, and the bytes of shared memory it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    goal = TARGETS[target]
    signature, constants, attributes = _specialised(launch)
    options = {name: value for name, value in launch.constants.items() if name.startswith("num_")}
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget(goal.backend, goal.arch, goal.warp),
        options=options,
    )
    if "amdgcn" in compiled.asm:
        return read_amdgcn(compiled.asm["amdgcn"]), compiled.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        run = subprocess.run([tool, "-sass", "-res-usage", cubin], capture_output=True, text=True, check=True)
    return read_sass(run.stdout), compiled.metadata.shared


def _runtime(kernel: Any) -> list[str]:
    return [p.name for p in kernel.params if not p.is_constexpr]


def _specialised(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[Any]]]:
    """Types, compile-time values and attributes of all parameters, as Triton's own launcher derives them: ``None``
    and an int of 1 become constants, and an int that 16 divides tells the compiler so, as do all pointers."""
    arguments = iter(launch.arguments)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.constants[parameter.name] if parameter.is_constexpr else next(arguments)
        specialise = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialise and type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, Tensor) or (specialise and isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def table(result: Report) -> str:
    """The report for a terminal."""
    head = ("kernel", "dtype", "target", "regs", "spills", "shared KiB", "tensor cores", "GFLOP", "MB", "roofline µs")
    lines = [head]
    for r in result.rows:
        cores = " ".join(f"{count} {name}" for name, count in sorted(r.tensor.items())) or "-"
        numbers = (f"{r.flops / 1e9:.1f}", f"{r.bytes / 1e6:.1f}", f"{r.roofline_us:.1f}")
        shared = f"{r.shared / KIB:.1f}/{TARGETS[r.target].shared // KIB}"
        lines.append((r.kernel, r.dtype, r.target, str(r.registers), str(r.spills), shared, cores, *numbers))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"NOT COMPILED for {target}: {reason}" for target, reason in result.unusable.items()]
    text += [f"FAULT {fault}" for fault in result.faults]
    text.append(f"{len(result.rows)} kernels compiled, {len(result.faults)} faults")
    return "\n".join(text)


def to_json(result: Report) -> str:
    """The report for a program."""
    return json.dumps({**asdict(result), "faults": result.faults}, indent=1)
