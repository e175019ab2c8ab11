"""The reward of reasoning-gym problems against their own reference answers."""

import json

import pytest
import reasoning_gym

from metagrpo.trainer.config import RewardConfig
from metagrpo.trainer.rewards import RewardPool
from metagrpo.trainer.rewards.gym import reasoning_gym_reward


def rows(task, count=4):
    data = reasoning_gym.create_dataset(task, size=count, seed=7)
    entries = [data[index] for index in range(count)]
    columns = {
        "answer": [entry["answer"] for entry in entries],
        "task": [task] * count,
        "metadata": [json.dumps(entry["metadata"]) for entry in entries],
    }
    return [entry["question"] for entry in entries], columns


def score(prompts, completions, columns):
    return reasoning_gym_reward(prompts, completions, [[]] * len(prompts), **columns, more=["x"] * len(prompts))


@pytest.mark.parametrize("task", ["letter_counting", "chain_sum", "word_sorting", "countdown", "n_queens"])
def test_the_reference_answer_scores_one(task):
    prompts, columns = rows(task)
    assert score(prompts, columns["answer"], columns) == [1.0] * 4
    tagged = [f"<think>1</think> <answer>no</answer> <answer> {answer} </answer>" for answer in columns["answer"]]
    assert score(prompts, tagged, columns) == [1.0] * 4


def test_another_answer_scores_less():
    prompts, columns = rows("chain_sum")
    assert score(prompts, ["<answer>no idea</answer>"] * 4, columns) == [0.0] * 4
    # The base scorer gives a text that contains the answer len(answer) / len(text).
    long = [f"{answer} apples" for answer in columns["answer"]]
    expected = [len(answer) / len(text) for answer, text in zip(columns["answer"], long, strict=True)]
    assert score(prompts, long, columns) == pytest.approx(expected)


def test_the_scorer_uses_the_metadata():
    # Any other solution of countdown is right, though it is not the reference.
    metadata = json.dumps({"numbers": [2, 3, 4], "target": 9})
    columns = {"answer": ["2+3+4"], "task": ["countdown"], "metadata": [metadata]}
    assert score(["?"], ["4+3+2"], columns) == [1.0]
    assert score(["?"], ["4+3-2"], columns)[0] < 1.0


def test_a_row_from_elsewhere_is_not_scored():
    columns = {"answer": ["4"], "task": [None], "metadata": [None]}
    assert score(["?"], ["4"], columns) == [None]


def test_chats_in_the_pool():
    prompts, columns = rows("letter_counting")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    completions = [[{"role": "assistant", "content": answer}] for answer in columns["answer"]]
    config = RewardConfig.model_validate({"functions": [{"path": "reasoning_gym"}, {"path": "last_number"}]})
    columns["task"][3] = "no_such_task"
    with RewardPool(config) as pool:
        result = pool.score(chats, completions, [[1]] * 4, columns)
    assert result.values == {"reasoning_gym": [1.0, 1.0, 1.0, None], "last_number": [1.0] * 4}
    assert result.errors == {"reasoning_gym": result.errors["reasoning_gym"]}
    assert result.errors["reasoning_gym"].startswith("ValueError: Dataset 'no_such_task' not registered")
