"""Trainings with a cause of slowness put into them, each in three strengths, for benchmarks/why.py. Imported in workers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import raysgd

#: What a step computes, in seconds, and the number of steps.
STEP_S, STEPS = 0.03, 100
#: The rank that differs from the others, where one does.
RANK = 1


@dataclass(frozen=True)
class Cause:
    """A cause of slowness.

    Attributes:
        finding: What ``raysgd why`` is expected to find first.
        train: The train_func.
        configs: Its config in each strength, the weakest first.
        remedy: What the config gets instead when the remedy is taken; None: it is not measured.
        backend: The backend of the Trainer.
        num_workers: The number of workers.
        burners: Processes that use the processor of `RANK` all the time, in each strength.
    """

    finding: str
    train: Any
    configs: tuple[dict[str, Any], ...]
    remedy: dict[str, Any] | None = None
    backend: str = "torch"
    num_workers: int = 2
    burners: tuple[int, ...] = (0, 0, 0)


class Items:
    """A map-style dataset, whose items take their time on some ranks."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.seconds, self.rank = config.get("item_s", 0.0), config.get("item_rank")

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.seconds and self.rank in (None, raysgd.world_rank()):
            time.sleep(self.seconds)
        return torch.full((4,), float(index))


class Blocking(raysgd.Callback):
    """A callback in the workers that waits, as a logger does for its server."""

    runs_in = "worker"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_result(self, result: raysgd.Result) -> None:
        time.sleep(self._seconds)


def train(config: dict[str, Any]) -> float:
    """Train a small model with DDP; returns the seconds per step after the first."""
    import torch
    from torch.utils.data import DataLoader

    rank = raysgd.world_rank()
    if config.get("is_pinned"):
        os.sched_setaffinity(0, {rank})
        torch.set_num_threads(1)
    time.sleep(config.get("setup_s", 0.0))
    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    heavy = torch.nn.Linear(config["width"], config["width"]) if config.get("width") else None
    heavy = None if heavy is None else raysgd.torch.prepare_model(heavy)
    dataset: Any = Items(config)
    workers = config.get("loader_workers", 0)
    loader = raysgd.torch.prepare_data_loader(DataLoader(dataset, batch_size=1, num_workers=workers))
    kept = [[number] for number in range(config.get("objects", 0))]
    state = {"weights": np.zeros(config.get("save_bytes", 0) // 8)}
    first = 0
    if config.get("save_every") and (loaded := raysgd.load_checkpoint()) is not None:
        first = int(loaded["step"][0]) + 1
    times = []
    for step, batch in enumerate(loader):
        if step < first:
            continue
        _compute(STEP_S, is_pinned=config.get("is_pinned", False))
        if rank == RANK:
            _differ(config, step)
        model(batch).sum().backward()
        if heavy is not None:
            with heavy.no_sync() if step % config.get("accumulate", 1) else nullcontext():
                heavy(torch.ones(1, config["width"])).sum().backward()
        if kept:
            gc.collect()
        if config.get("evaluation_s") and (rank == RANK or config.get("is_divided")):
            model.eval()
            with torch.no_grad():
                model(batch)
                time.sleep(config["evaluation_s"] / (raysgd.world_size() if config.get("is_divided") else 1))
            model.train()
        _save(config, step, state)
        raysgd.report({"step": step})
        times.append(time.monotonic())
    return (times[-1] - times[0]) / (len(times) - 1)


def _differ(config: dict[str, Any], step: int) -> None:
    """Do what one rank does and the others do not: take longer, or die once at a step."""
    time.sleep(config.get("extra_s", 0.0))
    if step in config.get("dies_at", ()) and not (mark := Path(config["mark"], str(step))).exists():
        mark.touch()
        os._exit(1)


def _save(config: dict[str, Any], step: int, state: dict[str, Any]) -> None:
    if state["weights"].size and step % config.get("save_stride", 1) == 0:
        raysgd.save_checkpoint(state)
    if (every := config.get("save_every")) and step % every == every - 1:
        raysgd.save_checkpoint({"step": np.array([step])})


class Lengths:
    """A map-style dataset of lengths: the number of values in a row."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> int:
        drawn = np.random.default_rng([index, raysgd.world_rank()])  # as a loader that shuffles gives them to the ranks
        return int(drawn.choice(self.lengths))


def train_on_rows(config: dict[str, Any]) -> float:
    """Train with DDP on batches whose rows are longer, or more, on one rank; the time of a step depends on its batch."""
    import torch
    from torch.utils.data import DataLoader

    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    rows = sum(config["rows"]) // 2 if config.get("is_even") else config["rows"][raysgd.world_rank()]
    loader = DataLoader(
        Lengths(config["lengths"]), batch_size=1, collate_fn=lambda lengths: torch.ones(rows, max(lengths))
    )
    times = []
    for step, batch in enumerate(raysgd.torch.prepare_data_loader(loader)):
        time.sleep(config.get("fixed_s", 0.0) + config["value_s"] * batch.numel())
        model(torch.ones(1, 4)).sum().backward()
        raysgd.report({"step": step})
        times.append(time.monotonic())
    return (times[-1] - times[0]) / (len(times) - 1)


def exchange(config: dict[str, Any]) -> float:
    """Train a tiny model with DDP, in steps that have little else to do."""
    import torch

    model = raysgd.torch.prepare_model(torch.nn.Linear(2, 2, bias=False))
    times = []
    for step in range(30 * STEPS):
        time.sleep(config["compute_s"])
        model(torch.ones(1, 2)).sum().backward()
        raysgd.report({"step": step})
        times.append(time.monotonic())
    return (times[-1] - times[0]) / (len(times) - 1)


def compile_again(config: dict[str, Any]) -> float:
    """Run steps of JAX, whose batches have another shape in each step, or in each n-th one."""
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda values: jnp.tanh(values @ values.T).sum())
    times = []
    for number in range(STEPS):
        step(jnp.ones((3 + number // config["stride"], 4))).block_until_ready()
        time.sleep(STEP_S)
        raysgd.report({"step": number})
        times.append(time.monotonic())
    return (times[-1] - times[0]) / (len(times) - 1)


def _compute(seconds: float, *, is_pinned: bool) -> None:
    if not is_pinned:
        time.sleep(seconds)
        return
    end_s = time.thread_time() + seconds  # of the processor, as real work
    while time.thread_time() < end_s:
        pass


def start_burners(number: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that use the processor of `RANK`; they end by themselves after some minutes."""
    code = (
        f"import os, time\nos.sched_setaffinity(0, {{{RANK}}})\nend = time.time() + 300\nwhile time.time() < end: pass"
    )
    return [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]


CAUSES: dict[str, Cause] = {
    "slow storage": Cause(
        "data", train, tuple({"item_s": part * STEP_S} for part in (0.3, 0.6, 1.0)), {"loader_workers": 1}
    ),
    "slow items on one rank": Cause(
        "data", train, tuple({"item_s": part * STEP_S, "item_rank": RANK} for part in (0.3, 1.0, 2.0)), {"item_s": 0.0}
    ),
    "slow rank": Cause(
        "straggler", train, tuple({"extra_s": part * STEP_S} for part in (0.2, 0.5, 2.0)), {"extra_s": 0.0}
    ),
    "busy processor": Cause("straggler", train, ({"is_pinned": True},) * 3, {}, burners=(1, 2, 4)),
    "slow exchange": Cause(
        "collectives", train, tuple({"width": width} for width in (2000, 3000, 4000)), {"accumulate": 2}
    ),
    "checkpoints too often": Cause(
        "checkpoints", train, tuple({"save_bytes": size << 20} for size in (32, 64, 128)), {"save_stride": 1000}
    ),
    "deaths": Cause(
        "restarts", train, tuple({"save_every": 25, "dies_at": tuple(range(20, 100, n))} for n in (60, 30, 20))
    ),
    "checkpoints too seldom": Cause(
        "restarts", train, tuple({"save_every": 45, "dies_at": dies_at} for dies_at in ((70,), (40, 85), (40, 80, 88)))
    ),
    "more rows on one rank": Cause(
        "uneven batches",
        train_on_rows,
        tuple({"lengths": [10], "rows": (10, rows), "value_s": 3e-4} for rows in (14, 20, 30)),
        {"is_even": True},
    ),
    "rows of many lengths": Cause(
        "uneven batches",
        train_on_rows,
        tuple(
            {"lengths": lengths, "rows": (1, 1), "value_s": 3e-3}
            for lengths in ([8, 12], [6, 14, 10, 10], [2, 18, 6, 14])
        ),
        {"lengths": [10]},
    ),
    "small batches": Cause(
        "small batches",
        train_on_rows,
        tuple(
            {"lengths": [8, 12], "rows": (1, 1), "value_s": each / 10, "fixed_s": STEP_S}
            for each in (0.03, 0.015, 0.005)
        ),
    ),
    "many messages": Cause("small batches", exchange, tuple({"compute_s": each} for each in (4e-4, 2e-4, 1e-4))),
    "evaluation on one rank": Cause(
        "evaluation",
        train,
        tuple({"evaluation_s": part * STEP_S} for part in (0.3, 1.0, 2.0)),
        {"is_divided": True},
    ),
    "garbage collection": Cause(
        "garbage collection",
        train,
        tuple({"objects": number} for number in (200_000, 600_000, 2_000_000)),
        {"objects": 0},
    ),
    "callback that waits": Cause(
        "callbacks", train, tuple({"callback_s": part * STEP_S} for part in (0.2, 0.5, 2.0)), {"callback_s": 0.0}
    ),
    "compiling again": Cause(
        "compiling", compile_again, tuple({"stride": number} for number in (6, 3, 1)), backend="jax", num_workers=1
    ),
    "long start": Cause("start", train, tuple({"setup_s": seconds} for seconds in (10.0, 20.0, 30.0))),
}
