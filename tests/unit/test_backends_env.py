"""The environment that the ``"env"`` backend gives, and the port that it keeps free for the script's group."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace

import pytest
import torch.distributed as dist

import raysgd
from raysgd.backends.base import Member
from raysgd.backends.env import EnvBackend, variables
from raysgd.errors import ConfigError

HOST = "127.0.0.1"
MEMBER = Member(
    rank=3,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    rendezvous=json.dumps([HOST, 2345]),
    node_ip=HOST,
    has_gpu=False,
    num_nodes=2,
    attempt=3,
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_member_has_the_variables_of_torchrun() -> None:
    assert variables(MEMBER, raysgd.EnvConfig(max_restarts=5, run_id="exp")) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": "2345",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "exp",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_torch_takes_the_variables_for_those_of_torchrun() -> None:
    EnvBackend(raysgd.EnvConfig()).init_process_group(MEMBER)
    assert dist.is_torchelastic_launched()


def test_script_forms_its_group_at_the_reserved_port() -> None:
    backend = EnvBackend(raysgd.EnvConfig())
    rendezvous = backend.open_rendezvous(HOST)
    backend.init_process_group(Member(0, 1, 0, 1, 0, rendezvous, HOST, has_gpu=False))
    try:
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        backend.destroy_process_group()
    assert not dist.is_initialized(), "the group of a script that did not destroy it is left"


def test_reserved_port_is_kept_from_others_until_the_attempt_is_over() -> None:
    backend = EnvBackend(raysgd.EnvConfig())
    _, port = json.loads(backend.open_rendezvous(HOST))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port))
    backend.destroy_process_group()
    with socket.socket() as other:
        other.bind((HOST, port))


def test_each_attempt_has_a_port_of_its_own() -> None:
    backends = [EnvBackend(raysgd.EnvConfig()) for _ in range(20)]
    ports = [json.loads(backend.open_rendezvous(HOST))[1] for backend in backends]
    for backend in backends:
        backend.destroy_process_group()
    assert len(set(ports)) == len(backends)


@pytest.mark.parametrize(
    ("error", "is_collective"),
    [
        (RuntimeError("[gloo/transport] Connection closed by peer"), True),
        (dist.DistNetworkError("the store is gone"), True),
        (ValueError("gloo"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_broken_group_is_distinguished_from_the_errors_of_a_script(error: Exception, is_collective: bool) -> None:
    assert EnvBackend(raysgd.EnvConfig()).is_collective_error(error) == is_collective


def test_every_attempt_has_new_processes() -> None:
    assert not raysgd.EnvConfig().can_rejoin
    assert replace(raysgd.EnvConfig(), max_restarts=1) != raysgd.EnvConfig()


@pytest.mark.parametrize(("field", "value"), [("max_restarts", -2), ("max_restarts", 1.5), ("run_id", "")])
def test_config_is_checked_when_it_is_created(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        raysgd.EnvConfig(**{field: value})  # type: ignore[arg-type]
