"""A stream whose iteration is behind its reader: missing frames are fetched, and each result comes once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import random
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
from ray.exceptions import RayActorError

from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.errors import MissingMetricError, WorkerError
from raysgd.trainer.stream import ResultStream
from support.poll import until

PATIENCE_S = 10.0
ITEM = 3  # frames that are fetched at once


class FakeChannel:
    """A run whose frames are all known beforehand.

    Args:
        num_results: How many it has.
        batch: Frames that come at once.
    """

    def __init__(self, num_results: int, batch: int = 4) -> None:
        start = {"attempt": 1, "world_size": 1, "iterations_before": 0, "time_before_s": 0.0}
        made = [Frame(0, frames.ATTEMPT, 1, data=start)]
        for n in range(num_results):
            rows = json.dumps([[1.0, 1.0, {"n": n}]]).encode()
            made.append(Frame(len(made), frames.REPORTS, 1, 0, {"first": n, "count": 1}, rows))
            if n % 5 == 0:
                made.append(Frame(len(made), frames.EVENT, 1, data={"kind": "sample", "timestamp": 1.0, "data": {}}))
        made.append(Frame(len(made), frames.RUN_END, 1, data={"kind": "done"}))
        made.append(Frame(len(made), frames.RUN_CLOSED, 1))
        self.made = made
        self.batch = batch
        self.is_read = threading.Event()
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_fetches = 0
        self.has_lost_cluster = False

    def stream(self, run_id: str) -> Iterator[list[Frame]]:
        for start in range(0, len(self.made), self.batch):
            yield self.made[start : start + self.batch]
        self.is_read.set()

    def frames(self, run_id: str, seq: int) -> list[Frame]:
        self.num_fetches += 1
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_S), "the one who lets it answer was held up"
        return self.made[seq : seq + ITEM]

    def values(self, run_id: str, *, first_only: bool) -> list[Any]:
        return [None]

    def stop(self, run_id: str, why: str, *, cancel: bool) -> None: ...


def stream_of(channel: Any, buffer_bytes: int = 1000) -> ResultStream:
    return ResultStream(
        channel,
        "run",
        reduce={},
        returns="first",
        make_reader=lambda stream: None,
        buffer_bytes=buffer_bytes,
    )


async def numbers(stream: ResultStream) -> list[int]:
    return [result["n"] async for result in stream]


def test_iteration_that_is_behind_gets_each_result_once_and_in_order() -> None:
    channel = FakeChannel(200)
    stream = stream_of(channel)
    assert channel.is_read.wait(PATIENCE_S)
    assert [result["n"] for result in stream] == list(range(200))
    assert channel.num_fetches > 50
    assert stream.is_finished()


@pytest.mark.parametrize("seed", range(20))
def test_iteration_that_is_behind_catches_up_while_results_arrive(seed: int) -> None:
    draw = random.Random(seed)
    channel = FakeChannel(draw.randint(1, 300), batch=draw.randint(1, 20))
    stream = stream_of(channel, buffer_bytes=draw.choice([0, 500, 5000]))
    assert [result["n"] for result in stream] == list(range(len(stream_results(channel))))


@pytest.mark.parametrize("seed", range(5))
async def test_async_iteration_that_is_behind_gets_each_result_once(seed: int) -> None:
    channel = FakeChannel(100, batch=seed + 1)
    assert await numbers(stream_of(channel, buffer_bytes=500 * seed)) == list(range(100))


def stream_results(channel: FakeChannel) -> list[Frame]:
    return [frame for frame in channel.made if frame.kind == frames.REPORTS]


async def test_slow_channel_does_not_block_the_event_loop() -> None:
    channel = FakeChannel(50)
    channel.may_answer.clear()
    stream = stream_of(channel)
    task = asyncio.ensure_future(numbers(stream))
    assert await asyncio.to_thread(channel.is_asked.wait, PATIENCE_S)
    for _ in range(10):  # the loop turns while the channel takes its time
        await asyncio.sleep(0)
    assert not task.done()
    channel.may_answer.set()
    assert await task == list(range(50))


async def test_iteration_cancelled_during_a_fetch_continues_where_it_was() -> None:
    channel = FakeChannel(50)
    stream = stream_of(channel, buffer_bytes=0)
    channel.may_answer.clear()
    for _ in range(2):  # the second asks for the same while the first is on its way
        task = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(channel.is_asked.wait, PATIENCE_S)
        channel.is_asked.clear()
        task.cancel()
        await asyncio.wait([task])
    channel.may_answer.set()
    assert await numbers(stream) == list(range(50))


def test_reader_continues_while_the_iteration_fetches() -> None:
    channel = FakeChannel(100)
    held = threading.Event()

    def slowly(run_id: str) -> Iterator[list[Frame]]:
        yield channel.made[:10]
        assert held.wait(PATIENCE_S)
        yield channel.made[10:]
        channel.may_answer.set()  # only once the reader came back for more

    channel.stream = slowly  # type: ignore[method-assign]
    channel.may_answer.clear()
    stream = stream_of(channel, buffer_bytes=400)
    threading.Thread(target=lambda: channel.is_asked.wait(PATIENCE_S) and held.set()).start()
    assert [result["n"] for result in stream] == list(range(100))


@pytest.mark.parametrize("first", [0, 1, 7, 50, 51])
def test_stream_begins_at_the_given_iteration(first: int) -> None:
    stream = ResultStream(cast(Any, FakeChannel(50)), "run", reduce={}, returns="first", from_iteration=first)
    assert [result["training_iteration"] for result in stream] == list(range(max(1, first), 51))


class ValuesLost(FakeChannel):
    """A run that has ended, and the process with what it returned is gone."""

    def values(self, run_id: str, *, first_only: bool) -> list[Any]:
        raise WorkerError("what train_func returned was lost")


def test_lost_return_values_raise_after_the_results() -> None:
    stream = stream_of(ValuesLost(20))
    assert len(list(stream)) == 20 and stream.is_finished()
    with pytest.raises(WorkerError, match="was lost"):
        stream.get_returns()


class BreaksOff(FakeChannel):
    """A controller that dies after the run's outcome and before its last frame."""

    def stream(self, run_id: str) -> Iterator[list[Frame]]:
        yield [frame for frame in self.made if frame.kind != frames.RUN_CLOSED]
        raise RayActorError


def test_run_lost_after_its_outcome_ends_all_waits() -> None:
    stream = stream_of(BreaksOff(20), buffer_bytes=1 << 20)
    results = []
    with contextlib.suppress(WorkerError):
        for result in stream:
            results.append(result)
    assert len(results) == 20
    with pytest.raises(WorkerError, match="the Trainer's controller process is gone"):
        stream.get_returns()


class Live(FakeChannel):
    """A run that lasts until ``may_end`` is set, and then fails with an exception of train_func."""

    def __init__(self, num_results: int) -> None:
        super().__init__(num_results)
        self.may_end = threading.Event()

    def stream(self, run_id: str) -> Iterator[list[Frame]]:
        *results, end, closed = self.made
        yield results
        assert self.may_end.wait(PATIENCE_S)
        failed = {"type_name": "builtins.ValueError", "summary": "ValueError: bad", "traceback": "", "rank": 0}
        failed |= {"kind": "error", "node": "n", "followed": [], "exception": cloudpickle.dumps(ValueError("bad"))}
        yield [Frame(end.seq, frames.RUN_END, 1, data=failed), closed]


class Lease:
    """Stands for what keeps the workers."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that only objects without cycles are freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ended(stream: ResultStream) -> None:
    with contextlib.suppress(ValueError):
        stream.get_returns()
    assert stream.wait_closed(PATIENCE_S)


def test_stream_of_a_live_run_that_nobody_holds_is_freed_with_its_lease(no_collector: None) -> None:
    channel, lease = Live(3), Lease()
    lease_of = weakref.ref(lease)
    stream = ResultStream(cast(Any, channel), "run", reduce={}, returns="first", lease=lease)
    assert next(stream)["n"] == 0
    stream_of_it, thread = weakref.ref(stream), stream._thread
    del lease, stream
    freed = until(lambda: stream_of_it() is None and lease_of() is None, PATIENCE_S)
    channel.may_end.set()
    thread.join(PATIENCE_S)
    assert freed, "the thread that reads the run holds the stream"


def test_lease_is_held_until_the_run_is_closed(no_collector: None) -> None:
    channel, lease = Live(3), Lease()
    lease_of = weakref.ref(lease)
    stream = ResultStream(cast(Any, channel), "run", reduce={}, returns="first", lease=lease)
    del lease
    assert next(stream)["n"] == 0 and lease_of() is not None
    channel.may_end.set()
    ended(stream)
    assert until(lambda: lease_of() is None, PATIENCE_S)


def test_lease_is_held_while_results_must_still_be_fetched(no_collector: None) -> None:
    channel, lease = FakeChannel(200), Lease()
    lease_of = weakref.ref(lease)
    stream = ResultStream(cast(Any, channel), "run", reduce={}, returns="first", buffer_bytes=400, lease=lease)
    del lease
    assert stream.wait_closed(PATIENCE_S)
    stream._thread.join(PATIENCE_S)
    assert lease_of() is not None
    assert [result["n"] for result in stream] == list(range(200))
    assert lease_of() is None


def test_exception_of_a_run_does_not_keep_what_the_caller_holds(no_collector: None) -> None:
    channel = Live(3)
    channel.may_end.set()

    class Owner:
        def __init__(self) -> None:
            self.stream = stream_of(channel)

        def run(self) -> Any:
            return self.stream.get_returns()

    def fails() -> weakref.ref[Owner]:
        owner = Owner()
        with pytest.raises(ValueError, match="bad"):
            owner.run()
        with pytest.raises(ValueError, match="bad"):
            list(owner.stream)
        owner.stream._thread.join(PATIENCE_S)
        return weakref.ref(owner)

    assert fails()() is None, "the stream's exception refers to the frames that it passed"


class Warns(FakeChannel):
    """A run with a warning of the controller, and one that a driver's callback has logged already."""

    def __init__(self) -> None:
        super().__init__(1)
        start = {"kind": "run_start", "timestamp": 5.0, "data": {"name": "run_001", "run_dir": "/runs/run_001"}}
        given: list[dict[str, Any]] = [
            {"message": "of the controller"},
            {"message": "of the driver", "source": "driver"},
        ]
        events = [start, *({"kind": "warning", "timestamp": 6.0, "data": data} for data in given)]
        made = [*(Frame(0, frames.EVENT, 0, data=data) for data in events), *self.made]
        self.made = [replace(frame, seq=seq) for seq, frame in enumerate(made)]


class Reader:
    """What calls the callbacks of a driver."""

    def feed(self, frame: Frame) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


@pytest.mark.parametrize(
    ("has_callbacks", "logs", "kept", "logged"),
    [
        (False, True, ["of the controller", "of the driver"], ["of the controller", "of the driver"]),
        (False, False, ["of the controller", "of the driver"], []),
        (True, True, ["of the controller"], ["of the controller"]),
    ],
)
def test_warnings_are_kept_and_logged_once(
    has_callbacks: bool, logs: bool, kept: list[str], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def make(stream: ResultStream) -> Any:
        return Reader() if has_callbacks else None

    stream = ResultStream(cast(Any, Warns()), "run", reduce={}, returns="first", make_reader=make, logs_warnings=logs)
    assert len(list(stream)) == 1
    assert stream.run_info.warnings == kept
    assert [record.getMessage() for record in caplog.records] == logged
    assert (stream.run_info.name, stream.run_dir, stream.run_info.started_s) == ("run_001", "/runs/run_001", 5.0)


def test_run_that_is_lost_with_its_controller_says_how_it_is_resumed() -> None:
    class Lost(Warns):
        def stream(self, run_id: str) -> Iterator[list[Frame]]:
            yield self.made[:1]
            raise RayActorError

    with pytest.raises(WorkerError, match=r"the run with it; raysgd\.Trainer\.restore\('/runs/run_001'\) resumes it"):
        list(stream_of(Lost()))


class EndsWithMissingMetric(FakeChannel):
    """A run that has succeeded, but for a metric that no report had."""

    def __init__(self) -> None:
        super().__init__(3)
        data = {"kind": "error", "error_type": "MissingMetricError", "message": "no 'los'", "key": "los"}
        self.made = [replace(frame, data=data) if frame.kind == frames.RUN_END else frame for frame in self.made]

    def values(self, run_id: str, *, first_only: bool) -> Any:
        return SimpleNamespace(open=lambda: ["first"] if first_only else ["first", "second"])


@pytest.mark.parametrize(("returns", "expected"), [("first", "first"), ("all", ["first", "second"])])
def test_missing_metric_is_raised_with_what_train_func_returned(returns: str, expected: Any) -> None:
    stream = ResultStream(cast(Any, EndsWithMissingMetric()), "run", reduce={}, returns=returns)
    with pytest.raises(MissingMetricError, match="no 'los'") as caught:
        stream.get_returns()
    assert (caught.value.key, caught.value.returned) == ("los", expected)
    assert pickle.loads(pickle.dumps(caught.value)).returned == expected
    assert [next(stream)["n"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(MissingMetricError):
        next(stream)
