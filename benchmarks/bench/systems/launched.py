"""Groups of processes without Ray, started by a framework's own launcher or as plain processes. Driver side.

The processes run `bench.member`. gloo uses the interface of the node's address, as with raysgd's backends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray.util

from bench.systems import FRAMEWORKS
from bench.systems.base import System, TrainFunc, wait_for_calm
from bench.systems.fragile import FragileSystem
from bench.worker import NUM_WORKERS
from raysgd.backends.addresses import find_free_address, find_interface

Command = list[str]
Variables = dict[str, str]


def _torchrun(node_ip: str, script: Command) -> Iterator[tuple[Command, Variables]]:
    yield _by_torchrun(NUM_WORKERS, 0, script), {}


def _by_torchrun(num_workers: int, max_restarts: int, script: Command) -> Command:
    options = ["--standalone", "--nproc-per-node", str(num_workers), "--max-restarts", str(max_restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def _horovodrun(node_ip: str, script: Command) -> Iterator[tuple[Command, Variables]]:
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(NUM_WORKERS)]
    yield [*launcher, sys.executable, *script], {}


def _tensorflow(node_ip: str, script: Command) -> Iterator[tuple[Command, Variables]]:
    cluster = {"worker": [find_free_address(node_ip) for _ in range(NUM_WORKERS)]}
    for rank in range(NUM_WORKERS):
        task = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
        yield [sys.executable, *script], {"TF_CONFIG": json.dumps(task)}


def _jax(node_ip: str, script: Command) -> Iterator[tuple[Command, Variables]]:
    address = find_free_address(node_ip)
    for rank in range(NUM_WORKERS):
        yield [sys.executable, *script], {"COORDINATOR": address, "RANK": str(rank)}


_LAUNCHERS: dict[str, Callable[[str, Command], Iterator[tuple[Command, Variables]]]] = {
    "torchrun": _torchrun,
    "horovodrun": _horovodrun,
    "tensorflow": _tensorflow,
    "jax": _jax,
}


class LaunchedSystem(System):
    """Processes of a launcher, without reports and checkpoints."""

    def open(self) -> None:
        wait_for_calm()

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        node_ip = ray.util.get_node_ip_address()
        script = _script(self.name, train_func, self._full(config))
        commands = list(_LAUNCHERS[self.name](node_ip, script))
        environment = _environment(node_ip)
        self.called = time.time()
        _wait_for([subprocess.Popen(command, env=environment | own) for command, own in commands])


class FragileTorchrun(FragileSystem):
    """torchrun, which restarts all processes when one has died; no Ray is started."""

    def start(self, params: Mapping[str, Any]) -> None:
        self.params = dict(params)
        wait_for_calm()

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        script = _script(self.name, train_func, self._full(config))
        command = _by_torchrun(self.params["num_workers"], self.params["max_restarts"], script)
        # Without this, a restarted group finds the addresses of the previous group in the agent's store.
        environment = _environment(ray.util.get_node_ip_address()) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        _wait_for([subprocess.Popen(command, env=environment)])


def _script(system: str, train_func: TrainFunc, config: dict[str, Any]) -> Command:
    target = f"{train_func.__module__}:{train_func.__qualname__}"
    return ["-m", "bench.member", FRAMEWORKS[system], target, json.dumps(config)]


def _environment(node_ip: str) -> Variables:
    return os.environ | {"GLOO_SOCKET_IFNAME": find_interface(node_ip) or ""}


def _wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; when one fails, kill the others.

    Raises:
        RuntimeError: A process has failed.
    """
    try:
        for process in processes:
            if process.wait() != 0:
                raise RuntimeError(f"a process ended with status {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
