"""What a restarted controller reads from the files of the run: the journal and the checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import part_prefix
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.frame_log import FrameLog
from raysgd.controller.journal.journal import Journal, stored_frames
from raysgd.controller.run.run_files import RunFiles
from raysgd.controller.run_plan import SEQ_GAP, AttemptRecord, build_previous_state
from raysgd.controller.states import Outcome
from raysgd.viewer.loaded_run import load_run


@pytest.fixture(params=["disk", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "disk":
        return Storage.from_uri(tmp_path / "run_001")
    return Storage(pyarrow.fs._MockFileSystem(), "bucket/run_001")


def report(seq: int, rank: int = 0, first: int = 0) -> Frame:
    return Frame(seq, frames.REPORTS, 1, rank, {"first": first, "count": 1}, b'[[0.0,0.0,{"x":1}]]')


def event(seq: int, kind: str, **data: Any) -> Frame:
    return Frame(seq, frames.EVENT, 1, data={"kind": kind, "timestamp": 1.0, "data": data})


def attempt(seq: int, number: int = 1, before: int = 0, size: int = 2) -> Frame:
    data = {"attempt": number, "world_size": size, "iterations_before": before, "time_before_s": 0.0}
    return Frame(seq, frames.ATTEMPT, number, data=data)


def write(storage: Storage, *read_frames: Frame) -> None:
    storage.make_dirs()
    journal = Journal(storage)
    for frame in read_frames:
        journal.append(frame)
    journal.flush()


# -- the files ---------------------------------------------------------------------------------------------------------


def test_reopened_journal_continues_after_existing_frames(storage: Storage) -> None:
    write(storage, event(0, "run_start"), attempt(1), report(2), report(3, 1), event(4, "warning"), report(5))
    journal = Journal(storage)
    read_frames, last = journal.reopen()
    assert [frame.seq for frame in read_frames] == [0, 1, 4] and last == 5
    journal.append(report(100))
    journal.append(event(101, "run_end"))
    journal.flush()
    assert [frame.seq for frame in stored_frames(storage)] == [0, 1, 2, 3, 4, 5, 100, 101]
    assert [frame.seq for frame in journal.frames_from(3, 101)] == [3, 5, 100]
    third = Journal(storage)
    assert third.reopen()[1] == 101
    third.append(report(200))
    third.flush()
    assert [frame.seq for frame in stored_frames(storage)][-1] == 200


def test_truncated_line_does_not_affect_next_line(tmp_path: Path) -> None:
    storage = Storage.from_uri(tmp_path)
    write(storage, event(0, "run_start"), report(1), report(2))
    for name in ("events.jsonl", "metrics-0000.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"seq":3,"att')
    journal = Journal(storage)
    read_frames, last = journal.reopen()
    assert ([frame.seq for frame in read_frames], last) == ([0], 2)
    journal.append(event(10, "warning"))
    journal.append(report(11))
    journal.flush()
    assert [frame.seq for frame in stored_frames(storage)] == [0, 1, 2, 10, 11]


def test_empty_folder_has_no_previous_state(storage: Storage) -> None:
    storage.make_dirs()
    assert Journal(storage).reopen() == ([], -1)
    past = RunFiles(storage, frozenset(), print).previous({})
    assert (past.attempt, past.is_open, past.manifests, past.published) == (0, False, (), None)


def saving_first(num_frames: int) -> list[Frame]:
    """Return the first frames of a run of two ranks that saves before it reports; its checkpoint 3 is of the second save."""
    rows = {0: b'[[0.0,7.0,{"loss":1.0}],[0.0,8.0,{"loss":0.5}]]', 1: b'[[0.0,7.0,{"loss":3.0}]]'}
    closing = [
        Frame(8, frames.REPORTS, 4, 0, {"first": 1, "count": 2, "closes": [[1, 3]]}, rows[0]),
        Frame(9, frames.REPORTS, 4, 1, {"first": 1, "count": 1, "closes": [[1, 3]]}, rows[1]),
    ]
    return [
        event(0, "run_start"),
        attempt(1, 4, before=10),
        Frame(2, frames.SAVING, 4, data={"number": 2, "iteration": 11}),
        *(
            Frame(
                3 + rank,
                frames.REPORTS,
                4,
                rank,
                {"first": 0, "count": 1, "closes": [[0, 2]]},
                b'[[0.0,0.0,{"loss":9}]]',
            )
            for rank in range(2)
        ),
        Frame(5, frames.CHECKPOINT, 4, data={"number": 2, "uri": "", "iteration": 11, "metrics": {"loss": 9}}),
        Frame(6, frames.SAVING, 4, data={"number": 3, "iteration": 12}),
        event(7, "sample"),
        *closing,
        Frame(
            10, frames.CHECKPOINT_SCORED, 4, data={"number": 3, "uri": "", "iteration": 12, "metrics": {"loss": 2.0}}
        ),
    ][:num_frames]


@pytest.mark.parametrize("num_frames", range(7, 12))
def test_round_of_the_newest_checkpoint_is_what_the_journal_says(storage: Storage, num_frames: int) -> None:
    """The TrainerActor died after any write; the last frame on storage is one of those after the commit."""
    write(storage, *saving_first(num_frames))
    files = RunFiles(storage, frozenset(), print)
    part = {0: take_snapshot({"n": 1}, StagingPool(1)).write(files.store.directory(3), part_prefix(4, 0))}
    fields = {"time_total_s": 5.0, "world_size": 2, "created_s": 1.0, "awaits_round": True}
    files.store.commit(Manifest(number=3, attempt=4, iteration=11, parts=part, **fields))  # type: ignore[arg-type]
    if num_frames == 11:
        files.store.write_round(files.store.read(3).with_round({"loss": 2.0}, 7.0))
    storage.write_bytes("run.json", json.dumps({"reduce": {"loss": "mean"}}).encode())
    expected = {7: (11, {}), 8: (11, {}), 9: (12, {"loss": 1.0}), 10: (12, {"loss": 2.0}), 11: (12, {"loss": 2.0})}
    if storage.is_local:
        (loaded,) = load_run(storage.uri).checkpoints
        assert (loaded.iteration, loaded.metrics) == expected[num_frames]
    (found,) = files.previous({"loss": "mean"}).manifests
    assert (found.iteration, found.metrics) == expected[num_frames]
    assert found.time_total_s == (5.0 if found.awaits_round else 7.0)
    assert files.store.read(3) == found, "the next reader need not look for it"


def test_only_what_a_failed_flush_left_counts_as_lost(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("disk full")

    storage.make_dirs()
    warned: list[str] = []
    files = RunFiles(storage, frozenset(), warned.append)
    files.journal.append(event(0, "run_start"))
    asyncio.run(files.flush())
    files.journal.append(event(1, "warning"))  # of a callback, while the run ends
    assert files.describe_lost() is None
    with monkeypatch.context() as patch:
        patch.setattr(files.journal, "flush", fail)
        asyncio.run(files.flush())
    assert "0 of 0 reports and 1 events could not be written" in str(files.describe_lost())
    assert warned == ["the run's files cannot be written, which is tried again: disk full"]
    asyncio.run(files.flush())
    assert files.describe_lost() is None
    files.close()


# -- the previous state ------------------------------------------------------------------------------------------------


def test_last_attempt_is_open_until_its_end_is_recorded() -> None:
    read_frames = [
        attempt(0),
        Frame(1, frames.ATTEMPT_END, 1, data={"keep_rounds": 0}),
        attempt(2, 2, before=7, size=3),
    ]
    past = build_previous_state(read_frames, 9, [], 4)
    assert (past.attempt, past.is_open, past.iterations_before, past.size) == (2, True, 7, 3)
    assert (past.next_seq, past.last_number) == (9 + SEQ_GAP, 4)
    assert not build_previous_state(read_frames[:2], 1, [], 0).is_open


def test_attempt_record_adds_attempt_missing_from_journal() -> None:
    past = build_previous_state([attempt(0)], 0, [], 0)
    later = past.up_to(AttemptRecord("id", 2, world_size=3, iterations_before=5))
    assert (later.attempt, later.is_open, later.size, later.iterations_before) == (2, True, 3, 5)
    assert past.up_to(AttemptRecord("id", 1, 9, 9)) == past.up_to(None) == past


def test_failures_keep_ranks_nodes_and_messages() -> None:
    data = {"ranks": [1, 2], "nodes": ["a", "b"], "error": "gone", "action": "retry 1", "raised": "ValueError: x"}
    (failure,) = build_previous_state([event(0, "failure", **data)], 0, [], 0).failures
    assert (failure.ranks, failure.nodes, failure.what, failure.raised) == ((1, 2), ("a", "b"), "gone", "ValueError: x")


def test_run_is_paused_until_it_is_resumed() -> None:
    paused, resumed = event(0, "paused", attempt=2), event(1, "resumed", attempt=2)
    assert build_previous_state([paused], 0, [], 0).is_paused
    assert not build_previous_state([paused, resumed], 1, [], 0).is_paused
    assert build_previous_state([paused, resumed, event(2, "paused", attempt=3)], 2, [], 0).is_paused


def test_stop_request_and_run_end_are_read_back() -> None:
    stop, cancel = event(0, "stop", why="enough"), event(1, "cancel", why="now")
    end = Frame(2, frames.RUN_END, 1, data={"kind": "error"})
    assert build_previous_state([stop], 0, [], 0).requested == Outcome("stopped", message="enough")
    past = build_previous_state([stop, cancel, end], 2, [], 0)
    assert (past.requested, past.published) == (Outcome("cancelled", message="now"), Outcome("error"))


# -- readers -----------------------------------------------------------------------------------------------------------


async def first_batches(reading: AsyncIterator[list[Frame]], count: int) -> list[int]:
    seqs: list[int] = []
    async for batch in reading:
        seqs += [frame.seq for frame in batch]
        if len(seqs) >= count:
            return seqs
    return seqs


async def test_readers_get_earlier_frames_and_continue_after_the_gap(storage: Storage) -> None:
    write(storage, event(0, "run_start"), attempt(1), report(2), report(3, 1))
    journal = Journal(storage)
    read_frames, last = journal.reopen()
    log = FrameLog(journal, min_interval_s=0.0, earlier=read_frames, next_seq=last + SEQ_GAP)
    gap = last + SEQ_GAP
    log.append(frames.EVENT, 1, data=event(gap, "controller_restart").data)
    log.append(frames.RUN_CLOSED, 1)
    for start, expected in ((0, [0, 1, 2, 3, gap, gap + 1]), (2, [2, 3, gap, gap + 1]), (50, [gap, gap + 1])):
        assert await first_batches(log.read(start), len(expected)) == expected


async def test_reader_ahead_of_the_journal_gets_new_frames(storage: Storage) -> None:
    write(storage, event(0, "run_start"))
    journal = Journal(storage)
    read_frames, last = journal.reopen()
    log = FrameLog(journal, min_interval_s=0.0, earlier=read_frames, next_seq=last + SEQ_GAP)
    reading = log.read(40)  # the reader had frames that were never stored
    log.append(frames.EVENT, 1, data=event(0, "warning").data)
    assert await first_batches(reading, 1) == [last + SEQ_GAP]
