"""A torch group meets where ``init_method`` says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import raysgd
from raysgd.backends.base import Member
from raysgd.backends.torch import Rendezvous, TorchBackend, _set_environment, remove_store_file
from raysgd.errors import ConfigError
from support.ports import free_port

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    "init_method", [None, "tcp://10.0.0.1:29500", "tcp://[::1]:29500", "file:///shared/meet", "env://"]
)
def test_init_method_of_torch_is_accepted(init_method: str | None) -> None:
    assert raysgd.TorchConfig(init_method=init_method).init_method == init_method


@pytest.mark.parametrize(
    "init_method", ["", "tcp://10.0.0.1", "tcp://:29500", "tcp://host:99999", "file://", "http://x:1"]
)
def test_invalid_init_method_is_refused_when_the_config_is_created(init_method: str) -> None:
    with pytest.raises(ConfigError, match=r"TorchConfig\(init_method="):
        raysgd.TorchConfig(init_method=init_method)


def test_default_is_a_free_port_of_rank_0s_node() -> None:
    rendezvous = Rendezvous.open(None, HOST)
    address = json.loads(rendezvous.address)
    assert address["host"] == HOST and address["port"] > 0
    rendezvous.close()
    rendezvous.close()


def test_given_port_is_bound_and_released() -> None:
    port = free_port()
    for _ in range(3):
        rendezvous = Rendezvous.open(f"tcp://{HOST}:{port}", "10.0.0.1")
        assert json.loads(rendezvous.address) == {"host": HOST, "port": port}
        with pytest.raises(ConfigError, match=f"cannot listen at {HOST}:{port}: .*use"):
            Rendezvous.open(f"tcp://{HOST}:{port}", "10.0.0.1")
        rendezvous.close()


def test_rendezvous_that_was_not_used_gives_its_port_to_the_next_one() -> None:
    port = free_port()
    backend = TorchBackend(raysgd.TorchConfig(init_method=f"tcp://{HOST}:{port}"))
    for _ in range(2):  # another worker was replaced before the group formed
        assert json.loads(backend.open_rendezvous(HOST)) == {"host": HOST, "port": port}
    backend.destroy_process_group()


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 0, on .* cannot listen at 192\.0\.2\.77:29500"):
        Rendezvous.open("tcp://192.0.2.77:29500", HOST)


def test_env_init_method_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ConfigError, match="MASTER_ADDR must be set in the workers"):
        Rendezvous.open("env://", HOST)
    monkeypatch.setenv("MASTER_ADDR", HOST)
    rendezvous = Rendezvous.open("env://", "10.0.0.1")
    assert json.loads(rendezvous.address) == {"host": HOST, "port": port}
    rendezvous.close()


def test_each_group_meets_in_a_file_of_its_own(tmp_path: Path) -> None:
    groups = [Rendezvous.open(f"file://{tmp_path}/meet", HOST) for _ in range(2)]
    paths = [Path(json.loads(rendezvous.address)["path"]) for rendezvous in groups]
    assert paths[0] != paths[1] and {path.parent for path in paths} == {tmp_path}
    paths[0].touch()
    for rendezvous in [*groups, *groups]:
        remove_store_file(rendezvous)
    assert not paths[0].exists()


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"RAYSGD_DEVICE_INDEX": "1"}, "ACCELERATE_TORCH_DEVICE", "cuda:1"),
        ({}, "ACCELERATE_USE_CPU", "true"),
        ({"ACCELERATE_USE_CPU": "false"}, "ACCELERATE_USE_CPU", "false"),
    ],
)
def test_accelerate_trains_on_the_device_of_the_worker(
    given: dict[str, str], name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    _set_environment(
        Member(
            rank=3,
            world_size=4,
            local_rank=1,
            local_world_size=2,
            node_rank=1,
            rendezvous="",
            node_ip=HOST,
            has_gpu=False,
        )
    )
    set_names = [key for key in environment if key.startswith("ACCELERATE_")]
    assert set_names == [name] and environment[name] == value
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("3", "1")
