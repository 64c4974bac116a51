"""Members meet before there is a group: each gets what all have brought, or hears in time that some have not come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.backends.base import Member
from raysgd.backends.meeting import MeetingPlace, free_address

HOST = "127.0.0.1"
BROUGHT = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


def member(rank: int, size: int, rendezvous: str) -> Member:
    return Member(rank, size, rank, size, 0, rendezvous, HOST, has_gpu=False)


def meet(brought: list[Any], *, come: int | None = None, timeout_s: float = 20) -> list[Future[list[Any]]]:
    """A meeting of as many as bring something; only the first ``come`` of them come to it."""
    size = len(brought)
    place = MeetingPlace()
    rendezvous = place.open(HOST)
    with ThreadPoolExecutor(size) as pool:
        return [
            pool.submit((place if rank == 0 else MeetingPlace()).meet, member(rank, size, rendezvous), each, timeout_s)
            for rank, each in enumerate(brought[:come])
        ]


@settings(max_examples=25)
@given(st.lists(BROUGHT, min_size=1, max_size=5))
def test_all_get_what_each_has_brought(brought: list[Any]) -> None:
    assert [each.result() for each in meet(brought)] == [brought] * len(brought)


def test_those_who_have_come_hear_who_has_not() -> None:
    first, second = meet(["a", "b", "c"], come=2, timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"ranks \[2\]"):
        first.result()
    with pytest.raises((TimeoutError, ConnectionError)):
        second.result()


def test_who_comes_to_nobody_is_told_so() -> None:
    place = MeetingPlace()
    rendezvous = place.open(HOST)
    place.close()
    with pytest.raises(OSError, match="refused"):
        MeetingPlace().meet(member(1, 2, rendezvous), None, timeout_s=5)


def test_one_who_leaves_before_the_end_is_no_end_of_waiting() -> None:
    """It said who it is, and has died: the others hear that from the controller; here they must not wait for ever."""
    place = MeetingPlace()
    host, port = json.loads(place.open(HOST))
    with socket.create_connection((host, port)) as link:
        link.sendall(b"[1, ")
    with pytest.raises(ConnectionError, match="left the meeting"):
        place.meet(member(0, 2, ""), None, timeout_s=5)


def test_a_place_serves_one_meeting_after_another() -> None:
    place = MeetingPlace()
    for number in range(3):
        rendezvous = place.open(HOST)
        other: Callable[[], Any] = lambda r=rendezvous, n=number: MeetingPlace().meet(member(1, 2, r), n, 5)  # noqa: E731
        with ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(other)
            assert place.meet(member(0, 2, rendezvous), "mine", 5) == ["mine", number] == theirs.result()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raysgd")]


def test_a_free_address_can_be_listened_at() -> None:
    host, _, port = free_address(HOST).rpartition(":")
    with socket.create_server((host, int(port))) as server:
        assert server.getsockname() == (HOST, int(port))
