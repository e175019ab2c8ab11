"""Choosing, forcing and reporting backends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from metagrpo.kernels import backend, last_backend, linear_logprob, sample_tokens, token_logprob

module = sys.modules["metagrpo.kernels.backend"]

CALLS = {
    "token_logprob": lambda x: token_logprob(x, torch.zeros(2, dtype=torch.int64)),
    "linear_logprob": lambda x: linear_logprob(x, x, torch.zeros(2, dtype=torch.int64)),
    "sample_tokens": lambda x: sample_tokens(x, seeds=torch.zeros(2, dtype=torch.int64), step=0),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METAGRPO_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """An operator with three backends; the values are why each refuses."""
    reasons: dict[str, str | None] = {"triton": None, "cpp": None, "torch": None}
    monkeypatch.setattr(module, "_IMPLEMENTATIONS", {})
    for name in reasons:
        module.register("op", name, "math", lambda x, name=name: reasons[name])
    return reasons


@pytest.mark.parametrize("op", CALLS)
def test_a_cpu_gets_a_cpus_backend(op: str) -> None:
    CALLS[op](torch.zeros(2, 2))
    assert last_backend(op) in ("cpp", "torch")
    with backend("torch"):
        CALLS[op](torch.zeros(2, 2))
    assert last_backend(op) == "torch"


def test_auto_takes_the_first_that_serves(fake: dict[str, str | None]) -> None:
    cpu, gpu = torch.zeros(1), type("", (), {"device": torch.device("cuda")})()
    assert module.choose("op", cpu).__name__ == "math" and last_backend("op") == "cpp"
    module.choose("op", gpu)
    assert last_backend("op") == "triton"
    fake["cpp"] = fake["triton"] = "reason"
    for x in (cpu, gpu):
        module.choose("op", x)
        assert last_backend("op") == "torch"


def test_forcing_nests_and_ends_with_its_block(fake: dict[str, str | None]) -> None:
    def chosen() -> str | None:
        module.choose("op", torch.zeros(1))
        return last_backend("op")

    with backend("torch"):
        with backend("triton"):
            assert chosen() == "triton"
            with backend("auto"):
                assert chosen() == "cpp"
        assert chosen() == "torch"
        seen: list[str | None] = []
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
        assert seen == ["cpp"]  # another thread is not forced
    with pytest.raises(ZeroDivisionError), backend("torch"):
        _ = 1 / 0
    assert chosen() == "cpp"


def test_environment_forces_and_a_block_overrides_it(
    fake: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAGRPO_BACKEND", "torch")
    module.choose("op", torch.zeros(1))
    assert last_backend("op") == "torch"
    with backend("cpp"):
        module.choose("op", torch.zeros(1))
    assert last_backend("op") == "cpp"
    monkeypatch.setenv("METAGRPO_BACKEND", "fortran")
    with pytest.raises(ValueError, match="unknown backend 'fortran': choose from triton, cpp, torch"):
        module.choose("op", torch.zeros(1))


def test_what_cannot_serve_is_refused_by_name(fake: dict[str, str | None]) -> None:
    fake["cpp"] = "no such instruction"
    with backend("cpp"), pytest.raises(RuntimeError, match="backend cpp cannot serve op: no such instruction"):
        module.choose("op", torch.zeros(1))
    del module._IMPLEMENTATIONS["op"]["triton"]
    with backend("triton"), pytest.raises(RuntimeError, match="backend triton has no op: it is served by cpp, torch"):
        module.choose("op", torch.zeros(1))
    with pytest.raises(ValueError, match="unknown backend 'cuda'"), backend("cuda"):
        pass
    with pytest.raises(ValueError, match="unknown backend 'auto'"):
        module.register("op", "auto", "math")


def test_last_backend_before_a_call_and_of_what_has_no_choice(fake: dict[str, str | None]) -> None:
    module._LAST.pop("op", None)
    assert last_backend("op") is None
    with pytest.raises(KeyError, match="policy_loss has no choice of backends"):
        last_backend("policy_loss")


@pytest.mark.parametrize("op", CALLS)
def test_triton_says_what_it_cannot_do(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with backend("triton"):
        with pytest.raises(RuntimeError, match=f"backend triton cannot serve {op}: its kernels run on a GPU.*cpu"):
            CALLS[op](torch.zeros(2, 2))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(RuntimeError, match=r"float16, bfloat16 and float32, not torch\.float64"):
            CALLS[op](torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.slow
def test_without_triton() -> None:
    """Import, run, and a refusal by name; nothing asks for a device on the way."""
    code = """
import importlib.util, sys, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find(name, *a)
sys.modules["triton"] = None
torch.cuda.is_available = torch.cuda.device_count = lambda: exit("a device was asked for")
from metagrpo.kernels import backend, last_backend, token_logprob
print(token_logprob(torch.zeros(1, 4), torch.zeros(1).long()).item(), last_backend("token_logprob"))
with backend("triton"):
    try:
        token_logprob(torch.zeros(1, 4), torch.zeros(1).long())
    except RuntimeError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    value, served, *refusal = run.stdout.split(maxsplit=2)
    assert float(value) == pytest.approx(-1.3862944, abs=1e-6) and served in ("cpp", "torch")
    assert refusal == ["backend triton cannot serve token_logprob: triton is not installed\n"]
