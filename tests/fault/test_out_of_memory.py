"""Workers that the kernel kills for memory in a limited cgroup, on the node of the controller and on another node."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.errors import WorkerDiedError
from support.cgroups import limited_memory
from support.poll import until
from support.runs import PATIENCE_S, events_of, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]
travels_by_value(__name__)

#: Nodes with room for one worker each.
NODES = (1, 1)

LIMIT_BYTES = 300 << 20
SIZE = r"[\d.]+ [GM]iB"


def is_sampled() -> bool:
    """Whether the agent of this node has sampled this process. The controller runs on the other node."""
    name = f"-agent-{ray.get_runtime_context().get_node_id()[:12]}-"
    agents = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if name in a["name"]]
    return any(ray.get(ray.get_actor(a, "raysgd").memory.remote(os.getpid())) is not None for a in agents)


def dies_on(config: dict[str, Any]) -> None:
    """Kill the rank on the node that ``dies_here`` selects; the others wait for it."""
    raysgd.barrier()
    is_here = ray.get_runtime_context().get_node_id() == config["controller"]
    if is_here == config["dies_here"]:
        assert is_here or until(is_sampled, PATIENCE_S)
        config["die"](config)
    time.sleep(1000)


def use_up_memory(config: dict[str, Any]) -> None:
    Path(config["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(b"x" * (10 << 20))
        time.sleep(0.1)  # slowly enough to be sampled in between


def kill_this_process(config: dict[str, Any]) -> None:
    held = b"x" * (100 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(len(held))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[raysgd.Trainer]:
    failure = raysgd.FailureConfig(max_failures=0)
    with make_trainer(tmp_path, 2, placement_strategy="STRICT_SPREAD", failure_config=failure) as trainer:
        yield trainer


def message_of_worker_death(trainer: raysgd.Trainer, config: dict[str, Any]) -> str:
    """Return the text that both the error and the run's events have."""
    config["controller"] = ray.get_runtime_context().get_node_id()
    with pytest.raises(WorkerDiedError) as caught:
        trainer.run(dies_on, config, callbacks=quiet())
    (failure,) = events_of(trainer, "failure")
    text = str(failure["error"])
    assert text in str(caught.value)
    (rank,) = caught.value.ranks
    assert text.startswith(f"the worker process of rank {rank} on {os.uname().nodename}")
    return text


@pytest.mark.parametrize("here", [True, False], ids=["controller's node", "another node"])
def test_out_of_memory_kill_is_explained(trainer: raysgd.Trainer, here: bool) -> None:
    with limited_memory(LIMIT_BYTES) as cgroup:
        config = {"dies_here": here, "die": use_up_memory, "cgroup": str(cgroup)}
        text = message_of_worker_death(trainer, config)
    assert re.search(
        rf"\) died: out of memory: its resident size grew from {SIZE} to {SIZE} in \d+ s; its cgroup has 300 MiB"
        rf"(, {SIZE} of it in use)?; the kernel's count of memory kills in its cgroup went up\. Smaller batches",
        text,
    ), text


@pytest.mark.parametrize("here", [True, False], ids=["controller's node", "another node"])
def test_other_kill_is_not_called_out_of_memory(trainer: raysgd.Trainer, here: bool) -> None:
    text = message_of_worker_death(trainer, {"dies_here": here, "die": kill_this_process})
    assert "died: SYSTEM_ERROR, " in text
    assert "out of memory" not in text


def test_memory_error_of_user_code_is_raised(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        bytearray(1 << 60)

    with pytest.raises(MemoryError):
        trainer.run(train_func, callbacks=quiet())
    assert events_of(trainer, "failure") == []
