"""The members of a TensorFlow cluster know each other's addresses without a server of raysgd."""

from __future__ import annotations

import json
import os
import socket

import pytest

import raysgd
from raysgd.backends.base import Member
from raysgd.backends.tensorflow import TensorflowBackend
from raysgd.workers.group.ranks import choose_rendezvous_ips, join_opened
from raysgd.workers.orders import WorkerInfo

TORCH, TENSORFLOW = raysgd.TorchConfig(), raysgd.TensorflowConfig()


def info_of(node: str) -> WorkerInfo:
    return WorkerInfo(node, f"10.0.0.{node}", f"node-{node}", pid=1)


def test_ranks_open_at_their_own_addresses_and_on_one_node_at_the_loopback() -> None:
    two_nodes, one_node = [info_of("1"), info_of("1"), info_of("2")], [info_of("1")] * 2
    assert choose_rendezvous_ips(two_nodes, TORCH) == ["10.0.0.1"]
    assert choose_rendezvous_ips(one_node, TORCH) == ["127.0.0.1"]
    assert choose_rendezvous_ips(two_nodes, TENSORFLOW) == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    assert choose_rendezvous_ips(one_node, TENSORFLOW) == ["127.0.0.1"] * 2


def test_member_gets_what_rank_0_opened_or_what_all_ranks_did() -> None:
    assert join_opened(TORCH, ["here"]) == "here"
    assert json.loads(str(join_opened(TENSORFLOW, ["a:1", "b:2"]))) == ["a:1", "b:2"]
    assert join_opened(TORCH, []) is None and join_opened(TENSORFLOW, []) is None


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[TensorflowBackend]:
    monkeypatch.setenv("TF_CONFIG", "")  # so that it is restored
    return [TensorflowBackend(TENSORFLOW) for _ in range(3)]


def test_all_members_get_all_addresses_and_the_port_of_each_is_free_for_its_server(
    backends: list[TensorflowBackend],
) -> None:
    opened = [backend.open_rendezvous("127.0.0.1") for backend in backends]
    assert len(set(opened)) == 3, "all are reserved"
    for rank, backend in enumerate(backends):
        port = int(opened[rank].rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        backend.init_process_group(Member(rank, 3, rank, 3, 0, json.dumps(opened), "127.0.0.1", has_gpu=False))
        assert json.loads(os.environ["TF_CONFIG"]) == {
            "cluster": {"worker": opened},
            "task": {"type": "worker", "index": rank},
        }
        socket.create_server(("127.0.0.1", port)).close()


def test_rendezvous_that_was_not_used_is_released_by_the_next_one(backends: list[TensorflowBackend]) -> None:
    backend = backends[0]
    first, second = backend.open_rendezvous("127.0.0.1"), backend.open_rendezvous("127.0.0.1")
    assert first != second
    socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))).close()
    backend.destroy_process_group()
    socket.create_server(("127.0.0.1", int(second.rpartition(":")[2]))).close()
