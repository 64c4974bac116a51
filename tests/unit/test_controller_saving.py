"""What readers hear of saves before they are on storage: each once, and the round it belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import frames
from raysgd.controller.commands import Say
from raysgd.controller.desk import CheckpointDesk
from raysgd.controller.plan import RunPlan
from raysgd.controller.shelf import Start
from raysgd.session.events import PartFailed, Saved


def desk(out: list[Any], start: Start | None = None, **settings: Any) -> CheckpointDesk:
    config = CheckpointConfig(keep_in_memory=False, **settings)
    plan = RunPlan(FailureConfig(), config, start or Start())
    return CheckpointDesk(plan, uri_of=lambda number: f"checkpoint {number}", out=out.append)


def saved(call: int, reports: int) -> Saved:
    return Saved(call, reports, 1.0, all_ranks=False, is_files=False, trusted=False, metrics=None)


def told(out: list[Any], kind: str = frames.SAVING) -> list[Any]:
    return [tuple(said.data.values()) for said in out if isinstance(said, Say) and said.kind == kind]


@pytest.mark.parametrize(("reports", "rounds"), [((1, 2), (5, 6)), ((0, 1), (5, 6))], ids=["after", "before"])
def test_each_save_is_told_once_with_its_round(reports: tuple[int, int], rounds: tuple[int, int]) -> None:
    out: list[Any] = []
    one = desk(out, Start("from", 4, 1.0))
    one.begin_attempt(1, 2)
    for call, before in enumerate(reports):
        for rank in (0, 1):
            one.take(rank, saved(call, before))
    assert told(out) == [(1, rounds[0]), (2, rounds[1])]


def test_a_number_that_came_to_nothing_is_told_again_by_the_next_attempt() -> None:
    out: list[Any] = []
    one = desk(out)
    one.begin_attempt(1, 1)
    one.take(0, saved(0, 3))
    one.end_attempt(0)
    one.begin_attempt(2, 1)
    one.take(0, saved(0, 1))
    assert told(out) == [(1, 3), (1, 1)]


def test_a_save_that_is_given_up_is_told_and_one_for_memory_alone_is_not() -> None:
    out: list[Any] = []
    one = desk(out)
    one.begin_attempt(1, 1)
    one.take(0, saved(0, 1))
    one.part_failed(PartFailed(0, "the disk is full"))
    assert told(out, frames.NOT_SAVED) == [(1,)]
    sparse: list[Any] = []
    other = CheckpointDesk(
        RunPlan(FailureConfig(), CheckpointConfig(memory_only_between=2)), uri_of=str, out=sparse.append
    )
    other.begin_attempt(1, 1)
    for call in range(4):
        other.take(0, saved(call, call + 1))
    assert told(sparse) == [(2, 2), (4, 4)]
