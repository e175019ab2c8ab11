"""What the machine code of a kernel says: registers, spills and tensor-core instructions.

NVIDIA's comes from ``cuobjdump -sass -res-usage``, AMD's is the assembly that Triton keeps, with its metadata.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple


class Reading(NamedTuple):
    """Of one kernel."""

    registers: int
    """Vector registers a thread."""
    stack: int
    """Bytes a thread keeps in local memory."""
    spills: int
    """Instructions that load from or store to local memory."""
    tensor: dict[str, int]
    """Tensor-core instructions by name."""


# An optional predicate, then the opcode: "/*0a30*/  @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;"
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9]*)")
_SASS_TENSOR = re.compile(r"(?:[HIDBQO]G?MMA|UTC[A-Z]*MMA)$")
_USAGE = re.compile(r"\bREG:(\d+)\s+STACK:(\d+)")

_AMD = re.compile(r"^\s+([a-z][a-z0-9_]+)\b", re.MULTILINE)
_AMD_FIELD = re.compile(r"^\s+\.(vgpr_count|agpr_count|private_segment_fixed_size):\s+(\d+)", re.MULTILINE)


def read_sass(text: str) -> Reading:
    """From the output of ``cuobjdump -sass -res-usage`` on a cubin of one kernel.

    Raises:
        ValueError: no instruction or no resource usage in it.
    """
    opcodes = Counter(_SASS.findall(text))
    usage = _USAGE.search(text)
    if not opcodes or usage is None:
        raise ValueError("the disassembly holds no instruction or no resource usage")
    tensor = {name: count for name, count in opcodes.items() if _SASS_TENSOR.match(name)}
    return Reading(int(usage[1]), int(usage[2]), opcodes["LDL"] + opcodes["STL"], tensor)


def read_amdgcn(text: str) -> Reading:
    """From AMD assembly of one kernel with its metadata.

    Raises:
        ValueError: no instruction or no metadata in it.
    """
    opcodes = Counter(_AMD.findall(text))
    fields = {name: int(value) for name, value in _AMD_FIELD.findall(text)}
    if not opcodes or "vgpr_count" not in fields:
        raise ValueError("the assembly holds no instruction or no metadata")
    tensor = {name: count for name, count in opcodes.items() if name.startswith(("v_mfma_", "v_smfmac_", "v_wmma_"))}
    spills = sum(count for name, count in opcodes.items() if name.startswith("scratch_"))
    return Reading(fields["vgpr_count"], fields["private_segment_fixed_size"], spills, tensor)
