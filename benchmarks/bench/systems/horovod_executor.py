"""``horovod.ray.RayExecutor``, Horovod's own way to run on Ray. Driver side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import ray.util
from horovod.ray import RayExecutor

from bench.systems.base import OnCheckpoint, OnReport, RaySystem, TrainFunc
from bench.worker import NUM_WORKERS
from raysgd.backends.rendezvous import find_interface


class HorovodExecutorSystem(RaySystem):
    """See `System`; it reports nothing."""

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        interface, full = find_interface(ray.util.get_node_ip_address()), self._full(config)
        self.called = time.time()
        executor = RayExecutor(RayExecutor.create_settings(), num_workers=NUM_WORKERS)
        executor.start()
        executor.run(_in_worker, [train_func, full, interface])
        executor.shutdown()


def _in_worker(train_func: TrainFunc, config: dict[str, Any], interface: str) -> None:
    import horovod.torch as hvd

    os.environ["HOROVOD_GLOO_IFACE"] = interface  # that of raysgd; the executor says lo where there is one node
    hvd.init()
    train_func(config)
    hvd.shutdown()
