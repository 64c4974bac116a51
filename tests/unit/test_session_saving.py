"""Files the user wrote, on their way to storage: what storage does wrong is told, what the caller does wrong is raised."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from raysgd.checkpoint.local_files import LocalFiles
from raysgd.checkpoint.retry import Retry
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.errors import CheckpointNotFoundError, StorageError
from raysgd.session.events import PartFailed, PartSafe, Warned, WorkerEvent
from raysgd.session.saving import CheckpointWriter


class Saver:
    """A writer whose storage is ``folder``, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.told: list[WorkerEvent] = []
        storage = Storage.from_uri(folder, retry=Retry(tries=1))
        self.writer = CheckpointWriter(
            CheckpointStore(storage), attempt=1, rank=0, first_number=1, pool=StagingPool(), put=self.told.append
        )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"123")
    return folder


def test_files_that_are_there_are_a_safe_part(tmp_path: Path, source: Path) -> None:
    saver = Saver(tmp_path / "run")
    saver.writer.save_files(0, source, {"generators": {}})
    (event,) = saver.told
    assert isinstance(event, PartSafe)
    assert [(os.path.basename(name), size) for name, size, _ in event.files] == [("weights", 3)]
    assert event.rank_state == {"generators": {}}


def test_storage_that_fails_is_told_and_not_raised(tmp_path: Path, source: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    saver = Saver(tmp_path / "run")
    saver.writer.save_files(2, source, {})
    (event,) = saver.told
    assert isinstance(event, PartFailed)
    assert event.call == 2 and "could not write" in event.error


def test_a_source_that_is_not_there_is_the_callers_mistake(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="there is nothing at"):
        saver.writer.save_files(0, tmp_path / "nothing", {})
    assert saver.told == []


def test_a_source_that_cannot_be_read_is_the_callers_mistake(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("raysgd.checkpoint.user_files.read_chunks", refuse)
    saver = Saver(tmp_path / "run")
    with pytest.raises(StorageError, match="Permission denied"):
        saver.writer.save_files(0, source, {})
    assert saver.told == []


def test_each_try_and_each_piece_that_goes_to_storage_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = LocalFiles.write, []

    def fail_once(files: LocalFiles, name: str, chunks: Iterable[bytes], *, atomic: bool) -> tuple[int, int]:
        size = write(files, name, chunks, atomic=atomic)
        calls.append(name)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return size

    monkeypatch.setattr(LocalFiles, "write", fail_once)
    told = []
    storage = Storage.from_uri(tmp_path, retry=Retry(sleep=lambda _: None)).telling(lambda: told.append(len(calls)))
    storage.write_chunks("file", lambda: [b"1", b"2", b"3"])
    assert told == [0] * 4 + [1] * 4


def test_a_save_that_waits_long_for_storage_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.session.saving.LONG_WAIT_S", 0.1)
    saver, state = Saver(tmp_path), {"weights": np.ones(1000)}
    saver.writer.on_chunk = lambda: time.sleep(0.3)
    for call in range(6):
        saver.writer.save(call, state, {}, trusted=False)
    saver.writer.close()
    (text,) = [event.message for event in saver.told if isinstance(event, Warned)]
    assert "storage is slower than they are made" in text
    assert len([event for event in saver.told if isinstance(event, PartSafe)]) == 6
