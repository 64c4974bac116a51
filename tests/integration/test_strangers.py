"""Strangers connect to every port of a run: the run continues, and what raysgd opens answers nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysgd
from raysgd.transport import TOKEN_BYTES
from support.runs import PATIENCE_S, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
travels_by_value(__name__)

#: A cluster of this module's own, because its ports are attacked too.
RAY_INIT = {"num_cpus": 2, "include_dashboard": False, "namespace": "strangers"}
NUM_AT_ONCE = 200
#: How long a port that answers nothing is listened to.
SILENT_S = 0.3
HELLO = json.dumps({"kind": "frames", "run": "x", "seq": 0}).encode()
GREETING = len(HELLO).to_bytes(2, "big") + HELLO
ATTACKS = {
    "garbage": random.Random(0).randbytes(100_000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "wrong token": bytes(TOKEN_BYTES) + GREETING,
    "no token": GREETING,
    "line of JSON": b'[1, "10.0.0.1:1"]\n',
}


def train_func(config: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    while not raysgd.broadcast(os.path.exists(config["end"])):
        ones = torch.ones(3)
        if dist.is_initialized():
            dist.all_reduce(ones)
        raysgd.report(total=float(ones[0]))
        time.sleep(0.02)
    return raysgd.world_rank()


def find_ports() -> dict[tuple[str, int], str]:
    """Return the addresses at which this process and its descendants listen, each with the process's title."""
    me = psutil.Process()
    found = {}
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    title = " ".join(process.cmdline()).split(" ")[0]
                    found[connection.laddr.ip, connection.laddr.port] = title
    return found


def reach(ip: str, port: int, timeout_s: float = 5.0) -> socket.socket:
    """Connect to a port; by the loopback if it listens on all interfaces."""
    return socket.create_connection(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip), port), timeout_s)


def send(ip: str, port: int, data: bytes) -> bytes | None:
    """Send data; return what the port answers, nothing if it hangs up, or None if it says nothing for a while."""
    with contextlib.suppress(OSError), reach(ip, port) as link:
        link.sendall(data)
        link.settimeout(SILENT_S)
        try:
            return link.recv(1000)
        except TimeoutError:
            return None
    return b""


@pytest.fixture
def run(ray_cluster: Any, tmp_path: Path) -> Iterator[Callable[[str], raysgd.ResultStream]]:
    """Return a function that starts a run of two workers with a backend, and waits until it trains."""
    with contextlib.ExitStack() as open_trainers:

        def start(backend: str) -> raysgd.ResultStream:
            failure = raysgd.FailureConfig(max_failures=0)
            trainer = open_trainers.enter_context(make_trainer(tmp_path, 2, backend, failure_config=failure))
            stream = trainer.run_generator(train_func, {"end": str(tmp_path / "end")}, callbacks=quiet(), returns="all")
            next(stream)
            return stream

        yield start


@pytest.mark.parametrize("backend", ["torch", "none"])
def test_strangers_at_every_port_learn_nothing_and_stop_nothing(
    run: Callable[[str], raysgd.ResultStream], tmp_path: Path, backend: str
) -> None:
    stream = run(backend)
    endpoint = stream._channel.call("endpoint")
    ports = find_ports()
    assert (endpoint.host, endpoint.port) in ports
    with contextlib.ExitStack() as silent:
        for ip, port in ports:
            with contextlib.suppress(OSError):
                silent.enter_context(reach(ip, port))
        attacks = [(ip, port, how) for ip, port in ports for how in ATTACKS]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda attack: send(*attack[:2], ATTACKS[attack[2]]), attacks))
        answered = {attack: answer for attack, answer in zip(attacks, answers, strict=True) if answer}
        assert not [attack for attack in answered if attack[:2] == (endpoint.host, endpoint.port)], answered
        for ip, port in ports:
            is_own = (ip, port) == (endpoint.host, endpoint.port)
            # Some ports of Ray accept fewer; how many is not our promise.
            with contextlib.nullcontext() if is_own else contextlib.suppress(OSError):
                for _ in range(NUM_AT_ONCE):
                    silent.enter_context(reach(ip, port, 10 if is_own else 0.5))
        for _ in range(20):  # they do not keep others from being served
            assert next(stream)["total"] == (2 if backend == "torch" else 1)
        (tmp_path / "end").touch()
        assert stream.get_returns() == [0, 1]


def test_silent_strangers_are_hung_up(run: Callable[[str], raysgd.ResultStream], tmp_path: Path) -> None:
    """The TrainerActor closes a connection that shows no token in 10 s."""
    stream = run("none")
    endpoint = stream._channel.call("endpoint")
    links = [reach(endpoint.host, endpoint.port) for _ in range(3)]
    for link in links:
        link.settimeout(PATIENCE_S)
        assert link.recv(1) == b""
        link.close()
    (tmp_path / "end").touch()
    assert stream.get_returns() == [0, 1]
