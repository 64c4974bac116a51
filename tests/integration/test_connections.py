"""raysgd's own connections bind to the node's address; a run that loses them continues through Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysgd
from raysgd.callbacks import JsonLinesCallback
from support.poll import until
from support.runs import PATIENCE_S, events_of, latest_run, make_trainer, pids, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


def cut(port: int) -> int:
    """Cut this process's connections to a port, as a network would; return their number."""
    count = 0
    for line in psutil.Process().net_connections("tcp"):
        if line.raddr and line.raddr.port == port:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(line.fd)) as other,
            ):  # the socket was closed meanwhile
                other.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def endpoint_of(trainer: raysgd.Trainer) -> Any:
    return trainer._runs.connect().call("endpoint")


def steps(config: dict[str, Any]) -> int:
    cuts = 0
    for step in range(config["steps"]):
        if step == config.get("cut_at") and raysgd.world_rank() == 1:
            cuts = until(lambda: cut(config["port"]), PATIENCE_S)  # a fast loop may run before its connection exists
        if step == config.get("wait_at"):
            until(lambda: os.path.exists(config["marker"]), PATIENCE_S)
        raysgd.report(step=step)
    raysgd.barrier()
    return cuts


def test_reports_bypass_ray(trainer: raysgd.Trainer) -> None:
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


def test_driver_that_loses_its_connection_misses_no_result(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    pids(trainer)
    port = endpoint_of(trainer).port
    # The workers wait for the cut: else a slow driver would be at its 100th result when the run is over.
    config = {"steps": 20_000, "wait_at": 10_000, "marker": str(tmp_path / "cut")}
    stream = trainer.run_generator(steps, config, callbacks=quiet())
    seen = []
    for result in stream:
        seen.append(result["step"])
        if len(seen) == 100:
            assert until(lambda: cut(port), PATIENCE_S) == 1
            Path(config["marker"]).touch()
    assert seen == list(range(20_000))


def test_listener_binds_to_the_node_address_only(trainer: raysgd.Trainer) -> None:
    pids(trainer)
    endpoint = endpoint_of(trainer)
    listening = {c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening if address.port == endpoint.port} == {endpoint.host}
    assert endpoint.host not in ("0.0.0.0", "::")


def test_worker_listeners_bind_to_the_node_address(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """Workers without a process group have only the sockets of Ray."""
    without = trainer.run(listens_on, callbacks=quiet(), returns="all")
    with make_trainer(tmp_path, 2, "torch") as torch_trainer:
        within = torch_trainer.run(listens_on, callbacks=quiet(), returns="all")
    host = endpoint_of(trainer).host
    for plain, grouped in zip(without, within, strict=True):
        more = Counter(grouped) - Counter(plain)
        assert more, "no socket of a process group was found"
        assert set(more) <= {host, "127.0.0.1"}, f"torch workers listen on {more}"


def listens_on() -> list[str]:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(torch.ones(()))
    raysgd.barrier()
    return [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]


# -- Ray with TLS ------------------------------------------------------------------------------------------------------


class SeemsEncrypted(raysgd.FailureConfig):
    """Makes only the TrainerActor believe that Ray uses TLS, when it unpickles its settings."""

    def __reduce__(self) -> Any:
        return _open_settings, (self.max_failures,)


def _open_settings(max_failures: int) -> raysgd.FailureConfig:
    os.environ["RAY_USE_TLS"] = "1"
    return raysgd.FailureConfig(max_failures=max_failures)


@pytest.fixture(scope="module")
def encrypted(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with make_trainer(tmp_path_factory.mktemp("runs"), failure_config=SeemsEncrypted()) as trainer:
        pids(trainer)
        assert endpoint_of(trainer) is None
        yield trainer


def much(config: dict[str, Any]) -> Any:
    start = 0
    if (state := raysgd.load_checkpoint()) is not None:
        start = state["step"] + 1
    for step in range(start, 2000):
        raysgd.report(step=step)
        if step == 999:
            raysgd.save_checkpoint({"step": step})
            while config["how"] == "dies" and raysgd.load_checkpoint() is None:
                time.sleep(0.01)
            if config["how"] == "dies" and raysgd.world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    raysgd.barrier()
    if config["how"] == "raises":
        raise ValueError("of the user")
    return start, bytes([raysgd.world_rank()]) * (8 << 20)


def test_with_tls_results_go_through_ray(encrypted: raysgd.Trainer) -> None:
    stream = encrypted.run_generator(much, {"how": "ends"}, callbacks=[*quiet(), JsonLinesCallback()], returns="all")
    assert [result["step"] for result in stream] == list(range(2000))
    assert [(start, value[0], len(value)) for start, value in stream.get_returns()] == [
        (0, 0, 8 << 20),
        (0, 1, 8 << 20),
    ]
    assert len(latest_run(encrypted).workers) == 4000
    assert not [event for event in events_of(encrypted, "warning") if "connection" in event["message"]]
    logs = [file for file in Path(str(encrypted.run_dir)).rglob("*.jsonl") if "metrics" not in file.name]
    assert 2000 in [len(file.read_text().splitlines()) for file in logs], "what the callbacks' process got"


def test_with_tls_an_error_arrives(encrypted: raysgd.Trainer) -> None:
    stream = encrypted.run_generator(much, {"how": "raises"}, callbacks=quiet())
    with pytest.raises(ValueError, match="of the user"):
        stream.get_returns()
    # The error is raised first, and the last records are written then.
    assert until(lambda: len(latest_run(encrypted).metrics) == 2000, PATIENCE_S), latest_run(encrypted)


def test_with_tls_a_dead_worker_is_replaced(encrypted: raysgd.Trainer) -> None:
    assert encrypted.run(much, {"how": "dies"}, callbacks=quiet())[0] == 1000
    assert list(latest_run(encrypted).metrics["step"]) == list(range(2000))
    (failure,) = events_of(encrypted, "failure")
    assert failure["ranks"] == [1]


class CannotListen(raysgd.FailureConfig):
    """Leaves the TrainerActor no address to listen on, when it unpickles its settings."""

    def __reduce__(self) -> Any:
        return _open_settings_without_an_address, ()


def _open_settings_without_an_address() -> raysgd.FailureConfig:
    from raysgd.transport import Listener

    async def refuse(*_: Any) -> Any:
        raise OSError("no such address")

    Listener.open = refuse  # type: ignore[method-assign]
    return raysgd.FailureConfig()


def test_controller_that_cannot_listen_warns_and_uses_ray(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, failure_config=CannotListen()) as trainer:
        stream = trainer.run_generator(steps, {"steps": 100}, callbacks=quiet())
        assert [result["step"] for result in stream] == list(range(100))
        (warning,) = events_of(trainer, "warning")
        assert "cannot listen on its node's address (no such address)" in warning["message"]
