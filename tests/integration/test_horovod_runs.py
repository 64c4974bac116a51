"""Behaviour that only the Horovod backend has."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysgd
from raysgd.errors import ConfigError
from support.frameworks import needs_horovod
from support.poll import until
from support.runs import PATIENCE_S, make_trainer, quiet, travels_by_value
from support.totals import with_horovod_and_torch

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ray_cluster"), needs_horovod]
travels_by_value(__name__)
travels_by_value("support.totals")


def interface_and_sum() -> tuple[str | None, float]:
    return os.environ.get("HOROVOD_GLOO_IFACE"), with_horovod_and_torch()(1.0)


def test_first_network_interface_of_the_node_is_used(tmp_path: Path) -> None:
    config = raysgd.HorovodConfig(nics=["no_such_nic", "lo"])
    with make_trainer(tmp_path, 2, config) as trainer:
        assert trainer.run(interface_and_sum, callbacks=quiet(), returns="all") == [("lo", 2.0)] * 2


def test_error_lists_the_interfaces_of_the_node(tmp_path: Path) -> None:
    config = raysgd.HorovodConfig(nics=["no_such_nic"])
    with (
        make_trainer(tmp_path, 2, config) as trainer,
        pytest.raises(
            ValueError,
            match=r"HorovodConfig\(nics=\['no_such_nic'\]\): the node \S+ has none of these interfaces; give one of .*lo",
        ),
    ):
        trainer.run(interface_and_sum, callbacks=quiet())


def wait_for_stopped_rank(config: dict[str, Any]) -> bool | None:
    """Rank 0 waits in an operation while rank 1 is stopped, then resumes rank 1; return whether the operation failed."""
    from horovod.common.exceptions import HorovodInternalError

    total = with_horovod_and_torch()
    total(1.0)
    if raysgd.world_rank() == 1:
        Path(config["folder"], "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(Exception):
            total(1.0)
        return None
    pid_file = Path(config["folder"], "pid")
    stopped = psutil.Process(until(lambda: int((pid_file.exists() and pid_file.read_text()) or 0), PATIENCE_S))
    assert until(lambda: stopped.status() == psutil.STATUS_STOPPED, PATIENCE_S)
    woken = threading.Event()
    waker = threading.Timer(15, lambda: (woken.set(), stopped.resume()))
    waker.start()
    had_given_up = False
    try:
        total(1.0)
    except HorovodInternalError:
        had_given_up = not woken.is_set()
    waker.join()
    return had_given_up


@pytest.mark.parametrize(("timeout_s", "gives_up"), [(5, True), (60, False)])  # the default timeout fails too
def test_operation_fails_after_timeout_s(tmp_path: Path, timeout_s: float, gives_up: bool) -> None:
    failure = raysgd.FailureConfig(heartbeat_timeout_s=100)
    with make_trainer(tmp_path, 2, raysgd.HorovodConfig(timeout_s=timeout_s), failure_config=failure) as trainer:
        config = {"folder": str(tmp_path)}
        assert trainer.run(wait_for_stopped_rank, config, callbacks=quiet()) is gives_up


def run_elastic() -> None:
    import horovod.torch as hvd
    import torch

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        raise AssertionError("it was entered")

    train(hvd.elastic.TorchState(model=torch.nn.Linear(1, 1)))


def test_hvd_elastic_run_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    with (
        make_trainer(tmp_path, 2, "horovod") as trainer,
        pytest.raises(ConfigError, match=r"hvd\.elastic\.run .*save_checkpoint.*load_checkpoint"),
    ):
        trainer.run(run_elastic, callbacks=quiet())
