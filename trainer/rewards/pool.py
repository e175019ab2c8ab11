"""Grading in processes that can be killed, so that a bad sample or a bad function costs itself alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from metagrpo.trainer.errors import ConfigError, RunError
from metagrpo.trainer.rewards.batch import Batch, Span
from metagrpo.trainer.rewards.grader import START_TIMEOUT, Grader
from metagrpo.trainer.rewards.load import Contract, resolve
from metagrpo.trainer.rewards.result import RewardResult
from metagrpo.trainer.rewards.text import Text

if TYPE_CHECKING:  # a worker imports this package and has no use for pydantic
    from metagrpo.trainer.config import RewardConfig

MAX_GROWTH = 2 << 30
"""Resident bytes by which a worker may grow after its first slab before it is replaced: graders leak."""
_LONGEST_SLAB = 64
_MAX_IDLE_DEATHS = 10


class RewardPool:
    """Reward functions in ``config.workers`` processes that live from step to step.

    A function is called on one sample at a time and has ``config.timeout`` seconds for it; functions marked
    :func:`~metagrpo.trainer.rewards.batched` get all samples in one call, and as long for the call. A call that
    overruns or whose process dies costs its own samples: the process and its children are killed and replaced,
    and the samples after it go to another. Workers import the functions by path and nothing else of the trainer;
    what they print goes where the trainer's output goes.

    Enter the pool and score from one thread that outlives it: Linux ties a worker's life to the thread that
    started it.

    Raises:
        ConfigError: a path does not resolve, on construction; a function cannot be imported or called as
            configured, on entering.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._specs = resolve(config.functions)
        self._weights = {
            spec.name: function.weight for spec, function in zip(self._specs, config.functions, strict=True)
        }
        self._timeout = config.timeout
        self._workers = config.workers
        self._graders: list[Grader] = []
        self._contracts: list[Contract] = []
        self._idle_deaths = 0

    def __enter__(self) -> RewardPool:
        try:
            for _ in range(self._workers):
                self._graders.append(self._start())
            nothing = Batch([], {})
            while not all(grader.ready for grader in self._graders):
                self._turn(nothing)
        except RunError as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Nothing is left behind; a second call does nothing."""
        while self._graders:
            self._graders.pop().kill()

    def check(self, columns: Sequence[str]) -> None:
        """Compare what the functions take with the columns that the data has.

        Raises:
            ConfigError: a function needs a column that is not there, or does not take one that is.
        """
        for spec, contract in zip(self._specs, self._contracts, strict=True):
            contract.check(spec.name, columns)

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> RewardResult:
        """Grade N samples with every function.

        Args:
            prompts: ``[N]``, strings or lists of chat messages.
            completions: ``[N]``, strings or lists of chat messages.
            completion_ids: ``[N]`` lists of token ids.
            columns: every column of the data, each ``[N]``.

        Raises:
            ConfigError: a function needs a column that is not there, or does not take one that is.
            RunError: workers cannot be started any more. The pool is closed then, as it is after any exception
                that interrupts the grading.
            RuntimeError: the pool is not open.
            ValueError: the lengths differ.
        """
        if not self._graders:
            raise RuntimeError("the reward pool is closed")
        self.check(list(columns))
        arguments = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        batch = Batch([spec.name for spec in self._specs], arguments)
        batch.queue.extend(self._spans(batch.size))
        try:
            while batch.queue or any(grader.span for grader in self._graders):
                self._submit(batch)
                self._turn(batch)
        except BaseException:
            self.close()  # answers under way would be taken for those of the next batch
            raise
        return batch.result(self._weights)

    def _start(self) -> Grader:
        try:
            return Grader(self._specs, self._timeout)
        except OSError as error:
            raise RunError(f"cannot start a reward worker: {error.strerror}") from error

    def _spans(self, size: int) -> list[Span]:
        """Slabs short enough to share the work out evenly, long enough to hide the way there and back."""
        longest = max(1, min(_LONGEST_SLAB, size // (4 * self._workers)))
        spans = []
        for function, contract in enumerate(self._contracts):
            call = max(1, size) if contract.batched else 1
            step = max(longest, call)
            spans += [Span(function, call, start, min(start + step, size)) for start in range(0, size, step)]
        return spans

    def _submit(self, batch: Batch) -> None:
        """Give every idle worker a span."""
        for index, grader in enumerate(self._graders):
            if batch.queue and grader.idle:
                if grader.submit(batch.queue[0], batch.arguments):
                    batch.queue.popleft()
                else:
                    self._bury(index, batch)

    def _turn(self, batch: Batch) -> None:
        """Wait until a worker says something, dies or is late, and deal with it."""
        now = time.monotonic()
        patience = min(grader.deadline for grader in self._graders) - now
        speaking = set(wait([grader.connection for grader in self._graders], max(0.0, patience)))
        now = time.monotonic()
        for index, grader in enumerate(self._graders):
            if grader.connection in speaking:
                self._listen(index, batch)
            elif grader.deadline <= now:
                self._bury(index, batch, late=True)

    def _listen(self, index: int, batch: Batch) -> None:
        grader = self._graders[index]
        span = grader.span
        message = grader.receive()
        if message is None:
            self._bury(index, batch)
        elif isinstance(message, str):
            raise RunError(message)
        elif span is None:
            self._contracts = message
        else:
            self._idle_deaths = 0
            batch.record(span, message)
            grader.advance()
            if grader.idle and grader.growth() > MAX_GROWTH:
                grader.kill()
                self._graders[index] = self._start()

    def _bury(self, index: int, batch: Batch, late: bool = False) -> None:
        """Kill a worker that is late or dead, charge the samples it was at, and start another."""
        grader = self._graders[index]
        end = grader.kill()
        if not grader.ready and (late or not self._contracts):
            functions = ", ".join(spec.target for spec in self._specs)
            what = f"was not ready after {START_TIMEOUT:g} s" if late else end
            raise RunError(f"a reward worker {what} while it imported {functions}")
        if grader.span is None:
            self._idle_deaths += 1
            if self._idle_deaths > _MAX_IDLE_DEATHS:
                raise RunError(f"reward workers keep dying before they are given work; the last one {end}")
        elif late:
            batch.charge(grader.span, "timeout", f"no answer within {self._timeout:g} s")
        else:
            batch.charge(grader.span, "error", f"its process {end}")
        self._graders[index] = self._start()
