"""The driver of a run on several machines: ``python -m support.cut_job STORAGE SETTINGS``, with the settings as JSON.

It prints a line of JSON for each result, and the line ``over`` at the end. Six logical workers train a small network on a
dataset, so that the weights after each step have the same bits on any number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import raysgd
from raysgd.testing import FaultPlan
from raysgd.testing.faults import Slow

NUM_LOGICAL = 6
BATCH_SIZE = 8
#: The last step of an epoch has fewer rows.
NUM_ROWS = 100 * NUM_LOGICAL * BATCH_SIZE - 10
DEFAULTS = {"steps": 200, "sleep_s": 0.05, "save_every": 5, "state_mb": 0, "reduce_at": 0}


def train_func(config: dict[str, Any]) -> int:
    """Train for some steps, save every few, and report a digest of the weights with the rows of each step.

    At the step ``reduce_at``, all ranks reduce 1 GB; the files ``reducing`` and ``reduced`` in the ``folder`` show when.
    """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    count = 0
    if (state := raysgd.load_checkpoint()) is not None:
        model.load_state_dict(state["model"])
        count = state["count"]
    padding = np.zeros(config["state_mb"] << 17)
    batches = raysgd.get_dataset().get_split().to_torch(BATCH_SIZE, shuffle="full")
    while count < config["steps"]:
        for step in raysgd.torch.logical_steps(batches, model):
            rows: list[int] = []
            model.zero_grad()
            for batch in step:
                model(batch["x"]).square().mean().backward()
                rows += batch["i"].tolist()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            count += 1
            if count == config["reduce_at"]:
                _reduce_much(Path(config["folder"]))
            time.sleep(config["sleep_s"])
            about = {"step": count, "rows": rows, "weights": _digest(model), "size": raysgd.world_size()}
            raysgd.report(about, node=os.uname().nodename, pid=os.getpid())
            if count % config["save_every"] == 0:
                raysgd.save_checkpoint({"model": model, "count": count, "padding": padding})
            if count == config["steps"]:
                break
    return count


def _reduce_much(folder: Path) -> None:
    import torch

    (folder / "reducing").touch()
    for _ in range(10):
        values = torch.ones(25_000_000)
        torch.distributed.all_reduce(values)
        assert values.eq(raysgd.world_size()).all()
    (folder / "reduced").touch()


def _digest(model: Any) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()[:16]


class StopWhenEnough(raysgd.Callback):
    """Ends the run when the file ``enough`` is in the folder."""

    def __init__(self, folder: str) -> None:
        self._enough = Path(folder, "enough")

    def on_result(self, result: raysgd.Result) -> None:
        if self._enough.exists():
            raise raysgd.Stop("the file enough is there")


def main(storage: str, settings: dict[str, Any]) -> None:
    config = {**DEFAULTS, "folder": storage, **settings.get("config", {})}
    os.makedirs(storage, exist_ok=True)
    function: Any = train_func
    if (slow := settings.get("slow_write")) is not None:
        function = FaultPlan([Slow(rank=0, phase="write", **slow)], folder=f"{storage}/faults").wrap(train_func)
    made: dict[str, Any] = {
        "failure_config": raysgd.FailureConfig(**{"abort_grace_s": 20, **settings.get("failure", {})}),
        "checkpoint_config": raysgd.CheckpointConfig(**settings.get("checkpoint", {})),
    }
    workers = settings["workers"]
    size = tuple(workers) if isinstance(workers, list) else workers
    made |= {"logical_workers": NUM_LOGICAL, "seed": 3, "deterministic": True}
    if "restore" in settings:
        trainer = raysgd.Trainer.restore(settings["restore"])
    else:
        run_config = raysgd.RunConfig(storage_path=storage, name="cut", **settings.get("run", {}))
        trainer = raysgd.Trainer(size, backend="torch", run_config=run_config, **made)
    rows = np.arange(NUM_ROWS)
    dataset = {"train": {"i": rows, "x": np.random.default_rng(0).standard_normal((NUM_ROWS, 4)).astype(np.float32)}}
    with trainer:
        for result in trainer.run_generator(function, config, dataset=dataset, callbacks=[StopWhenEnough(storage)]):
            shown = {name: result[name] for name in ("step", "weights", "size", "attempt")}
            shown["rows"] = sorted(row for worker in result.workers for row in worker["rows"])
            shown["all_weights"] = sorted({worker["weights"] for worker in result.workers})
            shown["pids"] = [f"{worker['node']}:{worker['pid']}" for worker in result.workers]
            line = json.dumps({**shown, "at": result["timestamp"]})
            print(f"{line}\n", end="", flush=True)  # at once: Ray's threads print to stdout too
            if settings.get("leave_at") == result["step"]:
                os._exit(0)
    print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
