"""Text out of what a reward function is given: a string, or a list of chat messages as in TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Text = str | Sequence[Mapping[str, Any]]
"""A prompt or a completion: plain text, or chat messages ``{"role": …, "content": …}``."""


def plain_text(text: Text) -> str:
    """The text itself, or the content of the last message; text parts of a message are joined."""
    if isinstance(text, str):
        return text
    if not text:
        return ""
    content = text[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part["type"] == "text")


def after_thinking(completion: Text) -> str:
    """What follows the last ``</think>``, or everything where there is none; stripped.

    Only the closing tag is looked for: newer chat templates open the thought themselves, in the prompt.
    """
    return plain_text(completion).rpartition("</think>")[2].strip()
