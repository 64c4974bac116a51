"""``horovod.ray.RayExecutor``, with which Horovod itself runs on Ray. Driver side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import ray.util
from horovod.ray import RayExecutor

from bench.systems.base import RaySystem, TrainFunc
from bench.worker import NUM_WORKERS
from raysgd.backends.addresses import find_interface


class HorovodExecutorSystem(RaySystem):
    """Horovod's executor, without reports and checkpoints."""

    def run(self, train_func: TrainFunc, config: Mapping[str, Any], **_: Any) -> None:
        interface, full = find_interface(ray.util.get_node_ip_address()), self._full(config)
        self.called = time.time()
        executor = RayExecutor(RayExecutor.create_settings(), num_workers=NUM_WORKERS)
        executor.start()
        executor.run(_in_worker, [train_func, full, interface])
        executor.shutdown()


def _in_worker(train_func: TrainFunc, config: dict[str, Any], interface: str) -> None:
    import horovod.torch as hvd

    os.environ["HOROVOD_GLOO_IFACE"] = interface  # the interface of raysgd's group; the executor chooses lo on one node
    hvd.init()
    train_func(config)
    hvd.shutdown()
