"""The files of a run: appending, segments, and reading back during writes."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal import journal
from raysgd.controller.journal.journal import Journal, LogFile, event_frame, report_frame, stored_frames
from raysgd.errors import CheckpointNotFoundError


def reports(seq: int, num_bytes: int = 10) -> Frame:
    rows = json.dumps([[1.5, 0.5, {"x": "x" * num_bytes, "n": seq}]], separators=(",", ":")).encode()
    return Frame(seq, frames.REPORTS, 2, seq % 3, {"first": seq, "count": 1}, rows)


def event(seq: int, kind: str = "warning", /, **data: Any) -> Frame:
    return Frame(seq, frames.EVENT, 1, data={"kind": kind, "timestamp": 12.5, "data": data})


def object_store() -> Storage:
    """A storage that writes complete files only, as S3 does."""
    storage = Storage(pyarrow.fs._MockFileSystem(), "bucket/run")
    assert not storage.is_local
    return storage


@pytest.fixture(params=["disk", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage.from_uri(tmp_path) if request.param == "disk" else object_store()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 300)


def lines(storage: Storage, name: str) -> list[Any]:
    return [json.loads(line) for line in storage.read_bytes(name).splitlines()]


def events_file(storage: Storage) -> str:
    """Return the first file of events."""
    return "events.jsonl" if storage.is_local else "events-0000.jsonl"


# -- contents ----------------------------------------------------------------------------------------------------------


def test_metrics_line_holds_a_batch_as_its_worker_encoded_it(storage: Storage) -> None:
    log = Journal(storage)
    log.append(Frame(7, frames.REPORTS, 1, 3, {"first": 10, "count": 2}, b'[[1.0,2.0,{"a":NaN}],[3.0,4.0,{}]]'))
    log.flush()
    assert storage.read_bytes("metrics-0000.jsonl") == (
        b'{"seq":7,"attempt":1,"rank":3,"first":10,"count":2,"rows":[[1.0,2.0,{"a":NaN}],[3.0,4.0,{}]]}\n'
    )


def test_events_and_other_frames_go_to_the_events_file(storage: Storage) -> None:
    log = Journal(storage)
    log.append(event(0, "run_start", name="run_001"))
    log.append(Frame(1, frames.ATTEMPT, 1, data={"attempt": 1, "world_size": 2}))
    log.flush()
    assert lines(storage, events_file(storage)) == [
        {"seq": 0, "attempt": 1, "kind": "run_start", "timestamp": 12.5, "data": {"name": "run_001"}},
        {"seq": 1, "attempt": 1, "kind": "attempt", "rank": -1, "data": {"attempt": 1, "world_size": 2}},
    ]
    assert not storage.exists("metrics-0000.jsonl")


@pytest.mark.parametrize(
    "frame",
    [
        event(3, "warning", message="careful"),
        event(3, "checkpoint", number=1),
        event(3, "run_end", kind="done", message=""),
        Frame(3, frames.ATTEMPT, 2, data={"attempt": 2, "world_size": 4, "iterations_before": 1}),
        Frame(3, frames.RANK_DONE, 2, 5),
        Frame(3, frames.ATTEMPT_END, 2, data={"keep_rounds": None}),
        Frame(3, frames.CHECKPOINT, 2, data={"number": 1, "metrics": {"loss": 0.5}}),
        Frame(3, frames.CHECKPOINT_SCORED, 2, data={"number": 1}),
        Frame(3, frames.CHECKPOINT_DELETED, 2, data={"number": 1}),
        Frame(3, frames.RUN_END, 2, data={"kind": "error", "message": "boom"}),
        Frame(3, frames.RUN_CLOSED, 2),
    ],
    ids=lambda frame: frame.data.get("kind", "") + " " + frame.kind,
)
def test_frame_is_read_back_unchanged(storage: Storage, frame: Frame) -> None:
    log = Journal(storage)
    log.append(frame)
    log.flush()
    (line,) = storage.read_bytes(events_file(storage)).splitlines()
    assert event_frame(line) == frame


def test_reports_are_read_back_unchanged(storage: Storage) -> None:
    tricky = Frame(0, frames.REPORTS, 1, 0, {"first": 0, "count": 1}, b'[[1.0,2.0,{"t":",\\"rows\\":[}"}]]')
    log = Journal(storage)
    log.append(tricky)
    log.append(reports(1))
    log.flush()
    back = [report_frame(line) for line in storage.read_bytes("metrics-0000.jsonl").splitlines()]
    assert back == [tricky, reports(1)]


def test_users_exception_is_not_written(storage: Storage) -> None:
    log = Journal(storage)
    log.append(Frame(0, frames.RUN_END, 1, data={"kind": "error", "exception": b"pickle", "summary": "boom"}))
    log.flush()
    (line,) = lines(storage, events_file(storage))
    assert line["data"] == {"kind": "error", "summary": "boom"}


def test_values_that_json_cannot_hold_are_written_as_text(storage: Storage) -> None:
    log = Journal(storage)
    log.append(event(0, "sample", path=Path("/tmp/x")))
    log.write_run({"resources": {1, 2}, "config": {"lr": 0.1}})
    log.flush()
    assert lines(storage, events_file(storage))[0]["data"] == {"path": "/tmp/x"}
    assert json.loads(storage.read_bytes("run.json"))["config"] == {"lr": 0.1}


def test_secrets_are_not_written(storage: Storage) -> None:
    log = Journal(storage, {"hunter2!"})
    log.append(event(0, "run_start", run_dir="s3://KEY:SECRET@bucket/run_001"))
    log.append(event(1, "warning", message="callback X failed: 401 for hunter2!"))
    log.append(Frame(2, frames.CHECKPOINT, 1, data={"uri": "s3://KEY:SECRET@bucket/c", "metrics": {"token_acc": 0.5}}))
    log.append(event(3, "run_end", kind="error", message="could not read s3://KEY:SECRET@bucket: api_key=hunter2!"))
    log.write_run({"run_dir": "s3://KEY:SECRET@bucket/run_001", "backend_config": {"api_key": "x", "port": 3}})
    log.flush()
    text = b"".join(storage.read_bytes(name) for name in storage.list_names()).decode()
    assert "SECRET" not in text and "hunter2!" not in text
    assert [line["kind"] for line in lines(storage, events_file(storage))][-1] == "run_end"
    assert lines(storage, events_file(storage))[2]["data"]["metrics"] == {"token_acc": 0.5}
    run = json.loads(storage.read_bytes("run.json"))
    assert run == {"run_dir": "s3://***@bucket/run_001", "backend_config": {"api_key": "***", "port": 3}}


# -- writing -----------------------------------------------------------------------------------------------------------


def test_flush_writes_each_line_once(storage: Storage) -> None:
    log = Journal(storage)
    log.append(reports(0))
    assert not storage.exists("metrics-0000.jsonl")
    for _ in range(3):
        log.flush()
    assert len(lines(storage, "metrics-0000.jsonl")) == 1


def test_local_files_are_only_appended_to(tmp_path: Path) -> None:
    log = Journal(Storage.from_uri(tmp_path))
    before, inodes = b"", set()
    for seq in range(5):
        log.append(reports(seq))
        log.flush()
        path = tmp_path / "metrics-0000.jsonl"
        now = path.read_bytes()
        assert now.startswith(before) and len(now) > len(before)
        before = now
        inodes.add(path.stat().st_ino)
    assert len(inodes) == 1


def test_object_store_gets_complete_files(small_segments: None) -> None:
    storage = object_store()
    log = Journal(storage)
    for seq in range(20):
        log.append(reports(seq))
        log.flush()
        names = [name for name in storage.list_names() if name.startswith("metrics")]
        assert sum(len(lines(storage, name)) for name in names) == seq + 1


def test_flush_to_an_object_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "EVENTS_SEGMENT_BYTES", 500)
    storage = object_store()
    put: list[int] = []
    write = storage.write_bytes
    monkeypatch.setattr(storage, "write_bytes", lambda name, data: (put.append(len(data)), write(name, data)))
    log = Journal(storage)
    for seq in range(100):
        log.append(event(seq, message="careful"))
        log.flush()
    assert max(put) < 2 * 500
    names = [name for name in storage.list_names() if name.startswith("events")]
    assert names[:2] == ["events-0000.jsonl", "events-0001.jsonl"]
    assert [line["seq"] for name in names for line in lines(storage, name)] == list(range(100))


def test_local_events_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "EVENTS_SEGMENT_BYTES", 100)
    log = Journal(Storage.from_uri(tmp_path))
    for seq in range(20):
        log.append(event(seq))
        log.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
    assert len(lines(Storage.from_uri(tmp_path), "events.jsonl")) == 20


def test_full_segment_is_not_written_again(storage: Storage, small_segments: None) -> None:
    log = Journal(storage)
    for seq in range(10):
        log.append(reports(seq, num_bytes=100))
    log.flush()
    assert storage.exists("metrics-0001.jsonl")
    storage.delete_file("metrics-0000.jsonl")
    for seq in range(10, 20):
        log.append(reports(seq, num_bytes=100))
        log.flush()
    assert not storage.exists("metrics-0000.jsonl")


def test_segments_are_bounded_and_consecutive(storage: Storage, small_segments: None) -> None:
    log = Journal(storage)
    for seq in range(30):
        log.append(reports(seq))
    log.flush()
    names = [name for name in storage.list_names() if name.startswith("metrics")]
    assert names == [f"metrics-{index:04d}.jsonl" for index in range(len(names))]
    assert all(storage.size(name) < 300 + 150 for name in names)
    assert [line["seq"] for name in names for line in lines(storage, name)] == list(range(30))


def test_failed_write_is_repeated_with_the_next_flush(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = Journal(Storage.from_uri(folder))
    log.append(reports(0))
    log.append(event(1))
    shutil.rmtree(folder)
    for seq in (2, 3):
        with pytest.raises(OSError, match="run"):
            log.flush()
        log.append(reports(seq))
    folder.mkdir()
    log.flush()
    log.flush()
    assert [line["seq"] for line in lines(Storage.from_uri(folder), "metrics-0000.jsonl")] == [0, 2, 3]
    assert [line["seq"] for line in lines(Storage.from_uri(folder), "events.jsonl")] == [1]


def test_full_disk_is_named_in_the_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    log = LogFile(Storage.from_uri("/dev"), "full")
    log.pending.append((0, b"{}\n"))
    with pytest.raises(OSError, match="No space left"):
        log.flush(1)


def test_lines_appended_during_a_flush_are_not_lost(tmp_path: Path) -> None:
    log = LogFile(Storage.from_uri(tmp_path), "lines")
    done = threading.Event()

    def flush_all_the_time() -> None:
        while not done.is_set():
            log.flush(20_000)

    flusher = threading.Thread(target=flush_all_the_time)
    flusher.start()
    for number in range(20_000):
        log.pending.append((number, b"%d\n" % number))
    done.set()
    flusher.join()
    log.flush(20_000)
    assert (tmp_path / "lines").read_bytes().split() == [b"%d" % number for number in range(20_000)]


class KilledError(Exception):
    """The process was killed before a write."""


@pytest.mark.parametrize("is_local", [True, False], ids=["disk", "object store"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from("re "), max_size=30), num_writes=st.integers(0, 12), segment=st.integers(1, 500))
def test_what_a_killed_process_leaves_has_no_event_without_the_reports_before_it(
    monkeypatch: pytest.MonkeyPatch, is_local: bool, kinds: list[str], num_writes: int, segment: int
) -> None:
    """A frame that comes during a flush belongs to the next one. On a local disk nothing at all is missing in between."""
    written = 0
    storage = Storage.from_uri(tempfile.mkdtemp()) if is_local else object_store()
    monkeypatch.setattr(journal, "SEGMENT_BYTES", segment)
    log = Journal(storage)
    pending = list(enumerate(kinds))
    flush_file = LogFile.flush

    def flush_or_die(file: LogFile, before: int) -> None:
        nonlocal written
        if written == num_writes:
            raise KilledError
        written += file.first_unwritten is not None
        flush_file(file, before)
        append_next()

    def append_next() -> None:
        if pending:
            seq, kind = pending.pop(0)
            if kind != " ":
                log.append(reports(seq) if kind == "r" else event(seq))

    with monkeypatch.context() as patch, contextlib.suppress(KilledError):
        patch.setattr(LogFile, "flush", flush_or_die)
        while pending:
            for _ in range(3):
                append_next()
            log.flush()
        log.flush()
    appended = [seq for seq, kind in enumerate(kinds) if kind != " "]
    try:
        found = [frame.seq for frame in stored_frames(storage)]
    except CheckpointNotFoundError:  # there are no events yet
        return
    if is_local:
        assert found == appended[: len(found)]
    last_event = max((seq for seq in found if kinds[seq] == "e"), default=-1)
    assert [seq for seq in appended if seq <= last_event and kinds[seq] == "r"] == [
        seq for seq in found if seq <= last_event and kinds[seq] == "r"
    ]


def test_lines_are_standard_json_and_read_back_as_they_were(storage: Storage) -> None:
    log = Journal(storage)
    metrics = {"loss": math.nan, "val": {"loss": [1.0, -math.inf]}, "none": None}
    frame = Frame(1, frames.CHECKPOINT, 1, data={"number": 1, "uri": "x", "iteration": 1, "metrics": metrics})
    given = [event(0, "checkpoint", number=1, metrics=metrics), frame, event(2)]
    for each in given:
        log.append(each)
    log.flush()
    written = storage.read_bytes(events_file(storage)).splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in written]
    assert strict[0]["data"]["metrics"] == {"loss": None, "val": {"loss": [1.0, None]}, "none": None}
    assert repr([event_frame(line) for line in written]) == repr(given)
    assert "nonfinite" not in strict[2]


def test_lines_that_could_not_be_written_are_counted_and_can_be_read(tmp_path: Path, small_segments: None) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = Journal(Storage.from_uri(folder))
    for seq in range(4):
        log.append(reports(seq, num_bytes=100))
    log.flush()
    shutil.move(folder, tmp_path / "away")
    for seq in range(4, 10):
        log.append(reports(seq, num_bytes=100))
    log.append(event(10))
    with pytest.raises(OSError, match="run"):
        log.flush()
    assert (log.num_reports, log.num_unwritten()) == (10, (6, 1))
    assert [frame.seq for frame in log.frames_from(5, 9)] == [5, 6, 7, 8]
    shutil.move(tmp_path / "away", folder)
    assert [frame.seq for frame in log.frames_from(0, 20)] == list(range(10))
    assert log.num_unwritten() == (0, 0)


# -- reading back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq", "before"), [(0, 30), (0, 1), (7, 23), (29, 30), (12, 12), (25, 100)])
def test_frames_are_read_back_for_any_range(storage: Storage, small_segments: None, seq: int, before: int) -> None:
    log = Journal(storage)
    for number in range(30):
        log.append(reports(number))
    assert [frame.seq for frame in log.frames_from(seq, before)] == list(range(seq, min(before, 30)))


def test_reading_back_flushes_first(storage: Storage) -> None:
    log = Journal(storage)
    log.append(reports(0))
    assert list(log.frames_from(0, 1)) == [reports(0)]


def test_segments_outside_the_range_are_not_read(storage: Storage, small_segments: None) -> None:
    log = Journal(storage)
    for number in range(30):
        log.append(reports(number))
    log.flush()
    names = [name for name in storage.list_names() if name.startswith("metrics")]
    first_of_last = lines(storage, names[-1])[0]["seq"]
    for name in names[:-1]:
        storage.delete_file(name)
    assert [frame.seq for frame in log.frames_from(first_of_last, 30)] == list(range(first_of_last, 30))


def test_incomplete_line_is_not_read(tmp_path: Path) -> None:
    log = Journal(Storage.from_uri(tmp_path))
    log.append(reports(0))
    log.flush()
    with open(tmp_path / "metrics-0000.jsonl", "ab") as file:
        file.write(b'{"seq":1,"attempt":1,"ra')
    assert [frame.seq for frame in log.frames_from(0, 1)] == [0]


def test_run_without_reports_reads_none(storage: Storage) -> None:
    assert list(Journal(storage).frames_from(0, 10)) == []
