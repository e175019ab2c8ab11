"""The maths reward: does the answer equal the reference as mathematics, by ``math-verify``."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from metagrpo.trainer.rewards.text import Text, after_thinking

_LATEX = LatexExtractionConfig(boxed_match_priority=0)
_PLAIN = ExprExtractionConfig()
_DELIMITED = re.compile(r"(?<!\\)\$.+(?<!\\)\$|\\boxed|\\\(|\\\[", re.DOTALL)

# math-verify's own timeouts are switched off: they are alarms, which act on a main thread alone, never interrupt
# a call into C, and grade what they cut short as wrong. The pool kills the process instead and counts a timeout.
# Each of its modules warns about that once; the warning is answered here.
for _module in ("parser", "grader"):
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.ERROR)


def math_reward(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the completion's answer is mathematically equal to ``answer``, else 0.0.

    The completion's answer is its last ``\boxed{…}`` after any thinking, else what ``math-verify`` finds: a
    formula between math delimiters or a plain number, "final answer is" first. ``answer`` is LaTeX, with or
    without delimiters. A completion without an answer, or with one that cannot be compared, is wrong.

    A comparison can take for ever (``9^{9^{9^9}}``) and has no time limit of its own: run it in a
    :class:`~metagrpo.trainer.rewards.RewardPool`.

    Returns:
        One value a completion; ``None`` where ``answer`` is empty or does not parse, so that a bad row is not
        taken for a bad completion.
    """
    return [_equal(after_thinking(completion), gold) for completion, gold in zip(completions, answer, strict=True)]


def _equal(text: str, gold: object) -> float | None:
    reference = _parse_reference("" if gold is None else str(gold))
    if not reference:
        return None
    answer = text[max(text.rfind(r"\boxed"), 0) :]  # several boxes would be read as one set
    found = parse(answer, extraction_config=[_LATEX, _PLAIN], parsing_timeout=None)
    return float(verify(reference, found, timeout_seconds=None))


@lru_cache(maxsize=1024)  # the completions of a group share it
def _parse_reference(gold: str) -> list[Any]:
    """The reference as sympy objects and its normalised text; empty where no part of it parses."""
    gold = " ".join(gold.split())  # an inline formula may not hold a line break
    if not _DELIMITED.search(gold):
        # Bare LaTeX is no formula to math-verify; a lone dollar is a currency, not a delimiter.
        gold = f"${gold.replace(chr(92) + '$', '').replace('$', '')}$"
    parsed = parse(gold, extraction_config=[_LATEX], parsing_timeout=None)
    return parsed if any(not isinstance(item, str) for item in parsed) else []
