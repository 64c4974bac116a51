"""A checkpoint of 512 MB of float32: how long the training thread stands still, and how soon the bytes are safe.

raysgd counts as safe what is committed: written, synced and in a manifest. Ray Train, used as its guide shows it
(``torch.save`` into a temporary folder, then ``report``), counts what its controller calls persisted; it syncs nothing.
``dd bs=8M conv=fsync`` writes as many bytes into the same folder, as often, as far apart, and keeps as many files as
raysgd keeps checkpoints: blocks of a disk that were in use a moment ago can be five times as fast as others.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from bench.inside import inside
from bench.notes import NUM_KEPT, gather, note
from bench.systems.base import System

NAME = "checkpoint"
TITLE = "Checkpoint of 512 MB"
SYSTEMS = ("ray_train", "ray_train_tuned", "dd", "raysgd")
QUICK_SYSTEMS = ("ray_train", "dd", "raysgd")
UNITS = {"first_stall_s": "s", "stall_s": "s", "first_durable_s": "s", "durable_s": "s", "mb_per_s": "MB/s"}
IS_FRESH = True
REPEAT = 3

_TENSORS = 32
_MIB = 1 << 20


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"mib": 64 if quick else 512, "saves": 3 if quick else 5}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    num_bytes = params["mib"] * _MIB
    # Saves are as far apart as they are in training: each is safe before the next.
    pause_s = 1.0 + 3 * _write_with_dd(system.folder / "trial.bin", params["mib"])
    (system.folder / "trial.bin").unlink()
    if system.name == "dd":
        return {
            "mb_per_s": [num_bytes / 1e6 / seconds for seconds in _save_with_dd(system.folder, pause_s, **params)][1:]
        }
    safe: list[float] = []
    system.run(train, {**params, "pause_s": pause_s}, on_checkpoint=safe.append)
    called, stalls = gather(system.folder, "saves")[0]
    if len(safe) != params["saves"]:
        raise RuntimeError(f"{len(safe)} of {params['saves']} checkpoints were completed")
    durable = [done - begun for begun, done in zip(called, safe, strict=True)]
    return {
        "first_stall_s": stalls[:1],
        "stall_s": stalls[1:],
        "first_durable_s": durable[:1],
        "durable_s": durable[1:],
        "mb_per_s": [num_bytes / 1e6 / seconds for seconds in durable[1:]],
    }


def train(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank, save = dist.get_rank(), inside(config).save
    size = config["mib"] * _MIB // 4 // _TENSORS
    state = {f"weight{i}": torch.rand(size) for i in range(_TENSORS)} if rank == 0 else None
    called, stalls = [], []
    for step in range(config["saves"]):
        dist.barrier()
        called.append(time.time())
        start = time.perf_counter()
        save(state, step)
        stalls.append(time.perf_counter() - start)
        time.sleep(config["pause_s"])
    note(config, "saves", rank, [called, stalls])


def _save_with_dd(folder: Path, pause_s: float, *, mib: int, saves: int) -> list[float]:
    took = []
    for number in range(saves):
        took.append(_write_with_dd(folder / f"{number}.bin", mib))
        if number >= NUM_KEPT:
            (folder / f"{number - NUM_KEPT}.bin").unlink()
        time.sleep(pause_s)
    return took


def _write_with_dd(target: Path, mib: int) -> float:
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=8M", f"count={mib // 8}", "conv=fsync"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start
