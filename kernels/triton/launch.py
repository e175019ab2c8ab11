"""Launching a kernel, or noting down what would be launched.

The ahead-of-time report runs the operators on tensors without storage (device ``meta``) and compiles the launches it
recorded, so it sees the arguments and configurations that ship and not a second list of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import Config, for_target


class Launch(NamedTuple):
    """A launch that was recorded."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    """Run-time arguments in the kernel's order: tensors, numbers, ``None``."""
    constants: dict[str, Any]
    """Compile-time arguments and options of the configuration."""


_recorded: list[Launch] | None = None


def launch(kernel: Any, programs: int, config: Config, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` programs of a kernel on the device of its first tensor."""
    if programs == 0:
        return
    if _recorded is not None:
        _recorded.append(Launch(kernel, programs, arguments, {**config, **constants}))
        return
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*arguments, **config, **constants)


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Record launches for a target instead of making them."""
    global _recorded
    _recorded = []
    try:
        with for_target(target):
            yield _recorded
    finally:
        _recorded = None
