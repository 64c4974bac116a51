"""Faults of a torch group: a rank is lost during a reduction, or the network between the ranks is cut."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

import raysgd
from raysgd.testing import Fault, FaultPlan, Kill, NetworkCut, Stop, check_history
from support.runs import PATIENCE_S, events_of, latest_run, pids, quiet, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.fault]
travels_by_value(__name__)

STEPS = 5


#: The grace is for a machine that has no core to spare for the survivors.
FAILURE = raysgd.FailureConfig(heartbeat_timeout_s=2, abort_grace_s=20, max_failures=1)
TRAINER = {"num_workers": 3, "backend": "torch", "seed": 3, "deterministic": True, "failure_config": FAILURE}


def train(config: dict[str, Any]) -> tuple[float, int, int]:
    """Train a small model for a few steps; return its final weight, the first step and the process id."""
    import torch

    state = raysgd.load_checkpoint()
    model = torch.nn.Linear(4, 1)
    start = 0
    if state is not None:
        model.load_state_dict(state["model"])
        start = state["step"] + 1
    model = raysgd.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, STEPS):
        rows = torch.arange(8.0).reshape(2, 4) * (raysgd.world_rank() + 1) / 10
        loss = (model(rows) - step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        raysgd.report(step=step, loss=loss)
        raysgd.save_checkpoint({"step": step, "model": model})
        deadline = time.monotonic() + 60
        while (saved := raysgd.load_checkpoint()) is None or saved["step"] < step:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return sum(parameter.sum().item() for parameter in model.parameters()), start, os.getpid()


@pytest.mark.parametrize(
    "fault", [Kill(rank=1, phase="collective", step=2), Stop(rank=2, phase="collective", step=2)], ids=repr
)
def test_run_resumes_after_rank_loss_in_a_reduction(trainer: raysgd.Trainer, fault: Fault) -> None:
    fault_free = trainer.run(train, {}, callbacks=quiet())[0]
    before = pids(trainer)
    plan = FaultPlan([fault])
    returned = trainer.run(plan.wrap(train), {}, callbacks=quiet(), returns="all")
    plan.assert_all_fired()
    check_history(latest_run(trainer).run_dir, within_s=PATIENCE_S)
    assert [weight for weight, _, _ in returned] == [fault_free] * 3
    assert [start for _, start, _ in returned] == [2, 2, 2]
    assert [pid == was for (_, _, pid), was in zip(returned, before, strict=True)] == [
        r != fault.rank for r in range(3)
    ]


def test_network_cut_ends_the_run_with_an_explanation(trainer: raysgd.Trainer) -> None:
    before = pids(trainer)
    plan = FaultPlan([NetworkCut(rank=1, step=2)])
    with pytest.raises(RuntimeError) as caught:
        trainer.run(plan.wrap(train), {}, callbacks=quiet())
    assert isinstance(caught.value.__cause__, raysgd.errors.WorkerTraceback)
    plan.assert_all_fired()
    check_history(latest_run(trainer).run_dir, within_s=PATIENCE_S)
    assert events_of(trainer, "failure") == []
    assert [checkpoint.load()["step"] for checkpoint in latest_run(trainer).checkpoints][:2] == [0, 1]
    # Only these connections were cut: the same processes form another group.
    assert pids(trainer) == before
    assert trainer.run(plan.wrap(train), {}, callbacks=quiet())[1] == 0
    check_history(latest_run(trainer).run_dir)


def be_late_at_the_store(config: dict[str, Any]) -> None:
    """Make a rank slow to ask from which sockets the others have joined the group."""
    import torch.distributed as dist

    if raysgd.world_rank() > 0:
        original = dist.TCPStore.fast_multi_get = dist.TCPStore.multi_get
        dist.TCPStore.multi_get = lambda store, keys: time.sleep(2) or original(store, keys)


def be_in_time_again(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    if raysgd.world_rank() > 0:
        dist.TCPStore.multi_get = dist.TCPStore.fast_multi_get


def test_run_resumes_after_rank_loss_while_others_join_the_group(trainer: raysgd.Trainer) -> None:
    def reduce(config: dict[str, Any]) -> float:
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    trainer.run(be_late_at_the_store, {}, callbacks=quiet())
    plan = FaultPlan([Kill(rank=0, phase="start")])
    assert trainer.run(plan.wrap(reduce), {}, callbacks=quiet(), returns="all") == [3.0] * 3
    plan.assert_all_fired()
    check_history(latest_run(trainer).run_dir)
    trainer.run(be_in_time_again, {}, callbacks=quiet())


def places() -> set[str]:
    """Return the source files of functions that run collectives."""
    import torch
    import torch.distributed as dist

    functions = [dist.all_reduce, torch.autograd.backward, torch.nn.parallel.DistributedDataParallel.forward]
    return {os.path.basename(function.__code__.co_filename) for function in functions}


def test_patched_torch_functions_are_restored(trainer: raysgd.Trainer) -> None:
    def reduce(config: dict[str, Any]) -> set[str]:
        import torch
        import torch.distributed as dist

        found = places()
        raysgd.report(step=1)
        dist.all_reduce(torch.ones(1))
        return found

    plan = FaultPlan([Kill(rank=0, phase="collective", step=1)])
    assert trainer.run(plan.wrap(reduce), {}, callbacks=quiet()) == {"injection.py"}
    plan.assert_all_fired()
    check_history(latest_run(trainer).run_dir)
    assert "collectives.py" not in trainer.run(places, callbacks=quiet())
