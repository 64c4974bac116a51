"""A process of a group without Ray: it joins the group, calls the train function and leaves. See `bench.systems.launched`.

It imports no more than a user's script would, because its imports are part of what is measured.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable

from bench.worker import NUM_WORKERS


def main(framework: str, target: str, config: str) -> None:
    """Run one member; ``target`` is the train function as ``module:name``, ``config`` its config as JSON."""
    leave = _JOIN[framework]()
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(json.loads(config))
    leave()


def _join_torch() -> Callable[[], object]:
    import torch.distributed as dist

    def leave() -> None:
        gc.collect()  # a DDP model that outlives its group ends the process with SIGABRT, once in some ten times
        dist.destroy_process_group()

    dist.init_process_group("gloo")
    return leave


def _join_horovod() -> Callable[[], object]:
    import horovod.torch as hvd

    os.environ["HOROVOD_GLOO_IFACE"] = os.environ["GLOO_SOCKET_IFNAME"]  # horovodrun says lo
    hvd.init()
    return hvd.shutdown


def _join_tensorflow() -> Callable[[], object]:
    import tensorflow  # noqa: F401  (its strategy joins, by TF_CONFIG)

    return lambda: None


def _join_jax() -> Callable[[], object]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["COORDINATOR"], NUM_WORKERS, int(os.environ["RANK"]))
    return jax.distributed.shutdown


_JOIN = {"torch": _join_torch, "horovod": _join_horovod, "tensorflow": _join_tensorflow, "jax": _join_jax}

if __name__ == "__main__":
    main(*sys.argv[1:])
