"""Events reach the controller in order and each once, whatever becomes of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysgd.session.events import Warned
from raysgd.transport import Endpoint, connect
from raysgd.workers import uplink
from raysgd.workers.uplink import Batch, Inbox, Inboxes, Place, Uplink
from support.listening import Loop, Relay, listening, loop_in_thread
from support.poll import until

KEY = "k"
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with loop_in_thread() as loop:
        yield loop


class Controller:
    """The controller's end of one worker's events."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._inboxes = Inboxes()
        self.inbox = loop.do(self._open())

    async def _open(self) -> Inbox:
        return self._inboxes.open(KEY)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Endpoint]:
        with listening(self._loop, {uplink.KIND: self._inboxes.handle}) as endpoint:
            yield endpoint

    async def give_up(self) -> None:
        self._inboxes.close(KEY)

    def take_over_ray(self, batches: list[Batch]) -> None:
        async def put() -> None:
            for batch in batches:
                self.inbox.put(batch)

        self._loop.do(put())

    def received(self, count: int) -> list[str]:
        async def get() -> list[str]:
            got: list[str] = []
            while len(got) < count:
                got += [event.message for event in await asyncio.wait_for(self.inbox.get(), PATIENCE_S)]
            return got

        return self._loop.do(get())


def events(number: int, size: int = 0) -> list[Any]:
    return [Warned(f"{number}" + "x" * size)]


def send_all(sender: Uplink, controller: Controller, count: int, size: int = 0) -> None:
    for number in range(count):
        controller.take_over_ray(sender.send(events(number, size)))
    controller.take_over_ray(sender.finish())


def test_events_arrive_over_the_connection_alone(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = Uplink(Place(endpoint, KEY))
        assert sender.is_direct
        for number in range(100):
            assert sender.send(events(number)) == []
        assert sender.finish() == []
    assert controller.received(100) == [str(number) for number in range(100)]
    assert sender.problem is None


def test_without_a_place_events_go_through_ray() -> None:
    sender = Uplink(None)
    assert not sender.is_direct and sender.problem is None
    assert sender.send(events(0)) == [Batch(0, events(0))]
    assert sender.send(events(1)) == [Batch(1, events(1))]
    assert sender.finish() == []


def test_where_nobody_listens_events_go_through_ray(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        pass
    sender = Uplink(Place(endpoint, KEY))
    send_all(sender, controller, 3)
    assert controller.received(3) == ["0", "1", "2"]
    assert sender.problem is not None and f"{endpoint.host}:{endpoint.port}" in sender.problem


def test_a_stream_the_controller_no_longer_wants_goes_through_ray(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = Uplink(Place(endpoint, "another"))
        send_all(sender, controller, 3)
    assert controller.received(3) == ["0", "1", "2"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_after_bytes=st.integers(0, 6000), count=st.integers(1, 30))
def test_a_connection_that_breaks_anywhere_loses_and_repeats_nothing(
    loop: Loop, cut_after_bytes: int, count: int
) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        relay = Relay(endpoint, cut_said=cut_after_bytes)
        try:
            send_all(Uplink(Place(relay.endpoint, KEY)), controller, count, size=100)
        finally:
            relay.close()
    assert controller.received(count) == [f"{number}" + "x" * 100 for number in range(count)]


def test_a_controller_that_does_not_answer_is_given_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "ACK_TIMEOUT_S", 0.1)

    async def deaf(*_: Any) -> None:
        await asyncio.sleep(PATIENCE_S)

    with listening(loop, {uplink.KIND: deaf}) as endpoint:
        sender = Uplink(Place(endpoint, KEY))
        assert sender.send(events(0)) == []
        assert sender.finish() == [Batch(0, events(0))]
        assert "TimeoutError" in str(sender.problem)


def test_a_sender_waits_for_a_controller_that_is_behind(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "MAX_UNACKNOWLEDGED_BYTES", 1000)
    controller = Controller(loop)
    is_let_go = asyncio.Event()

    async def slow(hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_let_go.wait()
        await controller.inbox.serve(reader, writer)

    async def let_go() -> None:
        is_let_go.set()

    with listening(loop, {uplink.KIND: slow}) as endpoint:
        sender = Uplink(Place(endpoint, KEY))
        thread = threading.Thread(target=send_all, args=(sender, controller, 20, 200))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        loop.do(let_go())
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(controller.received(20)) == 20 and sender.problem is None


def test_what_a_dead_worker_had_sent_is_read_first(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        line = connect(endpoint, {"kind": uplink.KIND, "key": KEY}, 10)
        from raysgd.transport.messages import pack

        line.sendall(b"".join(pack(Batch(number, events(number))) for number in range(50)) + pack("x")[:3])
        assert controller.received(1) == ["0"]
        line.close()
        loop.do(controller.inbox.wait_drained(PATIENCE_S))
        assert controller.received(49) == [str(number) for number in range(1, 50)]


def test_waiting_for_a_line_that_stays_open_ends(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = Uplink(Place(endpoint, KEY))
        sender.send(events(0))
        controller.received(1)
        loop.do(controller.inbox.wait_drained(0.05))
        sender.finish()


def test_a_worker_that_was_given_up_is_hung_up_on(loop: Loop) -> None:
    controller = Controller(loop)
    with controller.listening() as endpoint:
        sender = Uplink(Place(endpoint, KEY))
        sender.send(events(0))
        controller.received(1)
        loop.do(controller.give_up())
        assert until(lambda: sender.send(events(1)) != [], PATIENCE_S)


def test_a_batch_that_leaves_a_gap_is_no_batch(loop: Loop) -> None:
    controller = Controller(loop)
    controller.take_over_ray([Batch(1, events(1)), Batch(0, events(0)), Batch(0, events(0)), Batch(1, events(1))])
    assert controller.received(2) == ["0", "1"]
