"""The runner of callbacks: order, `Stop`, exceptions of callbacks, and the one end that every start gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from raysgd.callbacks import Callback, Stop
from raysgd.callbacks.runner import CallbackRunner
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.result import Event, Result, RunInfo
from raysgd.testing.callback_suite import make_info, make_result

EVENT = Event("warning", 0.0, {"message": "hello"})


class Recorder(Callback):
    """Records its calls, and raises the given exceptions."""

    def __init__(self, name: str = "", log: list[Any] | None = None, **raises: BaseException) -> None:
        self.name = name
        self.log: list[Any] = [] if log is None else log
        self.raises = raises

    def _called(self, hook: str, argument: object) -> None:
        self.log.append((self.name, hook, argument))
        if hook in self.raises:
            raise self.raises[hook]

    def on_run_start(self, info: RunInfo) -> None:
        self._called("on_run_start", info)

    def on_result(self, result: Result) -> None:
        self._called("on_result", result)

    def on_checkpoint(self, checkpoint: Any) -> None:
        self._called("on_checkpoint", checkpoint)

    def on_event(self, event: Event) -> None:
        self._called("on_event", event)

    def on_run_end(self, error: BaseException | None) -> None:
        self._called("on_run_end", error)

    def hooks(self) -> list[str]:
        return [hook for _, hook, _ in self.log]


class Critical(Recorder):
    critical = True


@dataclass
class Problems:
    """Collects what a runner reports."""

    texts: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def problems() -> Problems:
    return Problems()


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return make_info(tmp_path)


def test_callbacks_are_called_in_order_with_the_same_objects(problems: Problems, info: RunInfo) -> None:
    log: list[Any] = []
    runner = CallbackRunner([Recorder("a", log), Recorder("b", log)], problems)
    result, checkpoint, error = make_result(1), Checkpoint(None, iteration=1), ValueError("x")
    runner.start(info)
    runner.call("on_result", result)
    runner.call("on_event", EVENT)
    runner.call("on_checkpoint", checkpoint)
    runner.end(error)
    arguments = [info, result, EVENT, checkpoint, error]
    hooks = ["on_run_start", "on_result", "on_event", "on_checkpoint", "on_run_end"]
    expected = [(name, hook, argument) for hook, argument in zip(hooks, arguments, strict=True) for name in "ab"]
    assert [(name, hook, id(argument)) for name, hook, argument in log] == [(n, h, id(a)) for n, h, a in expected]
    assert not problems.texts


@pytest.mark.parametrize("error", [None, ValueError("the user's"), KeyboardInterrupt()])
def test_on_run_end_gets_the_error_of_the_run(error: BaseException | None, problems: Problems, info: RunInfo) -> None:
    # A defect of Ray Train v1: callbacks always got None.
    recorder = Recorder()
    runner = CallbackRunner([recorder], problems)
    runner.start(info)
    runner.end(error)
    assert recorder.log[-1] == ("", "on_run_end", error)


def test_first_stop_is_returned_after_all_callbacks_were_called(problems: Problems, info: RunInfo) -> None:
    first, second, last = Recorder(on_result=Stop("first")), Recorder(on_result=Stop("second")), Recorder()
    runner = CallbackRunner([first, second, last], problems)
    runner.start(info)
    stop = runner.call("on_result", make_result(1))
    assert stop is first.raises["on_result"]
    assert stop.reason == "first"
    assert last.hooks() == ["on_run_start", "on_result"]
    assert not problems.texts


@pytest.mark.parametrize("hook", ["on_checkpoint", "on_event", "on_run_start"])
def test_stop_may_be_raised_by_other_hooks(hook: str, problems: Problems, info: RunInfo) -> None:
    runner = CallbackRunner([Recorder(**{hook: Stop("enough")})], problems)
    stops = [runner.start(info), runner.call("on_result", make_result(1)), runner.call("on_event", EVENT)]
    stops.append(runner.call("on_checkpoint", Checkpoint(None, iteration=1)))
    assert [stop.reason for stop in stops if stop is not None] == ["enough"]


def test_exception_is_reported_and_does_not_end_the_run(problems: Problems, info: RunInfo) -> None:
    last = Recorder()
    runner = CallbackRunner([Recorder(on_result=OSError("disk full")), last], problems)
    runner.start(info)
    assert runner.call("on_result", make_result(1)) is None
    assert last.hooks()[-1] == "on_result"
    (text,) = problems.texts
    assert text.startswith("callback Recorder failed in on_result: OSError: disk full")
    assert "in _called" in text  # the traceback


def test_traceback_is_reported_once_and_three_failures_in_a_row_disable(problems: Problems, info: RunInfo) -> None:
    recorder = Recorder(on_result=OSError("disk full"))
    runner = CallbackRunner([recorder], problems)
    runner.start(info)
    for iteration in range(1, 11):
        runner.call("on_result", make_result(iteration))
    assert ["Traceback" in text for text in problems.texts] == [True, False, False]
    assert "no further calls" in problems.texts[-1]
    runner.end(None)
    assert recorder.hooks() == ["on_run_start", *["on_result"] * 3, "on_run_end"]


def test_separate_failures_do_not_disable_a_callback(problems: Problems, info: RunInfo) -> None:
    recorder = Recorder()
    runner = CallbackRunner([recorder], problems)
    runner.start(info)
    for iteration in range(1, 13):
        recorder.raises = {"on_result": OSError("flaky")} if iteration % 3 else {}
        runner.call("on_result", make_result(iteration))
    assert len(problems.texts) == 8
    assert recorder.hooks().count("on_result") == 12


def test_callback_whose_start_failed_gets_only_its_end(problems: Problems, info: RunInfo) -> None:
    recorder, other = Recorder(on_run_start=ImportError("no such library")), Recorder()
    runner = CallbackRunner([recorder, other], problems)
    runner.start(info)
    runner.call("on_result", make_result(1))
    runner.end(None)
    assert recorder.hooks() == ["on_run_start", "on_run_end"]
    assert other.hooks() == ["on_run_start", "on_result", "on_run_end"]
    assert len(problems.texts) == 1


def test_disabled_callback_is_enabled_in_the_next_run(problems: Problems, info: RunInfo) -> None:
    recorder = Recorder(on_run_start=OSError("not yet"))
    runner = CallbackRunner([recorder], problems)
    runner.start(info)
    runner.end(None)
    recorder.raises = {}
    runner.start(info)
    runner.call("on_result", make_result(1))
    assert recorder.hooks()[-1] == "on_result"


def test_equal_callbacks_are_counted_separately(problems: Problems, info: RunInfo) -> None:
    @dataclass
    class Fickle(Callback):
        name: str = "same"
        calls: list[int] = field(default_factory=list, compare=False)
        fails: bool = field(default=False, compare=False)

        def on_result(self, result: Result) -> None:
            self.calls.append(result["training_iteration"])
            if self.fails:
                raise OSError("x")

    good, bad = Fickle(), Fickle(fails=True)
    runner = CallbackRunner([good, bad], problems)
    runner.start(info)
    for iteration in range(1, 6):
        runner.call("on_result", make_result(iteration))
    assert good.calls == [1, 2, 3, 4, 5]
    assert bad.calls == [1, 2, 3]


@pytest.mark.parametrize("hook", ["on_run_start", "on_result", "on_event"])
def test_critical_exception_is_raised_after_the_others_were_called(
    hook: str, problems: Problems, info: RunInfo
) -> None:
    error, other = ValueError("diverged"), Recorder()
    runner = CallbackRunner([Critical(**{hook: error}), other], problems)

    def play() -> None:
        runner.start(info)
        runner.call("on_result", make_result(1))
        runner.call("on_event", EVENT)

    with pytest.raises(ValueError, match="diverged") as caught:
        play()
    assert caught.value is error
    if hook != "on_run_start":  # the others are not started any more
        assert other.hooks()[-1] == hook
    runner.end(caught.value)
    assert problems.texts == []


def test_failed_critical_start_ends_the_started_callbacks(problems: Problems, info: RunInfo) -> None:
    before, after = Recorder(), Recorder()
    critical = Critical(on_run_start=ValueError("no"))
    runner = CallbackRunner([before, critical, after], problems)
    with pytest.raises(ValueError, match="no"):
        runner.start(info)
    runner.end(ValueError("no"))
    assert before.hooks() == critical.hooks() == ["on_run_start", "on_run_end"]
    assert after.hooks() == []


def test_critical_end_is_raised_after_all_ends_unless_the_run_failed(problems: Problems, info: RunInfo) -> None:
    last = Recorder()
    runner = CallbackRunner([Critical(on_run_end=OSError("not saved")), last], problems)
    runner.start(info)
    with pytest.raises(OSError, match="not saved"):
        runner.end(None)
    assert last.hooks()[-1] == "on_run_end"
    runner.start(info)
    runner.end(ValueError("the run's own"))
    assert ["not saved" in text for text in problems.texts] == [True]


def test_every_start_gets_one_end(problems: Problems, info: RunInfo) -> None:
    recorder = Recorder()
    runner = CallbackRunner([recorder], problems)
    runner.end(None)
    runner.start(info)
    runner.end(None)
    runner.end(ValueError("again"))
    runner.call("on_result", make_result(1))
    assert recorder.hooks() == ["on_run_start", "on_run_end"]


@pytest.mark.parametrize("hook", ["on_run_start", "on_result", "on_run_end"])
def test_keyboard_interrupt_passes(hook: str, problems: Problems, info: RunInfo) -> None:
    interrupted, last = Recorder(**{hook: KeyboardInterrupt()}), Recorder()
    runner = CallbackRunner([interrupted, last], problems)

    def play() -> None:
        runner.start(info)
        runner.call("on_result", make_result(1))
        runner.end(ValueError("x"))

    with pytest.raises(KeyboardInterrupt):
        play()
    if hook == "on_run_end":
        assert last.hooks()[-1] == "on_run_end"
    assert not problems.texts


@pytest.mark.parametrize("rank", [None, 3])
def test_rank_is_set_before_on_run_start(rank: int | None, problems: Problems, info: RunInfo) -> None:
    class Ranked(Callback):
        seen: Any = "never"

        def on_run_start(self, info: RunInfo) -> None:
            self.seen = self.rank

    callback = Ranked()
    CallbackRunner([callback], problems, rank=rank).start(info)
    assert callback.seen == rank


def test_callback_warns_through_its_run_and_pickles_afterwards(
    problems: Problems, info: RunInfo, caplog: pytest.LogCaptureFixture
) -> None:
    class Warns(Callback):
        def on_result(self, result: Result) -> None:
            self.warn("careful")

    callback = Warns()
    runner = CallbackRunner([callback], problems)
    runner.start(info)
    runner.call("on_result", make_result(1))
    runner.end(None)
    assert problems.texts == ["careful"] and not caplog.records
    assert cloudpickle.loads(cloudpickle.dumps(callback)).rank is None
    callback.warn("outside of a run")
    assert [record.getMessage() for record in caplog.records] == ["outside of a run"]
