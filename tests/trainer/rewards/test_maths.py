"""The maths reward against equivalences worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.trainer.config import RewardConfig
from metagrpo.trainer.rewards import RewardPool
from metagrpo.trainer.rewards.maths import math_reward


def score(completion, answer):
    (value,) = math_reward(["?"], [completion], [[]], answer=[answer], more=["a column"])
    return value


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        # a bare reference is LaTeX
        ("x+1", r"\boxed{1+x}", 1.0),
        ("x+1", "so $x+1$", 1.0),
        ("x+1", r"\boxed{x+2}", 0.0),
        ("$x+1$", r"\boxed{1+x}", 1.0),
        (r"\boxed{x+1}", r"\boxed{1+x}", 1.0),
        (r"\(x+1\)", r"\boxed{1+x}", 1.0),
        ("x\n+ 1", r"\boxed{1+x}", 1.0),
        # numbers
        ("42", "The answer is 42.", 1.0),
        (42, r"\boxed{42}", 1.0),
        (0.5, r"\boxed{\frac{1}{2}}", 1.0),
        ("3/4", "0.75", 1.0),
        ("3/4", r"\boxed{\frac34}", 1.0),
        ("3/4", r"\boxed{\frac43}", 0.0),
        ("1,234", r"\boxed{1234}", 1.0),
        ("-3", r"\boxed{3}", 0.0),
        ("$18", "It costs $18.", 1.0),
        (r"\$18", r"\boxed{18}", 1.0),
        (r"50\%", r"\boxed{0.5}", 1.0),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", 1.0),
        (r"\pi", r"\boxed{3.14}", 0.0),
        # expressions, sets, equations, matrices
        ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0),
        ("(x+1)^2", r"\boxed{x^2+1}", 0.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("(1,2)", r"\boxed{(1,2)}", 1.0),
        ("(1,2)", r"\boxed{(2,1)}", 0.0),
        ("x=5", r"\boxed{5}", 1.0),
        ("x<3", r"\boxed{3>x}", 1.0),
        ("x<3", r"\boxed{x>3}", 0.0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", 1.0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}", 0.0),
        # the box goes first, and the last box counts
        ("8", r"The final answer is 7. \boxed{8}", 1.0),
        ("7", r"\boxed{7}, so the final answer is $9$", 1.0),
        ("7", r"\boxed{8} no, \boxed{7}", 1.0),
        ("8", r"\boxed{8} no, \boxed{7}", 0.0),
        # only what follows the thought
        ("7", r"<think>\boxed{7}</think> \boxed{8}", 0.0),
        ("8", r"perhaps \boxed{7}</think> \boxed{8}", 1.0),
        ("7", r"a</think>\boxed{8}</think>\boxed{7}", 1.0),
        ("7", r"<think>\boxed{7}</think> I forgot.", 0.0),
        # no answer is wrong
        ("7", "", 0.0),
        ("7", "no idea", 0.0),
        ("7", r"\boxed{}", 0.0),
        # no reference is not scored, and nothing equals nothing
        ("", "", None),
        ("   ", r"\boxed{}", None),
        (None, "7", None),
        ("{", r"\boxed{7}", None),
        ("?", "?", None),
        ("foo{ 7", r"\boxed{7}", None),
    ],
)
def test_equivalence(answer, completion, expected):
    assert score(completion, answer) == expected


def test_a_batch_of_chats():
    completions = [[{"role": "assistant", "content": text}] for text in (r"\boxed{1}", r"\boxed{2}")]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed"}, {"type": "text", "text": "{3}"}]}]
    prompts = [[{"role": "user", "content": "?"}]] * 3
    assert math_reward(prompts, [*completions, parts], [[]] * 3, answer=["1", "1", "3"]) == [1.0, 0.0, 1.0]


@given(st.text(max_size=40) | st.text(alphabet=r"\boxed{}$()[]fracsqrt123+-=/.,^_ ", max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_completion_is_right_or_wrong(text):
    if "^" not in text:  # towers of powers take for ever, which is the pool's business
        assert score(text, "7") in (0.0, 1.0)


@given(st.text(alphabet=r"\boxed{}$()[]fracsqrt123+-=/., ", max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_reference_is_scored_or_not(text):
    assert score(r"\boxed{7}", text) in (0.0, 1.0, None)


@pytest.mark.fault
@pytest.mark.slow
def test_a_comparison_without_end_is_a_timeout_not_a_zero():
    config = RewardConfig.model_validate({"workers": 2, "timeout": 5.0})  # math is the default
    completions = [r"\boxed{7}", r"\boxed{9^{9^{9^{9}}}-9^{9^{9^{9}}}+7}", r"\boxed{8}"]
    with RewardPool(config) as pool:
        result = pool.score(["?"] * 3, completions, [[]] * 3, {"answer": ["7"] * 3})
    assert result.status["math"] == ["ok", "timeout", "ok"]
    assert result.values["math"] == [1.0, None, 0.0]
