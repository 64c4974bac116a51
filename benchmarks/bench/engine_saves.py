"""Checkpoints of a sharded model: raysgd's and torch's Distributed Checkpoint (DCP). Runs in workers."""

from __future__ import annotations

import random
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import raysgd
from bench.steps import ENOUGH, open_marks

_LIMIT_S = 120.0


def make_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def compose(config: dict[str, Any]) -> tuple[raysgd.Engine, nn.Module]:
    """Return an engine, and a model that FSDP2 has sharded over all ranks."""
    engine = raysgd.Engine(zero_stage=3)
    model, *_ = engine.compose(model=make_model(config["width"], config["layers"]))
    return engine, model


def measure_saves(config: dict[str, Any]) -> dict[str, Any]:
    """Save the same model with both in turn; the next save begins when the last one is on the disk.

    Args:
        config: ``width`` and ``layers`` of the model; ``repetitions``; ``folder`` of DCP's files, of which the last one stays.

    Returns:
        By system, for each save: ``stall``, the seconds until the loop continues, and ``whole``, until the files are complete.
        ``bytes``: the size of the model.
    """
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", category=FutureWarning)
    _, model = compose(config)
    order = random.Random(0)
    taken: dict[str, list[dict[str, float]]] = {"raysgd": [], "dcp": []}
    for repetition in range(config["repetitions"] + 1):
        for name in order.sample(sorted(taken), 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)  # as a step would: no save may profit from the one before
            before = _newest_path()
            dist.barrier()
            began = time.perf_counter()
            if name == "raysgd":
                raysgd.save_checkpoint({"model": model.state_dict()}, all_ranks=True)
                stall = time.perf_counter() - began
                _wait_for_newer_than(before)
            else:
                path = Path(config["folder"], str(repetition))
                future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=path)
                stall = time.perf_counter() - began
                future.result()  # type: ignore[union-attr]
                if repetition and dist.get_rank() == 0:
                    shutil.rmtree(path.with_name(str(repetition - 1)))
            whole = time.perf_counter() - began
            longest = torch.tensor([stall, whole])
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            if repetition:  # the first one makes buffers
                taken[name].append({"stall": float(longest[0]), "whole": float(longest[1])})
    return {**taken, "bytes": 4 * sum(parameter.numel() for parameter in model.parameters())}


def _newest_path() -> str | None:
    found = raysgd.list_checkpoints()
    return found[-1].path if found else None


def _wait_for_newer_than(path: str | None) -> None:
    """Wait until a newer checkpoint than that at ``path`` is committed on storage."""
    deadline = time.monotonic() + _LIMIT_S
    while _newest_path() == path:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint was committed after {path}")
        time.sleep(0.002)


def measure_load(config: dict[str, Any]) -> dict[str, float]:
    """Load the model that was saved, into one that is sharded over another number of ranks; return the seconds by system."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", category=FutureWarning)
    _, model = compose(config)
    taken = {}
    for name in random.Random(config["seed"]).sample(["raysgd", "dcp"], 2):
        dist.barrier()
        began = time.perf_counter()
        if name == "raysgd":
            raysgd.torch.restore(raysgd.load_checkpoint()["model"], into=model)
        else:
            state = model.state_dict()
            dcp.load({"model": state}, checkpoint_id=config["folder"])
        dist.barrier()
        taken[name] = time.perf_counter() - began
    return taken


def train(config: dict[str, Any]) -> None:
    """Train a sharded model and record every step, as `bench.steps.train` does; save it every ``save_every`` steps."""
    folder, rank = Path(config["steps"]), dist.get_rank()
    engine = raysgd.Engine(zero_stage=3)
    model = make_model(config["width"], config["layers"])
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))
    began = time.perf_counter()
    state = engine.load_checkpoint()
    if state is not None:
        (folder / f"load-{rank}-{time.time_ns()}").write_text(str(time.perf_counter() - began))
    step = 0 if state is None else int(state["step"]) + 1
    group = torch.tensor([time.time_ns()])
    dist.broadcast(group, 0)
    with open_marks(folder, int(group), dist.get_world_size(), rank) as marks:
        while True:
            engine.backward(model(torch.rand(8, config["width"])).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            is_enough = torch.tensor([float(rank == 0 and (folder / ENOUGH).exists())])
            dist.all_reduce(is_enough)
            marks.write(f"{time.time()!r}\n")
            if is_enough.item():
                return
            if step % config["save_every"] == 0:
                engine.save_checkpoint(step=step)
            step += 1
            time.sleep(config["step_s"])
