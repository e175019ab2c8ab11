"""What a sampler is asked and what it answers: token ids in, token ids out.

Nothing here decodes or encodes text, so the ids that are trained are the ids that were sampled. A request
carries all that its tokens depend on (ids, seed, limits, adapter), so that any backend, in this process or on
another machine, can serve it in any order and in any batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample.

    Attributes:
        id: names the request; the completion carries it back.
        prompt_ids: the context, at least one token.
        max_tokens: the most tokens to generate, at least 1.
        seed: 63-bit; with the token's position it decides every random number of this request.
        stop_ids: a token of this set ends the completion and is its last token.
        temperature: the logits are divided by it; 0 is greedy.
        adapter: name of the LoRA adapter to sample with; ``None`` samples with the base model alone.
    """

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id!r} has an empty prompt")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id!r} asks for {self.max_tokens} tokens")
        if self.temperature < 0:
            raise ValueError(f"request {self.id!r} has temperature {self.temperature}")


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request.

    Attributes:
        id: the request's id.
        token_ids: the sampled ids, the stop id included where one was sampled.
        logprobs: log-probability of each under ``softmax(logits / temperature)``, the distribution it was
            drawn from (temperature 1 for a greedy request).
        finish_reason: ``"stop"`` where the last id is a stop id, else ``"length"``.
    """

    id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class Sampler(Protocol):
    """A backend that turns requests into completions with the current policy."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        ...

    def sync(self, version: int) -> None:
        """Take the trainer's weights as of ``version``; the next ``generate`` samples from them."""
        ...

    def close(self) -> None:
        """Free memory and end processes."""
        ...


def request_seed(*parts: int | str) -> int:
    """A 63-bit seed from what names a request: run seed, step, prompt, sample.

    Equal parts give equal seeds on every machine; any change gives an unrelated one, so that neighbours that a
    backend derives by counting up from a seed never meet.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
