"""Which implementation serves an operator: choosing, forcing and reporting it.

An implementation is a module that has the operator's functions under the names and with the contracts of the torch
reference's. It is imported when it is first chosen, so that neither Triton nor a compiled extension is needed to
import the package. The choice falls in the forward; the backward of a graph stays with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

BACKENDS = ("triton", "cpp", "torch")
"""Names of the backends. Left to itself an operator takes the first that serves its input: Triton on a GPU, C++ on a
CPU, torch where neither does."""

Refusal = Callable[[Tensor], "str | None"]
"""Why a backend cannot serve an operator on this input (its device, its dtype, a missing package), or ``None``."""


class _Implementation(NamedTuple):
    module: str
    refusal: Refusal


_IMPLEMENTATIONS: dict[str, dict[str, _Implementation]] = {}
_LAST: dict[str, str] = {}
_FORCED: ContextVar[str | None] = ContextVar("metagrpo_backend", default=None)


def register(op: str, name: str, module: str, refusal: Refusal = lambda x: None) -> None:
    """Let backend ``name`` serve the operator with the functions of a module, which need not be importable yet."""
    _check(name)
    _IMPLEMENTATIONS.setdefault(op, {})[name] = _Implementation(module, refusal)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend for the calls inside a ``with`` block; the environment's METAGRPO_BACKEND does it for all.

    Args:
        name: ``"triton"``, ``"cpp"``, ``"torch"``, or ``"auto"`` to undo an outer force.

    Raises:
        ValueError: an unknown name. A call that the forced backend cannot serve raises ``RuntimeError`` with the
            reason. Operators that exist in torch alone run there whatever is forced.
    """
    _check(name, "auto")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def last_backend(op: str) -> str | None:
    """The backend that served the last call of an operator such as ``"token_logprob"``; ``None`` before the first.

    Raises:
        KeyError: an operator that has torch alone, so that nothing is chosen.
    """
    if op not in _IMPLEMENTATIONS:
        raise KeyError(f"{op} has no choice of backends; those that have: {', '.join(sorted(_IMPLEMENTATIONS))}")
    return _LAST.get(op)


def choose(op: str, x: Tensor) -> Any:
    """The module that serves the operator on ``x``, its main input."""
    name = _FORCED.get() or os.environ.get("METAGRPO_BACKEND") or "auto"
    _check(name, "auto")
    table = _IMPLEMENTATIONS[op]
    if name == "auto":
        passed_over = "cpp" if x.device.type == "cuda" else "triton"  # Triton's interpreter is for tests alone
        name = next(n for n in BACKENDS if n in table and n != passed_over and table[n].refusal(x) is None)
    elif name not in table:
        raise RuntimeError(f"backend {name} has no {op}: it is served by {', '.join(sorted(table))}")
    elif (reason := table[name].refusal(x)) is not None:
        raise RuntimeError(f"backend {name} cannot serve {op}: {reason}")
    _LAST[op] = name
    return import_module(table[name].module)


def _check(name: str, *more: str) -> None:
    if name not in (*BACKENDS, *more):
        raise ValueError(f"unknown backend {name!r}: choose from {', '.join((*BACKENDS, *more))}")
