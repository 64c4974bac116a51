"""Libraries that bring their own set-up of a process group use the one of the run, in every attempt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing import FaultPlan, Kill
from support.runs import make_trainer, quiet, travels_by_value

pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
travels_by_value(__name__)


def train_func(config: dict[str, Any]) -> list[Any]:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    start = (raysgd.load_checkpoint() or {"step": -1})["step"] + 1
    for step in range(start, 4):
        accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
        gradient = accelerator.unwrap_model(model).weight.grad.item()
        raysgd.report(step=step, num_processes=accelerator.num_processes, gradient=gradient, pid=os.getpid())
        raysgd.save_checkpoint({"step": step})
        model.zero_grad()
        raysgd.barrier()  # so that this round has reached the controller before a later step kills a worker
    return [accelerator.process_index, accelerator.device.type == raysgd.device().type]


@pytest.mark.fault
@pytest.mark.timeout(180)
def test_accelerate_uses_the_group_of_each_attempt(ray_cluster: Any, tmp_path: Path) -> None:
    plan = FaultPlan([Kill(rank=1, step=3)])
    with make_trainer(tmp_path, (1, 2), "torch", failure_config=raysgd.FailureConfig(abort_grace_s=20)) as trainer:
        stream = trainer.run_generator(plan.wrap(train_func), callbacks=quiet(), returns="all")
        results = list(stream)
        plan.assert_all_fired()
        assert stream.get_returns() == [[0, True]]
    first, second = ([result for result in results if result["attempt"] == attempt] for attempt in (1, 2))
    assert first and {(result["num_processes"], result["gradient"]) for result in first} == {(2, 0.5)}, "not averaged"
    assert second and {(result["num_processes"], result["gradient"]) for result in second} == {(1, 0.0)}
    assert {result["pid"] for result in first} == {result["pid"] for result in second}, "rank 0 kept its process"
