"""`raysgd.torch.device`: which GPU a worker uses. CUDA is faked."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._C._distributed_c10d as c10d

import raysgd.torch
from raysgd.backends import torch as torch_backend
from raysgd.backends.base import Member
from raysgd.backends.torch import TorchConfig
from raysgd.errors import ConfigError
from raysgd.session import context
from raysgd.torch import devices

Machine = Callable[..., None]


@pytest.fixture(autouse=True)
def _no_session_is_left() -> Iterator[None]:
    yield
    context.uninstall()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Fake a number of visible GPUs, of which the worker has one."""

    def pretend(gpus: int, index: str | None = None, in_worker: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        if index is not None:
            monkeypatch.setenv("RAYSGD_DEVICE_INDEX", index)
        context.install(cast(Any, SimpleNamespace(in_worker=in_worker)))

    return pretend


def test_worker_uses_its_own_of_several_visible_gpus(machine: Machine) -> None:
    machine(4, index="2")
    assert raysgd.torch.device() == torch.device("cuda:2")


@pytest.mark.parametrize("gpus", [1, 2])
def test_worker_without_gpu_uses_none_of_the_visible_gpus(machine: Machine, gpus: int) -> None:
    machine(gpus)
    assert raysgd.torch.device() == torch.device("cpu")


@pytest.mark.parametrize(("gpus", "index"), [(0, None), (0, "0"), (1, None), (2, None), (1, "0"), (4, "2")])
@pytest.mark.parametrize("given", [0.0, 0.5, 1.0, 2.0])
def test_process_group_uses_the_same_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gpus: int, index: str | None, given: float
) -> None:
    machine(gpus, index)
    taken: list[int] = []
    formed: list[str] = []
    timeouts: list[timedelta] = []
    monkeypatch.setattr(os, "environ", os.environ.copy())  # members of a group export variables
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: formed.append(backend))
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", timeouts.append)
    store = torch.distributed.HashStore()
    store.set("raysgd/gloo/1", "[]")  # of the other member
    monkeypatch.setattr(torch_backend, "join_store", lambda *_, **__: store)
    has_gpu = given > 0 and gpus > 0
    member = Member(0, 2, 0, 2, 0, '{"host": "127.0.0.1", "port": 1}', "127.0.0.1", has_gpu, shares_gpu=0 < given < 1)
    backend = TorchConfig().make_backend()
    backend.init_process_group(member)
    device = raysgd.torch.device()
    assert taken == ([device.index] if device.type == "cuda" else [])
    assert formed == ["nccl" if has_gpu and given >= 1 else "gloo"]
    # With nccl, ranks would wait for each other in their first collective, which may come late.
    assert [store.timeout, *timeouts] == [timedelta(seconds=TorchConfig().timeout_s)] * 2
    backend.destroy_process_group()


def test_nccl_is_refused_for_workers_that_share_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1, "0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    member = Member(0, 2, 0, 2, 0, '{"host": "127.0.0.1", "port": 1}', "127.0.0.1", has_gpu=True, shares_gpu=True)
    with pytest.raises(ConfigError, match=r"The 2 workers share GPUs.*gpus_per_worker=1.*TorchConfig\(backend=None\)"):
        TorchConfig(backend="nccl").make_backend().init_process_group(member)


def test_machine_without_gpus_uses_the_cpu(machine: Machine) -> None:
    machine(0, index="0")
    assert raysgd.torch.device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("is_built", "has_driver", "index", "is_refused"),
    [(True, True, "0", True), (True, True, None, False), (True, False, "0", False), (False, True, "0", False)],
)
def test_worker_whose_gpu_is_hidden_does_not_train_on_the_cpu(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_built: bool,
    has_driver: bool,
    index: str | None,
    is_refused: bool,
) -> None:
    machine(0, index=index)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if is_built else None)
    monkeypatch.setattr(devices, "DRIVER_FILE", str(tmp_path if has_driver else tmp_path / "missing"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4f6b")
    if is_refused:
        with pytest.raises(ConfigError, match=r"CUDA sees none of CUDA_VISIBLE_DEVICES='MIG-4f6b'.*nvidia-smi -L"):
            raysgd.torch.device()
    else:
        assert raysgd.torch.device() == torch.device("cpu")


def test_gpu_is_used_outside_a_worker(machine: Machine) -> None:
    machine(2, index="1", in_worker=False)
    assert raysgd.torch.device() == torch.device("cuda:0")


@pytest.mark.parametrize("index", ["2", "-1", "first"])
def test_invisible_gpu_index_is_refused_with_the_allowed_ones(machine: Machine, index: str) -> None:
    machine(2, index=index)
    with pytest.raises(ConfigError, match=rf"RAYSGD_DEVICE_INDEX='{index}'.*from 0 to 1"):
        raysgd.torch.device()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_attempt_ends_by_aborting_nccl_communicators(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Nothing else ends a kernel that waits for a dead peer. gloo's sockets are closed instead."""
    aborted: list[str] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", lambda: aborted.append("all"))
    TorchConfig().make_backend().abort_process_group()
    assert aborted == (["all"] if backend == "nccl" else [])


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_flight_record_is_read_from_the_groups_library(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """CUDA builds have a separate flight recorder for nccl."""
    dumps = {name: pickle.dumps({"entries": [], "version": name}) for name in ("_dump_nccl_trace", "_dump_fr_trace")}
    for name, dump in dumps.items():
        monkeypatch.setattr(c10d, name, lambda includeStackTraces, dump=dump: dump, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    record = TorchConfig().make_backend().dump_flight_record()
    assert record is not None
    assert record.dump == dumps["_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"]


@pytest.mark.parametrize(("gpus", "says"), [(0, "sees no GPU"), (1, "has no nccl built in")])
def test_missing_nccl_is_refused_before_the_group_is_formed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gpus: int, says: str
) -> None:
    machine(gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: gpus == 0)
    member = Member(0, 1, 0, 1, 0, '{"host": "127.0.0.1", "port": 1}', "127.0.0.1", has_gpu=True)
    with pytest.raises(ConfigError, match=says + r".*backend_args=\{\"backend\": \"gloo\"\}"):
        TorchConfig(backend="nccl").make_backend().init_process_group(member)
