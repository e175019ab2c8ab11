"""No held-out problem, nor a mirror image of one, is trained on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagrpo.trainer.config import DataSource
from metagrpo.trainer.data.holdout import exclude_held_out, mirror_key, problem_text
from metagrpo.trainer.data.sources import load_rows
from metagrpo.trainer.errors import ConfigError

NUMBERS = st.lists(st.integers(0, 10**6), min_size=2, max_size=6)
TERMS = st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 9999)), min_size=2, max_size=6)
WORDS = st.lists(st.from_regex(r"[A-Za-z]{1,8}", fullmatch=True), min_size=2, max_size=6)


def sum_of(terms: list[tuple[str, int]]) -> str:
    """``a - b + c``: the first term bare where it is positive."""
    text = " ".join(f"{sign} {value}" for sign, value in terms)
    return f"State the answer to: {text.removeprefix('+ ')} ="


@given(TERMS.flatmap(lambda terms: st.tuples(st.just(terms), st.permutations(terms))))
def test_a_sum_keeps_its_key_when_its_terms_are_permuted(pair: tuple[list, list]) -> None:
    assert mirror_key(sum_of(pair[0])) == mirror_key(sum_of(pair[1]))


@given(NUMBERS.flatmap(lambda numbers: st.tuples(st.just(numbers), st.permutations(numbers))))
def test_a_product_keeps_its_key_when_its_factors_are_permuted(pair: tuple[list, list]) -> None:
    first, second = ("Multiply: " + " * ".join(map(str, numbers)) + "." for numbers in pair)
    assert mirror_key(first) == mirror_key(second)


@given(WORDS.flatmap(lambda words: st.tuples(st.just(words), st.permutations(words))))
def test_letter_counting_keeps_its_key_when_the_words_are_permuted(pair: tuple[list, list]) -> None:
    first, second = (f'How many times does "a" appear in: "{" ".join(words)}"?' for words in pair)
    assert mirror_key(first) == mirror_key(second)


@given(NUMBERS, NUMBERS)
def test_products_of_different_factors_have_different_keys(first: list[int], second: list[int]) -> None:
    same = sorted(first) == sorted(second)
    keys = [mirror_key(" * ".join(map(str, numbers))) for numbers in (first, second)]
    assert (keys[0] == keys[1]) == same


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("3 * 5", "5*3"),
        ("What is  2.5 + X?", "what is x + 2.5?"),
        ("(2 + 3) * 4 =", "4 * (3 + 2) ="),
        ("3*x + 5 = 20", "20 = 5 + 3*x"),
        ("3 - 5", "5 - 3"),
    ],
)
def test_mirror_images(first: str, second: str) -> None:
    assert mirror_key(first) == mirror_key(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("3 * 5", "3 - 5"),
        ("3 * 5", "3 * 5 * 5"),
        ("12 * 3", "1 * 23"),
        ("1.5 * 2", "1.2 * 5"),
        ('Count "a" in "bat"', 'Count "b" in "bat"'),
        ("1 0 0\n0 1 0", "0 1 0\n1 1 0"),
        ("_ Q _ _\n_ _ _ _", "_ _ _ _\n_ Q _ _"),
        ("][[]", "[[]]]"),
    ],
)
def test_different_problems(first: str, second: str) -> None:
    assert mirror_key(first) != mirror_key(second)


def test_one_digit_products_leave_no_mirror_image() -> None:
    """Of all 100 products a * b, ten are held out; what may be trained on follows from the unordered pairs."""
    source = DataSource(source="reasoning_gym:products", options={"min_digits": 1, "max_digits": 1}, size=100)
    rows = load_rows(source)

    def pair(row: dict) -> tuple[int, ...]:
        words = row["prompt"].replace(".", " ").split()
        return tuple(sorted(int(word) for word in words if word.isdigit()))

    held_out = rows[:10]
    forbidden = {pair(row) for row in held_out}
    allowed = [row for row in rows if pair(row) not in forbidden]
    assert len(allowed) < 90
    assert exclude_held_out(rows, held_out) == (allowed, 100 - len(allowed))


def test_chats_and_strings_compare_by_the_problem() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5 * 3"}]
    assert problem_text(chat) == "5 * 3"
    rows = [{"prompt": chat, "answer": "15"}, {"prompt": "5 * 4", "answer": "20"}]
    assert exclude_held_out(rows, [{"prompt": "3 * 5"}]) == (rows[1:], 1)


def test_nothing_held_out_drops_nothing() -> None:
    rows = [{"prompt": "1 + 1"}]
    assert exclude_held_out(rows, []) == (rows, 0)


def test_an_empty_remainder_is_an_error() -> None:
    with pytest.raises(ConfigError, match="each of the 1 training problems"):
        exclude_held_out([{"prompt": "1 + 2"}], [{"prompt": "2 + 1"}])
