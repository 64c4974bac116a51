"""Checkpoints that are ranked by a metric which none or only some of them have."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raysgd.config import CheckpointConfig
from raysgd.controller.commands import DeleteCheckpoint
from support.simulation import SimulatedRun, finish, part, previous_state_of, reports, running, saved, scoring


def save_scored(order: str, *metrics: dict[str, Any] | None, num_to_keep: int | None = 1) -> SimulatedRun:
    """Return a run of one rank that has ranked its checkpoints by ``acc``, and is over."""
    kept = CheckpointConfig(num_to_keep=num_to_keep, score_attribute="acc")
    run = running(1, checkpoint_config=kept)
    for call, each in enumerate(metrics):
        if order == "save first":
            run.deliver(0, saved(call, call), part(call))
            run.commit()
            run.deliver(0, scoring(each or {}, call))
        else:
            run.deliver(0, reports(call), saved(call, call + 1, each), part(call))
            run.commit()
    finish(run)
    assert run.is_closed and run.outcome is not None and run.outcome.is_success
    return run


def deleted(run: SimulatedRun) -> list[int]:
    return [command.number for command in run.all_of(DeleteCheckpoint)]


@pytest.mark.parametrize("order", ["report first", "save first"])
def test_unknown_score_attribute_is_warned_about_once_and_nothing_is_deleted(order: str) -> None:
    run = save_scored(order, *[{"accuracy": n} for n in range(5)])
    (warning,) = run.events("warning")
    assert warning["message"] == (
        "CheckpointConfig(score_attribute='acc'): checkpoint 1 has no metric 'acc' (did you mean 'accuracy'?); it has "
        "accuracy. No checkpoint is deleted until one has the metric, so num_to_keep does not bound their number."
    )
    assert deleted(run) == []


@pytest.mark.parametrize("order", ["report first", "save first"])
def test_score_attribute_of_some_rounds_ranks_from_the_first_one_on(order: str) -> None:
    run = save_scored(order, {"loss": 1}, {"loss": 1}, {"acc": 0.9}, {"acc": 0.5}, {"loss": 1})
    assert len(run.events("warning")) == 1
    assert set(deleted(run)) == {1, 2, 4}


@pytest.mark.parametrize("num_saves", [1, 2])
def test_checkpoints_without_metrics_are_warned_about(num_saves: int) -> None:
    run = save_scored("report first", *[None] * num_saves, num_to_keep=None)
    (warning,) = run.events("warning")
    assert warning["message"].endswith("checkpoint 1 has no metric 'acc'; it has no metrics.")


def test_known_score_attribute_is_not_warned_about() -> None:
    run = save_scored("save first", {"acc": 1}, {"acc": 2}, {"acc": 3})
    assert run.events("warning") == [] and deleted(run) == [1]
    assert save_scored("save first", {"acc": math.nan}, {"loss": 2}).events("warning") == []


def test_warning_about_the_score_is_not_repeated_by_a_restarted_controller() -> None:
    run = running(1, checkpoint_config=CheckpointConfig(num_to_keep=1, score_attribute="acc"))
    run.deliver(0, reports(0), saved(0, 1, {"loss": 1}), part())
    run.commit()
    run.restart(previous_state_of(run))
    run.ready()
    run.deliver(0, reports(0), saved(0, 1, {"loss": 1}), part())
    run.commit()
    finish(run)
    assert len(run.events("warning")) == 1
