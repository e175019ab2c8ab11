"""Prompts as token ids: templates, special tokens, lengths and stop ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Gemma3Config, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from metagrpo.trainer.config import DataConfig
from metagrpo.trainer.data.prompts import Problem, build_prompts, stop_ids
from metagrpo.trainer.errors import ConfigError

SPECIAL = ["<s>", "</s>", "<turn>"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% if think %}<think>{% endif %}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system\n role') }}{% endif %}" + CHAT


def byte_tokenizer(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """One token a byte; its own encoding puts ``<s>`` in front, as Llama's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=chat_template
    )


def built(prompts: list[Any], tokenizer: PreTrainedTokenizerFast | None = None, **fields: Any) -> list[str]:
    """What the model reads, special tokens written out."""
    tokenizer = tokenizer or byte_tokenizer()
    rows = [{"prompt": prompt} for prompt in prompts]
    problems, _ = build_prompts(rows, DataConfig(source="x", **fields), tokenizer, 10**6)
    return [str(tokenizer.decode(problem.token_ids)) for problem in problems]


def refused(*args: Any, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        built(*args, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_chat_template_writes_the_only_bos() -> None:
    assert built(["1 + 1", "é 😀"]) == [
        "<s><turn>user:1 + 1</s><turn>assistant:",
        "<s><turn>user:é 😀</s><turn>assistant:",
    ]


def test_special_tokens_are_single_ids() -> None:
    problems, _ = build_prompts([{"prompt": "a"}], DataConfig(source="x"), byte_tokenizer(), 100)
    # <s>, <turn>, "user:a", </s>, <turn>, "assistant:"
    assert len(problems[0].token_ids) == 1 + 1 + 6 + 1 + 1 + 10
    assert [problems[0].token_ids[i] for i in (0, 1, 8, 9)] == [0, 2, 1, 2]


def test_system_prompt_template_and_template_variables() -> None:
    assert built(
        ["{1, 2} of {prompt}"],
        system_prompt="Be brief.",
        prompt_template="Q: {prompt} {x}",
        chat_template_kwargs={"think": True},
    ) == ["<s><turn>system:Be brief.</s><turn>user:Q: {1, 2} of {prompt} {x}</s><turn>assistant:<think>"]


def test_chat_messages_stay_as_they_are() -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = "<turn>user:a</s><turn>assistant:b</s><turn>user:c</s><turn>assistant:"
    assert built([chat, "d"]) == ["<s>" + text, "<s><turn>user:d</s><turn>assistant:"]
    assert built([chat], system_prompt="S") == ["<s><turn>system:S</s>" + text]
    assert "lists of messages" in refused([chat], prompt_template="Q: {prompt}")
    own = [{"role": "system", "content": "x"}, *chat]
    assert "a system message of their own" in refused([own], system_prompt="S")


@pytest.mark.parametrize("template", [None, CHAT])
def test_plain_text_takes_the_tokenizers_special_tokens(template: str | None) -> None:
    fields = {} if template is None else {"chat_template": False}
    tokenizer = byte_tokenizer(template)
    assert built(["1 + 1 ="], tokenizer, **fields) == ["<s>1 + 1 ="]
    assert built(["<s>1 + 1 ="], tokenizer, **fields) == ["<s>1 + 1 ="]
    assert built(["b"], tokenizer, system_prompt="a", prompt_template="({prompt})", **fields) == ["<s>a\n\n(b)"]
    assert "need a chat template" in refused([[{"role": "user", "content": "a"}]], tokenizer, **fields)


def test_a_template_may_refuse() -> None:
    assert "no system role" in refused(["a"], byte_tokenizer(NO_SYSTEM), system_prompt="S")
    assert built(["a"], byte_tokenizer(NO_SYSTEM)) == ["<s><turn>user:a</s><turn>assistant:"]


def test_a_template_without_a_place_for_the_problem() -> None:
    assert "lacks {prompt}" in refused(["a"], prompt_template="Q: {problem}")


def test_overlong_prompts_are_left_out_and_counted() -> None:
    """In plain text a prompt of n letters has n + 1 tokens."""
    rows = [{"prompt": "x" * length, "answer": str(length)} for length in (3, 9, 4, 10, 2)]
    tokenizer = byte_tokenizer(None)
    problems, dropped = build_prompts(rows, DataConfig(source="x"), tokenizer, 10)
    assert ([problem.columns["answer"] for problem in problems], dropped) == (["3", "9", "4", "2"], 1)
    assert [problem.index for problem in problems] == [0, 1, 2, 3]
    for max_length, own in ((5, None), (99, 5), (5, 99)):
        data = DataConfig(source="x", max_prompt_length=own)
        problems, dropped = build_prompts(rows, data, tokenizer, max_length)
        assert ([len(problem.token_ids) for problem in problems], dropped) == ([4, 5, 3], 2)
    with pytest.raises(ConfigError, match="no prompt has at most 2 tokens: the shortest of 5 has 3"):
        build_prompts(rows, DataConfig(source="x"), tokenizer, 2)


def test_rewards_get_the_row_itself() -> None:
    row = {"prompt": "a", "answer": "b", "level": 3, "completions": ["x"], "prompts": 1, "completion_ids": 2}
    data = DataConfig(source="x", system_prompt="S", prompt_template="Q: {prompt}")
    problems, dropped = build_prompts([row], data, byte_tokenizer(), 100)
    (problem,) = problems
    assert dropped == 0
    assert problem == Problem(0, "a", problem.token_ids, {"answer": "b", "level": 3})


def nested_config() -> Any:
    """The language model's configuration lies within that of a model that sees, and each has its EOS."""
    config: Any = Gemma3Config(text_config={"eos_token_id": 9})
    config.eos_token_id = [4]
    return config


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (GenerationConfig(eos_token_id=[5, 6]), LlamaConfig(eos_token_id=7), {1, 5, 6, 7}),
        (GenerationConfig(eos_token_id=5), LlamaConfig(eos_token_id=[7, 8]), {1, 5, 7, 8}),
        (GenerationConfig(), LlamaConfig(eos_token_id=0), {0, 1}),
        (None, None, {1}),
        (None, nested_config(), {1, 4, 9}),
    ],
)
def test_every_eos_id_stops(generation: Any, model: Any, expected: set[int]) -> None:
    assert stop_ids(byte_tokenizer(), generation, model) == expected


def test_a_model_that_cannot_stop_is_refused() -> None:
    with pytest.raises(ConfigError, match="end-of-sequence"):
        stop_ids(SimpleNamespace(eos_token_id=None), GenerationConfig(), None)
