"""The ahead-of-time report: its reading of machine code, what fails it, and that what ships passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metagrpo.bench import static
from metagrpo.bench.cli import app
from metagrpo.bench.disassembly import Reading, read_amdgcn, read_sass

SASS = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel:
  REG:101 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
        code for sm_90a
                Function : kernel
        .headerflags    @"EF_CUDA_TEXMODE_UNIFIED"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                        /* 0x00000a00ff017b82 */
                                                                                 /* 0x000fe20000000800 */
        /*0010*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x01e00000041879f0 */
        /*0020*/              @UP1 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;         /* 0x000000ff */
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;         /* 0x000000ff */
        /*0040*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;   /* 0x000000ff */
        /*0050*/               @P3 STL.64 [R1+0x8], R2 ;                         /* 0x000000ff */
        /*0060*/                   LDL.LU R2, [R1+0x8] ;                         /* 0x000000ff */
        /*0070*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;                 /* 0x000000ff */
        /*0080*/                   STG.E desc[UR4][R2.64], R4 ;                  /* 0x000000ff */
"""

AMDGCN = """
kernel:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], 0
	v_mfma_f32_32x32x8_bf16 v[0:15], v[20:21], v[22:23], v[0:15]
	scratch_store_dword off, v3, s32 ; 4-byte Folded Spill
	global_store_dwordx4 v0, v[0:3], s[0:1]
	s_endpgm
    .private_segment_fixed_size: 4
    .sgpr_count:     46
    .vgpr_count:     118
    .vgpr_spill_count: 1
"""


def test_reading_of_nvidia_code() -> None:
    """HFMA2.MMA is a move on the multiply-add pipe, no matrix instruction; STG is a store to global memory."""
    assert read_sass(SASS) == Reading(101, 8, 2, {"HGMMA": 1, "HMMA": 2, "UTCHMMA": 1})


def test_reading_of_amd_code() -> None:
    assert read_amdgcn(AMDGCN) == Reading(118, 4, 1, {"v_mfma_f32_32x32x8_bf16": 2})


@pytest.mark.parametrize("read", [read_sass, read_amdgcn])
def test_nothing_to_read_is_an_error(read: Any) -> None:
    for text in ("", "Resource usage:", "        /*0000*/  EXIT ;", "\ts_endpgm\n"):
        with pytest.raises(ValueError, match=r"holds no instruction or no (resource usage|metadata)"):
            read(text)


def test_what_is_a_fault() -> None:
    sound = Reading(128, 0, 0, {"HMMA": 4})
    assert static.faults(sound, 1000, 1000, matrix=True) == []
    assert static.faults(sound._replace(tensor={}), 0, 1000, matrix=False) == []
    assert "2 loads and stores" in static.faults(sound._replace(spills=2), 0, 1000, matrix=True)[0]
    assert "8 bytes a thread" in static.faults(sound._replace(stack=8), 0, 1000, matrix=True)[0]
    assert "1001 bytes of shared memory" in static.faults(sound, 1001, 1000, matrix=True)[0]
    assert "without a tensor-core" in static.faults(sound._replace(tensor={}), 0, 1000, matrix=True)[0]


def test_roofline_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MB and 1 GFLOP on a GPU of 1 TB/s and 2 TFLOP/s: 1 µs of memory, 500 µs of arithmetic."""
    goal = static.TARGETS["sm_90"]._replace(bandwidth=1e12, matrix={"bf16": 2e12}, vector=1e9)
    monkeypatch.setitem(static.TARGETS, "sm_90", goal)
    monkeypatch.setattr(static, "examine", lambda launch, target: (Reading(64, 0, 0, {}), 300_000))
    launch = type("Launch", (), {"constants": {}})
    row = static.row("product", "bf16", "sm_90", launch, static.static_cases.Cost(10**9, 10**6, True))
    assert row.roofline_us == pytest.approx(500)
    result = static.Report({}, [row], {"gfx942": "no assembler"})
    text = static.table(result)
    assert "NOT COMPILED for gfx942: no assembler" in text and "1 kernels compiled, 2 faults" in text
    assert "FAULT product bf16 on sm_90: multiplies matrices without a tensor-core instruction" in text
    written = json.loads(static.to_json(result))
    assert written["rows"][0]["shared"] == 300_000 and len(written["faults"]) == 2
    assert written["unusable"] == {"gfx942": "no assembler"}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("sound", None),
        ("too many registers", "spills registers"),
        ("too much shared memory", "the target has 166912"),
        ("no dot", "multiplies matrices without a tensor-core instruction"),
    ],
)
def test_bad_kernels_fail(compiled: dict[str, Any], kernel: str, fault: str | None) -> None:
    faults = compiled["faults"][kernel]
    assert faults == [] if fault is None else any(fault in x for x in faults), faults


@pytest.mark.slow
def test_no_kernel_is_compiled_again_for_another_number_of_rows(compiled: dict[str, Any]) -> None:
    first, *others = compiled["specialisations"].values()
    assert len(first) >= 8 and all(other == first for other in others)


@pytest.mark.slow
def test_what_ships_passes(tmp_path: Path) -> None:
    """Every kernel of every operator, on every target that this installation of Triton compiles for."""
    pytest.importorskip("triton", reason="triton is not installed")
    run = CliRunner().invoke(app, ["static", "--json", str(tmp_path / "report.json")])
    assert run.exit_code == 0, run.output
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["faults"] == [] and f"{len(result['rows'])} kernels compiled, 0 faults" in run.output
    from metagrpo.kernels.triton import configs

    seen = {(row["kernel"], row["target"]) for row in result["rows"]}
    usable = [target for target in configs.TARGETS if target not in result["unusable"]]
    assert seen == {(kernel, target) for kernel in configs._TABLE for target in usable}
    assert {row["dtype"] for row in result["rows"]} == {"bf16", "fp32"}
    for row in result["rows"]:
        matrix = row["kernel"].startswith("linear") and not row["kernel"].endswith("combine")
        assert bool(row["tensor"]) == matrix and row["roofline_us"] > 0


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metagrpo.bench.cli.find_spec", lambda name: None)
    run = CliRunner().invoke(app, ["static"])
    assert run.exit_code == 1 and "triton is not installed" in run.output
