"""A run keeps its guarantees and ends, for any actions of ranks, storage and users in any order.

``RAYSGD_SCHEDULES`` is the number of schedules, ``RAYSGD_SCHEDULES_SEED`` their seed; ``RAYSGD_SCHEDULES_SCALE`` multiplies the
numbers of ranks, which are 1 to 3. ``RAYSGD_SCHEDULE=SEED:NUMBER`` repeats one.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import settings

from raysgd.controller.run_plan import Start
from support.run_fuzz import GIVEN, RunFuzz
from support.schedules import Call, repeat, run_schedule

NUM_SCHEDULES = int(os.environ.get("RAYSGD_SCHEDULES", 1000))
SEED = int(os.environ.get("RAYSGD_SCHEDULES_SEED", random.randrange(10**6)))
RunFuzz.scale = int(os.environ.get("RAYSGD_SCHEDULES_SCALE", 1))
NUM_ACTIONS = 60
PARTS = 10


def begin(**settings: Any) -> Call:
    """Return the call of the beginning, with some usual settings and these."""
    usual = {"on_write_error": "warn", "num_to_keep": None, "start": GIVEN, "are_ready": 1}
    return "begin", usual | settings


#: Schedules that once broke a promise, by what was wrong.
FOUND: dict[str, list[Call]] = {
    "a checkpoint written from memory was found by a new controller, and taken for one of the attempt before": [
        begin(num_ranks=1, max_failures=1, is_elastic=False, stored_every=1),
        ("all_ranks_save", {"is_written": False}),
        ("events_of_a_rank_arrive", {"index": 0, "count": 4}),
        ("a_process_dies", {"index": 0, "loses_unsent": True}),
        ("all_events_arrive", {"backwards": False}),
        ("workers_are_ready", {"size": 2, "luck": 3}),
        ("memory_is_written", {"succeeds": True}),
        ("the_controller_dies", {"luck": 0, "num_written": 1, "flushed": 1.0}),
    ],
    "the number of a checkpoint that was lost while it was written from memory was given to another one": [
        begin(num_ranks=1, max_failures=2, is_elastic=False, stored_every=3),
        ("a_rank_reports", {"index": 0, "count": 2}),
        ("all_ranks_save", {"is_written": False}),
        ("a_process_dies", {"index": 0, "loses_unsent": False}),
        ("a_user_pauses_the_run", {"luck": 0}),
        ("all_events_arrive", {"backwards": True}),
        ("a_user_resumes_the_run", {}),
        ("workers_are_ready", {"size": 1, "luck": 0}),
        ("one_rank_saves", {"index": 0, "is_written": False}),
        ("a_user_pauses_the_run", {"luck": 0}),
        ("a_process_dies", {"index": 0, "loses_unsent": False}),
    ],
    "the round of a committed checkpoint was in the journal alone, and its iteration was given to another report": [
        begin(num_ranks=3, max_failures=2, is_elastic=True, stored_every=0),
        ("events_of_a_rank_arrive", {"index": 0, "count": 1}),
        ("all_ranks_save", {"is_written": True}),
        ("all_events_arrive", {"backwards": False}),
        ("storage_answers", {"succeeds": True}),
        ("a_rank_reports", {"index": 0, "count": 1}),
        ("a_rank_reports", {"index": 1, "count": 1}),
        ("a_rank_reports", {"index": 2, "count": 1}),
        ("all_events_arrive", {"backwards": False}),
        ("the_controller_dies", {"luck": 0, "num_written": 0, "flushed": 1.0}),
    ],
    "ranks that had reached a save point of a pause that was withdrawn counted for the next save point": [
        begin(num_ranks=3, max_failures=2, is_elastic=True, stored_every=3),
        ("a_user_pauses_the_run", {"luck": 0}),
        ("all_ranks_save", {"is_written": True}),
        ("a_user_resumes_the_run", {}),
        ("a_joining_worker_is_ready", {}),
        ("much_time_passes", {}),
    ],
    "an older checkpoint got its score from a round that was dropped, since the newest had fewer rounds": [
        begin(num_ranks=1, max_failures=-1, is_elastic=True, stored_every=1),
        ("a_process_dies", {"index": 0, "loses_unsent": False}),
        ("events_of_a_rank_arrive", {"index": 0, "count": 5}),
        ("workers_are_ready", {"size": 3, "luck": 3}),
        ("all_ranks_save", {"is_written": True}),
        ("a_rank_reports", {"index": 1, "count": 1}),
        ("all_ranks_save", {"is_written": False}),
        ("a_rank_raises", {"index": 1, "kind": "retried"}),
    ],
    "a checkpoint that was written from memory, with its round, got the round a second time": [
        begin(num_ranks=3, max_failures=2, is_elastic=True, stored_every=1, on_write_error="warn"),
        ("a_rank_raises", {"index": 41742, "kind": "setup"}),
        ("events_of_a_rank_arrive", {"index": 10976, "count": 3}),
        ("much_time_passes", {}),
        ("workers_are_ready", {"size": 3, "luck": 7}),
        ("all_ranks_save", {"is_written": True}),
        ("a_rank_reports", {"index": 14605, "count": 1}),
        ("a_process_dies", {"index": 53427, "loses_unsent": False}),
        ("all_events_arrive", {"backwards": False}),
        ("a_user_pauses_the_run", {"luck": 0}),
        ("storage_answers", {"succeeds": False}),
    ],
}

TestRunFuzz = RunFuzz.TestCase
TestRunFuzz.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_promise(part: int) -> None:
    for number in range(part * NUM_SCHEDULES // PARTS, (part + 1) * NUM_SCHEDULES // PARTS):
        run_schedule(RunFuzz, SEED, number, NUM_ACTIONS)


@pytest.mark.parametrize("what", FOUND)
def test_schedule_that_broke_a_promise_does_not_any_more(what: str) -> None:
    repeat(RunFuzz, FOUND[what])


def test_schedule_of_many_ranks_that_broke_a_promise_does_not_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint got its round twice: when its attempt ended, and from a report that arrived later."""
    monkeypatch.setattr(RunFuzz, "scale", 10)
    calls: list[Call] = [
        begin(
            num_ranks=1,
            max_failures=2,
            on_write_error="raise",
            num_to_keep=1,
            start=Start(),
            are_ready=4,
            is_elastic=True,
            stored_every=0,
            score_attribute="loss",
        ),
        ("all_ranks_save", {"is_written": True}),
        ("a_node_drains", {"index": 5, "within_s": 3}),
        ("time_passes", {}),
        ("a_rank_reports", {"index": 9, "count": 2}),
        ("all_events_arrive", {"backwards": True}),
        ("a_rank_reports", {"index": 0, "count": 2}),
        ("storage_answers", {"succeeds": True}),
        ("a_user_stops_the_run", {"cancel": True, "luck": 0}),
    ]
    repeat(RunFuzz, calls)


@pytest.mark.skipif("RAYSGD_SCHEDULE" not in os.environ, reason="repeats one schedule")
def test_one_schedule() -> None:
    seed, number = map(int, os.environ["RAYSGD_SCHEDULE"].split(":"))
    run_schedule(RunFuzz, seed, number, NUM_ACTIONS)
