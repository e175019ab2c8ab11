"""Which tokens of a flat batch belong together, and their sums, with static shapes and no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequences of ``M`` flat tokens.

    Attributes:
        index: int64 ``[M]``, the rank of each token's sequence, in ``[0, count)``.
        length: ``[M]``, the number of tokens of each token's sequence, at least 1.
        count: 0-d int64, the number of distinct sequences.
    """

    index: Tensor
    length: Tensor
    count: Tensor

    @classmethod
    def from_ids(cls, sequence_ids: Tensor, dtype: torch.dtype) -> Sequences:
        """Sequences named by any integers ``[M]``, in any order; ``dtype`` is that of ``length``.

        Ids are ranked by a sort rather than by ``torch.unique``, whose output's size depends on the data and
        would make the host wait for the device.
        """
        ordered, order = torch.sort(sequence_ids, stable=True)
        starts = torch.diff(ordered, prepend=ordered[:1]) != 0  # the first sequence's own start is not marked
        index = torch.empty_like(order).scatter(0, order, starts.cumsum(0))
        ones = torch.ones_like(index, dtype=dtype)
        lengths = _segment_sum(ones, index)
        return cls(index=index, length=lengths[index], count=(lengths > 0).sum())

    def sum(self, values: Tensor) -> Tensor:
        """``Σ values`` over each token's sequence, ``[M]`` → ``[M]``.

        Carries no gradient: every loss here lets a token's gradient pass through its own log-prob alone.
        """
        return _segment_sum(values.detach(), self.index)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """``Σ values / length`` over each token's sequence, ``[M]`` → ``[M]``, without gradient."""
        return self.sum(values) / self.length

    def count_all(self, flags: Tensor) -> Tensor:
        """Number of sequences, 0-d, of which every token has its flag (bool ``[M]``) set."""
        whole = self.sum(flags.to(self.length.dtype)) == self.length
        return (whole.to(torch.float64) / self.length).sum().round()


def _segment_sum(values: Tensor, index: Tensor) -> Tensor:
    """Sum of ``values`` ``[M]`` at each index, in a buffer ``[M]``: there are at most as many sequences as tokens.

    Bitwise repeatable on both devices: ``index_add`` runs in order on a CPU but with atomics on a GPU, where
    ``index_put`` sorts instead.
    """
    out = torch.zeros_like(values)
    if values.is_cuda:
        return out.index_put((index,), values, accumulate=True)
    return out.index_add(0, index, values)
