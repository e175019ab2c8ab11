"""The native sampler: exact draws from the model, whatever else is in the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

from metagrpo.trainer.model import Policy
from metagrpo.trainer.packing import micro_batches
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rollout.protocol import Completion, Request, request_seed
from metagrpo.trainer.sample import Sample

from .tiny import CONFIGS, plain_logits, plain_logprobs, plain_model, tiny_policy

SHAPES = sorted(CONFIGS)
# Several of different lengths, two that share a prefix, one a prefix of another, one of a single token.
PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11], [40], [5, 6, 20, 21, 22], list(range(30, 49)), [90, 80, 70]]


def request(name: str, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Request:
    fields = {"seed": request_seed(name), "stop_ids": frozenset(), **fields}
    return Request(id=name, prompt_ids=prompt, max_tokens=max_tokens, **fields)


def mixed_requests() -> list[Request]:
    """All that may differ between neighbours: prompt, length, temperature, stop ids."""
    return [
        request(
            f"{place}/{copy}",
            prompt,
            max_tokens=3 + 5 * ((place + copy) % 4),
            temperature=(0.0, 0.6, 1.0, 1.7)[(place + 2 * copy) % 4],
            stop_ids=frozenset(range(copy * 12)),
        )
        for place, prompt in enumerate(PROMPTS)
        for copy in range(3)
    ]


def sampled(policy: Policy, requests: list[Request], max_batch_size: int = 64) -> list[Completion]:
    completions = NativeSampler(policy, max_batch_size).generate(requests)
    assert [completion.id for completion in completions] == [request.id for request in requests]
    return completions


def as_sample(request: Request, completion: Completion) -> Sample:
    prompt, ids = list(request.prompt_ids), completion.token_ids
    return Sample("a", prompt + ids, [False] * len(prompt) + [True] * len(ids), completion.logprobs, group=0)


def count_rows(policy: Policy) -> list[tuple[int, ...]]:
    """Shapes ``(rows, tokens)`` of what passes through the decoder from now on."""
    shapes: list[tuple[int, ...]] = []
    hook: Callable[..., None] = lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape))  # noqa: E731
    policy.decoder.register_forward_pre_hook(hook, with_kwargs=True)
    return shapes


def generated(model: Any, prompt: list[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """The greedy completion by transformers' own loop."""
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(stop_ids) or -1,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_transformers_greedy(shape: str) -> None:
    model, nothing = plain_model(shape), frozenset[int]()
    requests, expected = [], []
    for place, prompt in enumerate(PROMPTS):
        free = generated(model, prompt, 24, nothing)
        stop_ids = frozenset({free[3 * place], free[-1]})
        stopped = generated(model, prompt, 24, stop_ids)
        assert stopped[-1] in stop_ids
        requests += [
            request(f"{place}/free", prompt, 24, temperature=0.0),
            request(f"{place}/stopped", prompt, 24, temperature=0.0, stop_ids=stop_ids),
        ]
        expected += [(free, "length"), (stopped, "stop")]
    completions = sampled(tiny_policy(shape), requests)
    assert [(completion.token_ids, completion.finish_reason) for completion in completions] == expected


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_those_of_a_teacher_forced_pass(shape: str, lora: bool) -> None:
    model, policy = plain_model(shape, lora=lora), tiny_policy(shape, lora=lora)
    for temperature in (1.0, 0.6):
        requests = [
            request(f"{place}", prompt, 20, temperature=temperature, adapter=policy.adapter)
            for place, prompt in enumerate(PROMPTS)
        ]
        for asked, completion in zip(requests, sampled(policy, requests), strict=True):
            sample = as_sample(asked, completion)
            expected = plain_logprobs(model, sample, temperature).tolist()
            assert completion.logprobs == pytest.approx(expected, rel=1e-4, abs=1e-4)
            # The trainer's side, by the same temperature: pitfall 5.
            (batch,) = micro_batches([sample], 10**6)
            assert policy.logprobs(batch, temperature)[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_greedy_completion_has_the_logprobs_of_temperature_1() -> None:
    asked = request("a", PROMPTS[1], temperature=0.0)
    (completion,) = sampled(tiny_policy("qwen3"), [asked])
    expected = plain_logprobs(plain_model("qwen3"), as_sample(asked, completion)).tolist()
    assert completion.logprobs == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("shape", ["llama", "qwen2", "gemma2", "deepseek"])
def test_a_request_does_not_depend_on_its_neighbours(shape: str) -> None:
    policy, requests = tiny_policy(shape), mixed_requests()
    expected = {completion.id: completion for completion in sampled(policy, requests)}
    for order, max_batch_size in (
        (requests[::-1], 64),
        (requests, 1),
        (requests[::2] + requests[1::2], 2),
        (requests[7:], 5),
        (requests[:1], 64),
    ):
        for completion in sampled(policy, order, max_batch_size):
            same = expected[completion.id]
            assert completion.token_ids == same.token_ids
            assert completion.finish_reason == same.finish_reason
            assert completion.logprobs == pytest.approx(same.logprobs, rel=1e-5, abs=1e-5)


def test_a_stop_id_ends_a_completion_and_is_its_last_token() -> None:
    policy, limits = tiny_policy("llama"), (1, 2, 7, 30)
    unstopped = sampled(policy, [request(f"{limit}", PROMPTS[0], limit) for limit in limits])
    for limit, completion in zip(limits, unstopped, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == limit
        assert completion.finish_reason == "length"
    free = unstopped[-1].token_ids
    for place in (0, 1, 11, 29):
        # The same request with the token that it drew at this place among its stop ids.
        stop = frozenset({free[place], 10**6})
        asked = request("30", PROMPTS[0], 30, stop_ids=stop)
        (completion,) = sampled(policy, [asked])
        first = free.index(free[place])
        assert completion.token_ids == free[: first + 1]
        assert completion.logprobs == pytest.approx(unstopped[-1].logprobs[: first + 1], rel=1e-5, abs=1e-5)
        assert completion.finish_reason == "stop"  # also where the limit falls on the same token


def test_a_groups_prompt_is_prefilled_once() -> None:
    policy = tiny_policy("llama")
    shapes = count_rows(policy)
    # Prompts of 4, of 7 that begins with those 4, and of 1: a trie of 8 nodes, for 8 + 4 + 2 rows.
    requests = [
        request(f"{place}/{copy}", PROMPTS[place], 1)
        for place, copies in enumerate((8, 4, 2))
        for copy in range(copies)
    ]
    sampled(policy, requests)
    assert shapes == [(1, 8)]


def test_finished_rows_leave_the_batch() -> None:
    policy = tiny_policy("llama")
    shapes = count_rows(policy)
    sampled(policy, [request(f"{limit}", [limit, 50], limit) for limit in (5, 1, 3, 2)])
    # The first token of each comes from the prefill.
    assert shapes == [(1, 8), (3, 1), (2, 1), (1, 1), (1, 1)]


def test_waiting_requests_take_the_place_of_finished_ones() -> None:
    policy = tiny_policy("llama")
    shapes = count_rows(policy)
    sampled(
        policy,
        [request(name, [ord(name) - 60, 3], limit) for name, limit in zip("abcd", (3, 1, 2, 1), strict=True)],
        2,
    )
    # a and b enter, b ends; c enters, a and c go on, c ends; d enters and ends; a goes on alone.
    assert shapes == [(1, 4), (1, 2), (2, 1), (1, 2), (1, 1)]


def test_long_prompts_are_prefilled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, requests = tiny_policy("llama"), mixed_requests()
    expected = sampled(policy, requests)
    monkeypatch.setattr("metagrpo.trainer.rollout.native.PREFILL_TOKENS", 8)
    shapes = count_rows(policy)
    parted = sampled(policy, requests)
    prefills = [tokens for rows, tokens in shapes if rows == 1 and tokens > 1]
    assert prefills and all(tokens <= 8 or tokens == 19 for tokens in prefills)  # a prompt of 19 is never cut
    for completion, same in zip(parted, expected, strict=True):
        assert completion.token_ids == same.token_ids
        assert completion.logprobs == pytest.approx(same.logprobs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_draws_have_the_models_distribution(temperature: float) -> None:
    vocabulary, draws, prompt = 8, 4000, [3, 4, 5]
    policy, model = tiny_policy("llama", vocab_size=vocabulary), plain_model("llama", vocab_size=vocabulary)
    requests = [request(f"{index}", prompt, 2, temperature=temperature) for index in range(draws)]
    seen = Counter(tuple(completion.token_ids) for completion in sampled(policy, requests, draws))

    def distribution(ids: list[int]) -> list[float]:
        return (plain_logits(model, ids)[-1].detach() / temperature).softmax(-1).tolist()

    first = distribution(prompt)
    expected = {
        (a, b): draws * first[a] * share
        for a in range(vocabulary)
        for b, share in enumerate(distribution([*prompt, a]))
    }
    # Pairs too rare for the test are one cell together.
    common = [pair for pair, count in expected.items() if count >= 5]
    counts = [seen[pair] for pair in common] + [draws - sum(seen[pair] for pair in common)]
    means = [expected[pair] for pair in common] + [draws - sum(expected[pair] for pair in common)]
    assert len(common) > 10
    assert stats.chisquare(counts, means).pvalue > 1e-3


def test_other_seeds_draw_other_tokens_and_equal_ones_the_same() -> None:
    policy = tiny_policy("llama")
    requests = [request(f"{index}", PROMPTS[0], 12) for index in range(16)]
    drawn = {tuple(completion.token_ids) for completion in sampled(policy, requests)}
    assert len(drawn) == 16
    twins = [request(f"twin {index}", PROMPTS[0], 12, seed=7) for index in range(4)]
    assert len({tuple(completion.token_ids) for completion in sampled(policy, twins)}) == 1


def test_the_adapter_of_a_request() -> None:
    policy = tiny_policy("llama", lora=True)
    models: dict[str | None, nn.Module] = {None: plain_model("llama"), "default": plain_model("llama", lora=True)}
    requests = [
        request(f"{place}/{adapter}", prompt, 12, adapter=adapter)
        for place, prompt in enumerate(PROMPTS)
        for adapter in ("default", None)
    ]
    for asked, completion in zip(requests, sampled(policy, requests), strict=True):
        sample = as_sample(asked, completion)
        expected = {name: plain_logprobs(model, sample).tolist() for name, model in models.items()}
        assert completion.logprobs == pytest.approx(expected[asked.adapter], rel=1e-4, abs=1e-4)
        assert expected[None] != pytest.approx(expected["default"], rel=1e-2, abs=1e-2)
    with pytest.raises(ValueError, match="'other'"):
        sampled(policy, [request("a", [5], adapter="other")])
    with pytest.raises(ValueError, match="'default'"):
        sampled(tiny_policy("llama"), [request("a", [5], adapter="default")])


def test_the_weights_are_live() -> None:
    policy, asked = tiny_policy("llama"), request("a", PROMPTS[0])
    sampler = NativeSampler(policy, 4)
    (before,) = sampler.generate([asked])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.8)
    sampler.sync(1)
    (after,) = sampler.generate([asked])
    expected = plain_model("llama")
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(0.8)
    assert after.logprobs == pytest.approx(plain_logprobs(expected, as_sample(asked, after)).tolist(), abs=1e-4)
    assert after.logprobs[0] != pytest.approx(before.logprobs[0], abs=1e-2)
    sampler.close()


def test_a_request_beyond_the_models_positions_is_refused() -> None:
    policy = tiny_policy("llama", max_position_embeddings=20)
    (completion,) = sampled(policy, [request("a", PROMPTS[0], 16)])
    assert len(completion.token_ids) == 16
    with pytest.raises(ValueError, match=r"21 tokens.*20 positions"):
        sampled(policy, [request("a", PROMPTS[0], 17)])


def test_sampling_leaves_the_model_as_it_was() -> None:
    policy = tiny_policy("gemma2", lora=True)
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    for training in (True, False):
        policy.model.train(training)
        sampled(policy, mixed_requests())
        assert policy.model.training is training
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None


def test_no_requests_no_completions() -> None:
    assert NativeSampler(tiny_policy("llama"), 4).generate([]) == []
