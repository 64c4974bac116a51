"""What a rank records of its live state, and when that is the state of a complete step."""

from __future__ import annotations

import copy
import json
from typing import Any
from unittest import mock

import pytest
import torch

import raysgd
from raysgd.errors import AttemptEnded, UsageError
from raysgd.session.events import Mark
from raysgd.session.live.kept import leave_room
from raysgd.session.live.state import LiveState
from support.sessions import Worker

pytestmark = pytest.mark.usefixtures("closed_live_states")


class Training:
    """A model with batch norm and dropout, its optimizer and schedule, in an attempt of a worker."""

    def __init__(self, fused: bool | None = None) -> None:
        self.sent: list[Mark] = []
        self.worker = Worker(world_size=1, attempt=2, iterations_before=5, send_mark=self.sent.append)
        self.session = self.worker.session
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.live: LiveState = self.session.live_state({})
        self.hold(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def hold(self, **objects: Any) -> None:
        self.live.close()
        self.session.live = None
        self.live = self.session.live_state(objects)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(4, 3)).square().sum()
        return loss

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.forward().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.live.step(step=self.live.num_steps + 1)


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


@pytest.mark.parametrize("call", ["report", "should_stop"])
def test_calls_within_the_changes_let_the_step_end(call: str) -> None:
    """The attempt ends after the optimizer's step, and a loop reports before its ``live.step()``."""
    training = Training()
    training.step()
    training.forward().backward()
    training.optimizer.step()
    training.session.end("rank 1 died")
    if call == "report":
        training.session.report({"loss": 1.0})
    else:
        assert not training.session.should_stop()
    with pytest.raises(AttemptEnded):
        training.live.step()
    assert training.session.should_stop()
    with pytest.raises(AttemptEnded):
        training.session.report({"loss": 2.0})
    kept = training.live.take()
    assert kept is not None and kept.held.id.step == 2
    assert kept.held.iteration == 5 + (call == "report")


def test_save_within_the_changes_ends_the_attempt() -> None:
    """Left out, it would be missing for ever: training continues after the step."""
    training = Training()
    training.step()
    training.forward().backward()
    training.optimizer.step()
    training.session.end("rank 1 died")
    with pytest.raises(AttemptEnded):
        training.worker.save()
    assert training.live.take() is None


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


class Replacing(torch.optim.SGD):
    """An optimizer that replaces the tensors of its state in each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = self.state[parameter].get("mean", 0) + parameter.grad
        super().step()


def test_state_is_taken_whatever_tensors_an_optimizer_replaces() -> None:
    training = Training()
    training.optimizer = Replacing(training.model.parameters(), lr=0.1)  # type: ignore[assignment]
    training.hold(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
    training.step(5)
    expected = copy.deepcopy(training.live.state_dict())
    training.forward().backward()
    kept = training.live.take()
    assert kept is not None and equal(kept.state, expected)


def test_state_is_taken_after_parameters_were_added() -> None:
    training = Training()
    training.step(5)
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    training.optimizer.param_groups[1]["params"][0].grad = torch.ones(3)
    training.step()
    kept = training.live.take()
    assert kept is not None and kept.held.id.step == 6


def test_state_is_that_of_the_step_although_parameters_were_added_since() -> None:
    training = Training()
    training.step(5)
    expected = copy.deepcopy(training.live.state_dict())
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    kept = training.live.take()
    assert kept is not None and equal(kept.state, expected)


def test_batch_that_changes_nothing_is_no_step_of_its_own() -> None:
    """Its gradients are not in the state: training resumes before it."""
    training = Training()
    training.step(2)
    training.forward().backward()
    training.live.step(step=9)
    assert training.live.num_steps == 2
    kept = training.live.take()
    assert kept is not None and (kept.held.id.step, kept.state["step"]) == (2, 2)


def test_first_batch_that_changes_nothing_is_no_step_either() -> None:
    training = Training()
    training.forward().backward()
    training.live.step(step=1)
    assert training.live.num_steps == 0 and training.live.take() is None


def test_state_without_tensors_is_recorded_in_each_step() -> None:
    training = Training()
    training.hold(scheduler=training.scheduler)
    training.live.step(step=1)
    training.live.step(step=2)
    kept = training.live.take()
    assert kept is not None and kept.state["step"] == 2


def test_rate_in_a_tensor_is_that_of_the_step() -> None:
    training = Training()
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    training.step()
    rate = training.optimizer.param_groups[0]["lr"].clone()
    training.optimizer.param_groups[0]["lr"].mul_(0.5)  # a schedule at the begin of the next step
    kept = training.live.take()
    assert kept is not None and torch.equal(kept.state["optimizer"]["param_groups"][0]["lr"], rate)


def test_passes_between_two_changes_of_a_step_are_marked() -> None:
    """Two models take turns in a step; what is drawn for the second one is drawn before its exchange."""
    training = Training()
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)
    for _ in range(2):
        training.forward().backward()
        other.step()
        training.step()
    assert all(mark.is_settled for mark in training.sent if mark.step)


@pytest.mark.parametrize("is_own", [False, True])
def test_only_an_optimizer_of_the_state_begins_its_changes(is_own: bool) -> None:
    training = Training()
    training.step()
    probe = torch.nn.Linear(3, 1)
    parameters = training.model.parameters() if is_own else probe.parameters()
    torch.optim.SGD(parameters, lr=0.1).step()  # the objects have another optimizer
    assert training.live.is_changing == is_own


def test_marks_of_many_passes_do_not_displace_those_of_steps() -> None:
    """Else the generators of a rank that dies after some passes would not be known."""
    training = Training()
    training.step(2)
    for _ in range(8):
        training.forward().backward()
    marks = training.live.marks
    assert [(mark.step, mark.is_in_step) for mark in marks] == [(0, True), (1, False), (1, True), (2, False), (2, True)]
    assert marks[-1].small == training.session.own_state()


def test_pass_after_the_last_change_does_not_hide_what_it_draws() -> None:
    training = Training()
    training.step()
    training.forward().backward()
    training.optimizer.step()
    training.forward()  # an evaluation that draws
    training.live.step()
    assert not training.sent[-1].is_settled


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
