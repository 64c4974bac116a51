"""The connections of a group are found by where its members listen, and cut without touching any other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import pytest

from raysgd.backends import gloo_sockets

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and both ends of a connection to it."""
    with socket.create_server((LOOPBACK, 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield listener, server, client


def is_open(one: socket.socket, other: socket.socket) -> bool:
    """Whether what ``one`` sends arrives at ``other``."""
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


def test_listeners_are_those_of_this_process() -> None:
    before = gloo_sockets.listeners()
    with socket.create_server((LOOPBACK, 0)) as listener, socket.socket() as idle:
        idle.bind((LOOPBACK, 0))
        assert gloo_sockets.listeners() - before == {listener.getsockname()}
    assert gloo_sockets.listeners() == before


@pytest.mark.parametrize("side", ["own", "peer"])
def test_a_connection_is_cut_from_either_side_and_others_are_not(side: str) -> None:
    with connected() as (listener, server, client), connected() as (_, other_server, other_client):
        address = {listener.getsockname()}
        cut = gloo_sockets.cut(address, set()) if side == "own" else gloo_sockets.cut(set(), address)
        assert cut == 1
        assert not is_open(server, client) and not is_open(client, server)
        assert is_open(other_server, other_client) and is_open(other_client, other_server)
        with socket.create_connection(listener.getsockname()) as later:  # the listener itself is left alone
            assert later.getpeername() == listener.getsockname()


def test_it_wakes_who_waits_for_a_peer_that_says_nothing() -> None:
    with connected() as (listener, server, client):
        server.settimeout(20)
        gloo_sockets.cut({listener.getsockname()}, set())
        assert server.recv(1) == b""
        assert client.fileno() >= 0


def test_looking_changes_no_socket() -> None:
    """A socket object that is made of a file sets its mode, where there is a default timeout."""
    with connected() as (listener, server, client):
        socket.setdefaulttimeout(30)
        try:
            assert listener.getsockname() in gloo_sockets.listeners()
            gloo_sockets.cut({("192.0.2.1", 1)}, {("192.0.2.1", 2)})
        finally:
            socket.setdefaulttimeout(None)
        assert all(os.get_blocking(each.fileno()) for each in (listener, server, client))


def test_without_a_group_nothing_is_cut() -> None:
    with connected() as (_, server, client):
        assert gloo_sockets.cut((), ()) == 0
        assert is_open(server, client)


def test_ipv6() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        address = listener.getsockname()[:2]
        assert address in gloo_sockets.listeners()
        with socket.create_connection(address) as client:
            server, _ = listener.accept()
            with server:
                assert gloo_sockets.cut(set(), {address}) == 1
                assert not is_open(client, server)


def test_what_is_new_at_both_ends_is_the_groups_and_is_cut() -> None:
    """Not what one end alone has told, such as a connection of another library to somebody else."""
    before = gloo_sockets.connected()
    with connected() as (_, server, client), connected() as (_, other_server, other_client):
        theirs = [(client.getsockname(), client.getpeername())]  # as the process with the client would tell it
        found = gloo_sockets.connected() - before
        pairs = gloo_sockets.Pairs.of(found, [theirs])
        assert pairs.ends == {(server.getsockname(), server.getpeername())}
        assert pairs.cut() == 1
        assert not is_open(server, client) and not is_open(client, server)
        assert is_open(other_server, other_client) and is_open(other_client, other_server)


def test_ends_that_came_as_json_are_the_same() -> None:
    with connected() as (_, _, client):
        told = json.loads(json.dumps([[client.getsockname(), client.getpeername()]]))
        assert gloo_sockets.Pairs.of(gloo_sockets.connected(), [told]).cut() == 1
