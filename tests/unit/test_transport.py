"""Connections between raysgd's processes: they send the token first, then complete messages."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.transport import (
    MAX_MESSAGE_BYTES,
    TOKEN_BYTES,
    Endpoint,
    connect,
    pack,
    read_message,
    receive_message,
    shorten_retransmissions,
)
from support.listening import Loop, listening
from support.poll import until

HELLO = {"kind": "echo", "name": "a"}


async def echo(hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the hello, then each message back, until an end is asked for."""
    writer.write(pack(hello))
    while (message := await read_message(reader)) != "end":
        writer.write(pack(message))
        await writer.drain()


@pytest.fixture(scope="module")
def place(loop: Loop) -> Iterator[Endpoint]:
    with listening(loop, {"echo": echo}) as place:
        yield place


def is_hung_up(line: socket.socket) -> bool:
    line.settimeout(10)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


# -------------------------------------------------------------------------------------------------- messages


@given(st.lists(st.recursive(st.none() | st.binary() | st.integers(), st.lists, max_leaves=5)))
def test_messages_are_received_as_they_were_sent(messages: list[Any]) -> None:
    file = io.BytesIO(b"".join(pack(message) for message in messages))
    assert [receive_message(file) for _ in messages] == messages
    with pytest.raises(EOFError):
        receive_message(file)


@given(st.data())
def test_incomplete_message_ends_the_stream(data: st.DataObject) -> None:
    whole = pack({"rows": b"x" * 100})
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(EOFError):
        receive_message(io.BytesIO(whole[:cut]))


def test_invalid_length_ends_the_stream() -> None:
    with pytest.raises(EOFError, match="out of step"):
        receive_message(io.BytesIO((MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + b"x"))


# ------------------------------------------------------------------------------------------------ connections


def test_connection_is_served_by_the_handler_that_it_names(place: Endpoint) -> None:
    with connect(place, HELLO, 10) as line, line.makefile("rb") as file:
        assert receive_message(file) == HELLO
        for size in (0, 1, 5_000_000):
            line.sendall(pack(b"x" * size))
            assert receive_message(file) == b"x" * size
        line.sendall(pack("end"))
        with pytest.raises(EOFError):
            receive_message(file)


def test_connection_without_the_token_is_closed(place: Endpoint) -> None:
    wrong = Endpoint(place.host, place.port, bytes(len(place.token)))
    with connect(wrong, HELLO, 10) as line:
        assert is_hung_up(line)


@pytest.mark.parametrize(
    "after_token",
    [
        b"\x00\x02[]",
        b"\x00\x03{{{",
        b"\x00\x02\xff\xff",
        (19).to_bytes(2, "big") + b'{"kind": "missing"}',
        b"\x00\x02{}",
    ],
    ids=["no object", "no json", "no text", "no such kind", "no kind"],
)
def test_invalid_hello_ends_its_connection_only(place: Endpoint, after_token: bytes) -> None:
    with socket.create_connection((place.host, place.port), 10) as line:
        line.sendall(place.token + after_token)
        assert is_hung_up(line)
    with connect(place, HELLO, 10) as line, line.makefile("rb") as file:
        assert receive_message(file) == HELLO


def test_silent_connection_is_closed(loop: Loop) -> None:
    with (
        listening(loop, {"echo": echo}, hello_timeout_s=0.05) as place,
        socket.create_connection((place.host, place.port), 10) as line,
    ):
        assert is_hung_up(line)


def test_listener_binds_the_given_address_only(place: Endpoint) -> None:
    import psutil

    bound = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert (place.host, place.port) in bound
    assert not any(host in ("0.0.0.0", "::") and port == place.port for host, port in bound)


def test_connect_without_a_listener_raises_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        connect(Endpoint("127.0.0.1", port, bytes(TOKEN_BYTES)), HELLO, 1)


def test_failing_handler_ends_its_connection_only(loop: Loop) -> None:
    async def fails(*_: Any) -> None:
        raise KeyError("no such run")

    with listening(loop, {"fails": fails, "echo": echo}) as place:
        with connect(place, {"kind": "fails"}, 10) as line:
            assert is_hung_up(line)
        with connect(place, HELLO, 10) as line, line.makefile("rb") as file:
            assert receive_message(file) == HELLO


def test_closed_listener_accepts_no_connection(loop: Loop) -> None:
    with listening(loop, {"echo": echo}) as place:
        pass

    def is_closed() -> bool:
        try:
            connect(place, HELLO, 1).close()
        except OSError:
            return True
        return False

    assert until(is_closed, 10)


def test_token_is_not_in_the_repr() -> None:
    assert "secret" not in repr(Endpoint("127.0.0.1", 1, b"secret"))


def test_connections_of_the_process_send_again_at_most_a_second_after_the_last_try() -> None:
    """Otherwise one that was cut off for 15 s may be silent for 10 s more when the cable is in again."""
    option = 44  # TCP_RTO_MAX_MS of Linux 6.15
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as line:
        try:
            line.getsockopt(socket.IPPROTO_TCP, option)
        except OSError:
            pytest.skip("this kernel has no limit for a connection")
        shorten_retransmissions()
        accepted, _ = server.accept()
        with accepted:
            assert line.getsockopt(socket.IPPROTO_TCP, option) == 1000
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 900_000, "it is given up too early"
            line.sendall(b"x")
            assert accepted.recv(1) == b"x"
