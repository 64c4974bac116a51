"""The journal of a run is the same, however much of it is read at once, and while it is written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.checkpoint.storage.storage import Storage
from raysgd.controller import frames
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import stored_frames
from raysgd.runs.tail import JournalTail
from support.run_folders import RunFolder


def write(folder: RunFolder, steps: list[int], segment: int) -> int:
    """Write frames: for each number an event or the report of a rank; return the number of the last file of reports."""
    for step in steps:
        if step < 2:
            folder.event(("sample", "resize")[step], rank=0)
        else:
            segment += step > 7  # only the last file of a kind grows
            folder.reports(step % 2, 0, *[{"loss": 1.0}] * step, segment=segment)
    return segment


def drain(tail: JournalTail, max_bytes: int) -> list[Frame]:
    found = tail.read(max_bytes=max_bytes)
    while tail.is_behind:
        found += tail.read(max_bytes=max_bytes)
    return found


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(0, 6), max_size=8),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
)
def test_frames_come_once_and_in_order_in_parts_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[int],
    later: list[int],
    max_bytes: int,
    is_final: bool,
    has_reports: bool,
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("tail") / "run_001")
    storage = Storage.from_uri(folder.path)
    folder.event("run_start")
    tail = JournalTail(storage, clock=lambda: 0.0, reports=has_reports)
    segment = write(folder, first, 0)
    found = drain(tail, max_bytes)
    write(folder, later, segment)
    with open(folder.path / "events.jsonl", "ab") as file:
        file.write(b'{"seq":9999,"half a li')
    found += drain(tail, max_bytes)
    found += tail.read(is_final=is_final)
    expected = [frame for frame in stored_frames(storage) if has_reports or frame.kind != frames.REPORTS]
    assert [frame.seq for frame in found] == [frame.seq for frame in expected]
    assert [(frame.kind, frame.rows) for frame in found] == [(frame.kind, frame.rows) for frame in expected]
