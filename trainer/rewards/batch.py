"""A batch on its way through the pool: what is still to be graded, and what is known of the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metagrpo.trainer.rewards.result import RewardResult, Status, weighted_sum
from metagrpo.trainer.rewards.worker import Outcome


@dataclass(slots=True)
class Span:
    """Samples ``[start, stop)`` of one function, ``call`` of them a call; ``start`` moves as they are graded."""

    function: int
    call: int
    start: int
    stop: int

    @property
    def running(self) -> range:
        """The samples of the call that is next or under way."""
        return range(self.start, min(self.start + self.call, self.stop))


class Batch:
    """N samples under F functions.

    Attributes:
        queue: spans that no worker has.
        arguments: what the functions are called with, each ``[N]``.
        size: N.
    """

    def __init__(self, names: Sequence[str], arguments: Mapping[str, Sequence[Any]]) -> None:
        self.queue: deque[Span] = deque()
        self.arguments = {name: list(values) for name, values in arguments.items()}
        self.size = len(self.arguments.get("completions", ()))
        for name, values in self.arguments.items():
            if len(values) != self.size:
                raise ValueError(f"{len(values)} {name} for {self.size} completions")
        self._names = list(names)
        self._outcomes: list[dict[int, tuple[Status, float | None, str]]] = [{} for _ in names]

    def record(self, span: Span, outcomes: Iterable[Outcome]) -> None:
        """The running call of ``span`` is answered."""
        self._outcomes[span.function].update(zip(span.running, outcomes, strict=True))

    def charge(self, span: Span, status: Status, message: str) -> None:
        """The running call of ``span`` has failed; the samples after it are next in the queue."""
        self._outcomes[span.function].update(dict.fromkeys(span.running, (status, None, message)))
        rest = Span(span.function, span.call, span.running.stop, span.stop)
        if rest.running:
            self.queue.appendleft(rest)

    def result(self, weights: Mapping[str, float]) -> RewardResult:
        """Everything is graded: values in the order of the samples, whichever came first."""
        result = RewardResult({}, {})
        for name, outcomes in zip(self._names, self._outcomes, strict=True):
            rows = [outcomes[index] for index in range(self.size)]
            result.values[name] = [value for _, value, _ in rows]
            result.status[name] = [status for status, _, _ in rows]
            if first := next((message for _, _, message in rows if message), None):
                result.errors[name] = first
        result.reward = weighted_sum(result.values, weights)
        return result
