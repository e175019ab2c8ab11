"""A grading process: imports the reward functions once, then grades slab after slab until its pipe closes.

It is a fresh interpreter, not a fork: a fork of a process with torch's threads can deadlock, and
``multiprocessing``'s spawn would import the trainer's main module, torch and all, into every worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rewards.load import Contract, RewardSpec, contract, load

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_MESSAGE = 500


class Slab(NamedTuple):
    """Work for one worker: consecutive samples of one function.

    Attributes:
        function: its position among the specs.
        call: number of samples a call.
        arguments: prompts, completions, completion_ids and the columns, each a list of the slab's samples.
    """

    function: int
    call: int
    arguments: dict[str, list[Any]]


class Outcome(NamedTuple):
    """What became of one sample; ``message`` says what went wrong."""

    status: Literal["ok", "none", "error"]
    value: float | None = None
    message: str = ""


Loaded = list[Contract] | str
"""First message of a worker: the contract of each function, or why they could not be loaded."""


def main() -> None:
    """Entry point; ``sys.argv`` holds the parent's process id and the descriptor of the socket to it."""
    parent, descriptor = map(int, sys.argv[1:3])
    del sys.argv[1:]
    _die_with(parent)
    # Where memory runs out, the kernel shall take the grader and not the trainer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        specs: list[RewardSpec] = connection.recv()
        try:
            functions = [load(spec) for spec in specs]
            loaded: Loaded = [contract(*pair) for pair in zip(specs, functions, strict=True)]
        except ConfigError as error:
            connection.send(str(error))
            return
        connection.send(loaded)
        while True:
            slab: Slab = connection.recv()
            size = len(slab.arguments["completions"])
            options = specs[slab.function].options
            for start in range(0, size, slab.call):
                arguments = {name: values[start : start + slab.call] for name, values in slab.arguments.items()}
                connection.send(
                    grade(functions[slab.function], {**arguments, **options}, min(slab.call, size - start))
                )


def grade(function: Callable[..., Any], arguments: dict[str, Any], size: int) -> list[Outcome]:
    """Call the function on ``size`` samples; whatever it raises or returns becomes an outcome a sample."""
    try:
        returned = function(**arguments)
        if not isinstance(returned, Iterable):
            raise TypeError(f"returned {type(returned).__name__}, not a list of {size} numbers")
        values = list(itertools.islice(returned, size + 1))
        if len(values) != size:
            more = "more" if len(values) > size else str(len(values))
            raise ValueError(f"returned {more} values for {size} completions")
    except BaseException as error:  # SystemExit too: the sample has failed, the worker has not
        return [Outcome("error", message=describe(error))] * size
    return [_outcome(value) for value in values]


def describe(error: BaseException) -> str:
    """Type, message and last line of an exception, as one short line."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    (frame,) = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "" if frame.filename == __file__ else f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return " ".join(f"{type(error).__name__}: {message[:_LONGEST_MESSAGE]}{where[:_LONGEST_MESSAGE]}".split())


def _outcome(value: Any) -> Outcome:
    if value is None:
        return Outcome("none")
    try:
        if not hasattr(value, "__float__"):  # float() would also read a string
            raise TypeError(f"returned a {type(value).__name__}, not a number")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"returned {number}")
    except BaseException as error:
        return Outcome("error", message=describe(error))
    return Outcome("ok", number)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
