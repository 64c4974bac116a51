"""GPU assignment on a machine without GPUs: what Ray assigns, what workers see, and what is released."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.backends.torch import TorchConfig
from support.cluster import ClusterState
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)

RAY_INIT = {"num_gpus": 2}


def describe_gpus() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    total = torch.ones(())
    dist.all_reduce(total)
    return {
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "index": os.environ["RAYSGD_DEVICE_INDEX"],
        "own": ray.get_runtime_context().get_accelerator_ids()["GPU"],
        "total": total.item(),
        "device": str(raysgd.torch.device()),
        "pid": os.getpid(),
    }


@pytest.mark.parametrize(("each", "taken"), [(1, "2 of 2"), (0.5, "1 of 2")])
def test_workers_of_a_node_see_each_others_gpus_and_know_their_own(
    ray_cluster: Any, tmp_path: Path, each: float, taken: str
) -> None:
    state, before = ClusterState.now(), ray.available_resources()["GPU"]
    settings: dict[str, Any] = {"gpus_per_worker": each, "placement_strategy": "STRICT_PACK"}
    with make_trainer(tmp_path, 2, TorchConfig(backend="gloo"), **settings) as trainer:
        cold, warm = (trainer.run(describe_gpus, callbacks=quiet(), returns="all") for _ in range(2))
        assert before - ray.available_resources().get("GPU", 0) == pytest.approx(2 * each)
        rows = repr(trainer).splitlines()
    assert cold == warm, "a warm worker is another process, or sees other GPUs"
    owned = [seen["own"] for seen in cold]
    assert all(len(own) == 1 for own in owned)
    expected = sorted({gpu for own in owned for gpu in own}, key=int)
    assert len(expected) == 2 * each
    assert [seen["visible"] for seen in cold] == [",".join(expected)] * 2
    assert [seen["visible"].split(",")[int(seen["index"])] for seen in cold] == [own[0] for own in owned]
    assert [(seen["total"], seen["device"]) for seen in cold] == [(2.0, "cpu")] * 2  # no CUDA here

    assert rows[0] == f"Trainer: 2 x torch worker (1 CPU + {each:g} GPU)"
    assert rows[4].split()[-2:] == ["1", f"{each:g}"]
    assert rows[-1].split() == f"total of the cluster 2 of 8 {taken}".split()
    assert state.leftovers() == [], "GPUs were not released"


def visible_gpus() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_worker_without_gpus_sees_none(ray_cluster: Any, tmp_path: Path) -> None:
    """Also where the node's processes see GPUs; a value in ``runtime_env`` is the user's choice."""
    with make_trainer(tmp_path, 1) as trainer:
        seen = [trainer.run(visible_gpus, callbacks=quiet()) for _ in range(2)]
    assert seen == ["", ""]
    with make_trainer(tmp_path, 1, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}) as trainer:
        assert trainer.run(visible_gpus, callbacks=quiet()) == "1"


def train_until_group_has_grown() -> list[dict[str, Any]]:
    """Return what rank 0 saw in each group."""
    seen = raysgd.load_checkpoint() or []
    seen.append({**describe_gpus(), "size": raysgd.world_size()})
    while raysgd.world_size() == 1:
        raysgd.report(size=1)
        raysgd.save_checkpoint(seen)
        time.sleep(0.1)
    return list(seen)


def test_surviving_worker_keeps_its_gpus(ray_cluster: Any, tmp_path: Path) -> None:
    """CUDA reads the variable once per process: a later list would give an index of another GPU."""
    holder = ray.remote(num_gpus=1, num_cpus=0)(Holder).remote()
    ray.get(holder.is_there.remote())
    with make_trainer(tmp_path, (1, 2), TorchConfig(backend="gloo"), gpus_per_worker=1) as trainer:
        stream = trainer.run_generator(train_until_group_has_grown, callbacks=quiet(), returns="all")
        next(stream)
        ray.kill(holder)
        alone, together = stream.get_returns()[0]
    assert (alone["size"], together["size"], together["total"]) == (1, 2, 2.0)
    assert alone["pid"] == together["pid"]
    (own,) = alone["own"]
    assert [(seen["visible"], seen["index"]) for seen in (alone, together)] == [(own, "0")] * 2


class Holder:
    def is_there(self) -> None:
        return None
