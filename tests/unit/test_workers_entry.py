"""train_func's thread: entered for an attempt and left with it, or parked between two."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.errors import AttemptEnded
from raysgd.session.events import Ended, Failed, Parked, Returned
from raysgd.workers.entry import Entry

PATIENCE_S = 30


class FakeAttempt:
    """What an entry needs of `raysgd.workers.attempt.Attempt`; ``outcomes`` has what its stream would end with."""

    def __init__(self, train_func: Callable[..., Any] = lambda: None, *, joins: BaseException | None = None) -> None:
        self.outcomes: queue.Queue[Any] = queue.Queue()
        self.calls: list[str] = []
        self._train_func = train_func
        self._joins = joins
        self.is_over = False

    def open(self) -> tuple[Callable[..., Any], Any]:
        self.calls.append("open")
        return self._train_func, {}

    def go_on_from(self, before: FakeAttempt) -> None:
        self.calls.append("go on")

    def join_group(self) -> None:
        self.calls.append("join")
        if self._joins is not None:
            raise self._joins

    def check_live(self) -> None:
        if self.is_over:
            raise AttemptEnded("over")

    def entered(self) -> None:
        self.calls.append("entered")

    def tell(self, event: Any) -> None:
        self.calls.append("tell")

    def is_left_by(self, error: BaseException) -> bool:
        return False

    def returned(self, value: Any) -> Returned:
        return Returned(repr(value).encode(), 0)

    def failed(self, error: BaseException) -> Failed:
        return Failed(None, type(error).__name__, str(error), "", 0.0)

    def drop(self, error: BaseException | None) -> None:
        self.calls.append("drop")

    def finish(self, outcome: Any, before: Any = ()) -> None:
        self.calls.append("finish")
        self.outcomes.put((outcome, bool(before)))

    def outcome(self) -> tuple[Any, bool]:
        """How the stream ended, and whether train_func was left with it."""
        found: tuple[Any, bool] = self.outcomes.get(timeout=PATIENCE_S)
        return found


def begin(entry: Entry, attempt: Any) -> None:
    entry.begin(attempt)


def test_it_is_entered_and_left() -> None:
    entry, attempt = Entry(), FakeAttempt(lambda: "value")
    begin(entry, attempt)
    assert attempt.outcome() == (Returned(b"'value'", 0), True)
    assert attempt.calls == ["open", "join", "entered", "drop", "finish"]
    assert entry.join(PATIENCE_S) and not entry.is_parked


def test_it_goes_on_in_the_next_attempt() -> None:
    entry = Entry()
    seen: list[bool] = []

    def train_func() -> str:
        for _ in range(2):
            seen.append(entry.is_in_thread)
            entry.rejoin(3)
        return "value"

    first, second, third = FakeAttempt(train_func), FakeAttempt(), FakeAttempt()
    begin(entry, first)
    assert first.outcome() == (Parked(None, 3), False)
    assert entry.is_parked and not entry.is_inside(first)  # type: ignore[arg-type]
    begin(entry, second)
    assert second.outcome() == (Parked(None, 3), False)
    begin(entry, third)
    assert third.outcome() == (Returned(b"'value'", 0), True)
    assert second.calls == ["go on", "join", "entered", "drop", "finish"]
    assert "open" in first.calls
    assert "open" not in third.calls
    assert seen == [True, True] and not entry.is_in_thread


def test_a_group_that_does_not_form_is_left_for_another_one() -> None:
    entry = Entry()
    first = FakeAttempt(lambda: entry.rejoin(3))
    begin(entry, first)
    first.outcome()
    for joins, failed in ((RuntimeError("timed out"), "timed out"), (AttemptEnded("a peer died"), None)):
        attempt = FakeAttempt(joins=joins)
        begin(entry, attempt)
        outcome, is_left = attempt.outcome()
        assert (None if outcome.failed is None else outcome.failed.summary, is_left) == (failed, False)
        assert "entered" not in attempt.calls
    last = FakeAttempt()
    begin(entry, last)
    assert isinstance(last.outcome()[0], Returned)


def test_an_attempt_that_ends_before_it_goes_on_is_left_for_another_one() -> None:
    entry = Entry()
    first, second, third = FakeAttempt(lambda: entry.rejoin(3)), FakeAttempt(), FakeAttempt()
    second.is_over = True
    begin(entry, first)
    first.outcome()
    begin(entry, second)
    assert second.outcome() == (Parked(None, 3), False)
    begin(entry, third)
    assert isinstance(third.outcome()[0], Returned)


def test_a_mistake_in_joining_leaves_train_func() -> None:
    entry = Entry()
    first, second = FakeAttempt(lambda: entry.rejoin(3)), FakeAttempt(joins=ValueError("no such interface"))
    begin(entry, first)
    first.outcome()
    begin(entry, second)
    outcome, is_left = second.outcome()
    assert isinstance(outcome, Failed) and outcome.summary == "no such interface" and is_left


def test_who_waits_is_let_go() -> None:
    entry = Entry()
    left: list[str] = []

    def train_func() -> None:
        try:
            entry.rejoin(3)
        except AttemptEnded as error:
            left.append(str(error))
            raise

    attempt = FakeAttempt(train_func)
    begin(entry, attempt)
    attempt.outcome()
    entry.let_go("the run is over")
    assert entry.join(PATIENCE_S) and not entry.is_parked
    assert left == ["the run is over"]
    assert attempt.outcome() == (Ended(), True)


def test_who_is_let_go_before_it_waits_does_not_wait() -> None:
    entry, is_let_go = Entry(), threading.Event()

    def train_func() -> None:
        assert is_let_go.wait(PATIENCE_S)
        entry.rejoin()

    attempt = FakeAttempt(train_func)
    begin(entry, attempt)
    entry.let_go("the run is over")
    is_let_go.set()
    assert entry.join(PATIENCE_S)


def test_an_attempt_that_comes_after_it_was_let_go_is_over() -> None:
    entry = Entry()
    first, second, third = FakeAttempt(lambda: entry.rejoin(3)), FakeAttempt(), FakeAttempt()
    begin(entry, first)
    assert first.outcome() == (Parked(None, 3), False)
    entry.let_go("the run is over")
    begin(entry, second)
    assert second.outcome() == (Ended(), False)
    assert entry.join(PATIENCE_S)
    begin(entry, third)
    assert third.outcome() == (Ended(), False)


@pytest.mark.parametrize("which", ["its own", "another"])
def test_it_is_interrupted_in_the_attempt_that_is_meant(which: str) -> None:
    entry, is_inside, may_end = Entry(), threading.Event(), threading.Event()

    def train_func() -> str:
        is_inside.set()
        while not may_end.wait(0.001):
            pass
        return "value"

    attempt, other = FakeAttempt(train_func), FakeAttempt()
    begin(entry, attempt)
    assert is_inside.wait(PATIENCE_S)
    entry.interrupt(attempt if which == "its own" else other)  # type: ignore[arg-type]
    if which == "another":
        may_end.set()
    assert type(attempt.outcome()[0]) is (Ended if which == "its own" else Returned)
