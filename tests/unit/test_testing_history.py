"""`check_history` finds each broken promise, and finds nothing wrong with histories of the state machine.

`test_controller_fuzz` shows the latter for random histories.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import frames as f
from raysgd.controller.commands import GroupFailed
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import Journal
from raysgd.controller.run_plan import SEQ_GAP
from raysgd.session import events as e
from raysgd.testing.history import CLOSING_TIMEOUT_S, HistoryError, check_history, find_violations
from raysgd.testing.record import History, Stored
from raysgd.trainer.spec import describe_run, make_spec
from support.simulation import (
    SimulatedRun,
    broken,
    failed,
    finish,
    history_of,
    kill,
    part,
    previous_state_of,
    reports,
    running,
    saved,
)

Frames = list[Frame]


def one_retry() -> History:
    """Return a run of two ranks: three iterations, a checkpoint, the death of rank 1, the same again."""
    run = running(2, failure_config=FailureConfig(max_failures=1), checkpoint_config=CheckpointConfig(num_to_keep=1))
    for rank in range(2):
        run.deliver(rank, reports(0, 2), saved(0, 2), part(0), reports(2))
    run.commit()
    kill(run, 1)
    run.ready()
    for rank in range(2):
        run.deliver(rank, reports(0, 2), saved(0, 2), part(0), reports(2))
    run.commit()
    finish(run)
    assert run.is_closed
    return history_of(run, max_failures=1)


def give_up() -> History:
    """Return a run that allows no failure, and has one, with an exception in flight."""
    run = running(2, failure_config=FailureConfig(max_failures=0))
    run.deliver(0, failed("boom"))
    kill(run, 1)
    assert run.is_closed
    return history_of(run, max_failures=0)


def user_error() -> History:
    run = running(2)
    run.leave(1, failed("boom"))
    run.leave(0, broken())
    assert run.is_closed
    return history_of(run, max_failures=3)


def preempted() -> History:
    """Return a run in which rank 1 is preempted, both ranks leave by should_stop, and a second attempt finishes."""
    run = running()
    run.deliver(1, e.Preempted("SIGTERM"))
    for rank in (0, 1):
        run.deliver(rank, reports(0))
    run.save()
    run.commit()
    for rank in (0, 1):
        run.leave(rank, e.Returned(b"value", 5, saw_stop=True))
    run.ready()
    for rank in (0, 1):
        run.deliver(rank, reports(0))
    finish(run)
    return history_of(run, max_failures=0)


def index_of(frames: Frames, kind: str, which: int = 0) -> int:
    """Return the index of a frame or an event of a kind."""
    kinds = [frame.data["kind"] if frame.kind == f.EVENT else frame.kind for frame in frames]
    return [place for place, found in enumerate(kinds) if found == kind][which]


def drop(kind: str, which: int = 0) -> Callable[[Frames], None]:
    """Remove a frame; the others are renumbered, so that there is no gap."""

    def change(frames: Frames) -> None:
        del frames[index_of(frames, kind, which)]

    return change


def double(kind: str, which: int = 0) -> Callable[[Frames], None]:
    def change(frames: Frames) -> None:
        place = index_of(frames, kind, which)
        frames.insert(place, frames[place])

    return change


def move(kind: str, which: int, to: str, to_which: int = 0) -> Callable[[Frames], None]:
    """Move a frame right behind another one."""

    def change(frames: Frames) -> None:
        moved = frames.pop(index_of(frames, kind, which))
        frames.insert(index_of(frames, to, to_which) + 1, moved)

    return change


def put(kind: str, which: int, **data: Any) -> Callable[[Frames], None]:
    """Change the data of a frame or an event, or a frame's ``attempt`` or ``rank``."""

    def change(frames: Frames) -> None:
        frame = frames[index_of(frames, kind, which)]
        held = frame.data["data"] if frame.kind == f.EVENT else frame.data
        for name, value in data.items():
            if name in held or frame.kind == f.EVENT:
                held[name] = value
            else:
                object.__setattr__(frame, name, value)

    return change


def renumber(frames: Frames) -> None:
    """Make the second attempt number 3."""
    frames[:] = [replace(frame, attempt=3) if frame.attempt == 2 else frame for frame in frames]


CORRUPTIONS: list[tuple[str, Callable[[], History], Callable[[Frames], None], str]] = [
    ("two ends", one_retry, double(f.RUN_CLOSED), "the run was closed 2 times"),
    ("no end", one_retry, drop(f.RUN_CLOSED), "the run has no end"),
    ("no outcome", one_retry, lambda fs: _drop_frame(fs, f.RUN_END), "the run has 0 outcomes: none"),
    ("continues after its end", one_retry, move("worker_up", 0, f.RUN_CLOSED), "the run continued after it was closed"),
    ("done without a rank", one_retry, drop(f.RANK_DONE, -1), "the run is done, and ranks [1] have not returned"),
    ("an attempt's number is missing", one_retry, renumber, "attempt 3 began where attempt 2"),
    ("no end of an attempt", one_retry, drop(f.ATTEMPT_END), "attempt 2 began before attempt 1 had ended"),
    ("the last attempt does not end", one_retry, drop(f.ATTEMPT_END, -1), "attempt 2 never ended"),
    ("an attempt ends twice", one_retry, double(f.ATTEMPT_END), "attempt 1 ended 2 times"),
    ("a zombie reports", one_retry, move(f.REPORTS, 0, f.ATTEMPT, 1), "reports of attempt 1, came during attempt 2"),
    ("a zombie saves", one_retry, move(f.CHECKPOINT, 0, f.ATTEMPT, 1), "checkpoint of attempt 1, came during"),
    ("a zombie enters", one_retry, move("entered", 0, f.ATTEMPT, 1), "rank 0 entered attempt 1 during attempt 2"),
    ("a rank enters twice", one_retry, double("entered"), "rank 0 entered attempt 1 2 times"),
    ("a worker is missing", one_retry, drop("worker_up"), "attempt 1 began without the workers of ranks [0]"),
    ("two ranks in a process", one_retry, put("worker_up", 0, pid=101), "process 101 on node0 is 2 ranks"),
    ("a dead process returns", one_retry, put("worker_up", 3, pid=101), "process 101, which had died as rank 1, is in"),
    (
        "a preempted process returns",
        preempted,
        put("worker_up", 3, pid=101),
        "process 101, which was preempted as rank 1",
    ),
    (
        "a report is lost",
        one_retry,
        put(f.REPORTS, 1, first=3),
        "rank 0 of attempt 1 made 2 reports, and then number 4",
    ),
    ("a report comes twice", one_retry, double(f.REPORTS, 0), "made 2 reports, and then number 1"),
    ("fewer rows than announced", one_retry, put(f.REPORTS, 0, rows=b"[]"), "has 0 of 2 reports"),
    ("an unknown rank", one_retry, put(f.REPORTS, 0, rank=5), "rank 5 of attempt 1, which has 2 ranks"),
    ("iterations are missing", one_retry, put(f.ATTEMPT, 1, iterations_before=7), "iterations 4 to 7 are missing"),
    ("an iteration is lost", one_retry, put(f.CHECKPOINT, -2, iteration=9), "a checkpoint is of iteration 9, and the"),
    (
        "a start from an old checkpoint",
        one_retry,
        put("attempt_start", 1, checkpoint=None),
        "2 started from None (iteration 2)",
    ),
    (
        "a start at a wrong iteration",
        one_retry,
        put("attempt_start", 1, iterations_before=1),
        "(iteration 1); the newest",
    ),
    ("a retry is not counted", one_retry, drop("failure"), "attempt 2 was entered after attempt 1, which had not"),
    ("a failure counts twice", one_retry, double("failure"), "attempt 1 was counted as 2 failures"),
    ("a wrong retry number", one_retry, put("failure", 0, action="retry 2"), "retries are numbered [2]"),
    ("an attempt after a stop", one_retry, put("failure", 0, action="stop"), "though it was decided to stop"),
    ("done despite a failure", one_retry, move("failure", 0, f.ATTEMPT, 1), "the run is done, though a failure"),
    ("retry without an attempt", give_up, put("failure", 0, action="retry 1"), "the actions were ['retry 1'], and"),
    ("the last exception is not named", give_up, put("failure", 0, raised="other"), "does not name 'other'"),
    ("the failure is not named", give_up, put("failure", 0, error="other"), "does not name 'other'"),
    ("the exception is not named", user_error, put("run_end", 0, message="rank 1: other"), "does not name 'boom'"),
    ("the rank is not named", user_error, put("run_end", 0, message="boom"), "does not name 'rank 1'"),
    (
        "no message",
        user_error,
        put("run_end", 1, summary="", rank=None, followed=[]),
        "the run failed without a message",
    ),
    ("cause and consequence", user_error, put("run_end", 1, followed=[[1, "x"]]), "is the cause of the error and its"),
]


def _drop_frame(frames: Frames, kind: str) -> None:
    frames[:] = [frame for frame in frames if frame.kind != kind]


def with_frames(history: History, change: Callable[[Frames], None]) -> History:
    changed = copy.deepcopy(list(history.frames))
    change(changed)
    return replace(history, frames=tuple(replace(frame, seq=seq) for seq, frame in enumerate(changed)))


@pytest.mark.parametrize("make", [one_retry, give_up, user_error])
def test_valid_history_has_no_violations(make: Callable[[], History]) -> None:
    history = make()
    assert find_violations(history) == []
    assert len(history.frames) > 10


def test_warning_after_the_end_is_no_violation() -> None:
    late = {
        "kind": "warning",
        "timestamp": 0.0,
        "data": {"message": "callback X failed in on_run_end", "source": "driver"},
    }
    assert find_violations(with_frames(one_retry(), lambda fs: fs.append(Frame(0, f.EVENT, 2, data=late)))) == []


@pytest.mark.parametrize(
    ("make", "change", "found"), [row[1:] for row in CORRUPTIONS], ids=[row[0] for row in CORRUPTIONS]
)
def test_broken_promise_is_found(make: Callable[[], History], change: Any, found: str) -> None:
    violations = find_violations(with_frames(make(), change))
    assert [violation for violation in violations if found in violation], violations


def test_retries_are_compared_with_max_failures() -> None:
    assert find_violations(replace(one_retry(), max_failures=None)) == []
    assert find_violations(replace(one_retry(), max_failures=-1)) == []
    assert find_violations(replace(one_retry(), max_failures=0)) == ["there were 1 retries, and max_failures is 0"]
    assert find_violations(replace(give_up(), max_failures=2)) == [
        "the run gave up after 0 retries, and max_failures is 2"
    ]


@given(place=st.integers(0, 10**6))
def test_lost_or_duplicate_frame_is_found_at_any_place(place: int) -> None:
    history = one_retry()
    place = 1 + place % (len(history.frames) - 2)  # not the last one, whose loss is a missing end
    lost = history.frames[:place] + history.frames[place + 1 :]
    doubled = history.frames[: place + 1] + history.frames[place:]
    assert f"frames {place} to {place} are missing in the journal" in find_violations(replace(history, frames=lost))
    assert f"frame {place} is in the journal twice" in find_violations(replace(history, frames=doubled))


def test_lost_run_may_have_lost_the_end_of_its_journal() -> None:
    history = one_retry()
    for length in range(5, len(history.frames)):
        found = find_violations(replace(history, frames=history.frames[:length], stored={}, max_failures=None))
        assert "the run has no end" in found
        assert not [violation for violation in found if "missing in the journal" in violation]


def killed_controller() -> tuple[list[Frame], History]:
    """Return the frames of a controller that died in attempt 2, and the history of the next one, which finished the run."""
    run = running(2, failure_config=FailureConfig(max_failures=2))
    kill(run, 1)
    run.ready()
    restarted = SimulatedRun(2, past=previous_state_of(run), failure_config=FailureConfig(max_failures=2))
    restarted.advance(1)
    restarted.ready()
    finish(restarted)
    return list(history_of(run).frames), history_of(restarted, max_failures=2)


def test_controller_that_dies_may_have_lost_the_end_of_one_attempt_and_the_start_of_the_next() -> None:
    before, after = killed_controller()
    kept = before[: index_of(before, f.ATTEMPT_END)]
    new = [replace(frame, seq=frame.seq + SEQ_GAP + len(kept)) for frame in after.frames[1:]]  # without the run's start
    lost = replace(after, frames=(*kept, *new))
    assert [violation for violation in find_violations(lost) if "began" in violation] == []
    without_end = [frame for frame in new if frame.kind != f.ATTEMPT_END]
    found = find_violations(replace(after, frames=(*kept, *without_end)))
    assert "attempt 3 began before attempt 1 had ended" in found


def test_controller_that_dies_may_have_written_nothing() -> None:
    history = one_retry()
    moved = [replace(frame, seq=frame.seq + SEQ_GAP - 1) for frame in history.frames]
    assert find_violations(replace(history, frames=tuple(moved))) == []
    moved = [replace(frame, seq=frame.seq + 1) for frame in history.frames]
    assert find_violations(replace(history, frames=tuple(moved))) == ["the journal begins with frame 1"]


def test_attempt_need_not_start_from_a_skipped_checkpoint() -> None:
    history = one_retry()
    note = Frame(
        0, f.EVENT, 1, data={"kind": "warning", "timestamp": 0.0, "data": {"message": "checkpoint 1 skipped: damaged"}}
    )

    def change(frames: Frames) -> None:
        put("attempt_start", 1, checkpoint=None, iterations_before=0)(frames)

    def with_note(frames: Frames) -> None:
        change(frames)
        frames.insert(index_of(frames, f.ATTEMPT, 1), note)

    def starts(change: Callable[[Frames], None]) -> list[str]:
        return [v for v in find_violations(with_frames(history, change)) if "the newest checkpoint" in v]

    assert len(starts(change)) == 1
    assert starts(with_note) == []


def test_regroup_needs_no_failure() -> None:
    history = one_retry()
    note = Frame(0, f.EVENT, 1, data={"kind": "regroup", "timestamp": 0.0, "data": {"why": "the group grows"}})

    def without_failure(frames: Frames) -> None:
        drop("failure")(frames)

    def with_regroup(frames: Frames) -> None:
        frames[index_of(frames, "failure")] = note

    def complaints(change: Callable[[Frames], None]) -> list[str]:
        return [v for v in find_violations(with_frames(history, change)) if "had not failed" in v]

    assert len(complaints(without_failure)) == 1
    assert complaints(with_regroup) == []


def test_failed_starts_count_as_failures_without_an_attempt() -> None:
    run = SimulatedRun(2, failure_config=FailureConfig(max_failures=3))
    run.feed(GroupFailed("WorkerDiedError", "died early", can_retry=True, ranks=(0,)))
    run.advance(10)
    run.ready()
    kill(run, 0)
    run.feed(GroupFailed("WorkerDiedError", "died early", can_retry=True, ranks=(1,)))
    run.advance(10)
    run.ready()
    finish(run)
    assert [note["action"] for note in run.events("failure")] == ["retry 1", "retry 2", "retry 3"]
    assert find_violations(history_of(run, max_failures=3)) == []


# ------------------------------------------------------------------------------------------------------ checkpoints


def stored(**changes: Any) -> Callable[[dict[int, Stored]], None]:
    """Change the last checkpoint on storage, number 2; number 1 was deleted."""

    def change(found: dict[int, Stored]) -> None:
        found[2] = replace(found[2], **changes)

    return change


def manifest(**changes: Any) -> Callable[[dict[int, Stored]], None]:
    def change(found: dict[int, Stored]) -> None:
        old = found[2].manifest
        assert old is not None
        found[2] = replace(found[2], manifest=replace(old, **changes))

    return change


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (dict.clear, "checkpoint 2 was committed, and is not on storage"),
        (stored(manifest=None), "checkpoint 2 was committed, and has no manifest"),
        (stored(problem="bits"), "checkpoint 2 was committed, and cannot be loaded: bits"),
        (stored(unlisted=(".tmp-1",)), "checkpoint 2 has files that are not its own: .tmp-1"),
        (manifest(iteration=9), "checkpoint 2 has iteration 4 in the journal, 9 in its manifest"),
        (manifest(attempt=1), "checkpoint 2 has attempt 2 in the journal, 1 in its manifest"),
        (manifest(parts={}), "checkpoint 2 holds no state"),
        (manifest(all_ranks=True), "checkpoint 2 of 2 ranks has no part of ranks [1]"),
        (lambda found: found.update({1: found[2]}), "checkpoint 1 was deleted, and is still there"),
        (lambda found: found.update({7: found[2]}), "checkpoint 7 is on storage, but not in the journal"),
        (
            lambda found: found.update({7: Stored(unlisted=("a",))}),
            "parts of checkpoint 7, which was never committed, are left: a",
        ),
    ],
)
def test_violation_on_storage_is_found(change: Any, violation: str) -> None:
    history = one_retry()
    found = dict(history.stored)
    change(found)
    assert find_violations(replace(history, stored=found)) == [violation]


# ------------------------------------------------------------------------------------------------------ stalls


def test_stalled_run_is_found() -> None:
    def at(*times: float) -> tuple[Frame, ...]:
        return tuple(
            Frame(seq, f.EVENT, 1, data={"kind": "warning", "timestamp": time, "data": {}})
            for seq, time in enumerate(times)
        )

    def stalls(frames: tuple[Frame, ...], within_s: float | None) -> list[str]:
        return [v for v in find_violations(History(frames, within_s=within_s)) if "nothing happened" in v]

    sample = Frame(2, f.EVENT, 1, data={"kind": "sample", "timestamp": 15.0, "data": {}})
    report = Frame(2, f.REPORTS, 1, 0, {"first": 0, "count": 1}, b'[[15.0, 1.0, {"n": 1}]]')
    still = "nothing happened for 10.0 s, between warning and warning"
    assert stalls(at(10.0, 20.0), 9.0) == [still]
    assert stalls(at(10.0, 20.0), 10.0) == stalls(at(10.0, 20.0), None) == []
    assert stalls((*at(10.0, 20.0), sample), 9.0) == [still], "a sample of the load is not progress"
    assert stalls((*at(10.0, 20.0), report), 9.0) == []


# ------------------------------------------------------------------------------------------------------ files


def write_run(folder: Path, history: History, upto: int | None = None) -> None:
    """Write the files of a run up to a frame, with the journal."""
    journal = Journal(Storage.from_uri(folder))
    for frame in history.frames[:upto]:
        journal.append(frame)
    journal.flush()
    spec = make_spec(num_workers=2, backend="none", failure_config=FailureConfig(max_failures=1))
    (folder / "run.json").write_text(json.dumps(describe_run(spec, write_run)))


def test_history_is_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, one_retry())
    violation = "checkpoint 2 was committed, and is not on storage"
    for allowed in (None, 1, 0):
        with pytest.raises(HistoryError, match=violation) as caught:
            check_history(tmp_path, max_failures=allowed)
        assert len(caught.value.violations) == (2 if allowed == 0 else 1)
        assert str(tmp_path) in str(caught.value)


def test_check_waits_for_the_end_of_the_run(tmp_path: Path) -> None:
    history = one_retry()
    write_run(tmp_path, history, -1)

    def write_end() -> None:
        journal = Journal(Storage.from_uri(tmp_path))
        journal.append(history.frames[-1])
        journal.flush()

    writer = threading.Timer(0.3, write_end)
    writer.start()
    with pytest.raises(HistoryError) as caught:
        check_history(tmp_path)
    writer.join()
    assert caught.value.violations == ("checkpoint 2 was committed, and is not on storage",)


def test_check_does_not_wait_for_a_run_without_an_outcome(tmp_path: Path) -> None:
    history = one_retry()
    place = index_of(list(history.frames), f.ATTEMPT)
    metrics_first = (*history.frames[:place], *(frame for frame in history.frames if frame.kind == f.REPORTS))
    write_run(tmp_path, replace(history, frames=metrics_first))
    began = time.monotonic()
    with pytest.raises(HistoryError) as caught:
        check_history(tmp_path)
    assert time.monotonic() - began < CLOSING_TIMEOUT_S / 2
    assert caught.value.violations == ("the run has no end",)
