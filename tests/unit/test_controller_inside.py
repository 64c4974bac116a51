"""A train_func that gets over the loss of members by itself: what the run makes of ranks that wait for the next attempt."""

from __future__ import annotations

from typing import Any

from raysgd.config import FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.moves import EXPLAIN_S, GATHER_S
from raysgd.controller.scaling_policy import SETTLE_S
from raysgd.session import events as e
from raysgd.testing.simulation import SimulatedRun, failed, finish, reports, running

TWICE = FailureConfig(max_failures=2)
#: A rank was told that the group changes, and has left it.
CHANGED = e.Parked(is_broken=False)


def inside(num_ranks: int = 3, **settings: Any) -> SimulatedRun:
    return running(num_ranks, recovers_inside=True, **{"failure": TWICE, **settings})


def lose(run: SimulatedRun, rank: int, *parked: int) -> None:
    """A worker dies, and others wait for what comes."""
    run.gone(rank, "killed")
    run.advance(GATHER_S)
    for other in parked:
        run.leave(other, e.Parked())


def test_those_who_wait_go_on_and_iterations_with_them() -> None:
    run = inside()
    for rank, count in ((0, 5), (1, 4), (2, 7)):
        run.say(rank, reports(0, count))
    run.now += 10
    lose(run, 1, 0, 2)
    assert [command.goes_on for command in run.all_of(c.EndRanks)] == [True]
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2, parked=(0, 2))
    run.ready(num_parked=2)
    assert run.entries[-1].iterations_before == 4  # rounds that all had made
    assert run.entries[-1].time_before_s >= 10
    assert run.said(frames.ATTEMPT)[-1].data["iterations_before"] == 4
    assert [note["ranks"] for note in run.notes("failure")] == [[1]]
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_where_none_of_them_is_left_the_newest_checkpoint_counts() -> None:
    run = inside()
    for rank in range(3):
        run.say(rank, reports(0, 5))
    run.save(0, reports=5)
    run.commit()
    for rank in range(3):
        run.say(rank, reports(5, 3))
    lose(run, 1, 0, 2)
    run.ready(num_parked=0)
    assert run.entries[-1].iterations_before == 5


def test_rounds_after_the_commit_of_the_first_of_them_are_made_again() -> None:
    run = inside()
    for rank in range(3):
        run.say(rank, reports(0, 5))
    run.gone(0, "killed")
    run.advance(GATHER_S)
    run.leave(1, e.Parked(iteration=4))
    run.leave(2, e.Parked(iteration=3))
    run.ready(num_parked=2)
    assert run.entries[-1].iterations_before == 4


def test_a_commit_is_not_ahead_of_rounds_that_were_lost_on_their_way() -> None:
    run = inside()
    for rank, count in ((0, 5), (1, 3), (2, 5)):
        run.say(rank, reports(0, count))
    run.gone(1, "killed")
    run.advance(GATHER_S)
    run.leave(0, e.Parked(iteration=5))
    run.leave(2, e.Parked(iteration=5))
    run.ready(num_parked=2)
    assert run.entries[-1].iterations_before == 3


def test_the_same_wait_for_another_try_if_the_group_does_not_form() -> None:
    run = inside()
    lose(run, 1, 0, 2)
    run.feed(c.GroupFailed("WorkerDiedError", "it died", can_retry=True, ranks=(2,)))
    run.advance(60)
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2, parked=None)  # ranks are others by now
    run.ready(num_parked=1)
    assert run.entries[-1].attempt == 2


def test_a_rank_that_left_train_func_is_none_of_them() -> None:
    run = inside()
    run.gone(1, "killed")
    run.advance(GATHER_S)
    run.leave(0, e.Ended())
    run.leave(2, e.Parked())
    assert run.all_of(c.PrepareGroup)[-1].parked == (2,)


def test_a_group_that_broke_and_nobody_died_is_a_failure() -> None:
    run = inside(failure=FailureConfig(max_failures=1))
    for _ in range(2):
        for rank in range(3):
            run.leave(rank, e.Parked())
        run.advance(GATHER_S + EXPLAIN_S)
        if run.outcome is None:
            assert run.all_of(c.PrepareGroup)[-1].parked == (0, 1, 2)
            run.ready(num_parked=3)
    assert "no worker had died" in run.notes("failure")[0]["error"]
    assert run.outcome is not None and run.outcome.kind == "error"


def test_a_group_that_did_not_form_again_is_told_with_what_failed() -> None:
    run = inside()
    run.leave(0, e.Parked(failed("timed out", in_setup=True)))
    run.leave(1, e.Parked(failed("timed out", in_setup=True)))
    run.leave(2, e.Parked())
    run.advance(GATHER_S + EXPLAIN_S)
    assert "timed out" in run.notes("failure")[0]["error"]
    assert run.all_of(c.PrepareGroup)[-1].parked == (0, 1, 2)


def test_an_error_of_ones_own_ends_the_run_and_lets_those_go_who_wait() -> None:
    run = inside()
    run.leave(1, failed("the cause"))
    run.leave(0, e.Parked())
    run.advance(GATHER_S)
    assert run.outcome is not None and run.outcome.failed is not None and run.outcome.failed.summary == "the cause"
    assert run.all_of(c.EndRanks)[-1] == c.EndRanks(1, (2,), "the run is over", goes_on=False)
    run.leave(2, e.Ended())
    assert run.is_closed


def test_what_has_an_end_of_its_own_is_not_gone_on_from() -> None:
    run = inside()
    run.stop(cancel=True)
    assert [command.goes_on for command in run.all_of(c.EndRanks)] == [False]


def test_it_grows_when_train_func_is_ready_for_it_and_saves_nothing_for_it() -> None:
    run = inside(2)
    run.feed(c.NewcomerUp())
    run.advance(SETTLE_S)
    assert run.all_of(c.ChangeGroup) == [c.ChangeGroup(1)]
    assert not run.all_of(c.AgreeOnSave)
    run.leave(0, CHANGED)
    run.leave(1, CHANGED)
    assert run.all_of(c.PrepareGroup)[-1].parked == (0, 1)
    assert [note["why"] for note in run.notes("regroup")] == ["the group grows"]
    assert not run.notes("failure")
    run.num_ranks = 3
    run.ready(num_parked=2)
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_a_preempted_rank_is_ended_when_all_have_left_their_group() -> None:
    run = inside(2)
    run.say(1, e.Preempted("SIGTERM"))
    assert run.all_of(c.ChangeGroup) and not run.all_of(c.AskToStop)  # which would have train_func return
    run.leave(0, CHANGED)
    run.leave(1, CHANGED)
    assert c.KillRanks((1,)) in run.told
    assert not run.notes("failure")


def test_a_death_while_the_group_is_to_change_is_a_failure() -> None:
    """Those who are left hear of it by a broken collective, before the controller does."""
    run = inside(3)
    run.feed(c.NewcomerUp())
    run.advance(SETTLE_S)
    assert run.all_of(c.ChangeGroup)
    run.leave(0, e.Parked())
    run.leave(2, e.Parked())
    run.gone(1, "killed")
    assert [note["ranks"] for note in run.notes("failure")] == [[1]]
    assert not run.notes("regroup")
    assert run.all_of(c.PrepareGroup)[-1].parked == (0, 2)


def test_a_preempted_rank_is_asked_to_stop_where_it_cannot_leave_its_group_by_itself() -> None:
    run = inside(2)
    run.say(1, e.Preempted("SIGTERM"))
    assert [command.stops for command in run.all_of(c.ChangeGroup)] == [True]
    grows = inside(2)
    grows.feed(c.NewcomerUp())
    grows.advance(SETTLE_S)
    assert [command.stops for command in grows.all_of(c.ChangeGroup)] == [False]


def test_a_rest_waits_for_a_save_of_what_only_those_who_wait_have() -> None:
    run = inside(2)
    for rank in range(2):
        run.say(rank, reports(0, 9))
    run.feed(c.NewcomerUp())
    run.advance(SETTLE_S)
    run.feed(c.PauseAsked())
    for rank in range(2):
        run.leave(rank, e.Parked(iteration=9, is_broken=False))
    assert not run.all_of(c.ReleaseWorkers)
    run.feed(c.PauseAsked())  # once more, meanwhile
    assert not run.all_of(c.ReleaseWorkers)
    run.ready(num_parked=2)
    assert run.entries[-1].iterations_before == 9
    assert run.all_of(c.AgreeOnSave)[-1].attempt == 2


def test_a_rest_gives_the_workers_back_and_those_who_wait_with_them() -> None:
    run = inside(2)
    run.feed(c.PauseAsked())
    assert run.all_of(c.AgreeOnSave)
    run.save()
    for rank in range(2):
        run.say(rank, e.AtSavePoint(0))
    run.commit()
    for rank in range(2):
        run.leave(rank, e.Parked())
    assert run.all_of(c.ReleaseWorkers)
    run.feed(c.ResumeAsked())
    assert run.all_of(c.PrepareGroup)[-1].parked == ()
