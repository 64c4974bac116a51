"""Start of a run, an exception, checkpoints, and the step of a DDP model, compared with Ray Train and others."""

from __future__ import annotations

import contextlib
import importlib
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.measures.base import ALL, Measure
from bench.systems import PRELOADING
from bench.systems.base import System
from bench.worker import NUM_KEPT, gather, note, session_of

#: The runs after the first one; the systems that are not listed start cold each time.
_WARM_RUNS = {"raysgd": 6, "monarch": 6, "ray_train": 1, "ray_train_tuned": 1}
#: Libraries of many modules, which a run imports before the last starts are timed.
_LIBRARIES = ("sklearn.ensemble", "datasets", "mlflow.pytorch", "tensorflow")


def _params_of_start(system: str, quick: bool) -> dict[str, Any]:
    libraries = _LIBRARIES[:1] if quick else _LIBRARIES
    return {"warm_runs": _WARM_RUNS.get(system, 0), "libraries": libraries if system == "raysgd" else ()}


def run_start(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time the start of train_func: the first time, again with the same Trainer, and after a run that imports libraries.

    The clock starts at the call (``run``, ``fit``, the launcher's command) and stops at the first line of train_func on the
    last of the two ranks, with the gloo group formed. Ray was started before, and is idle.
    """
    cold, _ = _start(system)
    warm = [_start(system) for _ in range(params["warm_runs"])]
    series = {"cold_s": [cold]}
    if warm:
        series["warm_s"] = [entered for entered, _ in warm]
        series["warm_returned_s"] = [returned for _, returned in warm]
    if params["libraries"]:
        system.run(train_imports, {"libraries": params["libraries"]})
        after = [_start(system) for _ in range(params["warm_runs"])]
        series["warm_after_imports_s"] = [entered for entered, _ in after]
    return series


def _start(system: System) -> tuple[float, float]:
    system.run(train_start, {})
    returned = time.time()
    return max(gather(system.folder, "entered")) - system.called, returned - system.called


def train_start(config: dict[str, Any]) -> None:
    entered = time.time()
    import torch.distributed as dist

    note(config, "entered", dist.get_rank(), entered)


def train_imports(config: dict[str, Any]) -> None:
    for name in config["libraries"]:
        with contextlib.suppress(ImportError):  # it is not installed
            importlib.import_module(name)


START = Measure(
    name="start",
    title="Start",
    systems=("ray_train", "ray_train_tuned", "torchrun", "monarch", "bare", "raysgd", PRELOADING),
    quick_systems=("ray_train", "torchrun", "bare", "raysgd", PRELOADING),
    units={"cold_s": "s", "warm_s": "s", "warm_returned_s": "s", "warm_after_imports_s": "s"},
    repeat=4,
    params=_params_of_start,
    run=run_start,
)


_EXCEPTION_RUNS = {"raysgd": (5, 2), "ray_train": (2, 1), "ray_train_tuned": (2, 1)}


def _params_of_exception(system: str, quick: bool) -> dict[str, Any]:
    full, small = _EXCEPTION_RUNS[system]
    return {"runs": small if quick else full}


def run_exception(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time from an exception in train_func on rank 1 to the same exception in the driver."""
    return {"seconds": [_time_to_driver(system) for _ in range(params["runs"])]}


def _time_to_driver(system: System) -> float:
    try:
        # A random time, because Ray Train polls.
        system.run(train_exception, {"after_s": random.uniform(0.5, 2.5)})
    except Exception as error:
        caught = time.time()
        if "a mistake of the user's" not in str(error):
            raise
    else:
        raise RuntimeError("the exception did not arrive")
    path = system.folder / "raised-1.json"
    raised = float(path.read_text(encoding="utf-8"))
    path.unlink()
    return caught - raised


def train_exception(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    time.sleep(config["after_s"])
    if rank == 1:
        note(config, "raised", rank, time.time())
        raise ValueError("a mistake of the user's")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)


EXCEPTION = Measure(
    name="exception",
    title="Exception in train_func to raised in the driver",
    systems=ALL,
    units={"seconds": "s"},
    is_fresh=False,
    repeat=2,
    params=_params_of_exception,
    run=run_exception,
)


_TENSORS = 32
_MIB = 1 << 20


def _params_of_checkpoint(system: str, quick: bool) -> dict[str, Any]:
    return {"mib": 64 if quick else 512, "saves": 3 if quick else 5}


def run_checkpoint(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time a checkpoint of 512 MB of float32: how long the training thread waits, and when the bytes are safe.

    raysgd's bytes are safe when the checkpoint is committed: written, synced and in a manifest. Ray Train, used as in its
    guide (``torch.save`` into a temporary folder, then ``report``), syncs nothing; its bytes count when its controller calls
    them persisted. ``dd bs=8M conv=fsync`` writes as many bytes to the same folder at the same intervals, and keeps as many
    files as raysgd keeps checkpoints: recently used blocks of a disk can be five times as fast as others.
    """
    num_bytes = params["mib"] * _MIB
    # As in training, each save is safe before the next.
    pause_s = 1.0 + 3 * _write_with_dd(system.folder / "trial.bin", params["mib"])
    (system.folder / "trial.bin").unlink()
    if system.name == "dd":
        return {
            "mb_per_s": [num_bytes / 1e6 / seconds for seconds in _save_with_dd(system.folder, pause_s, **params)][1:]
        }
    safe: list[float] = []
    system.run(train_checkpoint, {**params, "pause_s": pause_s}, on_checkpoint=safe.append)
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


def train_checkpoint(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank, save = dist.get_rank(), session_of(config).save
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


CHECKPOINT = Measure(
    name="checkpoint",
    title="Checkpoint of 512 MB",
    systems=("ray_train", "ray_train_tuned", "dd", "raysgd"),
    quick_systems=("ray_train", "dd", "raysgd"),
    units={"first_stall_s": "s", "stall_s": "s", "first_durable_s": "s", "durable_s": "s", "mb_per_s": "MB/s"},
    repeat=3,
    params=_params_of_checkpoint,
    run=run_checkpoint,
)


_BATCH = 64


def _params_of_ddp(system: str, quick: bool) -> dict[str, Any]:
    return {"steps": 10 if quick else 40, "blocks": 2 if quick else 5}


def run_ddp(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time the steps of two models with DistributedDataParallel; the loop is the same in all systems."""
    system.run(train_ddp, params)
    return {f"{name}_step_s": blocks for name, blocks in gather(system.folder, "blocks")[0].items()}


def make_models() -> dict[str, Any]:
    """Return two networks for images of 28 x 28 pixels."""
    from torch import nn

    conv = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip
    mlp = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return {"conv": conv, "mlp": mlp}


def train_ddp(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(dist.get_rank())
    images = torch.rand(_BATCH, 1, 28, 28)
    labels = torch.randint(10, (_BATCH,))
    took = {}
    for name, plain in make_models().items():
        model = session_of(config).prepare_model(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def steps(count: int, model: nn.Module = model, optimizer: Any = optimizer) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return (time.perf_counter() - start) / count

        steps(config["steps"])
        took[name] = [steps(config["steps"]) for _ in range(config["blocks"])]
    note(config, "blocks", dist.get_rank(), took)


DDP = Measure(
    name="ddp",
    title="DDP step",
    systems=("ray_train", "torchrun", "raysgd"),
    quick_systems=("torchrun", "raysgd"),
    units={"conv_step_s": "s", "mlp_step_s": "s"},
    repeat=5,
    #: Ray gives its workers a lower priority, which torchrun's processes do not have.
    environment={"RAY_worker_niceness": "0"},
    params=_params_of_ddp,
    run=run_ddp,
)
