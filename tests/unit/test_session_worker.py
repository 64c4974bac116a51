"""The session of one attempt: what its calls send, when they raise, and where a stop is found."""

from __future__ import annotations

import functools
import json
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._util.json import decode
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.errors import (
    AttemptEnded,
    CheckpointCorruptError,
    CheckpointError,
    MetricError,
    SessionError,
    UsageError,
)
from raysgd.session.events import Reports, Saved, StartUnusable, WorkerEvent
from raysgd.session.gates import StopGate
from raysgd.session.local import LocalSession
from raysgd.session.rank_state import capture_generators
from support.sessions import FakeStart, Worker

PATIENCE_S = 30  # far above what anything here takes


CALLS: dict[str, Callable[[Worker], object]] = {
    "report": lambda worker: worker.report(loss=1.0),
    "save_checkpoint": lambda worker: worker.save(),
    "load_checkpoint": lambda worker: worker.session.load_checkpoint(None, allow_pickle=False),
    "barrier": lambda worker: worker.session.barrier(),
    "broadcast": lambda worker: worker.session.broadcast(1),
}


# -- reports -----------------------------------------------------------------------------------------------------------


def test_reports_are_sent_in_order_with_their_times() -> None:
    worker = Worker(time_before_s=100.0)
    worker.report(loss=1.0)
    worker.report(loss=2.0)
    (event,) = worker.sent()
    assert isinstance(event, Reports)
    (first, second) = decode(event.rows)
    assert [first[2], second[2]] == [{"loss": 1.0}, {"loss": 2.0}]
    assert first[0] <= second[0]
    assert 100.0 <= first[1] <= second[1] < 100.0 + PATIENCE_S  # training time continues
    assert worker.session.num_reports == 2


def test_refused_report_is_not_counted() -> None:
    worker = Worker()
    with pytest.raises(MetricError):
        worker.report(loss=object())
    assert worker.session.num_reports == 0
    assert worker.sent() == []


def test_callbacks_get_each_report() -> None:
    seen: list[dict[str, Any]] = []
    worker = Worker(on_report=[lambda metrics: seen.append(dict(metrics))])
    worker.report(loss=1.0)
    worker.report(loss=2.0)
    assert seen == [{"loss": 1.0}, {"loss": 2.0}]


# -- the end of the attempt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_call_raises_once_the_attempt_is_over(call: str) -> None:
    worker = Worker()
    worker.session.end("rank 1 died")
    for _ in range(2):
        with pytest.raises(AttemptEnded, match="rank 1 died"):
            CALLS[call](worker)
    assert worker.sent() == []
    assert worker.writer.calls == []


@pytest.mark.parametrize("call", sorted(CALLS))
def test_call_from_a_thread_that_outlives_train_func_raises(call: str) -> None:
    worker = Worker()
    worker.session.close()
    with pytest.raises(SessionError, match="train_func has returned"):
        CALLS[call](worker)
    assert worker.sent() == []


def test_except_exception_does_not_catch_the_end_of_the_attempt() -> None:
    worker = Worker()
    worker.session.end("over")
    assert not issubclass(AttemptEnded, Exception)
    assert worker.session.is_ended and worker.session.should_stop()


def test_each_call_raises_a_new_exception_after_the_end() -> None:
    worker = Worker()
    worker.session.end("over")
    raised = []
    for _ in range(2):
        with pytest.raises(AttemptEnded) as caught:
            worker.report()
        raised.append(caught.value)
    assert raised[0] is not raised[1]  # tracebacks would pile up, and hold their frames


# -- saving ------------------------------------------------------------------------------------------------------------


def test_saves_are_numbered_with_the_reports_before_them() -> None:
    worker = Worker()
    worker.report()
    worker.save("a")
    worker.report()
    worker.report()
    worker.save("b", allow_pickle=True)
    assert [(saved.call, saved.reports) for saved in worker.saved()] == [(0, 1), (1, 3)]
    assert worker.writer.calls == [("state", 0, ("a", False)), ("state", 1, ("b", True))]


def test_rank_0_saves_the_state_and_all_ranks_their_rank_state() -> None:
    for rank, kind in ((0, "state"), (1, "nothing")):
        worker = Worker(rank)
        worker.save()
        assert [call[0] for call in worker.writer.calls] == [kind]
        assert set(worker.writer.rank_states[0]["generators"]) >= {"python"}


def test_all_ranks_save_their_parts() -> None:
    worker = Worker(rank=1)
    worker.save("part", all_ranks=True)
    assert worker.writer.calls == [("state", 0, ("part", False))]
    (saved,) = worker.saved()
    assert saved.all_ranks


def test_files_are_copied_by_the_rank_that_gives_the_state() -> None:
    for rank, kind in ((0, "files"), (1, "nothing")):
        worker = Worker(rank)
        worker.save("/some/folder", files=True)
        assert [call[0] for call in worker.writer.calls] == [kind]
        (saved,) = worker.saved()
        assert saved.is_files


def test_rank_without_a_state_may_give_none() -> None:
    worker = Worker(rank=1)
    worker.save(None)
    assert len(worker.saved()) == 1


def test_rank_without_files_may_give_none() -> None:
    for rank in (0, 1):
        worker = Worker(rank)
        worker.save(None, files=True, all_ranks=True)
        assert [call[0] for call in worker.writer.calls] == ["nothing"]
        (saved,) = worker.saved()
        assert saved.is_files and saved.all_ranks


@pytest.mark.parametrize(("rank", "all_ranks"), [(0, False), (0, True), (1, True)])
def test_rank_that_gives_the_state_must_not_give_none(rank: int, all_ranks: bool) -> None:
    worker = Worker(rank)
    with pytest.raises(CheckpointError, match=rf"save_checkpoint\(None\) on rank {rank}"):
        worker.save(None, all_ranks=all_ranks)
    assert worker.sent() == []


def test_state_that_cannot_be_saved_counts_as_a_call_without_a_checkpoint() -> None:
    worker = Worker()
    with pytest.raises(CheckpointError, match="holds a socket"):
        worker.save(CheckpointError("holds a socket"))
    worker.save("next")  # the other ranks made both calls
    assert [saved.call for saved in worker.saved()] == [1]


# -- scores ------------------------------------------------------------------------------------------------------------


def scores(worker: Worker) -> list[Any]:
    """Of each save its metrics, and of each report that a checkpoint belongs to the save and the metrics."""
    found: list[Any] = []
    for event in worker.sent():
        if isinstance(event, Saved):
            found.append(("Saved", event.call, None if event.metrics is None else json.loads(event.metrics)))
        elif isinstance(event, Reports):
            made = [row[2] for row in json.loads(event.rows)]
            found += [("Report", call, made[index - event.first]) for index, call in event.closes]
    return found


def test_save_in_a_loop_that_reports_first_is_scored_by_the_report_before() -> None:
    worker = Worker()
    for loss in (3, 2, 1):
        worker.report(loss=loss)
        worker.save()
    assert scores(worker) == [("Saved", 0, {"loss": 3}), ("Saved", 1, {"loss": 2}), ("Saved", 2, {"loss": 1})]


def test_save_in_a_loop_that_saves_first_is_scored_by_the_report_after() -> None:
    worker = Worker()
    for loss in (3, 2):
        worker.save()
        worker.report(loss=loss)
    assert scores(worker) == [
        ("Saved", 0, None),
        ("Report", 0, {"loss": 3}),
        ("Saved", 1, None),
        ("Report", 1, {"loss": 2}),
    ]


def test_first_report_after_a_save_scores_it() -> None:
    worker = Worker()
    worker.save()
    worker.report(loss=3)
    worker.report(loss=2)
    assert scores(worker) == [("Saved", 0, None), ("Report", 0, {"loss": 3})]


@pytest.mark.parametrize("saves_first", [True, False])
def test_save_says_whether_it_belongs_to_the_next_report(saves_first: bool) -> None:
    worker = Worker()
    if not saves_first:
        worker.report(loss=3)
    for _ in range(2):
        worker.save()
        worker.report(loss=2)
    assert [saved.awaits_round for saved in worker.saved()] == [saves_first, saves_first]


def test_metrics_argument_scores_a_save() -> None:
    first, after = Worker(), Worker()
    first.save(metrics={"acc": 0.5})
    first.report(loss=3)
    assert scores(first) == [("Saved", 0, {"acc": 0.5}), ("Report", 0, {"loss": 3})]
    after.report(loss=3)
    after.save(metrics={"acc": 0.5})
    after.report(loss=2)
    assert scores(after) == [("Saved", 0, {"acc": 0.5})]


def test_metrics_of_a_save_follow_the_rules_of_reports() -> None:
    worker = Worker()
    with pytest.raises(MetricError):
        worker.save(metrics={"acc": object()})
    assert worker.sent() == [] and worker.writer.calls == []


def test_logical_workers_are_part_of_a_save_which_is_refused_while_one_of_them_computes() -> None:
    worker = Worker(rank=1, logical_workers=5)
    logical = worker.session.logical
    assert logical is not None and list(logical.own) == [3, 4]
    with logical.acting_as(3):
        random.random()
        with pytest.raises(UsageError, match="call it after that loop"):
            worker.save()
        with pytest.raises(UsageError, match="call it after that loop"):
            worker.report(loss=1.0)
    worker.report(loss=1.0)
    worker.save()
    assert set(worker.writer.rank_states[0]["logical_generators"]) == {"3"}


# -- loading -----------------------------------------------------------------------------------------------------------


def test_first_start_loads_none() -> None:
    assert Worker().session.load_checkpoint(None, allow_pickle=False) is None


def test_start_is_loaded_for_this_rank_with_its_generators() -> None:
    states = capture_generators()
    expected = random.random()
    worker = Worker(rank=1, start=FakeStart("start", states))
    assert worker.session.load_checkpoint(None, allow_pickle=True) == ("start", 1, 2, True)
    assert random.random() == expected


def test_load_after_a_save_gives_the_newest_committed_checkpoint() -> None:
    worker = Worker(start=FakeStart("start"))
    worker.save()
    load = functools.partial(worker.session.load_checkpoint, None, allow_pickle=False)
    assert load() == ("start", 0, 2, False)  # it is not committed yet
    worker.link.newest = FakeStart("newest")
    assert load() == ("newest", 0, 2, False)
    worker.save()
    load()
    assert worker.link.questions == [(0, 1), (1, 1), (2, 2)]


def test_damage_found_later_is_reported_for_the_starting_checkpoint() -> None:
    start, newest = FakeStart("start"), FakeStart("newest")
    worker = Worker(start=start)
    worker.session.load_checkpoint(None, allow_pickle=False)
    assert start.on_unusable is not None
    start.on_unusable(CheckpointCorruptError("a shard is damaged"))
    assert StartUnusable("a shard is damaged") in worker.sent()
    worker.save()
    worker.link.newest = newest
    worker.session.load_checkpoint(None, allow_pickle=False)
    assert newest.on_unusable is not None
    newest.on_unusable(CheckpointCorruptError("another"))
    assert not any(isinstance(event, StartUnusable) for event in worker.sent())


def test_load_before_the_first_save_does_not_ask_the_controller() -> None:
    worker = Worker()
    worker.link.newest = FakeStart("of another rank that has saved already")
    assert worker.session.load_checkpoint(None, allow_pickle=False) is None
    assert worker.link.questions == []


def test_attempt_that_ends_during_a_load_gets_no_state() -> None:
    worker = Worker(start=FakeStart("start"))
    worker.save()
    worker.link.newest_checkpoint = lambda *_: worker.session.end("a rank died")  # type: ignore[assignment]
    with pytest.raises(AttemptEnded):
        worker.session.load_checkpoint(None, allow_pickle=False)


def test_load_with_a_path_gives_the_state_there(tmp_path: Path) -> None:
    alone = LocalSession(tmp_path)
    for all_ranks in (False, True):  # one rank saves for all in both cases
        alone.save_checkpoint({"a": 1}, files=False, metrics=None, all_ranks=all_ranks, allow_pickle=False)
    worker = Worker(rank=1, start=FakeStart("start"))
    for number in (1, 2):
        assert worker.session.load_checkpoint(tmp_path / f"checkpoint_00000{number}", allow_pickle=False) == {"a": 1}


def test_checkpoints_are_listed_by_the_controller_in_the_order_of_the_calls() -> None:
    worker = Worker()
    worker.link.listed = [Checkpoint("/run/checkpoint_1", {"loss": 0.5}, 3)]
    assert worker.session.list_checkpoints() == worker.link.listed
    worker.save()
    worker.session.list_checkpoints()
    assert worker.link.questions == [(0, 0), (1, 1)]
    worker.link.list_checkpoints = lambda *_: worker.session.end("a rank died")  # type: ignore[assignment]
    with pytest.raises(AttemptEnded):
        worker.session.list_checkpoints()


def test_single_process_lists_its_checkpoints(tmp_path: Path) -> None:
    assert LocalSession().list_checkpoints() == []
    alone = LocalSession(tmp_path)
    for step in (1, 2):
        alone.save_checkpoint(step, files=False, metrics={"step": step}, all_ranks=False, allow_pickle=False)
    listed = alone.list_checkpoints()
    assert [(checkpoint.load(), checkpoint.metrics) for checkpoint in listed] == [(1, {"step": 1}), (2, {"step": 2})]


class OnDevice:
    """A 0-d CUDA tensor's stand-in: its number costs a wait for the device."""

    def __init__(self, number: float, read: list[int | None]) -> None:
        self._number = number
        self._read = read

    def item(self) -> float:
        self._read.append(threading.current_thread().ident)
        return self._number


OnDevice.__module__ = "jax"  # a framework whose scalars are held as they are


@pytest.mark.parametrize("saves_first", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_report_does_not_wait_for_a_device(saves_first: bool, own: bool) -> None:
    worker = Worker()
    read: list[int | None] = []
    metrics = {"metrics": {"best": OnDevice(0.25, read)}} if own else {}
    if saves_first:
        worker.save(**metrics)
    worker.report(loss=OnDevice(0.5, read))
    if not saves_first:
        worker.save(**metrics)
    assert read == []
    sent: list[WorkerEvent] = []
    thread = threading.Thread(target=lambda: sent.extend(worker.sent()))
    thread.start()
    thread.join()
    assert read and set(read) == {thread.ident}
    given = [json.loads(event.metrics) for event in sent if isinstance(event, Saved) and event.metrics is not None]
    made = [row[2] for event in sent if isinstance(event, Reports) for row in json.loads(event.rows)]
    assert made == [{"loss": 0.5}]
    assert given == ([{"best": 0.25}] if own else [] if saves_first else [{"loss": 0.5}])


# -- barriers ----------------------------------------------------------------------------------------------------------


def test_ranks_wait_for_each_other_before_train_func() -> None:
    worker, alone = Worker(), Worker(world_size=1)
    worker.session.wait_for_others()
    alone.session.wait_for_others()
    worker.session.barrier()
    assert worker.link.barriers == [("enter", 0, None), ("barrier", 0, None)]
    assert alone.link.barriers == []
    assert worker.session.progress.heartbeat(is_inside=False).calls == 1, "no call of train_func's"


def test_barriers_and_broadcasts_are_counted_separately() -> None:
    worker = Worker(rank=1)
    worker.link.answer = pickle.dumps("x")
    worker.session.barrier()
    worker.session.broadcast(None)
    worker.session.barrier()
    assert worker.link.barriers == [("barrier", 0, None), ("broadcast", 0, None), ("barrier", 1, None)]
    assert worker.session.barriers() == [("barrier", 2, None), ("broadcast", 1, None)]


def test_broadcast_gives_rank_0s_object() -> None:
    payload = {"lr": 0.1}
    zero, one = Worker(0), Worker(1)
    assert zero.session.broadcast(payload) is payload
    sent = zero.link.barriers[0][2]
    assert sent is not None
    one.link.answer = sent
    assert one.session.broadcast("ignored") == payload
    assert one.link.barriers == [("broadcast", 0, None)]


def test_broadcast_without_rank_0_raises() -> None:
    worker = Worker(rank=1)
    worker.link.answer = b""
    with pytest.raises(SessionError, match="rank 0 returned without calling broadcast"):
        worker.session.broadcast(None)


def test_gather_goes_through_the_controller_where_the_group_carries_no_bytes() -> None:
    worker = Worker(rank=1)
    worker.link.join_barrier = lambda what, index, payload: pickle.dumps(  # type: ignore[method-assign]
        {1: payload, 0: pickle.dumps("zero")}
    )
    assert worker.session.gather("one") == ["zero", "one"]
    grouped = Worker(rank=1, gather=lambda payload: [pickle.dumps("zero"), payload])
    assert grouped.session.gather("one") == ["zero", "one"]
    assert grouped.link.barriers == []


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_should_stop_is_false_without_a_stop() -> None:
    worker = Worker()
    assert not worker.session.should_stop()
    worker.report()


def test_loop_that_checks_finds_the_stop_and_may_report_until_it_checks_again() -> None:
    worker = Worker()
    worker.report()
    checks, reports = worker.session.stop_gate.hold(worker.session.num_reports)
    worker.session.stop_gate.release(checks, reports)
    assert worker.session.should_stop()
    worker.report()
    worker.save()
    worker.report(last=True)
    assert worker.session.should_stop()
    with pytest.raises(AttemptEnded, match="asked to stop"):
        worker.report()
    assert worker.session.num_reports == 3


def test_rank_that_is_behind_continues_to_the_agreed_check() -> None:
    worker = Worker()
    worker.session.stop_gate.hold(worker.session.num_reports)
    worker.session.stop_gate.release(from_check=2, last_report=1)
    assert [worker.session.should_stop() for _ in range(4)] == [False, False, True, True]
    worker.report()
    worker.report()
    with pytest.raises(AttemptEnded):
        worker.report()


def test_stop_without_a_report_limit_ends_no_report() -> None:
    worker = Worker()
    checks, _ = worker.session.stop_gate.hold(worker.session.num_reports)
    worker.session.stop_gate.release(checks, None)
    for _ in range(5):
        worker.report()
    assert not worker.session.saw_stop
    assert worker.session.should_stop() and worker.session.saw_stop


def test_second_stop_is_found_no_later_and_ends_at_a_report() -> None:
    worker = Worker()
    worker.session.stop_gate.hold(worker.session.num_reports)
    worker.session.stop_gate.release(from_check=1, last_report=None)
    worker.session.stop_gate.hold(worker.session.num_reports)
    worker.session.stop_gate.release(from_check=3, last_report=0)
    assert [worker.session.should_stop() for _ in range(3)] == [False, True, True]
    worker.report()
    with pytest.raises(AttemptEnded, match="asked to stop"):
        worker.report()


@pytest.mark.parametrize("call", [lambda worker: worker.session.should_stop(), lambda worker: worker.report()])
def test_held_rank_waits_until_it_is_released(call: Callable[[Worker], object]) -> None:
    worker = Worker()
    checks, reports = worker.session.stop_gate.hold(worker.session.num_reports)
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call(worker)))
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    worker.session.stop_gate.release(checks + 5, reports + 5)
    thread.join(PATIENCE_S)
    assert len(answers) == 1 and not answers[0]


@pytest.mark.parametrize("is_late", [False, True])
def test_held_rank_is_released_when_the_attempt_ends(is_late: bool) -> None:
    worker = Worker()
    raised: list[BaseException] = []

    def check_and_report() -> None:
        assert worker.session.should_stop()
        try:
            worker.report()
        except AttemptEnded as ended:
            raised.append(ended)

    if is_late:  # the end overtakes the call that holds
        worker.session.end("rank 1 died")
        worker.session.stop_gate.hold(worker.session.num_reports)
    else:
        worker.session.stop_gate.hold(worker.session.num_reports)
    thread = threading.Thread(target=check_and_report, daemon=True)
    thread.start()
    if not is_late:
        worker.session.end("rank 1 died")
    thread.join(PATIENCE_S)
    assert [str(ended) for ended in raised] == ["rank 1 died"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_all_ranks_find_a_stop_at_the_same_check(made: list[int]) -> None:
    gates = [StopGate() for _ in made]
    for gate, checks in zip(gates, made, strict=True):
        assert not any(gate.check() for _ in range(checks))
    places = [gate.hold(0)[0] for gate in gates]
    for gate in gates:
        gate.release(max(places), 0)
    first = []
    for gate, checks in zip(gates, made, strict=True):
        while not gate.check():
            checks += 1
        first.append(checks)
    assert len(set(first)) == 1 and first[0] >= max(made)
