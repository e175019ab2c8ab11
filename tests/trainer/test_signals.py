"""SIGTERM and SIGINT stop the run where nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from metagrpo.trainer.signals import Interrupted, StopSignals, exit_code

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def received() -> Iterator[list[int]]:
    """The handlers that were there before write down what reaches them."""
    numbers: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: numbers.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@BOTH
def test_a_signal_stops_at_once(number: signal.Signals) -> None:
    with StopSignals(), pytest.raises(Interrupted) as caught:
        signal.raise_signal(number)
        raise AssertionError("the signal came later")
    assert caught.value.number == number
    assert str(caught.value) == number.name


def test_no_handler_for_errors_takes_it_for_one() -> None:
    with StopSignals(), pytest.raises(Interrupted), suppress(Exception):
        signal.raise_signal(signal.SIGTERM)


@BOTH
def test_a_deferred_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    done = []
    with StopSignals() as signals, pytest.raises(Interrupted) as caught:
        with signals.deferred():
            signal.raise_signal(number)
            done.append("block")
        done.append("after")
    assert done == ["block"]
    assert caught.value.number == number


def test_blocks_without_a_signal_end_quietly() -> None:
    with StopSignals() as signals:
        for _ in range(2):
            with signals.deferred():
                pass
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)  # no longer deferred


@BOTH
def test_the_second_signal_acts_as_without_us(number: signal.Signals, received: list[int]) -> None:
    with StopSignals() as signals, suppress(Interrupted), signals.deferred():
        signal.raise_signal(number)
        assert received == []
        signal.raise_signal(number)
        assert received == [number]


def test_an_error_in_a_deferred_block_is_not_hidden() -> None:
    with StopSignals() as signals, pytest.raises(KeyError), signals.deferred():
        signal.raise_signal(signal.SIGTERM)
        raise KeyError("the error")


@BOTH
def test_handlers_are_put_back(number: signal.Signals, received: list[int]) -> None:
    before = signal.getsignal(number)
    with StopSignals():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before
    with suppress(Interrupted), StopSignals():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before
    signal.raise_signal(number)
    assert received == [number]


def test_the_exit_code() -> None:
    assert exit_code(signal.SIGTERM) == 0
    assert exit_code(signal.SIGINT) == 130  # what a shell reports of a program that SIGINT ended
