"""A reader of a run gets every frame once: over a connection, through Ray, or first one and then the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal import frame_streams as downlink
from raysgd.controller.journal.frame_streams import read_frames, serve_frames
from raysgd.transport import Endpoint
from support.listening import Loop, Relay, listening

BATCH = 3


def frames_of_a_run(count: int) -> list[Frame]:
    reports = [Frame(seq, frames.REPORTS, 1, rank=seq % 2, rows=b"x" * 100) for seq in range(count)]
    return [*reports, Frame(count, frames.RUN_END, 1), Frame(count + 1, frames.RUN_CLOSED, 1)]


def batches_from(run: list[Frame], seq: int) -> list[list[Frame]]:
    return [run[at : at + BATCH] for at in range(seq, len(run), BATCH)]


class FakeController:
    """A double of the handle of a TrainerActor: its stream begins at the requested frame."""

    def __init__(self, run: list[Frame]) -> None:
        self._run = run
        self.asked_from: list[int] = []
        self.stream = self

    def options(self, **_: Any) -> FakeController:
        return self

    def remote(self, run_id: str, seq: int) -> list[list[Frame]]:
        assert run_id == "r"
        self.asked_from.append(seq)
        return batches_from(self._run, seq)


@pytest.fixture(autouse=True)
def _refs_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


def server(run: list[Frame]) -> Any:
    async def batches(seq: int) -> AsyncIterator[list[Frame]]:
        for batch in batches_from(run, seq):
            yield batch

    async def read(run_id: str, seq: int) -> AsyncIterator[list[Frame]]:
        if run_id != "r":
            raise KeyError(run_id)
        return batches(seq)

    return partial(serve_frames, read)


def seqs(controller: FakeController, endpoint: Endpoint | None, last: str = frames.RUN_CLOSED) -> list[int]:
    return [frame.seq for batch in read_frames(controller, endpoint, "r", last=last) for frame in batch]


def test_frames_are_read_over_the_connection(loop: Loop) -> None:
    run = frames_of_a_run(100)
    controller = FakeController(run)
    with listening(loop, {downlink.KIND: server(run)}) as endpoint:
        assert seqs(controller, endpoint) == list(range(102))
    assert controller.asked_from == []


def test_frames_are_read_through_ray_without_an_endpoint() -> None:
    controller = FakeController(frames_of_a_run(10))
    assert seqs(controller, None) == list(range(12))
    assert controller.asked_from == [0]


def test_reader_stops_after_the_last_frame_that_it_wants(loop: Loop) -> None:
    run = frames_of_a_run(BATCH * 3 - 1)  # the last batch holds only the end of the files
    controller = FakeController(run)
    with listening(loop, {downlink.KIND: server(run)}) as endpoint:
        assert seqs(controller, endpoint, frames.RUN_END) == list(range(BATCH * 3))
    assert seqs(controller, None, frames.RUN_END) == list(range(BATCH * 3))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_after_bytes=st.integers(0, 4000), count=st.integers(0, 20))
def test_broken_connection_continues_through_ray(loop: Loop, cut_after_bytes: int, count: int) -> None:
    run = frames_of_a_run(count)
    with listening(loop, {downlink.KIND: server(run)}) as endpoint:
        relay = Relay(endpoint, cut_received=cut_after_bytes)
        try:
            assert seqs(FakeController(run), relay.endpoint) == list(range(count + 2))
        finally:
            relay.close()


def test_refused_connection_continues_through_ray(loop: Loop) -> None:
    """The controller may refuse an unknown run: the read through Ray raises the error of the controller."""
    run = frames_of_a_run(5)
    controller = FakeController(run)

    async def refuse(*_: Any) -> None:
        raise KeyError("no such run")

    with listening(loop, {downlink.KIND: refuse}) as endpoint:
        assert seqs(controller, endpoint) == list(range(7))
    assert controller.asked_from == [0]
