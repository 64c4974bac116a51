"""Runs whose workers do not start: which errors are retried, and what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from raysgd.checkpoint.storage.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.commands import StopRequested
from raysgd.controller.frames import Frame
from raysgd.controller.policies import after_failure
from raysgd.controller.requests import RunRequest
from raysgd.controller.run.executor import Run
from raysgd.controller.state_machine.run_machine import RunMachine
from raysgd.controller.states import CALLBACK_NODE
from raysgd.errors import InfeasibleError, RaySGDError, StartTimeoutError, WorkerDiedError, WorkerError
from raysgd.result import Event, RunInfo
from raysgd.workers.orders import WorkerTask
from support.journals import STARTED, WrittenRun
from support.simulation import failed


class FailingGroup:
    """Workers that never start."""

    memory: Any = None
    live_reports: Mapping[int, Any] = {}

    size = 2

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_asked = 0

    def on_joining_worker(self, all_frames: Callable[[], None]) -> None:
        pass

    def expect(self, size: int) -> None:
        pass

    def release(self) -> None:
        pass

    async def get_ready(self, **options: Any) -> list[str]:
        self.num_asked += 1
        raise self.error


class WaitingGroup(FailingGroup):
    """Workers that need for ever to start."""

    async def get_ready(self, **options: Any) -> list[str]:
        await asyncio.Event().wait()
        raise self.error


def make_run(group: Any, folder: Path, **options: Any) -> Run:
    """Return a run with these workers and two allowed failures."""
    return Run(
        RunRequest(WorkerTask("id", b"code"), "runs", {}),
        RunInfo("run_001", str(folder), {}, 2, "none"),
        group,
        Storage.from_uri(folder),
        failure=FailureConfig(max_failures=2),
        checkpoint=CheckpointConfig(),
        share=lambda order: order,
        **options,
    )


async def frames_of(run: Run) -> list[Frame]:
    return [frame async for batch in run.log.read(0) for frame in batch]


async def outcome_of(group: Any, folder: Path) -> dict[str, Any]:
    run = make_run(group, folder)
    await run.execute()
    (end,) = [frame.data for frame in await frames_of(run) if frame.kind == frames.RUN_END]
    return end


async def test_workers_that_die_while_starting_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_failure, "RESTART_DELAY_S", 0.001)
    group = FailingGroup(WorkerDiedError("no more of rank 1", ranks=(1,)))
    outcome = await outcome_of(group, tmp_path)
    assert group.num_asked == 3
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
async def test_permanent_start_error_ends_the_run_at_once(tmp_path: Path, error: Exception) -> None:
    group = FailingGroup(error)
    outcome = await outcome_of(group, tmp_path)
    assert group.num_asked == 1
    assert outcome["error_type"] == (type(error).__name__ if isinstance(error, RaySGDError) else "WorkerError")
    assert str(error) in outcome["message"]


async def test_end_by_a_callback_is_recorded_with_the_place_of_its_error(tmp_path: Path) -> None:
    run = make_run(WaitingGroup(RuntimeError()), tmp_path)
    executed = asyncio.ensure_future(run.execute())
    await asyncio.sleep(0)
    await run.stop(StopRequested("a callback failed", cancel=True, failed=failed("ValueError: boom")))
    await executed
    events = [frame.data for frame in await frames_of(run) if frame.kind == frames.EVENT]
    (end,) = [event["data"] for event in events if event["kind"] == "run_end"]
    assert end == {"kind": "error", "message": f"{CALLBACK_NODE}: ValueError: boom"}


@pytest.mark.parametrize("broken", [{c.GroupFailed}, {c.GroupFailed, StopRequested}], ids=["once", "in its end too"])
async def test_error_of_the_controller_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: set[type[c.Input]]
) -> None:
    """It is taken for no failure of a worker, which would be tried again, and no reader waits for ever."""
    step = RunMachine.step

    def broken_step(machine: RunMachine, given: c.Input) -> list[c.Command]:
        if type(given) in broken:
            raise KeyError("a mistake of ours")
        return step(machine, given)

    monkeypatch.setattr(RunMachine, "step", broken_step)
    group = FailingGroup(WorkerDiedError("no more of rank 1", ranks=(1,)))
    run = make_run(group, tmp_path)
    await asyncio.wait_for(run.execute(), 10)
    assert group.num_asked == 1
    (end,) = [frame.data for frame in await frames_of(run) if frame.kind == frames.RUN_END]
    assert end["error_type"] == "WorkerError"
    last = "GroupFailed" if len(broken) == 1 else "StopRequested"
    assert end["message"].startswith(f"raysgd itself failed in its controller, on {last}; please report this:")
    assert "KeyError: 'a mistake of ours'" in end["message"]


async def test_error_in_handling_events_of_a_rank_ends_the_run(tmp_path: Path) -> None:
    run = make_run(WaitingGroup(RuntimeError()), tmp_path)
    executed = asyncio.ensure_future(run.execute())
    await asyncio.sleep(0)
    run._on_fault("events of rank 0", KeyError("a mistake of ours"))
    await asyncio.wait_for(executed, 10)
    (end,) = [frame.data for frame in await frames_of(run) if frame.kind == frames.RUN_END]
    assert end["message"].startswith("raysgd itself failed in its controller, on events of rank 0; please report this:")


class LaterGroup(FailingGroup):
    """Workers that start the second time; remembers what is on storage when they are ready."""

    def __init__(self, folder: Path) -> None:
        super().__init__(WorkerDiedError("a worker died while it was starting", ranks=(0,)))
        self._folder = folder
        self.written = ""
        self.is_ready = asyncio.Event()

    async def get_ready(self, **options: Any) -> list[str]:
        if self.num_asked == 0:
            await super().get_ready()
        return []

    async def check_storage(self, storage: Storage) -> None:
        pass

    async def open_rendezvous(self) -> str:
        return ""

    def info(self, rank: int) -> Any:
        self.written = "".join(path.read_text() for path in self._folder.glob("events.jsonl"))
        self.is_ready.set()
        raise asyncio.CancelledError  # the test needs no more of the attempt


def test_failure_is_on_storage_before_the_next_attempt_begins(tmp_path: Path) -> None:
    """Otherwise a controller that dies then would not count it."""
    group = LaterGroup(tmp_path)

    async def start() -> None:
        run = make_run(group, tmp_path)
        execution = asyncio.create_task(run.execute())
        await group.is_ready.wait()
        await run.stop(StopRequested("the test is over", cancel=True))
        await execution

    asyncio.run(start())
    assert '"kind":"failure"' in group.written


async def test_events_before_a_restart_of_the_controller_are_observed_first(tmp_path: Path) -> None:
    earlier = WrittenRun(tmp_path / "run_001")
    earlier.begin_attempt([11])
    earlier.write()
    seen: list[Event] = []
    make_run(
        FailingGroup(OSError()), earlier.path, is_resumed=True, observe=lambda event, iteration: seen.append(event)
    )
    assert [event.kind for event in seen] == ["run_start", "worker_up", "attempt_start", "entered"]
    assert {event.timestamp for event in seen} == {STARTED}
