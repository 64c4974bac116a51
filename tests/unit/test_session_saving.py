"""Files that the user wrote are copied to storage: storage failures become events, mistakes of the caller raise."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage.storage import Retry, Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.errors import CheckpointNotFoundError, StorageError
from raysgd.session.events import PartFailed, PartSafe, Warned, WorkerEvent
from raysgd.session.saving import CheckpointWriter


class Saver:
    """A writer whose storage is ``folder``, and its events."""

    def __init__(self, folder: Path) -> None:
        self.events: list[WorkerEvent] = []
        storage = Storage.from_uri(folder, retry=Retry(tries=1))
        self.writer = CheckpointWriter(
            CheckpointStore(storage), attempt=1, rank=0, first_number=1, pool=StagingPool(), put=self.events.append
        )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"123")
    return folder


def test_saved_files_are_a_durable_part(tmp_path: Path, source: Path) -> None:
    saver = Saver(tmp_path / "run")
    saver.writer.save_files(0, source, {"generators": {}})
    (event,) = saver.events
    assert isinstance(event, PartSafe)
    assert [(os.path.basename(name), size) for name, size, *_ in event.files] == [("weights", 3)]
    assert event.rank_state == {"generators": {}}


def test_storage_failure_is_an_event_and_does_not_raise(tmp_path: Path, source: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    saver = Saver(tmp_path / "run")
    saver.writer.save_files(2, source, {})
    (event,) = saver.events
    assert isinstance(event, PartFailed)
    assert event.call == 2 and "could not write" in event.error


def test_missing_source_raises(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        saver.writer.save_files(0, tmp_path / "nothing", {})
    assert saver.events == []


def test_unreadable_source_raises(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    # Not by the mode of a file, which does not keep root from reading it.
    monkeypatch.setattr("raysgd.checkpoint.storage.storage.read_chunks", refuse)
    saver = Saver(tmp_path / "run")
    with pytest.raises(StorageError, match="Permission denied"):
        saver.writer.save_files(0, source, {})
    assert saver.events == []


def test_each_try_and_each_part_written_is_progress(tmp_path: Path) -> None:
    failures: list[OSError] = []
    num_failures_seen: list[int] = []

    def chunks() -> Iterator[bytes]:
        yield from [b"1", b"2", b"3"]
        if not failures:
            failures.append(OSError(5, "Input/output error"))
            raise failures[0]

    storage = Storage.from_uri(tmp_path, retry=Retry(sleep=lambda _: None)).with_progress(
        lambda: num_failures_seen.append(len(failures))
    )
    storage.write_chunks("file", chunks)
    assert num_failures_seen == [0] * 4 + [1] * 4


def test_save_that_waits_long_for_storage_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.session.saving.LONG_WAIT_S", 0.1)
    saver, state = Saver(tmp_path), {"weights": np.ones(1000)}
    saver.writer.on_chunk = lambda: time.sleep(0.3)
    for call in range(6):
        saver.writer.save(call, state, {}, allow_pickle=False)
    saver.writer.close()
    (text,) = [event.message for event in saver.events if isinstance(event, Warned)]
    assert "storage is slower than they are made" in text
    seconds = [event.seconds for event in saver.events if isinstance(event, PartSafe)]
    assert len(seconds) == 6 and min(seconds) >= 0.3, "from the call to the last byte"
