"""A state on its way from a survivor to a new rank, over TCP."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from raysgd.checkpoint.streaming import read_state, stream_state
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError
from raysgd.session.events import HeldStep, LiveReport, StepId
from raysgd.session.live.kept import KeptState
from raysgd.workers.orders import LiveOrder
from raysgd.workers.process.live import FromSurvivor, LiveHolder

HELD = HeldStep(StepId(1, 7), positions={"data": {"epoch": 1}})
STATE = {"model": {"weight": torch.arange(300_000.0), "steps": torch.tensor(3)}, "lr": [0.1, None], "step": 7}


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Release what the holders of a test keep."""
    made: list[LiveHolder] = []
    init = LiveHolder.__init__
    monkeypatch.setattr(LiveHolder, "__init__", lambda holder, *given: init(holder, *given) or made.append(holder))
    yield
    for holder in made:
        holder.release()


def holder_with(state: dict[str, Any]) -> tuple[LiveHolder, LiveReport]:
    holder = LiveHolder("127.0.0.1")
    holder.begin("run", None)
    holder.keep(KeptState(HELD, state))
    report = holder.report("run")
    assert report is not None
    return holder, report


def load(order: LiveOrder) -> tuple[Any, dict[str, Any], LiveHolder]:
    other = LiveHolder("127.0.0.1")
    state, small = FromSurvivor(order, other).load(0, 1, allow_pickle=False, on_unusable=lambda error: None)
    return state, small, other


def test_new_rank_copies_the_state_and_can_be_a_source_itself() -> None:
    _, report = holder_with(STATE)
    order = LiveOrder(HELD, b'{"generators": {}}', report.endpoint)
    state, small, other = load(order)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert (state["lr"], state["step"]) == ([0.1, None], 7)
    assert small == {"generators": {}, "data": {"data": {"epoch": 1}}}
    assert other.kept is not None and other.kept.held == HELD


def test_survivor_gets_its_own_tensors() -> None:
    holder, _ = holder_with(STATE)
    state, _ = FromSurvivor(LiveOrder(HELD, None, None), holder).load(
        0, 1, allow_pickle=False, on_unusable=lambda error: None
    )
    assert state["model"]["weight"] is STATE["model"]["weight"]
    state["model"]["more"] = 1
    assert "more" not in STATE["model"]


@pytest.mark.parametrize("fault", ["released", "another step", "changed"])
def test_state_that_is_not_there_any_more_is_not_loaded(fault: str) -> None:
    state = {"weight": torch.arange(300_000.0)}
    holder, report = holder_with(state)
    held = HELD
    if fault == "released":
        holder.release()
    elif fault == "another step":
        held = replace(HELD, id=StepId(1, 6))
    else:
        state["weight"].add_(1)
    with pytest.raises(CheckpointNotFoundError, match="could not be copied"):
        load(LiveOrder(held, None, report.endpoint))


def test_state_of_another_run_is_released() -> None:
    holder, _ = holder_with(STATE)
    assert holder.report("another run") is None
    assert holder.kept is None


@pytest.mark.parametrize("place", [0, 20, 200, -200, -1])
def test_damaged_bytes_are_noticed(place: int) -> None:
    data = bytearray(b"".join(bytes(chunk) for chunk in stream_state(STATE)))
    assert torch.equal(read_state(io.BytesIO(data), "x")["model"]["weight"], STATE["model"]["weight"])
    data[place] ^= 1
    with pytest.raises(CheckpointCorruptError):
        read_state(io.BytesIO(data), "x")
