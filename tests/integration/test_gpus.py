"""GPUs as far as a machine without any can show them: what Ray hands out, what workers see of it, what comes back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.backends.torch import TorchConfig
from support.cluster import ClusterState
from support.runs import make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.slow
travels_by_value(__name__)

RAY_INIT = {"num_gpus": 2}


def what_it_sees() -> dict[str, Any]:
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
        cold, warm = (trainer.run(what_it_sees, callbacks=quiet(), returns="all") for _ in range(2))
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
    assert state.leftovers() == [], "GPUs were not given back"
