"""The reward of reasoning-gym problems: each task's own scorer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import reasoning_gym

from metagrpo.trainer.rewards.text import Text, after_thinking, plain_text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[str],
    task: Sequence[str | None],
    metadata: Sequence[str],
    **columns: Any,
) -> list[float | None]:
    """What the task's scorer gives the completion's answer, from 0 to 1.

    The answer is the content of the last ``<answer>…</answer>`` after any thinking, else all of that text. Most
    scorers give a long text that merely contains the answer a small part of the mark.

    Args:
        answer: the problem's reference answer.
        task: name of the reasoning-gym task.
        metadata: the problem's ``metadata`` as JSON.

    Returns:
        One value a completion; ``None`` where ``task`` is ``None``: a row from elsewhere.

    Raises:
        ValueError: reasoning-gym has no such task, or the metadata is no JSON.
    """
    return [
        None if name is None else _score(plain_text(prompt), after_thinking(completion), gold, name, meta)
        for prompt, completion, gold, name, meta in zip(prompts, completions, answer, task, metadata, strict=True)
    ]


def _score(question: str, text: str, gold: str, task: str, metadata: str) -> float:
    tagged = _ANSWER.findall(text)
    entry = {"question": question, "answer": gold, "metadata": json.loads(metadata)}
    return float(_scorer(task)(tagged[-1].strip() if tagged else text, entry))


@cache
def _scorer(task: str) -> Callable[..., float]:
    return reasoning_gym.get_score_answer_fn(task)
