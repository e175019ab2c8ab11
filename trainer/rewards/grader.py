"""The parent's end of one grading process: start it, send it work, watch its deadline, kill it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from metagrpo.trainer.rewards.batch import Span
from metagrpo.trainer.rewards.load import RewardSpec
from metagrpo.trainer.rewards.worker import Slab

START_TIMEOUT = 300.0
"""Seconds a worker may take to import the reward functions."""
_KILL_TIMEOUT = 10.0
# The parent's search path takes the place of the child's own, which the current directory would head.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[3:]; from metagrpo.trainer.rewards.worker import main; main()"


class Grader:
    """One worker process. It has its own session: no Ctrl-C reaches it, and its children die with it."""

    def __init__(self, specs: Sequence[RewardSpec], timeout: float) -> None:
        self._timeout = timeout
        self.ready = False
        self.span: Span | None = None
        self._baseline: int | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setblocking(True)  # whatever socket.setdefaulttimeout says
            # A worker that is stopped halfway through a message must not stop the parent.
            limit = struct.pack("@ll", math.ceil(timeout), 0)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, limit)
            self.connection = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, str(os.getpid()), str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.deadline = time.monotonic() + START_TIMEOUT
        with contextlib.suppress(OSError):  # one that has died already is found out by reading
            self.connection.send(list(specs))

    @property
    def idle(self) -> bool:
        """Whether it waits for work."""
        return self.ready and self.span is None

    def submit(self, span: Span, arguments: dict[str, list[Any]]) -> bool:
        """Send the samples of ``span``; false where the worker is gone."""
        part = {name: values[span.start : span.stop] for name, values in arguments.items()}
        try:
            self.connection.send(Slab(span.function, span.call, part))
        except OSError:
            return False
        self.span = span
        self.deadline = time.monotonic() + self._timeout
        return True

    def receive(self) -> Any:
        """The next message, or ``None`` where the worker is gone."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return None
        if not self.ready:
            self.ready = True
            self.deadline = math.inf
        return message

    def advance(self) -> None:
        """The running call is answered: the next one starts, with a deadline of its own."""
        assert self.span is not None
        self.span.start = self.span.running.stop
        if self.span.start == self.span.stop:
            self.span = None
        self.deadline = math.inf if self.span is None else time.monotonic() + self._timeout

    def growth(self) -> int:
        """Resident bytes gained since the first call of this, so that what is loaded once does not count."""
        try:
            memory = psutil.Process(self._process.pid).memory_info().rss
        except psutil.Error:  # it is gone, and found out by reading
            return 0
        if self._baseline is None:
            self._baseline = memory
        return memory - self._baseline

    def kill(self) -> str:
        """End the process and its children, and say how it had ended if it had."""
        # The process is not reaped before the group is killed, so the number is still its own.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        try:
            code = self._process.wait(_KILL_TIMEOUT)
        except subprocess.TimeoutExpired:  # stuck in the kernel; subprocess reaps it when it comes out
            return f"does not end {_KILL_TIMEOUT:g} s after SIGKILL"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
