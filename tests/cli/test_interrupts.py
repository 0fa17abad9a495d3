"""Signals that nobody may lose: one whose exception is swallowed ends the program all the same, and none breaks a clean-up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hicache_ray.interrupts import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


class Struck:
    """Is interrupted while it is destroyed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        strike(self.number)


def strike(number: int) -> None:
    """A signal to this process, whose handler has run when it returns or raises."""
    heard = signal.getsignal(number)
    os.kill(os.getpid(), number)
    for _ in range(1000):
        assert signal.getsignal(number) is heard


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_that_a_destructor_swallows_ends_the_next_wait(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: lost.append(what.exc_type))
    ended = []

    def work() -> None:
        with ExitStack() as begun, interrupts.raising():
            begun.callback(ended.append, "cleaned up")
            Struck(number)
            assert lost == [KeyboardInterrupt]
            assert ended == []
            interrupts.wait()

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert ended == ["cleaned up"]


@pytest.mark.parametrize("number", SIGNALS)
def test_another_signal_does_not_break_the_clean_up(number: int) -> None:
    ended = []

    def work() -> None:
        with ExitStack() as begun:
            begun.callback(ended.append, "all of it")
            begun.callback(strike, number)
            with interrupts.raising():
                strike(number)
                ended.append("the signal has not raised")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert ended == ["all of it"]


def test_what_is_heard_while_it_is_held_raises_at_the_next_look() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        strike(signal.SIGINT)
        assert interrupts.heard
        for look in (interrupts.check, interrupts.wait):
            with pytest.raises(KeyboardInterrupt):
                look()
        with pytest.raises(KeyboardInterrupt), interrupts.raising():
            raise AssertionError("it was heard before")


def test_a_signal_that_arrives_during_a_wait_ends_it() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            interrupts.wait()
        timer.join()


def test_handlers_of_a_library_are_replaced() -> None:
    with Interrupts() as interrupts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.install()
        with pytest.raises(KeyboardInterrupt):
            strike(signal.SIGTERM)


def test_one_that_was_not_entered_touches_no_handler() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    interrupts = Interrupts()
    interrupts.install()
    with interrupts.raising():
        interrupts.check()
    assert [signal.getsignal(number) for number in SIGNALS] == before
