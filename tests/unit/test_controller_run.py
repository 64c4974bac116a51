"""A run whose workers cannot be had: which errors are worth another try."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from raysgd.checkpoint.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import frames, retries
from raysgd.controller.requests import RunRequest
from raysgd.controller.run import Run
from raysgd.errors import InfeasibleError, RaySGDError, StartTimeoutError, WorkerDiedError, WorkerError
from raysgd.result import RunInfo


class NoFleet:
    """Workers that never come up."""

    memory: Any = None

    size = 2
    recovers_inside = False

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_asked = 0

    def on_newcomer(self, told: Callable[[], None]) -> None:
        pass

    def expect(self, size: int) -> None:
        pass

    def release(self) -> None:
        pass

    async def get_ready(self, *, keep_size: bool = False, parked: Collection[int] | None = ()) -> list[str]:
        self.num_asked += 1
        raise self.error


async def outcome_of(fleet: Any, folder: Path) -> dict[str, Any]:
    """How a run ends that has these workers, and may fail twice."""
    run = Run(
        RunRequest("id", "runs", b"code", {}),
        RunInfo("run_001", str(folder), {}, 2, "none"),
        fleet,
        Storage.from_uri(folder),
        failure=FailureConfig(max_failures=2),
        checkpoint=CheckpointConfig(),
        share=lambda order: order,
    )
    await run.execute()
    told = [frame async for batch in run.log.read(0) for frame in batch]
    (end,) = [frame.data for frame in told if frame.kind == frames.RUN_END]
    return end


async def test_workers_that_died_while_starting_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "PAUSE_S", 0.001)
    fleet = NoFleet(WorkerDiedError("no more of rank 1", ranks=(1,)))
    outcome = await outcome_of(fleet, tmp_path)
    assert fleet.num_asked == 3
    assert (outcome["error_type"], outcome["ranks"], outcome["failures"]) == ("WorkerDiedError", [1], 3)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("numpy died of an import"),
        StartTimeoutError("not up in time"),
        InfeasibleError("needs more"),
        OSError("a worker died"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_would_happen_again_is_told_at_once(tmp_path: Path, error: Exception) -> None:
    fleet = NoFleet(error)
    outcome = await outcome_of(fleet, tmp_path)
    assert fleet.num_asked == 1
    assert outcome["error_type"] == (type(error).__name__ if isinstance(error, RaySGDError) else "WorkerError")
    assert str(error) in outcome["message"]
