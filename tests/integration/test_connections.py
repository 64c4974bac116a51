"""The connections beside Ray: bound to the node's address, and a run that loses them goes on through Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import raysgd
from support.runs import events_of, latest_run, make_trainer, pids, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with make_trainer(tmp_path_factory.mktemp("runs")) as trainer:
        yield trainer


def cut(port: int) -> int:
    """Cut this process's connections to a port, as a network would; returns how many there were."""
    lines = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]
    for line in lines:
        with socket.socket(fileno=os.dup(line.fd)) as other:
            other.shutdown(socket.SHUT_RDWR)
    return len(lines)


def endpoint_of(trainer: raysgd.Trainer) -> Any:
    return trainer._channel.call("endpoint")  # type: ignore[union-attr]


def steps(config: dict[str, Any]) -> int:
    cuts = 0
    for step in range(config["steps"]):
        if step == config.get("cut_at") and raysgd.world_rank() == 1:
            cuts = cut(config["port"])
        raysgd.report(step=step)
    raysgd.barrier()
    return cuts


def test_reports_do_not_go_through_ray(trainer: raysgd.Trainer) -> None:
    pids(trainer)
    port = endpoint_of(trainer).port
    stream = trainer.run_generator(
        steps, {"steps": 1000, "cut_at": 500, "port": port}, callbacks=quiet(), returns="all"
    )
    assert [result["step"] for result in stream] == list(range(1000))
    assert stream.get_returns() == [0, 1]
    (warning,) = events_of(trainer, "warning")
    assert f":{port}" in warning["message"] and "Ray" in warning["message"]
    assert len(latest_run(trainer).workers) == 2000


def test_a_driver_that_loses_its_connection_misses_nothing(trainer: raysgd.Trainer) -> None:
    pids(trainer)
    port = endpoint_of(trainer).port
    stream = trainer.run_generator(steps, {"steps": 20_000}, callbacks=quiet())
    seen = []
    for result in stream:
        seen.append(result["step"])
        if len(seen) == 100:
            assert cut(port) == 1
    assert seen == list(range(20_000))


def test_it_listens_on_the_nodes_address_alone(trainer: raysgd.Trainer) -> None:
    pids(trainer)
    endpoint = endpoint_of(trainer)
    listening = {c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening if address.port == endpoint.port} == {endpoint.host}
    assert endpoint.host not in ("0.0.0.0", "::")


def test_beside_an_encrypted_ray_nothing_goes_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    from raysgd.workers.cluster import uses_tls

    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert not uses_tls()
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert uses_tls()
