"""The processes of the control plane are killed: the controller itself, and the one of its callbacks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import WorkerError
from support.cluster import ClusterState
from support.poll import until
from support.runs import (
    PATIENCE_S,
    are_gone,
    controller_pid,
    events_of,
    latest_run,
    make_trainer,
    pids,
    quiet,
    travels_by_value,
)

pytestmark = [
    pytest.mark.shared_trainer,
    pytest.mark.fault,
]
travels_by_value(__name__)


@pytest.fixture(scope="module")
def trainer(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raysgd.Trainer]:
    with make_trainer(tmp_path_factory.mktemp("runs")) as trainer:
        yield trainer


class Logger(raysgd.Callback):
    """Writes a line per result, in the process of the controller's callbacks."""

    runs_in = "controller"

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def on_result(self, result: raysgd.Result) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps([result["step"], os.getpid()]) + "\n")


def until_there_is_a_file(config: dict[str, Any]) -> str:
    step = 0
    while not os.path.exists(config["file"]):
        raysgd.report(step=step)
        step += 1
        time.sleep(0.01)
    return "went"


def test_the_process_of_the_callbacks(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = {"file": str(tmp_path / "go")}
    stream = trainer.run_generator(until_there_is_a_file, config, callbacks=[*quiet(), Logger(log)])
    assert until(lambda: log.exists() and log.read_text().endswith("]\n"), PATIENCE_S)
    killed = json.loads(log.read_text().splitlines()[0])[1]
    os.kill(killed, signal.SIGKILL)
    assert are_gone([killed])
    (tmp_path / "go").write_text("")
    assert stream.get_returns() == "went", "training does not depend on it"
    told = [warning["message"] for warning in events_of(trainer, "warning")]
    assert any("the process of the controller's callbacks is gone" in message for message in told)

    log.unlink()
    assert (
        trainer.run(until_there_is_a_file, {"file": str(tmp_path / "go")}, callbacks=[*quiet(), Logger(log)]) == "went"
    )
    assert trainer.run(report_once, callbacks=[*quiet(), Logger(log)]) is None
    assert json.loads(log.read_text().splitlines()[-1])[1] != killed


def report_once() -> None:
    raysgd.report(step=0)


def test_the_controller(ray_cluster: Any, tmp_path: Path, trainer: raysgd.Trainer) -> None:
    trainer.shutdown()
    before = ClusterState.now()
    with make_trainer(tmp_path / "runs") as other:
        processes = pids(other)
        config = {"file": str(tmp_path / "never")}
        stream = other.run_generator(until_there_is_a_file, config, callbacks=quiet())
        seen = next(stream)
        assert until((Path(str(stream.run_dir)) / "events.jsonl").exists, PATIENCE_S)
        os.kill(controller_pid(), signal.SIGKILL)
        with pytest.raises(WorkerError, match="the Trainer's controller process is gone, and the run with it"):
            stream.get_returns()
        assert seen["step"] == 0
        assert are_gone(processes)
        assert before.leftovers() == []
        assert raysgd.load_run(str(stream.run_dir)).outcome is None
        after = pids(other)
        assert len(after) == 2 and not set(after) & set(processes), "the Trainer cannot be used again"
        assert latest_run(other).outcome == "done"
