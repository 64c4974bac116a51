"""What a rank records of its live state, and when that is the state of a complete step."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import raysgd
from raysgd.errors import AttemptEnded, UsageError
from raysgd.session.base import Identity
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import Mark
from raysgd.session.live.kept import leave_room
from raysgd.session.live.state import LiveState
from raysgd.session.worker import Codec, WorkerSession
from support.sessions import FakeLink, FakeWriter


class Training:
    """A model with batch norm and dropout, its optimizer and schedule, in an attempt of a worker."""

    def __init__(self, fused: bool | None = None) -> None:
        self.sent: list[Mark] = []
        self.session = WorkerSession(
            Identity(),
            event_queue=EventQueue(1.0),
            writer=FakeWriter(),  # type: ignore[arg-type]
            link=FakeLink(),
            codec=Codec(pickle.dumps, pickle.loads),
            start=None,
            time_before_s=0.0,
            seed=None,
            deterministic=False,
            attempt=2,
            iterations_before=5,
            send_mark=self.sent.append,
        )
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.live: LiveState = self.session.live_state(objects)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(4, 3)).square().sum()
        return loss

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.forward().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.live.step(step=self.live.num_steps + 1)


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close each live state after its test, as the worker does when train_func has left."""
    made: list[LiveState] = []
    init = LiveState.__init__
    monkeypatch.setattr(LiveState, "__init__", lambda live, *given: init(live, *given) or made.append(live))
    yield
    for live in made:
        live.close()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_state_is_that_of_the_step_although_a_pass_and_the_schedule_went_on() -> None:
    training = Training()
    training.step(3)
    expected = copy.deepcopy(training.live.state_dict())
    training.forward().backward()  # changes statistics, gradients and generators
    training.scheduler.step()
    kept = training.live.take()
    assert kept is not None and kept.held.id == (2, 3)
    assert equal(kept.state, expected)
    assert kept.is_unchanged


def test_tensors_are_not_copied() -> None:
    training = Training()
    training.step()
    kept = training.live.take()
    assert kept is not None
    assert kept.state["model"]["0.weight"].data_ptr() == training.model[0].weight.data_ptr()


@pytest.mark.parametrize("fused", [None, True])
def test_state_is_not_taken_between_the_begin_of_changes_and_the_end_of_the_step(fused: bool | None) -> None:
    training = Training(fused)
    training.step()
    training.forward().backward()
    training.optimizer.step()
    assert training.live.is_changing
    assert training.live.take() is None


def test_state_that_something_else_has_changed_is_not_taken() -> None:
    training = Training()
    training.step()
    with torch.no_grad():
        training.model[0].weight.add_(1)
    assert training.live.take() is None


def test_kept_state_knows_that_it_was_changed() -> None:
    training = Training()
    training.step()
    kept = training.live.take()
    assert kept is not None
    kept.state["model"]["0.weight"].add_(1)
    assert not kept.is_unchanged


def test_reports_between_a_step_and_the_next_pass_count_with_the_step() -> None:
    training = Training()
    training.step()
    training.session.report({"loss": 1})
    training.forward()
    training.session.report({"loss": 2})
    kept = training.live.take()
    assert kept is not None and kept.held.iteration == 6


def test_marks_have_the_generators_after_each_step_and_each_pass() -> None:
    training = Training()
    training.step(2)
    assert [(mark.step, mark.is_in_step, mark.is_settled) for mark in training.sent] == [
        (0, True, False),
        (1, False, True),
        (1, True, True),
        (2, False, True),
    ]
    smalls = [mark.small for mark in training.sent]
    assert smalls[0] == smalls[1] != smalls[2] == smalls[3]  # only the passes draw
    assert json.loads(training.live.marks[-1].small or b"") == json.loads(training.session.own_state())


def test_rank_that_draws_after_the_pass_is_not_settled() -> None:
    training = Training()
    training.step()
    training.forward().backward()
    torch.rand(1)
    training.optimizer.step()
    training.live.step()
    assert [mark.is_settled for mark in training.sent[-2:]] == [True, False]
    training.step()
    assert not training.sent[-1].is_settled


def test_step_that_is_complete_when_the_attempt_ends_counts() -> None:
    training = Training()
    training.step()
    training.forward().backward()
    training.optimizer.step()
    training.session.end("rank 1 died")
    with pytest.raises(AttemptEnded):
        training.live.step()
    kept = training.live.take()
    assert kept is not None and kept.held.id.step == 2


def test_optimizer_changes_nothing_after_the_end_of_the_attempt() -> None:
    training = Training()
    training.step()
    training.forward().backward()
    training.session.end("rank 1 died")
    with pytest.raises(AttemptEnded):
        training.optimizer.step()
    assert training.live.take() is not None


def test_live_state_is_made_once_of_what_has_a_state() -> None:
    training = Training()
    with pytest.raises(UsageError, match="called before in this attempt"):
        training.session.live_state({"model": training.model})
    with pytest.raises(UsageError, match=r"give values that change in each step to its step\(step=\.\.\.\)"):
        raysgd.live_state(step=3)


def test_live_state_outside_a_worker_is_saved_and_loaded() -> None:
    model = torch.nn.Linear(2, 2)
    live = raysgd.live_state(model=model)
    live.step(epoch=4)
    state = live.state_dict()
    assert state["epoch"] == 4
    other = torch.nn.Linear(2, 2)
    again = raysgd.live_state(model=other)
    again.load_state_dict(state)
    assert torch.equal(other.weight, model.weight) and again.state_dict()["epoch"] == 4


@pytest.mark.parametrize(("total", "is_moved"), [(1000, False), (140, True)])
def test_state_moves_to_the_host_if_a_gpu_has_no_room_for_two(
    monkeypatch: pytest.MonkeyPatch, total: int, is_moved: bool
) -> None:
    class OnGpu:
        is_cuda, _version = True, 0

        def numel(self) -> int:
            return 10

        def element_size(self) -> int:
            return 4

        def cpu(self) -> str:
            return "on the host"

    tensor = OnGpu()
    state = {"model": {"weight": tensor}, "steps": [3]}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, total))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 120)
    weight = "on the host" if is_moved else tensor
    assert leave_room(state) == {"model": {"weight": weight}, "steps": [3]}


def test_optimizer_of_the_engine_is_refused() -> None:
    from raysgd.engine.optimizer.engine_optimizer import EngineOptimizer

    training = Training()
    training.session.live = None
    with pytest.raises(UsageError, match=r"live_state\(optimizer=...\) got the engine's optimizer"):
        training.session.live_state({"optimizer": EngineOptimizer(training.optimizer, mock.Mock())})
