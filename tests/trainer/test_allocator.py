"""The allocator keeps what is freed; measured in a process of its own, since the setting is the process's."""

import ctypes
import subprocess
import sys

import pytest

from metagrpo.trainer.allocator import keep_freed_memory

# Blocks far above the 32 MiB up to which glibc would learn by itself to keep them.
PROGRAM = """
import psutil
from metagrpo.trainer.allocator import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
resident = lambda: psutil.Process().memory_info().rss >> 20
before = resident()
block = bytearray(128 << 20)
held = resident()
del block
print(before, held, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone has these settings")
@pytest.mark.parametrize("keep", [False, True])
def test_freed_memory_stays_with_the_process(keep: bool) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, check=True
    )
    before, held, after = map(int, result.stdout.split())
    assert held - before >= 127
    if keep:
        assert after - before >= 127
    else:
        assert after - before < 16


def test_a_c_library_without_the_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert keep_freed_memory() is False


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the C library is called"))
    assert keep_freed_memory() is False
