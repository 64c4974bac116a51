"""torchrun, the launcher that comes with torch: two processes, gloo, no Ray. Driver side, but for `main`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench.systems.base import OnCheckpoint, OnReport, System, TrainFunc, wait_for_calm


class TorchrunSystem(System):
    """See `System`; it reports nothing."""

    def open(self) -> None:
        wait_for_calm()

    def run(
        self,
        train_func: TrainFunc,
        config: Mapping[str, Any],
        *,
        on_report: OnReport | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        target = f"{train_func.__module__}:{train_func.__qualname__}"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = ["-m", "bench.systems.torchrun", target, json.dumps(self._full(config))]
        self.called = time.time()
        subprocess.run([*launcher, *script], check=True)


def main(target: str, config: str) -> None:
    """One of the two processes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(json.loads(config))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
