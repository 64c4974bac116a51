"""The driver of a run on several machines: ``python -m support.cut_job STORAGE SETTINGS``, with the settings as JSON.

It prints a line of JSON for each result, and the line ``over`` at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

import numpy as np

import raysgd


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Reduce and save in each step, so that all ranks wait for each other; read the rows of a dataset if there is one."""
    import torch
    import torch.distributed as dist

    state = raysgd.load_checkpoint() or {"step": 0, "total": 0.0}
    step, total = int(state["step"]), float(state["total"])
    batches = raysgd.get_dataset("train").get_split().iter_batches(8, shuffle="full") if config["rows"] else None
    for batch in itertools.repeat({"i": []}) if batches is None else batches:
        if step >= config["steps"]:
            break
        time.sleep(config["sleep_s"])
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        total += float(ones[0]) / raysgd.world_size()
        step += 1
        raysgd.report(
            step=step,
            total=total,
            size=raysgd.world_size(),
            at=time.time(),
            node=os.uname().nodename,
            pid=os.getpid(),
            rows=[int(row) for row in batch["i"]],
        )
        if step % 5 == 0:
            raysgd.save_checkpoint({"step": step, "total": total})
    return {"step": step, "total": total}


def main(storage: str, settings: dict[str, Any]) -> None:
    config = {"steps": 200, "sleep_s": 0.05, "rows": 0, **settings.get("config", {})}
    run_config = raysgd.RunConfig(storage_path=storage, name="cut", **settings.get("run", {}))
    workers = settings["workers"]
    trainer = raysgd.Trainer(
        tuple(workers) if isinstance(workers, list) else workers,
        backend="torch",
        failure_config=raysgd.FailureConfig(**settings.get("failure", {})),
        run_config=run_config,
    )
    dataset = {"train": {"i": np.arange(config["rows"])}} if config["rows"] else None
    with trainer:
        for result in trainer.run_generator(train_func, config, dataset=dataset, callbacks=[]):
            rows = [row for worker in result.workers for row in worker["rows"]]
            shown = {name: result[name] for name in ("step", "total", "size", "attempt", "at")}
            pids = [f"{worker['node']}:{worker['pid']}" for worker in result.workers]
            print(json.dumps({**shown, "rows": rows, "pids": pids}), flush=True)
            if settings.get("leave_at") == result["step"]:
                os._exit(0)
    print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
