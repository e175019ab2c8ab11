"""Packing: the forest is the trie of its sequences, and every trained token finds the state that predicts it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.trainer.packing import MicroBatch, TokenTree, build_tree, cut_by_budget, micro_batches
from metagrpo.trainer.sample import Sample

from .tiny import branch_samples, make_sample

IDS = st.integers(min_value=0, max_value=2)  # few ids, so that prefixes are shared often
SEQUENCES = st.lists(st.lists(IDS, min_size=1, max_size=7), min_size=1, max_size=8)
BUDGETS = st.integers(min_value=1, max_value=40)


@st.composite
def samples_of_ids(draw: st.DrawFn) -> list[Sample]:
    """Samples of few ids with any mask, some of them without a trained token."""
    samples = []
    for index, ids in enumerate(draw(SEQUENCES)):
        trained = [False] + [draw(st.booleans()) for _ in ids[1:]]
        samples.append(make_sample(ids, trained, id=str(index)))
    return samples


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    """The nodes of the trie: every distinct non-empty prefix."""
    return {tuple(ids[:stop]) for ids in sequences for stop in range(1, len(ids) + 1)}


def node_prefixes(tree: TokenTree, sequences: list[list[int]], paths: list) -> dict[int, tuple[int, ...]]:
    """The prefix that each node stands for, by the paths; a node on two paths must stand for the same."""
    named: dict[int, tuple[int, ...]] = {}
    for ids, path in zip(sequences, paths, strict=True):
        assert len(path) == len(ids)
        for depth, node in enumerate(path.tolist()):
            prefix = tuple(ids[: depth + 1])
            assert named.setdefault(node, prefix) == prefix
    assert set(named) == set(range(tree.size))
    return named


@settings(deadline=None)
@given(SEQUENCES)
def test_the_nodes_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    tree, paths = build_tree(sequences)
    named = node_prefixes(tree, sequences, paths)
    assert sorted(named.values()) == sorted(prefixes(sequences))
    assert tree.token_ids.tolist() == [named[node][-1] for node in range(tree.size)]
    assert tree.positions.tolist() == [len(named[node]) - 1 for node in range(tree.size)]


@settings(deadline=None)
@given(SEQUENCES)
def test_a_node_sees_its_ancestors_and_itself(sequences: list[list[int]]) -> None:
    tree, paths = build_tree(sequences)
    named = node_prefixes(tree, sequences, paths)
    for query in range(tree.size):
        for key in range(tree.size):
            visible = key <= query < int(tree.end[key])
            assert visible == (named[query][: len(named[key])] == named[key]), (query, key)


@settings(deadline=None)
@given(SEQUENCES)
def test_a_tree_a_first_token(sequences: list[list[int]]) -> None:
    tree, paths = build_tree(sequences)
    named = node_prefixes(tree, sequences, paths)
    assert [named[start] for start in tree.starts[:-1]] == sorted({(ids[0],) for ids in sequences})
    assert tree.starts[-1] == tree.size
    children: dict[tuple[int, ...], int] = {}
    for prefix in named.values():
        children[prefix[:-1]] = children.get(prefix[:-1], 0) + 1
    branches = {prefix for prefix, count in children.items() if count > 1 and prefix}
    assert tree.is_shared == bool(branches)


@settings(deadline=None)
@given(SEQUENCES)
def test_nothing_is_shared_on_request(sequences: list[list[int]]) -> None:
    tree, paths = build_tree(sequences, share=False)
    assert tree.token_ids.tolist() == [token for ids in sequences for token in ids]
    assert tree.positions.tolist() == [depth for ids in sequences for depth in range(len(ids))]
    lengths = [len(ids) for ids in sequences]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    assert tree.end.tolist() == [end for end, length in zip(ends, lengths, strict=True) for _ in range(length)]
    assert list(tree.starts) == [0, *ends]
    assert [path.tolist() for path in paths] == [
        list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)
    ]
    assert not tree.is_shared


def test_a_tree_worked_by_hand() -> None:
    # 5 ─ 6 ─ 7 and 5 ─ 6 ─ 8 ─ 9, and apart from them 4: in depth-first order 4 | 5 6 7 8 9.
    tree, paths = build_tree([[5, 6, 8, 9], [4], [5, 6, 7], [5, 6, 7], [5, 6]])
    assert tree.token_ids.tolist() == [4, 5, 6, 7, 8, 9]
    assert tree.positions.tolist() == [0, 0, 1, 2, 2, 3]
    assert tree.end.tolist() == [1, 6, 6, 4, 6, 6]
    assert tree.starts == (0, 1, 6)
    assert [path.tolist() for path in paths] == [[1, 2, 4, 5], [0], [1, 2, 3], [1, 2, 3], [1, 2]]
    assert tree.is_shared and tree.size == 6


@settings(deadline=None)
@given(SEQUENCES, BUDGETS, st.booleans())
def test_every_sequence_is_in_one_cut_and_a_cut_keeps_the_budget(
    sequences: list[list[int]], budget: int, share: bool
) -> None:
    cuts = cut_by_budget(sequences, budget, share)
    assert sorted(index for cut in cuts for index in cut) == list(range(len(sequences)))
    for cut in cuts:
        held = [sequences[index] for index in cut]
        size = len(prefixes(held)) if share else sum(map(len, held))
        assert size <= budget or len(cut) == 1


def test_cuts_are_full() -> None:
    # Eight sequences of 4 with a common prefix of 3: the trie of n of them has 3 + n nodes.
    sequences = [[1, 2, 3, last] for last in range(8)]
    assert [len(cut) for cut in cut_by_budget(sequences, 7)] == [4, 4]
    assert [len(cut) for cut in cut_by_budget(sequences, 8, share=False)] == [2, 2, 2, 2]
    assert [len(cut) for cut in cut_by_budget(sequences, 1)] == [1] * 8


def context_of(batch: MicroBatch, row: int) -> list[int]:
    """The tokens that a node sees, in order, by the mask alone."""
    tree = batch.tree
    return [int(tree.token_ids[key]) for key in range(row + 1) if row < int(tree.end[key])]


@settings(deadline=None)
@given(samples_of_ids(), BUDGETS, st.booleans())
def test_each_trained_token_is_predicted_once_from_its_own_context(
    samples: list[Sample], budget: int, share: bool
) -> None:
    seen: list[str] = []
    for batch in micro_batches(samples, budget, share):
        inputs = [sample.token_ids[: last_trained(sample)] for sample in batch.samples]
        size = len(prefixes(inputs)) if share else sum(map(len, inputs))
        assert batch.tree.size == size
        assert size <= budget or len(batch.samples) == 1
        assert batch.logical_tokens == sum(map(len, inputs))
        expected = [
            (index, position, sample.token_ids[position])
            for index, sample in enumerate(batch.samples)
            for position in range(len(sample.token_ids))
            if sample.trained[position]
        ]
        assert batch.sequence_ids.tolist() == [index for index, _, _ in expected]
        assert batch.targets.tolist() == [token for _, _, token in expected]
        for row, (index, position, _) in zip(batch.rows.tolist(), expected, strict=True):
            assert context_of(batch, row) == batch.samples[index].token_ids[:position]
        seen += [sample.id for sample in batch.samples]
    assert sorted(seen) == sorted(sample.id for sample in samples if any(sample.trained))


def last_trained(sample: Sample) -> int:
    """Index of the last trained token."""
    return max(index for index, flag in enumerate(sample.trained) if flag)


def test_what_predicts_nothing_is_not_forwarded() -> None:
    # Token 4 is the last one trained: it is predicted, not fed, and neither are the two after it.
    sample = make_sample([10, 11, 12, 13, 14, 15, 16], [False, False, True, False, True, False, False])
    (batch,) = micro_batches([sample], 100)
    assert batch.tree.token_ids.tolist() == [10, 11, 12, 13]
    assert batch.rows.tolist() == [1, 3]
    assert batch.targets.tolist() == [12, 14]


def test_a_branch_point_predicts_several_tokens() -> None:
    # Both completions begin after 7 8, so one hidden state serves two targets; 30 and 31 are only predicted.
    first = make_sample([7, 8, 20, 30], [False, False, True, True], id="a")
    second = make_sample([7, 8, 21, 31], [False, False, True, True], id="b")
    (batch,) = micro_batches([first, second], 100)
    assert batch.tree.token_ids.tolist() == [7, 8, 20, 21]
    assert batch.rows.tolist() == [1, 2, 1, 3]
    assert batch.targets.tolist() == [20, 30, 21, 31]


def test_a_prompt_is_forwarded_once_a_group() -> None:
    # Two prompts of 50 tokens, eight completions each of 20, no two with the same first token.
    samples = [
        make_sample([group] * 50 + [10 + generation] * 20, [False] * 50 + [True] * 20, id=f"{group}/{generation}")
        for group in range(2)
        for generation in range(8)
    ]
    (batch,) = micro_batches(samples, 10**6)
    assert batch.tree.size == 2 * (50 + 8 * 19)  # the last token of a completion is only predicted
    assert batch.logical_tokens == 2 * 8 * (50 + 19)


def test_samples_without_a_trained_token_give_no_batch() -> None:
    assert list(micro_batches([], 100)) == []
    assert list(micro_batches([make_sample([1, 2, 3], [False] * 3)], 100)) == []


def test_one_adapter_a_batch() -> None:
    samples = [make_sample([1, 2], [False, True], adapter=name) for name in ("a", "b")]
    with pytest.raises(ValueError, match="one adapter"):
        list(micro_batches(samples, 100))
    assert len(list(micro_batches(samples[:1] * 2, 100))) == 1


def test_the_batch_moves_as_a_whole() -> None:
    (batch,) = micro_batches(branch_samples(), 10**6)
    moved = batch.to(torch.device("meta"))
    tensors = (moved.tree.token_ids, moved.tree.positions, moved.tree.end, moved.rows, moved.targets)
    assert {tensor.device.type for tensor in (*tensors, moved.sequence_ids)} == {"meta"}
    assert moved.tree.starts == batch.tree.starts
