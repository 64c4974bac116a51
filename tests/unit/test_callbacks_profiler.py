"""Traces of the torch profiler: which steps, which ranks, and that nothing of one run shows in the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import TorchProfilerCallback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.testing.callback_suite import make_info, make_result

torch = pytest.importorskip("torch")


def train(
    callback: TorchProfilerCallback, run_dir: Path, steps: int, *, rank: int | None = 0, attempt: int = 1
) -> None:
    """A run whose n-th step is marked ``step_n``."""
    problems: list[str] = []
    runner = CallbackRunner([callback], problems.append, rank=rank)
    runner.start(make_info(run_dir))
    for step in range(1, steps + 1):
        with torch.profiler.record_function(f"step_{step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        runner.call("on_result", make_result(step, attempt))
    runner.end(None)
    assert not problems


def steps_in(path: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step_")})


def traces(run_dir: Path, rank: int = 0) -> list[Path]:
    return sorted((run_dir / "profiler" / f"rank_{rank}").glob("*.json"))


def test_the_active_steps_of_each_cycle_are_in_its_trace(tmp_path: Path) -> None:
    callback = TorchProfilerCallback(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    train(callback, tmp_path, steps=12)
    first, second = traces(tmp_path)
    assert steps_in(first) == ["step_4", "step_5"]
    assert steps_in(second) == ["step_8", "step_9"]
    assert first.name == "trace_001_attempt_1_iteration_000005.pt.trace.json"
    assert callback.traces == [str(first), str(second)]


def test_the_trace_has_the_operators(tmp_path: Path) -> None:
    train(TorchProfilerCallback(), tmp_path, steps=6)
    (trace,) = traces(tmp_path)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_run_that_ends_within_a_cycle_writes_its_trace(tmp_path: Path) -> None:
    train(TorchProfilerCallback(wait=1, warmup=1, active=10), tmp_path, steps=4)
    (trace,) = traces(tmp_path)
    assert steps_in(trace) == ["step_3", "step_4"]


@pytest.mark.parametrize(("rank", "traced"), [(0, False), (1, True), (3, True), (None, False)])
def test_only_selected_ranks_are_traced(rank: int | None, traced: bool, tmp_path: Path) -> None:
    train(TorchProfilerCallback(ranks=(1, 3)), tmp_path, steps=6, rank=rank)
    assert bool(traces(tmp_path, rank or 0)) is traced
    assert (tmp_path / "profiler").exists() is traced


def test_a_second_run_has_its_own_traces_only(tmp_path: Path) -> None:
    # Defect of an earlier system: traces were never cleared, so each run carried those before it.
    callback = TorchProfilerCallback(wait=0, warmup=1, active=1)
    for name in ("run_1", "run_2"):
        train(callback, tmp_path / name, steps=4)
        assert callback.traces == [str(path) for path in traces(tmp_path / name)]
        assert len(callback.traces) == 1


def test_another_attempt_leaves_the_traces_of_the_first(tmp_path: Path) -> None:
    callback = TorchProfilerCallback(wait=0, warmup=1, active=1)
    train(callback, tmp_path, steps=4, attempt=1)
    train(callback, tmp_path, steps=4, attempt=2)
    assert [path.name[:20] for path in traces(tmp_path)] == ["trace_001_attempt_1_", "trace_001_attempt_2_"]
