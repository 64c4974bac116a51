"""A group forms while one of its members dies before it joined, or imports slowly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from support.runs import events_of, make_trainer, once, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(200)]
travels_by_value(__name__)

INIT_TIMEOUT_S = 5


class Arriving:
    """Part of a config that causes a fault when a worker unpickles it.

    The second process that unpickles it dies; or a new process takes longer than the others would wait in the group.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.folder, self.what = str(folder), what

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not raysgd_worker():
            return
        if self.what == "dies" and not once(self.folder, "first") and once(self.folder, "died"):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "is slow" and Path(self.folder, "died").exists() and once(self.folder, f"came-{os.getpid()}"):
            time.sleep(2 * INIT_TIMEOUT_S)
        Path(self.folder, f"came-{os.getpid()}").touch()


def raysgd_worker() -> bool:
    import threading

    return threading.current_thread().name == "raysgd-train"


def reduce_and_die(config: dict[str, Any]) -> dict[str, int]:
    import torch
    import torch.distributed as dist

    state = raysgd.load_checkpoint()
    for step in range(0 if state is None else state["step"] + 1, 3):
        dist.all_reduce(torch.ones(1))
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step})
    arriving = config["arriving"]
    if raysgd.world_rank() == 1 and arriving.what == "is slow" and once(arriving.folder, "died"):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return {"pid": os.getpid()}


@pytest.mark.parametrize("what", ["dies", "is slow"])
def test_survivors_waiting_for_a_member_keep_their_processes(ray_cluster: Any, tmp_path: Path, what: str) -> None:
    backend = raysgd.TorchConfig(init_timeout_s=INIT_TIMEOUT_S)
    failure = raysgd.FailureConfig(max_failures=1, abort_grace_s=20)
    (tmp_path / "marks").mkdir()
    with make_trainer(tmp_path / "runs", 3, backend, failure_config=failure) as trainer:
        before = trainer.run(os.getpid, callbacks=quiet(), returns="all")
        config = {"arriving": Arriving(tmp_path / "marks", what)}
        returned = trainer.run(reduce_and_die, config, callbacks=quiet(), returns="all")
        after = [value["pid"] for value in returned]
        assert len(set(before) & set(after)) == 2, "more processes than the dead one were replaced"
        (failed,) = events_of(trainer, "failure")
        assert "died" in failed["error"]
