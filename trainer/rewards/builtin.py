"""Built-in rewards that need the standard library alone: the last number, and the length penalty."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from metagrpo.trainer.rewards.text import Text, after_thinking

_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-−])?"  # a sign has nothing before it to be subtracted from: "x=-3", not "5-3"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"  # 1,234.5
    r"|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"  # 1234.5 and .5
)


def last_number(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    """1.0 where the last number of the completion, after any thinking, equals ``answer``, else 0.0.

    Numbers are plain decimals, with or without a sign and thousands separators, compared exactly: ``1,234`` is
    1234 and ``0.50`` is 0.5; a full stop that ends the sentence is no part of the number. A fraction, a power or
    a number in scientific notation is not put together: of ``3/4`` the last number is 4.

    Returns:
        One value a completion; ``None`` where ``answer`` is not one plain number.
    """
    return [
        _same_number(after_thinking(completion), gold) for completion, gold in zip(completions, answer, strict=True)
    ]


def length_penalty(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    buffer: int,
    **columns: Any,
) -> list[float | None]:
    """Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13), from -1 to 0.

    A completion of n tokens costs nothing up to ``max_length - buffer``, then linearly more,
    ``-(n - (max_length - buffer)) / buffer``, and -1 from ``max_length`` on.

    Args:
        max_length: length in tokens at which the penalty is full.
        buffer: width in tokens of the slope before it, from 1 to ``max_length``.

    Raises:
        ValueError: ``buffer`` is out of its range.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must lie between 1 and max_length {max_length}, got {buffer}")
    free = max_length - buffer
    return [min(max(free - len(ids), -buffer), 0) / buffer for ids in completion_ids]


def _same_number(text: str, gold: object) -> float | None:
    reference = _NUMBER.fullmatch(str(gold).strip())
    if reference is None:
        return None
    found = _NUMBER.findall(text)
    return float(bool(found) and _decimal(found[-1]) == _decimal(reference.group()))


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("−", "-"))
