"""The time that a backward pass waits for other ranks. A communication hook that replies late stands in for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysgd.backends import torch_transfers
from raysgd.session import context
from raysgd.session.progress import Progress, Stopwatch
from raysgd.torch import reduction
from raysgd.torch.model import DistributedModel, broadcast_buffers
from raysgd.torch.reduction import time_waiting

WAIT_S = 0.1
PATIENCE_S = 30
#: A backward pass has begun to wait.
waits = threading.Event()

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def waiting() -> Iterator[Stopwatch]:
    stopwatch = Progress().waiting
    with pytest.MonkeyPatch.context() as patch:
        begin = reduction._BackwardHook._begin

        def begin_and_say_so(self: Any) -> None:
            begin(self)
            waits.set()

        patch.setattr(reduction._BackwardHook, "_begin", begin_and_say_so)
        yield stopwatch


def reply_late(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    waits.clear()

    def reply() -> None:
        waits.wait(PATIENCE_S)
        time.sleep(WAIT_S)
        future.set_result(bucket.buffer())

    threading.Thread(target=reply).start()
    return future


# DDP compares the hook's annotations with classes, not with strings.
reply_late.__annotations__ = {}


def model(waiting: Stopwatch, net: nn.Module | None = None, **settings: Any) -> DistributedModel:
    made = DistributedModel(net or nn.Linear(3, 1), **settings)
    time_waiting(made, waiting)
    made.register_comm_hook(None, reply_late)
    return made


def backward(*models: nn.Module) -> None:
    sum(each(torch.ones(2, 3)).sum() for each in models).backward()  # type: ignore[union-attr]


class OneOfTwo(nn.Module):
    """Uses its two layers alternately."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn = 1 - self.turn
        return self.layers[self.turn](x)  # type: ignore[no-any-return]


def test_each_backward_pass_is_timed(waiting: Stopwatch) -> None:
    prepared = model(waiting)
    elapsed_s = 0.0
    for count in (1, 2, 3):
        began = time.monotonic()
        backward(prepared)
        elapsed_s += time.monotonic() - began
        assert count * WAIT_S <= waiting.seconds <= elapsed_s


@pytest.mark.parametrize("net", [nn.Linear(3, 1), OneOfTwo()], ids=["all", "one in turn"])
def test_models_with_unused_parameters_are_timed(waiting: Stopwatch, net: nn.Module) -> None:
    prepared = model(waiting, net, find_unused_parameters=True)
    for count in (1, 2, 3):
        backward(prepared)
        assert waiting.seconds >= count * WAIT_S


def test_two_models_in_one_pass_are_timed_once(waiting: Stopwatch) -> None:
    """Both replies come at the same time, so that the time must be counted once."""
    first, second = model(waiting), model(waiting)
    began = time.monotonic()
    backward(first, second)
    elapsed_s = time.monotonic() - began
    assert WAIT_S <= waiting.seconds <= elapsed_s, "counted twice, it exceeds the elapsed time"


def test_passes_without_synchronization_are_not_timed(waiting: Stopwatch) -> None:
    prepared = model(waiting)
    with prepared.no_sync():
        backward(prepared)
    assert waiting.seconds < WAIT_S / 2
    backward(prepared)
    assert waiting.seconds >= WAIT_S


def test_broadcasting_buffers_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda *args: time.sleep(WAIT_S))
    began = context.current().progress.waiting.seconds
    broadcast_buffers(nn.BatchNorm1d(2))
    assert context.current().progress.waiting.seconds - began >= WAIT_S


def test_waiting_for_an_operation_of_torch_is_timed() -> None:
    torch_transfers.install()
    waiting = context.current().progress.waiting
    began = waiting.seconds
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.wait()
    assert waiting.seconds > began


def test_timing_continues_after_a_failed_pass(waiting: Stopwatch) -> None:
    broken = model(waiting)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("not a number")

    broken.bias.register_hook(fail)
    with pytest.raises(ValueError, match="not a number"):
        backward(broken)
    before = waiting.seconds
    backward(model(waiting))
    assert waiting.seconds - before >= WAIT_S
