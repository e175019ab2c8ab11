"""Keep held-out problems, and their mirror images, out of training."""

from __future__ import annotations

import re
from typing import Any

from metagrpo.trainer.errors import ConfigError

# A number, a word, or one other visible character. A plus sign is no token: a term of a sum that moves to or from
# the front loses or gains one.
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\s\w+]|_")


def problem_text(prompt: str | list[dict[str, str]]) -> str:
    """The text that poses the problem: a string itself, or the contents of a chat but for its system message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt if message["role"] != "system")


def mirror_key(text: str) -> str:
    """A canonical form that a problem shares with its mirror images.

    Each line becomes its tokens (numbers, words, punctuation) in lower case and sorted, so ``3 * 5`` and ``5 * 3``,
    a sum with its terms in any order, and a letter to be counted in the same words in another order fall together.
    The order of the lines stays, so two boards that hold the same pieces elsewhere do not.

    The key errs towards equality: ``3 - 5`` and ``5 - 3`` share one. A task that is about order within a line, such
    as rewriting a string over a small alphabet, loses different problems as well.
    """
    lines = (" ".join(sorted(_TOKEN.findall(line))) for line in text.casefold().splitlines())
    return "\n".join(line for line in lines if line)


def exclude_held_out(
    train_rows: list[dict[str, Any]], held_out_rows: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """The training rows that neither are a held-out problem nor mirror one, in order, and how many were dropped.

    Raises:
        ConfigError: no training row is left.
    """
    held_out = {mirror_key(problem_text(row["prompt"])) for row in held_out_rows}
    kept = [row for row in train_rows if mirror_key(problem_text(row["prompt"])) not in held_out]
    if not kept:
        raise ConfigError(
            f"each of the {len(train_rows)} training problems equals or mirrors a held-out one: "
            "ask for more training problems, or for fewer or other held-out ones"
        )
    return kept, len(train_rows) - len(kept)
