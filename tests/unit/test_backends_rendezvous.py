"""Members exchange values before their group exists; members that do not arrive are reported in time."""

from __future__ import annotations

import json
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from raysgd.backends.base import Member
from raysgd.backends.rendezvous import RendezvousPoint, find_free_address

HOST = "127.0.0.1"


def make_member(rank: int, size: int, rendezvous: str) -> Member:
    return Member(rank, size, rank, size, 0, rendezvous, HOST, has_gpu=False)


def start_exchange(
    values: list[Any], *, num_arriving: int | None = None, timeout_s: float = 20
) -> list[Future[list[Any]]]:
    """Exchange one value per rank; only the first ``num_arriving`` ranks take part. ``timeout_s`` is rank 0's."""
    first = RendezvousPoint()
    rendezvous = first.open(HOST)

    def take_part(rank: int) -> list[Any]:
        point = first if rank == 0 else RendezvousPoint()
        member = make_member(rank, len(values), rendezvous)
        return point.exchange(member, values[rank], timeout_s if rank == 0 else 20)

    with ThreadPoolExecutor(len(values)) as pool:
        return [pool.submit(take_part, rank) for rank in range(len(values))[:num_arriving]]


@pytest.mark.parametrize("values", [["alone"], ["a", None], [1, True, ["ü", [], 10**20], "line\nbreak"]])
def test_all_members_get_all_values_by_rank(values: list[Any]) -> None:
    assert [future.result() for future in start_exchange(values)] == [values] * len(values)


def test_timeout_names_the_ranks_that_did_not_arrive() -> None:
    first, second = start_exchange(["a", "b", "c"], num_arriving=2, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"ranks \[.*2\]"):
        first.result()
    with pytest.raises(ConnectionError):
        second.result()


def test_member_without_a_rank_0_fails_at_once() -> None:
    point = RendezvousPoint()
    rendezvous = point.open(HOST)
    point.close()
    with pytest.raises(OSError, match="refused"):
        RendezvousPoint().exchange(make_member(1, 2, rendezvous), None, timeout_s=5)


def test_member_that_dies_during_the_exchange_ends_it() -> None:
    """The controller reports the death; here nobody may wait for ever."""
    point = RendezvousPoint()
    host, port = json.loads(point.open(HOST))
    with socket.create_connection((host, port)) as link:
        link.sendall(b"[1, ")
    with pytest.raises(ConnectionError, match="left the rendezvous"):
        point.exchange(make_member(0, 2, ""), None, timeout_s=5)


def test_point_serves_one_exchange_after_another() -> None:
    point = RendezvousPoint()
    with ThreadPoolExecutor(1) as pool:
        for number in range(3):
            member = make_member(1, 2, point.open(HOST))
            theirs = pool.submit(RendezvousPoint().exchange, member, number, 5)
            assert point.exchange(make_member(0, 2, ""), "mine", 5) == ["mine", number] == theirs.result()


def test_free_address_can_be_bound() -> None:
    host, _, port = find_free_address(HOST).rpartition(":")
    with socket.create_server((host, int(port))) as server:
        assert server.getsockname() == (HOST, int(port))
