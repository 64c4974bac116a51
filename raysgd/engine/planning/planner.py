"""`Planner` compares the strategies for one model. `plan` and the engine's automatic plan use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from raysgd.engine.planning.candidates import Candidate, evaluate, list_space
from raysgd.engine.planning.memory import in_gb
from raysgd.engine.planning.profile import ModelProfile, Segment
from raysgd.engine.planning.step_time import Hardware
from raysgd.engine.planning.support import EngineSupport
from raysgd.engine.planning.trace import OptimizerFn, TracedModel

# Of candidates whose times differ by less than this, the one with the fewest strategies is chosen.
_SAME_TIME = 0.02
_FACTORS = (2, 4, 8)


@dataclass(frozen=True)
class Workers:
    """The devices that a strategy is for, and what they train on.

    Attributes:
        count: Devices.
        batch_rows: Rows of one optimizer step, of all devices together.
        per_replica: Devices that hold one replica between them; None: any number.
    """

    count: int
    batch_rows: int
    per_replica: int | None = None


class Planner:
    """Compares strategies for one model; sizes of micro-batches are traced when they are first needed.

    Args:
        model: The model.
        optimizer_fn: Makes the optimizer.
        workers: The devices.
        limit_bytes: What a device has for a strategy.
        hardware: Speeds.
        support: Knows what the engine can apply.

    Attributes:
        profile: What was found of the model.
    """

    def __init__(
        self,
        model: TracedModel,
        optimizer_fn: OptimizerFn,
        *,
        workers: Workers,
        limit_bytes: float,
        hardware: Hardware,
        support: EngineSupport,
    ) -> None:
        self._model = model
        self._workers = workers
        self._limit_bytes = limit_bytes
        self._hardware = hardware
        self._support = support
        self.profile = profile_model(model, optimizer_fn, [1])

    def compare(
        self, fixed: Mapping[str, Any], workers: Workers | None = None
    ) -> tuple[tuple[Candidate, ...], Mapping[str, str]]:
        """Estimate all strategies, and return them with the reasons against those that cannot work.

        Args:
            fixed: Fields that are not varied.
            workers: Other devices than the planner's.
        """
        workers = workers or self._workers
        space = list_space(
            self.profile,
            fixed,
            num_workers=workers.count,
            batch_rows=workers.batch_rows,
            workers_per_replica=workers.per_replica,
            refuse=self._support.find_obstacle,
        )
        steps = dict(self.profile.steps)
        for count in sorted({num_rows for _, _, num_rows in space.configs} - set(steps)):
            steps[count] = self._model.trace(count).segments
        self.profile = replace(self.profile, steps=steps, stage_blocks=self._support.stage_blocks)
        return evaluate(self.profile, space, self._hardware, self._limit_bytes), space.refused

    def first_fitting(self, fixed: Mapping[str, Any], workers: Workers | None = None) -> Candidate | None:
        """Return the fastest strategy that fits, or None."""
        candidates, _ = self.compare(fixed, workers)
        return candidates[0] if candidates and candidates[0].is_fitting else None

    # -- what would help if nothing fits ------------------------------------------------------------------------------

    def say_what_would_help(self, candidates: tuple[Candidate, ...], memory_per_device: float, helps: list[str]) -> str:
        """Describe the smallest need, and the changes with which the model would fit."""
        smallest = min(candidates, key=lambda one: one.memory.total)
        text = (
            f"The model fits nowhere: {self.profile.num_parameters:,} parameters on {self._workers.count} x "
            f"{in_gb(memory_per_device)} GB, of which {in_gb(self._limit_bytes)} GB may be used. The smallest need is "
            f"{in_gb(smallest.memory.total)} GB per device, with {smallest.describe()} and {smallest.num_rows} rows in a "
            f"micro-batch: {smallest.memory.explain()}."
        )
        advice = f"What would help: {'; '.join(helps)}." if helps else "A smaller model or larger devices are needed."
        return f"{text} {advice}"

    def find_freed_choice(self, fixed: Mapping[str, Any], *, kept: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the first choice made by hand without which the model fits; choices in ``kept`` are not tried."""
        for name in fixed:
            if name in ("precision", "fused_optimizer", *kept):
                continue
            others = {key: value for key, value in fixed.items() if key != name}
            if fitting := self.first_fitting(others):
                value = getattr(fitting.config, name)
                yield f"{name}={value!r} instead of {fixed[name]!r} ({in_gb(fitting.memory.total)} GB)"
                return

    def find_more_workers(self, fixed: Mapping[str, Any], *, with_more_rows: bool = False) -> Iterator[str]:
        """Yield the smallest multiple of the workers on which the model fits.

        Args:
            fixed: Fields that are not varied.
            with_more_rows: Whether each worker keeps its rows, so that a step has more of them.
        """
        for factor in _FACTORS:
            workers = replace(self._workers, count=self._workers.count * factor)
            if with_more_rows:
                workers = replace(workers, batch_rows=workers.batch_rows * factor)
            if fitting := self.first_fitting(fixed, workers):
                yield f"{workers.count} workers ({in_gb(fitting.memory.total)} GB each)"
                return

    def find_larger_replicas(self, fixed: Mapping[str, Any]) -> Iterator[str]:
        """Yield the smallest number of workers for each replica with which it fits, with the same batches."""
        now = self._workers.per_replica or 1
        for factor in _FACTORS:
            each = now * factor
            if self._workers.count % each or self._workers.batch_rows % factor:
                continue
            fewer = Workers(self._workers.count, self._workers.batch_rows // factor, each)
            if fitting := self.first_fitting(fixed, fewer):
                yield f"Trainer(..., workers_per_replica={each}) ({in_gb(fitting.memory.total)} GB)"
                return

    def find_smaller_batches(self, fixed: Mapping[str, Any], rows: int) -> Iterator[str]:
        """Yield the largest batches of a loader with which the model fits, accumulated to the same steps.

        Args:
            fixed: Fields that are not varied, with ``accumulation_steps``.
            rows: Rows of a batch of the loader.
        """
        for factor in (one for one in range(2, rows + 1) if rows % one == 0):
            steps = fixed["accumulation_steps"] * factor
            if fitting := self.first_fitting({**fixed, "accumulation_steps": steps}):
                count = rows // factor
                yield (
                    f"batches of {count} row{'s' * (count > 1)} with accumulation_steps={steps} "
                    f"({in_gb(fitting.memory.total)} GB)"
                )
                return

    def find_offload(self, fixed: Mapping[str, Any]) -> Iterator[str]:
        """Yield ``cpu_offload=True`` if the model fits with it."""
        may_offload = not fixed.get("cpu_offload") and fixed.get("zero_stage", 3) == 3
        if may_offload and (fitting := self.first_fitting({**fixed, "cpu_offload": True})):
            yield (
                f"cpu_offload=True ({in_gb(fitting.memory.total)} GB on the device, {in_gb(fitting.memory.host)} GB of the "
                "host for each worker)"
            )


def profile_model(model: TracedModel, optimizer_fn: OptimizerFn, rows: list[int]) -> ModelProfile:
    """Trace a model for sizes of a micro-batch, and describe its parameters."""
    steps = {count: model.trace(count) for count in rows}
    first = next(iter(steps.values()))
    obstacle = model.layout.obstacle
    if model.layout.has_own_plan and first.leaking_block is not None:
        obstacle = f"the layers of {first.leaking_block} are not pairs of column- and row-parallel layers"
    segments: dict[int, tuple[Segment, ...]] = {count: step.segments for count, step in steps.items()}
    return ModelProfile(
        parameters=model.describe_parameters(optimizer_fn, first.sides),
        buffer_bytes=model.count_buffer_bytes(),
        num_blocks=len(model.layout.blocks),
        stacks={name: len(blocks) for name, blocks in model.layout.stacks.items()},
        head_counts=model.layout.head_counts,
        tensor_parallel_obstacle=obstacle,
        steps=segments,
    )


def choose_fused_step(fixed: Mapping[str, Any], optimizer_fn: Any, device: str) -> dict[str, Any]:
    """Choose a fused step where torch has one with every strategy: it needs no temporary tensors of the size of the parameters.

    On a CPU, torch's optimizers work parameter by parameter, so that there is nothing to save.
    """
    base = getattr(optimizer_fn, "func", optimizer_fn)
    is_fusible = base in (torch.optim.Adam, torch.optim.AdamW)
    if "fused_optimizer" in fixed or device == "cpu" or not is_fusible:
        return dict(fixed)
    return {**fixed, "fused_optimizer": True}


def choose(candidates: tuple[Candidate, ...]) -> Candidate:
    """Return the simplest of the fastest strategies that fit. The first one fits."""
    fastest = candidates[0].time.total_s
    equal = [one for one in candidates if one.is_fitting and one.time.total_s <= fastest * (1 + _SAME_TIME)]
    return min(equal, key=lambda one: (one.num_strategies, one.time.total_s))


def say_impossible(refused: Mapping[str, str], fixed: Mapping[str, Any]) -> str:
    """Say why no strategy can work."""
    chosen = ", ".join(f"{name}={value!r}" for name, value in fixed.items() if name != "fused_optimizer")
    reasons = list(dict.fromkeys(refused.values())) or ["no size of a micro-batch divides the batch"]
    given = f"with {chosen} " if chosen else ""
    return f"No strategy {given}can work: {'; '.join(reasons[:3])}."
