"""SIGTERM and SIGINT: stop at once where nothing is lost, else at the end of the update."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A signal asked the run to stop. No ``Exception``, so that no handler for errors takes it for one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """What the process exits with: 0 after SIGTERM, which asks for a clean end, else the shell's 128 + number."""
    return 0 if number == signal.SIGTERM else 128 + number


class StopSignals:
    """While open, SIGTERM and SIGINT raise :class:`Interrupted` in the main thread, unless they are deferred.

    A second signal of the same kind acts as it would without us, so that a stuck run can be ended.
    """

    def __init__(self) -> None:
        self._deferred = False
        self._pending: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold a signal back until the block ends: within it, the weights are between two steps."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._previous[number])  # type: ignore[arg-type]
        if self._deferred:
            self._pending = number
        else:
            raise Interrupted(number)
