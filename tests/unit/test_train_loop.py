"""`raysgd.train.loop`: what is due when, each once per step; and a training that resumes anywhere continues as it would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import ConfigError
from raysgd.train.loop import LoopPosition, LoopSettings, Stepper, train

Event = tuple[Any, ...]


class Recorder(Stepper):
    """Writes down what the loop asks for. Its state is the number of steps by epoch, which an epoch's end changes too."""

    def __init__(self, num_steps: int, *, knows_length: bool, position: LoopPosition | None = None) -> None:
        self.position = position or LoopPosition()
        self._num_steps, self._knows_length = num_steps, knows_length
        self.events: list[Event] = []
        self.saved: list[tuple[int, dict[str, Any]]] = []  # how many events were before it, and its position
        self.recorded: list[tuple[int, dict[str, Any]]] = []  # the same of places

    def _note(self, what: str) -> None:
        self.events.append((what, self.position.epoch, self.position.epoch_steps, self.position.steps))

    def train_epoch(self) -> Iterator[None]:
        for _ in range(self.position.epoch_steps, self._num_steps):
            self.events.append(("step", self.position.epoch, self.position.epoch_steps))
            yield

    def is_epoch_over(self) -> bool:
        return self._knows_length and self.position.epoch_steps == self._num_steps

    def validate(self) -> None:
        self._note("validate")

    def report(self) -> None:
        self._note("report")

    def save(self) -> None:
        self._note("save")
        self.saved.append((len(self.events), asdict(self.position)))

    def record(self, *, is_same_step: bool) -> None:
        assert is_same_step != self.position.is_pending
        self.recorded.append((len(self.events), asdict(self.position)))

    def end_epoch(self) -> None:
        self._note("end_epoch")

    def of(self, what: str) -> list[int]:
        return [event[-1] for event in self.events if event[0] == what]


def never() -> bool:
    return False


def stops_after(number: int) -> Callable[[], bool]:
    """Return a `should_stop` that is true from the given call on."""
    calls = iter(range(1, 1_000_000))
    return lambda: next(calls) >= number


INTERVALS = st.none() | st.integers(1, 5)
SETTINGS = st.builds(
    LoopSettings,
    epochs=st.integers(1, 4),
    steps=st.none() | st.integers(1, 20),
    report_every=st.integers(1, 4),
    validate_every=INTERVALS,
    validate_every_epochs=INTERVALS,
    validates_last=st.booleans(),
    validates_before_saving=st.booleans(),
    save_every=INTERVALS,
    save_every_epochs=INTERVALS,
    saves_last=st.booleans(),
)


def divides(interval: int | None, number: int) -> bool:
    return interval is not None and number % interval == 0


@given(SETTINGS, st.integers(1, 6), st.booleans())
def test_all_that_is_due_is_done_once_per_step_in_order(settings: LoopSettings, num: int, knows_length: bool) -> None:
    it = Recorder(num, knows_length=knows_length)
    train(it, settings, never)
    total = min(settings.epochs * num, settings.steps or 1_000)  # type: ignore[operator]
    assert it.of("step") == [step % num for step in range(total)]
    last = {total}
    by_steps = {step for step in range(1, total + 1) if divides(settings.save_every, step)}
    # An epoch of unknown length ends when there is no further batch, which is not seen if the steps end before.
    ended = total // num - (
        not knows_length and settings.steps is not None and total % num == 0 and total == settings.steps
    )
    by_epochs = {epoch * num for epoch in range(1, ended + 1) if divides(settings.save_every_epochs, epoch)}
    saved = by_steps | by_epochs | (last if settings.saves_last else set())
    assert set(it.of("save")) == saved
    validated = {step for step in range(1, total + 1) if divides(settings.validate_every, step)}
    validated |= {epoch * num for epoch in range(1, ended + 1) if divides(settings.validate_every_epochs, epoch)}
    validated |= last if settings.validates_last else set()
    validated |= saved if settings.validates_before_saving else set()
    assert it.of("validate") == sorted(validated)
    reported = {step for step in range(1, total + 1) if divides(settings.report_every, step)} | validated | saved
    reported |= {epoch * num for epoch in range(1, ended + 1)}
    assert set(it.of("report")) == reported
    if knows_length:
        assert it.of("save") == sorted(saved), "more than one checkpoint of a step"
        assert it.of("report") == sorted(reported), "more than one report of a step"
    order = {"validate": 0, "report": 1, "save": 2}
    for step in range(1, total + 1) if knows_length else ():
        kinds = [order[event[0]] for event in it.events if event[0] in order and event[-1] == step]
        assert kinds == sorted(kinds)


@given(SETTINGS, st.integers(1, 6), st.booleans(), st.data())
def test_training_resumed_at_any_checkpoint_continues_as_it_would_have(
    settings: LoopSettings, num: int, knows_length: bool, data: st.DataObject
) -> None:
    whole = Recorder(num, knows_length=knows_length)
    train(whole, settings, never)
    if not whole.saved:
        return
    before, at = data.draw(st.sampled_from(whole.saved))
    resumed = Recorder(num, knows_length=knows_length, position=LoopPosition(**at))
    train(resumed, settings, never)
    assert resumed.events == whole.events[before:]


@given(SETTINGS, st.integers(1, 6), st.booleans(), st.integers(1, 20))
def test_stopped_training_saves_its_last_step_and_resumes_there(
    settings: LoopSettings, num: int, knows_length: bool, calls: int
) -> None:
    whole, first = (Recorder(num, knows_length=knows_length) for _ in range(2))
    train(whole, settings, never)
    train(first, settings, stops_after(calls))
    assert first.position.steps == min(calls, whole.position.steps)
    if first.position.steps == whole.position.steps:
        return
    assert first.of("save")[-1] == calls
    second = Recorder(num, knows_length=knows_length, position=LoopPosition(**first.saved[-1][1]))
    train(second, settings, never)
    steps = [event for each in (first, second) for event in each.events if event[0] in ("step", "end_epoch")]
    assert steps == [event for event in whole.events if event[0] in ("step", "end_epoch")]


def test_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="the training data has no batch for this worker"):
        train(Recorder(0, knows_length=True), LoopSettings(epochs=1), never)


@given(SETTINGS, st.integers(1, 6), st.booleans(), st.data())
def test_training_continued_from_any_place_is_as_it_would_have_been(
    settings: LoopSettings, num: int, knows_length: bool, data: st.DataObject
) -> None:
    """A step is recorded when it is made, and again when what was due after it is done."""
    whole = Recorder(num, knows_length=knows_length)
    train(whole, settings, never)
    assert {at["steps"] for _, at in whole.recorded} == set(range(1, whole.position.steps + 1))
    number, at = data.draw(st.sampled_from(whole.recorded))
    continued = Recorder(num, knows_length=knows_length, position=LoopPosition(**at))
    train(continued, settings, never)
    assert continued.events == whole.events[number:]
    assert continued.position == whole.position
