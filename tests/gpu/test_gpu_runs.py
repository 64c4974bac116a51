"""Runs of a Trainer on a GPU. Needs Ray. The variants on the CPU have a pretended GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="needs Ray")
cloudpickle = pytest.importorskip("cloudpickle")

import raysgd  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

HELD = 1 << 22


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_trainer(folder: Path, num_workers: int, device: torch.device, gpus_per_worker: float) -> raysgd.Trainer:
    given = {} if device.type == "cuda" else {"backend": "gloo"}
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("has a real GPU in place of the pretended one")
    return raysgd.Trainer(
        num_workers,
        "torch",
        given,
        gpus_per_worker=gpus_per_worker,
        run_config=raysgd.RunConfig(storage_path=folder),
        failure_config=raysgd.FailureConfig(max_failures=1),
    )


def quiet() -> list[raysgd.Callback]:
    return [raysgd.callbacks.ProgressCallback(mode="off")]


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train for the time that a sample of the GPU's memory takes, die once if asked to; return what was seen."""
    import torch.distributed as dist

    device = raysgd.device()
    torch.manual_seed(raysgd.world_rank())
    model = torch.nn.Linear(4, 1)
    held = torch.zeros(HELD, device=device)
    step, state = 0, raysgd.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
        step = state["step"] + 1
    model = raysgd.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(8, 4, device=device)
    total = torch.ones(3, device=device)
    dist.all_reduce(total)
    until = time.monotonic() + config["seconds"]
    while step < 3 or time.monotonic() < until:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        is_over = torch.tensor([float(time.monotonic() >= until)], device=device)
        dist.all_reduce(is_over)
        raysgd.report(step=step, loss=loss.detach(), peak=torch.cuda.max_memory_allocated() if held.is_cuda else 0)
        if step < 3:
            raysgd.save_checkpoint({"step": step, "model": model, "optimizer": optimizer})
        if config.get("dies") and state is None and time.monotonic() >= until - config["seconds"] / 2:
            os._exit(1)  # the saves have become durable meanwhile
        step += 1
        if is_over.item() and step >= 3:
            break
    return {
        "device": str(device),
        "group": dist.get_backend(),
        "total": total.tolist(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["RAYSGD_DEVICE_INDEX"])],
        "pid": os.getpid(),
        "resumed_from": None if state is None else state["step"],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "model": model,
    }


def test_worker_trains_on_its_gpu_and_resumes_after_its_death(
    cluster: None, device: torch.device, tmp_path: Path
) -> None:
    is_gpu = device.type == "cuda"
    with make_trainer(tmp_path, 1, device, 1) as trainer:
        stream = trainer.run_generator(train, {"seconds": 4.0, "dies": True}, callbacks=quiet())
        results = list(stream)
        seen = stream.get_returns()
        run = raysgd.load_run(trainer.run_dir)
        again = trainer.run(train, {"seconds": 0.0}, callbacks=quiet())
        saved = trainer.get_last_checkpoint()
    assert (seen["device"], seen["group"]) == (("cuda:0", "nccl") if is_gpu else ("cpu", "gloo"))
    assert seen["total"] == [1.0] * 3 and seen["resumed_from"] is not None
    assert again["pid"] == seen["pid"] and again["device"] == seen["device"], (
        "a second run has another process or device"
    )
    assert {parameter.device.type for parameter in seen["model"].parameters()} == {"cpu"}
    assert all(isinstance(result["loss"], float) for result in results) and results[-1]["attempt"] == 2
    peaks = [result["peak"] for result in results]
    memory = run.samples["gpu_memory_bytes"].dropna().tolist()
    if is_gpu:
        assert min(peaks) >= 4 * HELD and max(memory) >= 4 * HELD
    assert saved is not None
    state = saved.load()
    assert {value.device.type for value in state["model"].values()} == {"cpu"}


def test_two_workers_share_a_gpu(cluster: None, device: torch.device, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, device, 0.5) as trainer:
        first, second = trainer.run(train, {"seconds": 0.0}, callbacks=quiet(), returns="all")
    assert [seen["group"] for seen in (first, second)] == ["gloo"] * 2
    assert [seen["device"] for seen in (first, second)] == ["cuda:0" if device.type == "cuda" else "cpu"] * 2
    assert first["total"] == second["total"] == [2.0] * 3
    assert first["weights"] == second["weights"] and first["visible"] == second["visible"]
    assert first["pid"] != second["pid"]


@pytest.mark.gpu
def test_worker_finds_its_gpu_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with make_trainer(tmp_path, 1, torch.device("cuda"), 1) as trainer:
            seen = trainer.run(train, {"seconds": 0.0}, callbacks=quiet())
    finally:
        ray.shutdown()
    assert (seen["visible"], seen["device"], seen["group"]) == (name, "cuda:0", "nccl")
