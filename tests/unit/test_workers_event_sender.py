"""Events reach the controller in order and each once, even if the connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysgd.session.events import NUM_MARKS, Mark, Warned, add_mark
from raysgd.transport import Endpoint, connect
from raysgd.workers import events_connection
from raysgd.workers.events_connection import Batch, EventSender, Inbox, InboxAddress, Inboxes, MarkSender, newest_marks
from support.listening import Loop, Relay, listening
from support.poll import until

KEY = "k"
PATIENCE_S = 20.0


class Controller:
    """The controller's end of one worker's events."""

    def __init__(self, loop: Loop, interval_s: float = 0.0) -> None:
        self._loop = loop
        self._inboxes = Inboxes()
        self.inbox = loop.run(self._open(interval_s))

    async def _open(self, interval_s: float) -> Inbox:
        return self._inboxes.open(KEY, interval_s)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Endpoint]:
        with listening(self._loop, {events_connection.KIND: self._inboxes.handle}) as endpoint:
            yield endpoint

    async def close(self) -> None:
        self._inboxes.close(KEY)

    def receive_through_ray(self, batches: list[Batch]) -> None:
        async def put() -> None:
            for batch in batches:
                self.inbox.put(batch)

        self._loop.run(put())

    def received(self, count: int) -> list[str]:
        async def get() -> list[str]:
            got: list[str] = []
            while len(got) < count:
                got += [event.message for event in await asyncio.wait_for(self.inbox.items.get(), PATIENCE_S)]
            return got

        return self._loop.run(get())


def events(number: int, size: int = 0) -> list[Any]:
    return [Warned(f"{number}" + "x" * size)]


def send_all(sender: EventSender, controller: Controller, count: int, size: int = 0) -> None:
    for number in range(count):
        controller.receive_through_ray(sender.send(events(number, size)))
    controller.receive_through_ray(sender.finish())


def test_events_travel_over_the_connection(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = EventSender(InboxAddress(endpoint, KEY), on_problem=lambda problem: pytest.fail(str(problem)))
        for number in range(100):
            assert sender.send(events(number)) == []
        assert sender.finish() == []
    assert controller.received(100) == [str(number) for number in range(100)]


def test_events_travel_over_a_connection_with_a_high_descriptor(loop: Loop) -> None:
    """A user's data loader may have more than a thousand files open when the sender connects."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("this process may not open so many files")
    controller = Controller(loop)
    with contextlib.ExitStack() as files, controller.listening() as endpoint:
        for _ in range(1100):
            files.enter_context(open(os.devnull, "rb"))
        sender = EventSender(InboxAddress(endpoint, KEY), on_problem=lambda problem: pytest.fail(str(problem)))
        assert sender.send(events(0)) == []
        assert sender.finish() == []
    assert controller.received(1) == ["0"]


def test_without_an_address_events_travel_through_ray() -> None:
    problems: list[str | None] = []
    sender = EventSender(None, on_problem=problems.append)
    assert problems == [None]
    assert sender.send(events(0)) == [Batch(0, events(0))]
    assert sender.send(events(1)) == [Batch(1, events(1))]
    assert sender.finish() == []


def test_events_travel_through_ray_where_nobody_listens(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        pass
    problems: list[str | None] = []
    send_all(EventSender(InboxAddress(endpoint, KEY), on_problem=problems.append), controller, 3)
    assert controller.received(3) == ["0", "1", "2"]
    assert len(problems) == 1 and f"{endpoint.host}:{endpoint.port}" in str(problems[0])


def test_events_travel_through_ray_if_their_inbox_is_closed(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = EventSender(InboxAddress(endpoint, "another"))
        send_all(sender, controller, 3)
    assert controller.received(3) == ["0", "1", "2"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_after_bytes=st.integers(0, 6000), count=st.integers(1, 30))
def test_broken_connection_loses_and_repeats_no_event(loop: Loop, cut_after_bytes: int, count: int) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        relay = Relay(endpoint, cut_sent=cut_after_bytes)
        try:
            send_all(EventSender(InboxAddress(relay.endpoint, KEY)), controller, count, size=100)
        finally:
            relay.close()
    assert controller.received(count) == [f"{number}" + "x" * 100 for number in range(count)]


def test_events_travel_through_ray_if_the_controller_does_not_acknowledge(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_connection, "ACK_TIMEOUT_S", 0.1)

    async def deaf(*_: Any) -> None:
        await asyncio.sleep(PATIENCE_S)

    with listening(loop, {events_connection.KIND: deaf}) as endpoint:
        problems: list[str | None] = []
        sender = EventSender(InboxAddress(endpoint, KEY), on_problem=problems.append)
        assert sender.send(events(0)) == []
        assert sender.finish() == [Batch(0, events(0))]
        assert len(problems) == 1 and "TimeoutError" in str(problems[0])


def test_sender_waits_for_a_controller_that_is_behind(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_connection, "MAX_UNACKNOWLEDGED_BYTES", 1000)
    controller = Controller(loop)
    is_released = asyncio.Event()

    async def slow(hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_released.wait()
        await controller.inbox.serve(reader, writer)

    async def release() -> None:
        is_released.set()

    with listening(loop, {events_connection.KIND: slow}) as endpoint:
        problems: list[str | None] = []
        sender = EventSender(InboxAddress(endpoint, KEY), on_problem=problems.append)
        thread = threading.Thread(target=send_all, args=(sender, controller, 20, 200))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        loop.run(release())
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(controller.received(20)) == 20 and problems == []


def test_events_that_a_dead_worker_had_sent_are_read(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        connection = connect(endpoint, {"kind": events_connection.KIND, "key": KEY}, 10)
        from raysgd.transport import pack

        connection.sendall(b"".join(pack(Batch(number, events(number))) for number in range(50)) + pack("x")[:3])
        assert controller.received(1) == ["0"]
        connection.close()
        loop.run(controller.inbox.wait_drained(PATIENCE_S))
        assert controller.received(49) == [str(number) for number in range(1, 50)]


def test_waiting_for_a_connection_that_stays_open_times_out(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = EventSender(InboxAddress(endpoint, KEY))
        sender.send(events(0))
        controller.received(1)
        loop.run(controller.inbox.wait_drained(0.05))
        sender.finish()


def test_closing_an_inbox_closes_its_connections(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = EventSender(InboxAddress(endpoint, KEY))
        sender.send(events(0))
        controller.received(1)
        loop.run(controller.close())
        assert until(lambda: sender.send(events(1)) != [], PATIENCE_S)


def test_batch_that_leaves_a_gap_is_dropped(loop: Loop) -> None:
    controller = Controller(loop)
    controller.receive_through_ray([Batch(1, events(1)), Batch(0, events(0)), Batch(0, events(0)), Batch(1, events(1))])
    assert controller.received(2) == ["0", "1"]


def marks_of(number: int, small: bytes = b"{}") -> Mark:
    return Mark(number, small, is_in_step=number % 2 == 1, is_settled=True)


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60), st.integers(1, 20))
def test_marks_are_those_that_all_of_them_would_leave(passes: list[tuple[int, bool]], at_a_time: int) -> None:
    """Whatever is not unpacked: many passes make a step where gradients are accumulated."""
    sent, expected, small = [], deque([Mark(0, b"")], maxlen=NUM_MARKS), b""
    for step, (num_passes, is_drawn) in enumerate(passes):
        for number in range(num_passes + 1):
            small, before = (b"%d %d" % (step, number) if is_drawn else small), small
            mark = Mark(step, small, is_in_step=number > 0)
            sent.append(pickle.dumps(mark if small != before else replace(mark, small=None)))
            add_mark(expected, mark)
    found = deque([Mark(0, b"")], maxlen=NUM_MARKS)
    for start in range(0, len(sent), at_a_time):
        for mark in newest_marks(sent[start : start + at_a_time], found[-1].small):
            add_mark(found, mark)
    assert found == expected


def test_newest_marks_are_known_whatever_was_skipped(loop: Loop) -> None:
    """The controller reads at intervals; what belongs to the rank travels seldom, and is known of each newest mark."""
    controller = Controller(loop, interval_s=PATIENCE_S)
    sent = [marks_of(number, b"drawn %d" % (number // 500)) for number in range(2000)]
    with controller.listening() as endpoint:
        sender = MarkSender(InboxAddress(endpoint, KEY))
        for mark in sent:
            sender.send(mark)
        sender.close()
        loop.run(controller.inbox.wait_drained(PATIENCE_S))
    assert list(controller.inbox.marks) == sent[-NUM_MARKS:]


def test_marks_that_do_not_fit_are_dropped_and_later_ones_are_whole(loop: Loop) -> None:
    """A rank does not wait for a controller that does not read."""
    controller = Controller(loop, interval_s=PATIENCE_S)
    with controller.listening() as endpoint:
        sender = MarkSender(InboxAddress(endpoint, KEY))
        for number in range(3000):
            sender.send(marks_of(number, b"%05d" % number * 2000))
        loop.run(controller.inbox.wait_drained(0.2))
        assert until(lambda: bool(controller.inbox.marks) and controller.inbox.marks[-1].step < 2999, PATIENCE_S)

        def is_last_known() -> bool:
            sender.send(marks_of(3000))
            return controller.inbox.marks[-1] == marks_of(3000)

        assert until(is_last_known, PATIENCE_S)
        sender.close()
        loop.run(controller.inbox.wait_drained(PATIENCE_S))
    assert all(mark.small in (b"{}", b"%05d" % mark.step * 2000) for mark in controller.inbox.marks)
