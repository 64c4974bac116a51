"""Programs that were written for torchrun, as train_func: they form their group, train with DDP, and destroy the group."""

from __future__ import annotations

import os
from typing import Any

import pytest

import raysgd
from raysgd.errors import UsageError
from support.runs import events_of, latest_run, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

TORCH_TRAINER = {"num_workers": 2}


def main() -> dict[str, Any]:
    """Train as the tutorials of torch do, with nothing of raysgd."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group(backend="gloo", init_method="env://", timeout=timedelta(minutes=5))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    assert (rank, int(os.environ["WORLD_SIZE"])) == (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
    found = {
        "rank": rank,
        "local_rank": local_rank,
        "loss": loss.item(),
        "weights": [round(weight, 6) for weight in model.module.weight.flatten().tolist()],
        "environment": sorted({"MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK"} & os.environ.keys()),
        "pid": os.getpid(),
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_script_for_torchrun_runs_twice_in_the_same_workers(torch_trainer: raysgd.Trainer) -> None:
    first, second = (torch_trainer.run(main, callbacks=quiet(), returns="all") for _ in range(2))
    for seen in (first, second):
        assert [(each["rank"], each["local_rank"]) for each in seen] == [(0, 0), (1, 1)]
        assert seen[0]["weights"] == seen[1]["weights"] and seen[0]["loss"] < 0.05
        assert seen[0]["environment"] == ["GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert [each["pid"] for each in first] == [each["pid"] for each in second], "the workers were replaced"
    assert list(latest_run(torch_trainer).events["kind"]).count("attempt_start") == 1
    assert events_of(torch_trainer, "warning") == []


def train_in_a_group_of_its_own() -> tuple[str, bool]:
    import tempfile

    import torch.distributed as dist

    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        size = dist.get_world_size()
        dist.destroy_process_group()
    return size, dist.is_initialized()


def test_script_may_form_a_group_of_its_own_after_it_has_destroyed_raysgds(torch_trainer: raysgd.Trainer) -> None:
    assert torch_trainer.run(train_in_a_group_of_its_own, callbacks=quiet(), returns="all") == [(1, False)] * 2
    assert len(torch_trainer.run(main, callbacks=quiet(), returns="all")) == 2


def test_another_group_is_refused_with_what_to_do(torch_trainer: raysgd.Trainer) -> None:
    def ask_for_nccl() -> None:
        import torch.distributed as dist

        dist.init_process_group("nccl")

    with pytest.raises(UsageError, match=r"backend='nccl'.*asks for another group.*gloo, rank \d of 2.*backend_args"):
        torch_trainer.run(ask_for_nccl, callbacks=quiet())
