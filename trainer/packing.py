"""Lays samples out as a trie of token ids, so that every shared prefix passes through the model once.

G completions of one prompt share the prompt, MRT's branches share a prefix, a debate's critics share the
question and the answers. Samples sorted by their ids meet their longest common prefixes with their neighbours, so
one pass over the sorted list builds the trie in depth-first order. In that order a node's subtree is an interval:
query ``q`` may see key ``k`` exactly if ``k <= q < end[k]``. That one integer a node is the whole attention mask,
for packing and for sharing alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from metagrpo.trainer.sample import Sample


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A forest of token ids in depth-first order.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``, a node's depth: the position id of its token in its own sequence.
        end: int64 ``[T]``, one past the last node of each node's subtree.
        starts: where each root's tree begins, and ``T`` at the end; trees do not see each other.
    """

    token_ids: Tensor
    positions: Tensor
    end: Tensor
    starts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of nodes: the tokens that pass through the model."""
        return self.token_ids.numel()

    @property
    def is_shared(self) -> bool:
        """Whether any node has more than one child."""
        stops = torch.tensor(self.starts[1:], device=self.end.device)
        sizes = stops - torch.tensor(self.starts[:-1], device=self.end.device)
        return not torch.equal(self.end, stops.repeat_interleave(sizes))

    def to(self, device: torch.device) -> TokenTree:
        """The same forest with its tensors on ``device``."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            end=self.end.to(device),
        )


def build_tree(sequences: Sequence[Sequence[int]], share: bool = True) -> tuple[TokenTree, list[np.ndarray]]:
    """Build the trie of ``sequences``.

    Args:
        sequences: token ids, none empty.
        share: false gives each sequence a tree of its own.

    Returns:
        The forest, and for each sequence, in the order given, its path: int64 ``[len(sequence)]`` node indices.
    """
    order = _sorted_indices(sequences) if share else range(len(sequences))
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    starts: list[int] = []
    end = np.empty(sum(len(ids) for ids in sequences), dtype=np.int64)
    paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    previous = np.empty(0, dtype=np.int64)
    path = np.empty(0, dtype=np.int64)
    size = 0
    for index in order:
        ids = np.asarray(sequences[index], dtype=np.int64)
        common = _common_prefix(previous, ids) if share else 0
        end[path[common:]] = size  # those subtrees are complete
        if common == 0:
            starts.append(size)
        path = np.concatenate([path[:common], np.arange(size, size + len(ids) - common)])
        tokens.append(ids[common:])
        depths.append(np.arange(common, len(ids)))
        size += len(ids) - common
        paths[index] = path
        previous = ids
    end[path] = size
    tree = TokenTree(
        token_ids=torch.from_numpy(np.concatenate(tokens)),
        positions=torch.from_numpy(np.concatenate(depths)),
        end=torch.from_numpy(end[:size].copy()),
        starts=(*starts, size),
    )
    return tree, paths


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    A trained token ``token_ids[i]`` of a sample is predicted by the hidden state of token ``i - 1``, which may be a
    branch point that predicts a different token for each of its children.

    Attributes:
        samples: in the order of ``sequence_ids``.
        tree: what passes through the model: each sample up to the token before its last trained one.
        rows: int64 ``[M]``, the node whose hidden state predicts each trained token.
        targets: int64 ``[M]``, the trained token ids.
        sequence_ids: int64 ``[M]``, index into ``samples`` of each trained token.
    """

    samples: list[Sample]
    tree: TokenTree
    rows: Tensor
    targets: Tensor
    sequence_ids: Tensor

    @property
    def logical_tokens(self) -> int:
        """Tokens that would pass through the model without sharing."""
        return sum(_input_length(sample) for sample in self.samples)

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch with its tensors on ``device``."""
        return replace(
            self,
            tree=self.tree.to(device),
            rows=self.rows.to(device),
            targets=self.targets.to(device),
            sequence_ids=self.sequence_ids.to(device),
        )


def micro_batches(samples: Sequence[Sample], token_budget: int, share: bool = True) -> Iterator[MicroBatch]:
    """Cut samples into micro-batches of at most ``token_budget`` forwarded tokens.

    A sample is never cut: one that is longer than the budget has a micro-batch of its own. Samples without a
    trained token are left out: nothing of theirs would be predicted.

    Raises:
        ValueError: the samples belong to several adapters, whose hidden states cannot be shared.
    """
    if len({sample.adapter for sample in samples}) > 1:
        raise ValueError("a micro-batch holds the samples of one adapter")
    samples = [sample for sample in samples if _input_length(sample)]
    inputs = [sample.token_ids[: _input_length(sample)] for sample in samples]
    for indices in cut_by_budget(inputs, token_budget, share):
        yield _micro_batch([samples[index] for index in indices], share)


def cut_by_budget(sequences: Sequence[Sequence[int]], token_budget: int, share: bool = True) -> list[list[int]]:
    """Part sequences into batches whose tries hold at most ``token_budget`` tokens; neighbours share most.

    Returns:
        Index lists that together name every sequence once. A sequence over the budget has a list of its own.
    """
    order = _sorted_indices(sequences) if share else range(len(sequences))
    batches: list[list[int]] = []
    size = 0
    previous = np.empty(0, dtype=np.int64)
    for index in order:
        ids = np.asarray(sequences[index], dtype=np.int64)
        cost = len(ids) - (_common_prefix(previous, ids) if share else 0)
        if not batches or size + cost > token_budget:
            batches.append([])
            size, cost = 0, len(ids)
        batches[-1].append(index)
        size += cost
        previous = ids
    return batches


def _sorted_indices(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Indices in the lexicographic order of the sequences, which makes prefix sharers neighbours."""
    return sorted(range(len(sequences)), key=lambda index: list(sequences[index]))


def _micro_batch(samples: list[Sample], share: bool) -> MicroBatch:
    tree, paths = build_tree([sample.token_ids[: _input_length(sample)] for sample in samples], share)
    rows, targets, sequence_ids = [], [], []
    for index, (sample, path) in enumerate(zip(samples, paths, strict=True)):
        trained = np.flatnonzero(sample.trained)
        rows.append(path[trained - 1])
        targets.append(np.asarray(sample.token_ids, dtype=np.int64)[trained])
        sequence_ids.append(np.full(len(trained), index, dtype=np.int64))
    return MicroBatch(
        samples=samples,
        tree=tree,
        rows=torch.from_numpy(np.concatenate(rows)),
        targets=torch.from_numpy(np.concatenate(targets)),
        sequence_ids=torch.from_numpy(np.concatenate(sequence_ids)),
    )


def _input_length(sample: Sample) -> int:
    """Tokens that must pass through the model: all before the last trained one, which is only predicted."""
    for index in range(len(sample.trained) - 1, -1, -1):
        if sample.trained[index]:
            return index
    return 0


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
