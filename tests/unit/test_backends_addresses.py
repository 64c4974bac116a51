"""Ports for servers that other libraries create."""

from __future__ import annotations

import socket

import pytest

from raysgd.backends.addresses import address_of, find_free_address, reserve_port

HOST = "127.0.0.1"


def test_free_address_can_be_bound() -> None:
    host, _, port = find_free_address(HOST).rpartition(":")
    with socket.create_server((host, int(port))) as server:
        assert server.getsockname() == (HOST, int(port))


def test_reserved_port_accepts_nobody_and_is_given_to_nobody() -> None:
    with reserve_port(HOST) as reserved:
        host, _, port = address_of(reserved).rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 5)
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, int(port)))
    with socket.create_server((host, int(port))) as server:
        assert server.getsockname() == (HOST, int(port))
