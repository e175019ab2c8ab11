"""From rows to prompts as token ids, made once: nothing is encoded again later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from metagrpo.trainer.config import DataConfig
from metagrpo.trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

Messages = list[dict[str, str]]

# Keyword arguments that a reward function gets from the trainer; a column of that name would collide.
_RESERVED = frozenset({"prompt", "prompts", "completions", "completion_ids"})


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that can be sampled from.

    Attributes:
        index: its place in the list that :func:`build_prompts` returns.
        prompt: what reward functions get: the row's own prompt, without template or system prompt.
        token_ids: what the sampler gets.
        columns: the row's other columns, for the reward functions; none is named ``prompt``, ``prompts``,
            ``completions`` or ``completion_ids``.
    """

    index: int
    prompt: str | Messages
    token_ids: list[int]
    columns: dict[str, Any]


def build_prompts(
    rows: list[dict[str, Any]], data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Problem], int]:
    """Problems in the order of the rows, and the number of those left out since their prompt is too long.

    A string goes through ``prompt_template`` and becomes a user message; a list of messages stays as it is. Where
    the tokenizer has a chat template, and ``data.chat_template`` holds, that template writes every special token
    and the encoding adds none, so there is one BOS at most. Otherwise the text is encoded with the tokenizer's
    special tokens, after the system prompt and an empty line.

    Args:
        rows: as :func:`~metagrpo.trainer.data.sources.load_rows` returns them.
        max_length: most tokens of a prompt; ``data.max_prompt_length`` may lower it.

    Raises:
        ConfigError: every prompt is too long, the template lacks ``{prompt}``, or the rows do not go with the
            template, the system prompt or the tokenizer.
    """
    if "{prompt}" not in data.prompt_template:
        raise ConfigError("prompt_template lacks {prompt}, the place of the problem")
    if data.chat_template and tokenizer.chat_template is not None:
        encoded = _encode_chats([_conversation(row["prompt"], data) for row in rows], data, tokenizer)
    else:
        encoded = _encode_texts([_plain_text(row["prompt"], data) for row in rows], tokenizer)

    limit = min(max_length, data.max_prompt_length or max_length)
    problems: list[Problem] = []
    for row, token_ids in zip(rows, encoded, strict=True):
        if len(token_ids) <= limit:
            columns = {name: value for name, value in row.items() if name not in _RESERVED}
            problems.append(Problem(len(problems), row["prompt"], token_ids, columns))
    if not problems:
        raise ConfigError(
            f"no prompt has at most {limit} tokens: the shortest of {len(rows)} has {min(map(len, encoded))}"
        )
    return problems, len(rows) - len(problems)


def stop_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    model_config: PretrainedConfig | None,
) -> frozenset[int]:
    """Every id that ends a completion: the EOS ids of generation config, model config and tokenizer together.

    Raises:
        ConfigError: there is none, so that no completion could end.
    """
    found: set[int] = set()
    text_config = model_config.get_text_config() if model_config is not None else None
    for holder in (tokenizer, generation_config, model_config, text_config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    if not found:
        raise ConfigError("neither tokenizer nor model names an end-of-sequence token: set eos_token")
    return frozenset(found)


def _conversation(prompt: str | Messages, data: DataConfig) -> Messages:
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": _fill(data.prompt_template, prompt)}]
    elif data.prompt_template != "{prompt}":
        raise ConfigError("prompt_template is for prompts that are strings, and these are lists of messages")
    else:
        messages = prompt
    if data.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError("system_prompt is set, and the data bring a system message of their own")
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _plain_text(prompt: str | Messages, data: DataConfig) -> str:
    if not isinstance(prompt, str):
        raise ConfigError(
            "the prompts are lists of messages, which need a chat template: "
            "take a tokenizer that has one and leave chat_template on"
        )
    text = _fill(data.prompt_template, prompt)
    return text if data.system_prompt is None else f"{data.system_prompt}\n\n{text}"


def _fill(template: str, problem: str) -> str:
    """A plain replacement: problems hold braces, which ``str.format`` would read."""
    return template.replace("{prompt}", problem)


def _encode_chats(
    conversations: list[Messages], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    try:
        texts = tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=True, **data.chat_template_kwargs
        )
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template refuses the prompts: {' '.join(str(error).split())}") from error
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    bos = tokenizer.bos_token_id
    encoded = tokenizer(texts)["input_ids"]
    # A text that spells out the BOS token itself would start with two.
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in encoded]
