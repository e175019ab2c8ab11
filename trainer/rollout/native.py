"""The native sampler: any Hugging Face causal model, in the trainer's process, on the live weights.

Prompts are prefilled as one token tree, so a group's prompt (or any prefix that requests share) is computed once,
at its true length and without padding. Decoding keeps one row a request in a static key-value cache; a row that
finishes leaves the batch and a waiting request takes its place. What a request draws depends on its own seed and
the position of the token, not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metagrpo.kernels import sample_tokens
from metagrpo.trainer.attention import TreeLayout, masked_attention
from metagrpo.trainer.model import Policy
from metagrpo.trainer.packing import TokenTree, build_tree, cut_by_budget
from metagrpo.trainer.rollout.protocol import Completion, Request

PREFILL_TOKENS = 8192


@dataclass(slots=True)
class _Row:
    """A request being decoded; its index in the list of rows is its row in the cache."""

    request: Request
    index: int
    length: int
    """Tokens in the cache."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self._stopped or len(self.token_ids) == self.request.max_tokens

    @property
    def _stopped(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.request.stop_ids

    def completion(self) -> Completion:
        reason = "stop" if self._stopped else "length"
        return Completion(self.request.id, self.token_ids, self.logprobs, reason)  # type: ignore[arg-type]


class KeyValueCache:
    """Keys and values of every layer, ``[rows, kv_heads, length, D]`` each, allocated at a layer's first use.

    Values may have another ``D`` than keys, as in DeepSeek's latent attention.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows = rows
        self.length = length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores of a layer whose keys and values look like ``key`` and ``value``, ``[B, kv_heads, T, D]``."""
        if index not in self.layers:
            keys, values = (
                like.new_zeros(self.rows, like.shape[1], self.length, like.shape[3]) for like in (key, value)
            )
            self.layers[index] = (keys, values)
        return self.layers[index]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a row over another."""
        for keys, values in self.layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]


class PrefillLayout(TreeLayout):
    """A tree whose keys and values are also written to the cache, each path to the row that asked for it."""

    def __init__(self, tree: TokenTree, backend: str, cache: KeyValueCache, rows: Sequence[int], paths: list) -> None:
        super().__init__(tree, backend)
        self.cache = cache
        device = tree.token_ids.device
        lengths = [len(path) for path in paths]
        self.nodes = torch.from_numpy(np.concatenate(paths)).to(device)
        self.rows = torch.tensor(rows).repeat_interleave(torch.tensor(lengths)).to(device)
        self.slots = torch.cat([torch.arange(length) for length in lengths]).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """See :class:`TreeLayout`."""
        for store, new in zip(self.cache.layer(layer, key, value), (key, value), strict=True):
            store[self.rows, :, self.slots] = new[0].transpose(0, 1)[self.nodes]
        return super().attend(layer, query, key, value, **options)


class DecodeLayout:
    """One new token a row: it is written at the row's length, then sees all that the row holds."""

    def __init__(self, cache: KeyValueCache, lengths: Tensor, longest: int) -> None:
        self.cache = cache
        self.lengths = lengths
        self.span = longest + 1
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        """See :class:`~metagrpo.trainer.attention.Layout`; ``T`` is 1."""
        keys, values = self.cache.layer(layer, key, value)
        keys[self.rows, :, self.lengths] = key[:, :, 0]
        values[self.rows, :, self.lengths] = value[:, :, 0]
        batch, heads, _, dim = query.shape
        # The query heads that share a key head stand as its rows, so keys are never repeated.
        folded = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
        out = masked_attention(
            folded,
            keys[:batch, :, : self.span],
            values[:batch, :, : self.span],
            self._mask(window, query.dtype),
            scale,
            softcap,
        )
        return out.reshape(batch, 1, heads, value.shape[-1])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            slots = torch.arange(self.span, device=self.lengths.device)
            hidden = slots > self.lengths[:, None]
            if window is not None:
                hidden |= slots <= self.lengths[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


class NativeSampler:
    """Samples from a :class:`Policy` as it stands; there is nothing to synchronise.

    Args:
        policy: the model, live.
        max_batch_size: most rows decoded at once.
    """

    def __init__(self, policy: Policy, max_batch_size: int) -> None:
        self.policy = policy
        self.max_batch_size = max_batch_size

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests; see :class:`~metagrpo.trainer.rollout.protocol.Sampler`."""
        completions: dict[int, Completion] = {}
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            for adapter in sorted({request.adapter for request in requests}, key=str):
                with self.policy.using(adapter):
                    mine = [(index, request) for index, request in enumerate(requests) if request.adapter == adapter]
                    completions.update(self._decode(mine))
        finally:
            self.policy.model.train(training)
        return [completions[index] for index in range(len(requests))]

    def sync(self, version: int) -> None:
        """Nothing to do: the weights are the trainer's own."""

    def close(self) -> None:
        """Nothing to do: no memory outlives a call."""

    def _decode(self, indexed: list[tuple[int, Request]]) -> dict[int, Completion]:
        length = max(len(request.prompt_ids) + request.max_tokens for _, request in indexed)
        if length > self.policy.max_length:
            raise ValueError(f"{length} tokens are asked for, the model has {self.policy.max_length} positions")
        # Neighbours in the waiting line share prefixes; the longest are not kept for last, where they would decode
        # alone: the order is that of the requests.
        waiting = [_Row(request, index, len(request.prompt_ids)) for index, request in reversed(indexed)]
        cache = KeyValueCache(min(len(waiting), self.max_batch_size), length)
        rows: list[_Row] = []
        done: dict[int, Completion] = {}
        while waiting or rows:
            free = cache.rows - len(rows)
            if waiting and free:
                admitted = [waiting.pop() for _ in range(min(free, len(waiting)))]
                self._prefill(admitted, cache, len(rows))
                rows += admitted
            else:
                self._step(rows, cache)
            self._retire(rows, cache, done)
        return done

    def _prefill(self, admitted: list[_Row], cache: KeyValueCache, first_row: int) -> None:
        """Fill the cache with the prompts and sample each row's first token."""
        prompts = [list(row.request.prompt_ids) for row in admitted]
        for batch in cut_by_budget(prompts, PREFILL_TOKENS):
            tree, paths = build_tree([prompts[i] for i in batch])
            tree = tree.to(self.policy.device)
            layout = PrefillLayout(tree, self.policy.attention, cache, [first_row + i for i in batch], paths)
            hidden = self.policy.hidden_states(tree.token_ids[None], tree.positions[None], layout)[0]
            last = torch.tensor([int(path[-1]) for path in paths], device=hidden.device)
            ends, row_of_end = last.unique(return_inverse=True)
            self._sample([admitted[i] for i in batch], self.policy.logits(hidden[ends])[row_of_end])

    def _step(self, rows: list[_Row], cache: KeyValueCache) -> None:
        """Feed each row its newest token and sample the next."""
        device = self.policy.device
        ids = torch.tensor([row.token_ids[-1:] for row in rows], device=device)
        lengths = torch.tensor([row.length for row in rows], device=device)
        layout = DecodeLayout(cache, lengths, max(row.length for row in rows))
        hidden = self.policy.hidden_states(ids, lengths[:, None], layout)[:, 0]
        for row in rows:
            row.length += 1
        self._sample(rows, self.policy.logits(hidden))

    def _sample(self, rows: list[_Row], logits: Tensor) -> None:
        device = logits.device
        temperatures = [row.request.temperature for row in rows]
        same = len(set(temperatures)) == 1  # a plain number saves the sampler a pass over the logits
        tokens, logprobs = sample_tokens(
            logits,
            seeds=torch.tensor([row.request.seed for row in rows], device=device),
            step=torch.tensor([len(row.token_ids) for row in rows], device=device),
            temperature=temperatures[0] if same else torch.tensor(temperatures, device=device),
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)

    def _retire(self, rows: list[_Row], cache: KeyValueCache, done: dict[int, Completion]) -> None:
        """Take finished rows out; the last row moves into each gap, so that the rows stay the first of the cache."""
        for slot in range(len(rows) - 1, -1, -1):
            if not rows[slot].finished:
                continue
            done[rows[slot].index] = rows[slot].completion()
            last = rows.pop()
            if slot < len(rows):
                cache.move_row(len(rows), slot, last.length)
                rows[slot] = last
