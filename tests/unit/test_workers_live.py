"""A state on its way from a survivor to a new rank, over TCP."""

from __future__ import annotations

import io
import socket
from concurrent.futures import wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.checkpoint.streaming import read_state, stream_state
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError, UsageError
from raysgd.session.events import HeldStep, LiveReport, StepId
from raysgd.session.live.kept import KeptState
from raysgd.transport import Endpoint
from raysgd.workers.orders import LiveOrder
from raysgd.workers.process.live import FromSurvivor, LiveHolder

HELD = HeldStep(StepId(1, 7), positions={"data": {"epoch": 1}})
STATE = {"model": {"weight": torch.arange(300_000.0), "steps": torch.tensor(3)}, "lr": [0.1, None], "step": 7}


pytestmark = pytest.mark.usefixtures("closed_live_states")


def holder_with(state: dict[str, Any]) -> tuple[LiveHolder, LiveReport]:
    holder = LiveHolder("127.0.0.1")
    holder.begin("run", None)
    left: Any = SimpleNamespace(marks=(), take=lambda: KeptState(HELD, state), close=lambda: None)
    holder.on_left(0, 1, left, None)
    report = holder.report("run")
    assert report is not None
    return holder, report


def load(order: LiveOrder) -> tuple[Any, dict[str, Any], LiveHolder]:
    other = LiveHolder("127.0.0.1")
    other.begin("run", order)
    state, small = FromSurvivor(order, other).load(0, 1, allow_pickle=False, on_unusable=lambda error: None)
    return state, small, other


def test_new_rank_copies_the_state_and_can_be_a_source_itself() -> None:
    _, report = holder_with(STATE)
    order = LiveOrder(HELD, b'{"generators": {}}', report.endpoint)
    state, small, other = load(order)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert (state["lr"], state["step"]) == ([0.1, None], 7)
    assert small == {"generators": {}, "data": {"data": {"epoch": 1}}}
    report = other.report("run")
    assert report is not None and report.held == HELD
    again, _, _ = load(replace(order, endpoint=report.endpoint))
    assert torch.equal(again["model"]["weight"], STATE["model"]["weight"])


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
    assert holder.report("run") is None


def test_state_is_copied_while_the_model_is_built() -> None:
    source, report = holder_with(STATE)
    other = LiveHolder("127.0.0.1")
    other.begin("run", LiveOrder(HELD, None, report.endpoint))
    copy = other._copy
    assert copy is not None
    wait([copy._found], 30)
    source.release()
    assert torch.equal(other.state_of(HELD).state["model"]["weight"], STATE["model"]["weight"])


def test_copy_of_an_attempt_that_has_ended_is_abandoned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = LiveHolder("127.0.0.1")
        other.begin("run", LiveOrder(HELD, None, Endpoint("127.0.0.1", silent.getsockname()[1], b"token")))
        copy = other._copy
        assert copy is not None
        line, _ = silent.accept()
        with line:
            other.begin("run", None)
            with pytest.raises(CheckpointNotFoundError, match="could not be copied"):
                copy.result()
        with pytest.raises(UsageError, match="call it once"):
            other.state_of(HELD)


@pytest.mark.parametrize("place", [0, 20, 200, -200, -1])
def test_damaged_bytes_are_noticed(place: int) -> None:
    data = bytearray(b"".join(bytes(chunk) for chunk in stream_state(STATE)))
    assert torch.equal(read_state(io.BytesIO(data), "x")["model"]["weight"], STATE["model"]["weight"])
    data[place] ^= 1
    with pytest.raises(CheckpointCorruptError):
        read_state(io.BytesIO(data), "x")
