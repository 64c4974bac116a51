"""A node whose GPUs have names instead of numbers, as with MIG, Slurm or Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raysgd.backends.torch import TorchConfig
from support.cluster import cluster_of_one
from support.runs import make_trainer, quiet, travels_by_value

travels_by_value(__name__)

GPUS, MIG_DEVICES = ("GPU-4f6b", "GPU-0a1c"), ("MIG-4f6b", "MIG-0a1c")


@pytest.fixture
def cluster_with_gpus(_no_process_is_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS + MIG_DEVICES))
    with cluster_of_one(num_cpus=4, num_gpus=4):
        yield


def own_and_visible() -> tuple[str, str, str]:
    (own,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return own, visible[int(os.environ["RAYSGD_DEVICE_INDEX"])], ",".join(visible)


def test_workers_see_gpus_by_their_names(cluster_with_gpus: None, tmp_path: Path) -> None:
    """CUDA uses only the first MIG device that a process sees, so each worker with one sees no other."""
    with make_trainer(tmp_path, 4, TorchConfig(backend="gloo"), gpus_per_worker=1) as trainer:
        seen = trainer.run(own_and_visible, callbacks=quiet(), returns="all")
    assert all(own == found for own, found, _ in seen)
    visible = {own: visible for own, _, visible in seen}
    assert visible == {
        **dict.fromkeys(GPUS, ",".join(sorted(GPUS))),
        **{name: name for name in MIG_DEVICES},
    }
