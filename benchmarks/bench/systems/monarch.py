"""Monarch: processes with torch from `torchmonarch`, without Ray. Driver side, except the actor.

It is measured if it can be imported: `pip install --no-deps --target FOLDER torchmonarch==0.7.0 pyre-extensions
typing-inspect mypy-extensions lark tabulate opentelemetry-api flask py-spy xxhash`, and FOLDER in ``PYTHONPATH``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from monarch.actor import Actor, current_rank, endpoint, this_host

from bench.systems.base import System, TrainFunc
from bench.worker import NUM_WORKERS


class Member(Actor):
    """A process with torch and a gloo group."""

    @endpoint
    def join(self, port: int) -> None:
        import torch.distributed as dist

        rank = current_rank().rank
        store = dist.TCPStore("127.0.0.1", port, world_size=NUM_WORKERS, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)

    @endpoint
    def run(self, train_func: TrainFunc, config: dict[str, Any]) -> Any:
        return train_func(config)


class MonarchSystem(System):
    """A mesh of processes on this host. As raysgd's workers, they and their group stay from one run to the next."""

    _members: Any = None
    _processes: Any = None

    def reset(self) -> None:
        processes, self._processes, self._members = self._processes, None, None
        if processes is not None:
            processes.stop().get()

    def close(self) -> None:
        self.reset()

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        full = self._full(config)
        self.called = time.time()
        if self._members is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            self._processes = this_host().spawn_procs(per_host={"gpus": NUM_WORKERS})
            self._members = self._processes.spawn("member", Member)
            self._members.join.call(port).get()
        self._members.run.call(train_func, full).get()
