"""The last number and the length penalty, by hand and from their formulas."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagrpo.trainer.rewards import last_number, length_penalty


def score(completion, answer):
    (value,) = last_number(["?"], [completion], [[]], answer=[answer], more=["a column"])
    return value


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("4", "2 + 2 = 4", 1.0),
        ("4", "4 is 2 + 2", 0.0),
        ("4", "It is 4.", 1.0),
        ("4", "It is **4**!", 1.0),
        ("4", r"\boxed{4}", 1.0),
        (4, "4", 1.0),
        (4.0, "4", 1.0),
        ("1234", "about 1,234", 1.0),
        ("1,234", "1234.", 1.0),
        ("1234567.5", "1,234,567.50", 1.0),
        ("234", "1,234", 0.0),
        ("2", "1,2", 1.0),  # a list, not a number
        ("3", "(1,2,3)", 1.0),
        ("0.5", "0.50", 1.0),
        ("0.5", ".5", 1.0),
        ("0.5", "0.51", 0.0),
        ("-3", "x = -3", 1.0),
        ("-3", "x=-3", 1.0),
        ("-3", "x = −3", 1.0),
        ("3", "x=-3", 0.0),
        ("3", "5-3", 1.0),  # a difference
        ("3", "f(5)-3", 1.0),
        ("0", "-0", 1.0),
        ("7", "007", 1.0),
        ("4", "3/4", 1.0),  # fractions are not put together
        ("0.75", "3/4", 0.0),
        ("9" * 30, "9" * 30, 1.0),  # exact beyond a float
        ("9" * 30, "9" * 29 + "8", 0.0),
        ("4", "<think>5</think> 4", 1.0),
        ("5", "4 or 5</think> 4", 0.0),
        ("4", "none", 0.0),
        ("4", "", 0.0),
        ("", "", None),
        (None, "4", None),
        ("3/4", "3/4", None),
        ("four", "4", None),
    ],
)
def test_last_number(answer, completion, expected):
    assert score(completion, answer) == expected


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_last_number_of_two(first, second):
    assert score(f"Not {first:,} but {second:,}.", str(second)) == 1.0
    assert score(f"Not {second} but {first}.", str(second)) == float(first == second)


@given(st.text())
def test_last_number_takes_any_text(text):
    assert score(text, "7") in (0.0, 1.0)


def penalty(lengths, **options):
    count = len(lengths)
    return length_penalty(["?"] * count, [""] * count, [[0] * length for length in lengths], **options)


def test_length_penalty_by_hand():
    # DAPO's own numbers in small: full at 20 tokens, free up to 20 - 4.
    assert penalty([0, 16, 17, 18, 19, 20, 21, 500], max_length=20, buffer=4) == [
        0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0,
    ]  # fmt: skip


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 200))
def test_length_penalty_is_equation_13(buffer, free, length):
    max_length = free + buffer
    if length <= max_length - buffer:
        expected = Fraction(0)
    elif length <= max_length:
        expected = Fraction(max_length - buffer - length, buffer)
    else:
        expected = Fraction(-1)
    assert penalty([length], max_length=max_length, buffer=buffer) == [pytest.approx(float(expected), abs=1e-15)]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_length_penalty_refuses_a_buffer_out_of_range(buffer):
    with pytest.raises(ValueError, match="between 1 and max_length 20"):
        penalty([1], max_length=20, buffer=buffer)
