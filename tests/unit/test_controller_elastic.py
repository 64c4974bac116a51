"""How an elastic group takes in newcomers: out of which save, when, and when not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.config import CheckpointConfig
from raysgd.controller import commands as c
from raysgd.controller.savepoint import AGAIN_S, REACH_S
from raysgd.controller.scaling_policy import FLAP_S, MAX_PAUSE_S, MIN_PAUSE_S, SETTLE_S, ScalingPolicy
from raysgd.session import events as e
from raysgd.testing.simulation import SimulatedRun, finish, kill, part, running, saved, uri_of


def agreed(num_ranks: int = 2, **settings: Any) -> SimulatedRun:
    """A run whose ranks are agreeing on a save, as a newcomer is up."""
    run = running(num_ranks, **settings)
    run.feed(c.NewcomerUp())
    run.advance(SETTLE_S)
    assert run.all_of(c.AgreeOnSave) == [c.AgreeOnSave(1)]
    return run


def reach(run: SimulatedRun, call: int = 0, *ranks: int) -> None:
    for rank in ranks or range(run.num_ranks):
        run.say(rank, e.AtSavePoint(call))


def ended(run: SimulatedRun) -> list[str]:
    return [command.why for command in run.all_of(c.EndRanks)]


def test_the_group_grows_out_of_a_save_that_is_committed() -> None:
    run = agreed()
    run.save()
    reach(run)
    assert not ended(run)
    run.commit()
    assert ended(run) == ["the group grows"]
    for rank in range(2):
        run.leave(rank, e.Ended())
    assert run.all_of(c.PrepareGroup)[1:] == [c.PrepareGroup(2)]
    run.num_ranks = 3
    run.ready()
    assert (run.entries[-1].attempt, run.entries[-1].checkpoint) == (2, uri_of(1))
    assert run.notes("failure") == []
    finish(run)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_newcomers_that_come_together_are_taken_in_together() -> None:
    run = running()
    for _ in range(5):
        run.feed(c.NewcomerUp())
        run.advance(SETTLE_S / 2)
    assert run.all_of(c.AgreeOnSave) == []
    run.advance(SETTLE_S)
    assert len(run.all_of(c.AgreeOnSave)) == 1


def test_one_who_came_while_the_group_formed_is_not_forgotten() -> None:
    run = SimulatedRun(2)
    run.feed(c.NewcomerUp())
    run.feed(c.GroupReady(("a", "b"), num_newcomers=1))
    for rank in range(2):
        run.say(rank, e.Entered(run.now))
    run.advance(SETTLE_S)
    assert len(run.all_of(c.AgreeOnSave)) == 1


def test_one_who_was_taken_in_while_the_group_formed_is_not_waited_for() -> None:
    run = SimulatedRun(2)
    run.feed(c.NewcomerUp())
    run.ready()
    run.advance(SETTLE_S)
    assert run.all_of(c.AgreeOnSave) == []


def test_a_commit_before_any_rank_is_there_is_not_missed() -> None:
    run = agreed()
    run.save()
    run.commit()
    assert not ended(run)
    reach(run)
    assert ended(run) == ["the group grows"]


def test_a_rank_that_does_not_come_is_not_waited_for_for_long() -> None:
    run = agreed()
    run.save()
    reach(run, 0, 0)
    run.commit()
    assert not ended(run)
    run.advance(REACH_S)
    assert ended(run) == ["the group grows"]


def test_nobody_leaves_before_the_checkpoint_is_there() -> None:
    run = agreed()
    run.save()
    reach(run)
    run.advance(10 * REACH_S)
    assert not ended(run)


def test_a_checkpoint_that_cannot_be_written_is_not_left_after_but_the_next_is() -> None:
    run = agreed(checkpoint=CheckpointConfig(on_write_error="warn"))
    run.save()
    reach(run)
    run.fail_commit()
    assert run.all_of(c.CallOffSave) == [c.CallOffSave(1)]
    run.advance(AGAIN_S)
    assert len(run.all_of(c.AgreeOnSave)) == 2
    run.save(1, 2)
    reach(run, 1)
    run.commit()
    assert ended(run) == ["the group grows"]


def test_a_part_that_cannot_be_written_calls_it_off_too() -> None:
    run = agreed(checkpoint=CheckpointConfig(on_write_error="warn"))
    run.say(0, saved(), e.PartFailed(0, "disk full"))
    reach(run)
    assert run.all_of(c.CallOffSave) == [c.CallOffSave(1)]


def test_who_waits_goes_on_when_the_run_is_asked_to_stop() -> None:
    run = agreed()
    run.save()
    reach(run, 0, 0)
    told = run.stop()
    assert [type(command) for command in told if not isinstance(command, c.Note)] == [c.CallOffSave, c.AskToStop]
    run.commit()
    reach(run, 0, 1)
    assert not ended(run)


def test_what_a_rank_has_done_to_the_end_is_not_done_again() -> None:
    run = agreed()
    run.leave(1)
    assert run.all_of(c.CallOffSave) == [c.CallOffSave(1)]
    run.feed(c.NewcomerUp())
    run.advance(60)
    assert len(run.all_of(c.AgreeOnSave)) == 1
    run.leave(0)
    assert run.outcome is not None and run.outcome.kind == "done"


def test_checkpoints_of_each_rank_bind_the_group_to_its_size() -> None:
    run = agreed()
    run.save(all_ranks=True)
    reach(run)
    run.commit()
    assert not ended(run) and run.all_of(c.CallOffSave) == [c.CallOffSave(1)]
    run.feed(c.NewcomerUp())
    run.advance(60)
    assert len(run.all_of(c.AgreeOnSave)) == 1
    (warning,) = run.notes("warning")
    assert "all_ranks=True" in warning["message"]
    kill(run)
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2, keep_size=True)


def test_parts_that_any_number_can_load_do_not_bind_it() -> None:
    run = agreed()
    for rank in range(run.num_ranks):
        run.say(rank, saved(all_ranks=True), replace(part(), beside="equal"))
    reach(run)
    run.commit()
    assert ended(run) and run.all_of(c.CallOffSave) == [] and run.notes("warning") == []


def test_a_death_on_the_way_out_is_no_failure() -> None:
    run = agreed()
    run.save()
    reach(run)
    run.commit()
    run.gone(0, "killed")
    run.leave(1, e.Ended())
    assert run.notes("failure") == []
    assert run.all_of(c.PrepareGroup)[-1] == c.PrepareGroup(2)


def test_a_death_before_ends_the_agreement() -> None:
    run = agreed()
    run.say(0, saved(), part())
    kill(run)
    run.num_ranks = 1
    run.ready()
    run.save(0, 1)
    run.commit()
    assert "the group grows" not in ended(run)
    assert len(run.notes("failure")) == 1


# -- when -------------------------------------------------------------------------------------------------------------

TIMES = st.floats(0, 1e6)


@given(first=TIMES, later=st.floats(0, SETTLE_S))
def test_the_policy_waits_for_all_who_come_within_a_second(first: float, later: float) -> None:
    policy = ScalingPolicy()
    assert policy.grow_at() is None
    policy.came(first)
    policy.came(first + later)
    assert policy.grow_at() == first + later + SETTLE_S


@given(grown=TIMES, came=st.floats(0, 100))
def test_two_growths_are_never_closer_than_the_pause(grown: float, came: float) -> None:
    policy = ScalingPolicy()
    policy.grown(grown)
    assert policy.grow_at() is None
    policy.came(grown + came)
    at = policy.grow_at()
    assert at is not None and at >= grown + MIN_PAUSE_S and at >= grown + came + SETTLE_S


@pytest.mark.parametrize(("num_losses", "pause"), [(1, 20), (2, 40), (10, MAX_PAUSE_S)])
def test_who_loses_workers_right_after_growing_grows_less_often(num_losses: int, pause: float) -> None:
    policy, now = ScalingPolicy(), 0.0
    for _ in range(num_losses):
        policy.grown(now)
        policy.shrunk(now + 1)
        now += 2
    policy.grown(now)
    policy.came(now)
    assert policy.grow_at() == now + pause


def test_a_node_that_takes_several_workers_with_it_counts_once() -> None:
    policy = ScalingPolicy()
    policy.grown(0)
    for _ in range(8):
        policy.shrunk(1)
    policy.came(2)
    assert policy.grow_at() == 2 * MIN_PAUSE_S


def test_what_goes_well_is_forgiven() -> None:
    policy = ScalingPolicy()
    policy.grown(0)
    policy.shrunk(1)
    policy.grown(20)
    later = 20 + 2 * MIN_PAUSE_S + FLAP_S + 1
    policy.grown(later)
    policy.came(later)
    assert policy.grow_at() == later + MIN_PAUSE_S
