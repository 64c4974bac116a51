"""A member of a process group without Ray: ``python member.py RANK WORLD_SIZE DEVICE FOLDER``.

It joins with raysgd's torch backend, trains a prepared model in a worker's session, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.session_alone import SessionAlone

import raysgd
from raysgd.backends.base import Member
from raysgd.backends.torch import TorchBackend, TorchConfig

STEPS = 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def train(rank: int, world_size: int, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(rank)  # all ranks start with rank 0's weights
    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (part[rank::world_size].to(device) for part in make_data())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        raysgd.report(step=step, loss=loss.detach())
    return model


def run_in_group(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    with SessionAlone(folder / f"rank-{rank}", rank, world_size) as session:
        device = raysgd.device()
        model = train(rank, world_size, device)
        total = torch.full((3,), float(rank + 1), device=device)
        dist.all_reduce(total)
        return {
            "device": str(device),
            "group": dist.get_backend(),
            "total": total.tolist(),
            "weights": [parameter.tolist() for parameter in model.parameters()],
            "where": sorted({str(parameter.device) for parameter in model.parameters()}),
            "losses": [metrics["loss"] for metrics in session.reports()],
        }


def join(backend: TorchBackend, rank: int, world_size: int, has_gpu: bool, store: Path) -> None:
    rendezvous = json.dumps({"path": str(store)})
    member = Member(
        rank, world_size, rank, world_size, 0, rendezvous, "127.0.0.1", has_gpu=has_gpu, shares_gpu=world_size > 1
    )
    backend.init_process_group(member)


def main(rank: int, world_size: int, device: str, folder: Path) -> None:
    backend = TorchBackend(TorchConfig(timeout_s=60))
    backend.load()
    found = []
    for number in range(2):  # a second attempt forms its group in the same process
        join(backend, rank, world_size, device == "cuda", folder / f"store-{number}")
        found.append(run_in_group(rank, world_size, folder / f"attempt-{number}"))
        record = backend.dump_flight_record()
        found[-1]["last"] = sorted({entry.operation for entry in record.last}) if record is not None else []
        backend.destroy_process_group()
        found[-1]["left"] = not dist.is_initialized()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
