"""Calls for an attempt, also those that arrive before the attempt begins."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raysgd.workers.process.worker_actor import CurrentAttempt


class Attempt:
    """Notes what is ordered of it."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.done: list[str] = []

    def do(self, what: str) -> str:
        self.done.append(what)
        return what


@pytest.fixture
def current() -> Any:
    return CurrentAttempt()


def order(current: CurrentAttempt, what: str, number: int = 1) -> str:
    return current.call(number, lambda attempt: attempt.do(what), "nothing")  # type: ignore[attr-defined]


def test_running_attempt_gets_calls_of_its_number(current: Any) -> None:
    attempt = Attempt()
    current.begin(attempt)
    assert order(current, "hold") == "hold" and order(current, "stop", 2) == "nothing"
    assert attempt.done == ["hold"] and current.get() is attempt


def test_calls_before_the_attempt_begins_are_made_in_order(current: Any) -> None:
    current.expect()
    assert [order(current, what) for what in ("hold", "stop")] == ["nothing"] * 2
    order(current, "of another", 2)
    attempt = Attempt()
    current.begin(attempt)
    assert attempt.done == ["hold", "stop"]
    assert order(current, "end") == "end"
    current.forget(attempt)
    current.expect()
    again = Attempt()
    current.begin(again)
    assert again.done == [], "what is done must not be done again"


def test_calls_for_an_attempt_that_is_over_are_dropped(current: Any) -> None:
    attempt = Attempt()
    current.expect()
    current.begin(attempt)
    current.forget(attempt)
    assert order(current, "stop") == "nothing" and current.get() is None
    current.expect()
    order(current, "of one that never came")
    current.expect()
    following = Attempt()
    current.begin(following)
    current.forget(attempt)
    assert following.done == [] and current.get() is following


def test_no_call_is_lost_between_threads(current: Any) -> None:
    for _ in range(200):
        attempt = Attempt()
        current.expect()
        start = threading.Barrier(2)

        def begin(attempt: Any = attempt, start: Any = start) -> None:
            start.wait()
            current.begin(attempt)

        thread = threading.Thread(target=begin)
        thread.start()
        start.wait()
        order(current, "stop")
        thread.join()
        assert attempt.done == ["stop"]
        current.forget(attempt)
