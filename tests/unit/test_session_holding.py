"""Snapshots for the cluster's memory: each is reported as held once it was taken, and its buffer is freed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.session import saving as holding
from raysgd.session.events import HoldFailed, PartHeld, PartSafe, WorkerEvent
from raysgd.session.saving import CheckpointWriter
from support.payloads import load_payload


class Saver:
    """A writer to ``folder`` and to memory, and its events."""

    def __init__(self, folder: Path, stored_every: int = 1) -> None:
        self.events: list[WorkerEvent] = []
        self.pool = StagingPool(num_buffers=2)
        self.writer = CheckpointWriter(
            CheckpointStore(Storage.from_uri(folder)),
            attempt=1,
            rank=0,
            first_number=1,
            pool=self.pool,
            put=self.events.append,
            is_held=True,
            stored_every=stored_every,
        )
        self.taken: list[Any] = []
        self._taker = threading.Thread(target=self._take, daemon=True)

    def save(self, call: int) -> None:
        self.writer.save(call, {"x": np.full(8, call)}, {"n": call}, allow_pickle=False)

    def take_all(self) -> None:
        self._taker.start()

    def _take(self) -> None:
        for payload in self.writer.payloads():
            self.taken.append(load_payload(payload.copy()))

    def events_of(self, kind: type) -> list[int]:
        return [event.call for event in self.events if isinstance(event, kind)]  # type: ignore[union-attr]


def test_payloads_are_the_saved_states_in_order(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.take_all()
    for call in range(5):  # more than there are buffers: they come back
        saver.save(call)
    saver.writer.close(wait_held=True)
    assert [state["x"][0] for state in saver.taken] == [0, 1, 2, 3, 4]
    assert saver.events_of(PartHeld) == saver.events_of(PartSafe) == [0, 1, 2, 3, 4]
    held = next(event for event in saver.events if isinstance(event, PartHeld))
    assert held.rank_state == {"n": 0} and held.num_bytes >= 64
    assert saver.events_of(HoldFailed) == []


def test_checkpoints_between_storage_intervals_are_held_in_memory_only(tmp_path: Path) -> None:
    saver = Saver(tmp_path, stored_every=3)
    saver.take_all()
    for call in range(7):
        saver.save(call)
    saver.writer.close(wait_held=True)
    assert saver.events_of(PartHeld) == [0, 1, 2, 3, 4, 5, 6]
    assert saver.events_of(PartSafe) == [2, 5]  # numbers 3 and 6


def test_snapshots_that_nobody_takes_fail_at_the_end_of_the_attempt(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.save(0)
    saver.save(1)
    saver.writer.close()
    assert saver.events_of(HoldFailed) == saver.events_of(PartSafe) == [0, 1]
    for _ in range(2):  # both buffers are free again
        saver.pool.acquire(10)


def test_close_waits_for_memory_up_to_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "TAKE_S", 0.05)
    saver = Saver(tmp_path)
    saver.save(0)
    saver.writer.close(wait_held=True)
    assert saver.events_of(HoldFailed) == saver.events_of(PartSafe) == [0]


def test_broken_memory_stream_does_not_affect_storage(tmp_path: Path) -> None:
    """As Ray closes it where the object store takes no more."""
    saver = Saver(tmp_path)
    saver.save(0)
    payloads = saver.writer.payloads()
    next(payloads)
    payloads.close()  # type: ignore[attr-defined]
    saver.save(1)
    saver.writer.close(wait_held=True)
    assert saver.events_of(HoldFailed) == saver.events_of(PartSafe) == [0, 1]
    assert saver.events_of(PartHeld) == []


def test_writer_without_memory_yields_no_payloads(tmp_path: Path) -> None:
    events: list[WorkerEvent] = []
    writer = CheckpointWriter(
        CheckpointStore(Storage.from_uri(tmp_path)),
        attempt=1,
        rank=0,
        first_number=1,
        pool=StagingPool(),
        put=events.append,
    )
    writer.save(0, {"x": 1}, {}, allow_pickle=False)
    assert list(writer.payloads()) == []
    writer.close(wait_held=True)
    assert [type(event) for event in events] == [PartSafe]
