"""The connections of a gloo group are found by its listeners, and shut down without touching any other connection."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
from collections.abc import Iterator

import pytest

from raysgd.backends import gloo_sockets

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """Yield a listener and both ends of a connection to it."""
    with socket.create_server((LOOPBACK, 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield listener, server, client


def is_open(one: socket.socket, other: socket.socket) -> bool:
    """Return True if a byte that ``one`` sends arrives at ``other``."""
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


def test_listeners_are_those_of_this_process() -> None:
    gc.collect()  # sockets that earlier tests left in cycles
    before = gloo_sockets.list_listeners()
    with socket.create_server((LOOPBACK, 0)) as listener, socket.socket() as idle:
        idle.bind((LOOPBACK, 0))
        assert gloo_sockets.list_listeners() - before == {listener.getsockname()}
    assert gloo_sockets.list_listeners() == before


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_listeners_of_both_families_are_found_with_and_without_a_default_timeout(timeout_s: float | None) -> None:
    with socket.create_server((LOOPBACK, 0)) as four, socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        socket.setdefaulttimeout(timeout_s)
        try:
            found = gloo_sockets.list_listeners()
        finally:
            socket.setdefaulttimeout(None)
        assert {four.getsockname(), six.getsockname()[:2]} <= found
        assert os.get_blocking(four.fileno()) and os.get_blocking(six.fileno())


@pytest.mark.parametrize("side", ["own", "peer"])
def test_connection_is_shut_down_from_either_side_and_others_stay(side: str) -> None:
    with connected() as (listener, server, client), connected() as (_, other_server, other_client):
        address = frozenset({listener.getsockname()})
        sides = (address, frozenset[gloo_sockets.Address]())
        assert gloo_sockets.GlooListeners(*(sides if side == "own" else sides[::-1])).shut_down() == 1
        assert not is_open(server, client) and not is_open(client, server)
        assert is_open(other_server, other_client) and is_open(other_client, other_server)
        with socket.create_connection(listener.getsockname()) as later:  # the listener itself is left alone
            assert later.getpeername() == listener.getsockname()


def test_shutdown_wakes_a_reader_of_a_silent_peer() -> None:
    with connected() as (listener, server, client):
        server.settimeout(20)
        gloo_sockets.GlooListeners(own=frozenset({listener.getsockname()})).shut_down()
        assert server.recv(1) == b""
        assert client.fileno() >= 0


def test_listing_connections_keeps_the_blocking_mode_of_sockets() -> None:
    """Creating a socket object for a descriptor sets the descriptor's mode if there is a default timeout."""
    with connected() as (listener, server, client):
        socket.setdefaulttimeout(30)
        try:
            assert listener.getsockname() in gloo_sockets.list_listeners()
            gloo_sockets.GlooListeners(frozenset({("192.0.2.1", 1)}), frozenset({("192.0.2.1", 2)})).shut_down()
        finally:
            socket.setdefaulttimeout(None)
        assert all(os.get_blocking(link.fileno()) for link in (listener, server, client))


def test_no_connection_is_shut_down_without_a_group() -> None:
    with connected() as (_, server, client):
        assert gloo_sockets.GlooListeners().shut_down() == 0
        assert is_open(server, client)


def test_ipv6_connection_is_shut_down() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        address = listener.getsockname()[:2]
        assert address in gloo_sockets.list_listeners()
        with socket.create_connection(address) as client:
            server, _ = listener.accept()
            with server:
                assert gloo_sockets.GlooListeners(of_peers=frozenset({address})).shut_down() == 1
                assert not is_open(client, server)


def test_only_connections_announced_by_both_ends_are_shut_down() -> None:
    """A connection that one end alone announced may be another library's."""
    before = gloo_sockets.list_connections()
    with connected() as (_, server, client), connected() as (_, other_server, other_client):
        theirs = [(client.getsockname(), client.getpeername())]  # as the client's process announces it
        found = gloo_sockets.list_connections() - before
        connections = gloo_sockets.GlooConnections.from_exchange(found, [theirs])
        assert connections.ends == {(server.getsockname(), server.getpeername())}
        assert connections.shut_down() == 1
        assert not is_open(server, client) and not is_open(client, server)
        assert is_open(other_server, other_client) and is_open(other_client, other_server)


def test_connection_ends_survive_json() -> None:
    with connected() as (_, _, client):
        announced = json.loads(json.dumps([[client.getsockname(), client.getpeername()]]))
        assert gloo_sockets.GlooConnections.from_exchange(gloo_sockets.list_connections(), [announced]).shut_down() == 1
