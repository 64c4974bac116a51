"""The driver of a run whose ranks exchange gradients of 4 MB in each step: ``python -m support.link_job STORAGE``.

Each worker takes the two CPUs of a machine.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import raysgd

COMPUTING_S, STEPS, WIDTH = 0.03, 60, 1000


def train_func(config: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    model = raysgd.torch.prepare_model(torch.nn.Linear(WIDTH, WIDTH))
    for step in range(STEPS):
        end = time.thread_time() + COMPUTING_S
        while time.thread_time() < end:
            pass
        model(torch.ones(1, WIDTH)).sum().backward()
        raysgd.report(step=step)


def main(storage: str) -> None:
    run_config = raysgd.RunConfig(storage_path=storage, name="link")
    with raysgd.Trainer(3, backend="torch", cpus_per_worker=2, run_config=run_config) as trainer:
        trainer.run(train_func)
        print(f"ran in {trainer.run_dir}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
