"""Imports in an idle Ray process, so that a replacement which takes it over need not wait for them.

The TrainerActor requests such a process (`raysgd.workers.group.preloading`). Ray calls `preload` in it before it gives the
process any work. The process and the TrainerActor meet in the cluster's key-value store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray.experimental import internal_kv

from raysgd._util.imports import uncollected
from raysgd._util.json import decode, encode
from raysgd.workers.placement.cluster import NAMESPACE

#: The environment variable with the key of the process's order.
VARIABLE = "RAYSGD_PRELOAD"
#: What Ray calls in the process.
HOOK = f"{__name__}.preload"
#: What each worker imports of raysgd in its first call.
_OWN = ("raysgd.workers.process.actor", "raysgd.workers.process.build", "raysgd.workers.process.class_api")


@dataclass(frozen=True)
class PreloadOrder:
    """What a process is to import.

    Attributes:
        modules: In this order. Those that cannot be imported are left out.
        num_threads: The value of ``OMP_NUM_THREADS`` in a worker, which a framework reads when it is imported.
    """

    modules: Sequence[str]
    num_threads: int


@dataclass(frozen=True)
class PreloadedProcess:
    """A process that imports modules, or has done so.

    Attributes:
        created_s: The time of its start. Another process may get its id later.
        is_ready: It has imported them.
    """

    node_id: str
    pid: int
    created_s: float
    is_ready: bool = False


def preload() -> None:
    """Import what the order of this process says. Never raises: Ray would end the process, and what starts in it."""
    with contextlib.suppress(BaseException):
        _preload(os.environ.get(VARIABLE, ""))


def _preload(key: str) -> None:
    order = get_order(key)
    if order is None:  # a process with the environment of a worker that was preloaded, such as one of its tasks
        return
    process = psutil.Process()
    found = PreloadedProcess(ray.get_runtime_context().get_node_id(), process.pid, process.create_time())
    put_process(key, found)
    if get_order(key) is None:  # the Trainer was closed meanwhile, and may not know of this process
        os._exit(0)
    os.environ.setdefault("OMP_NUM_THREADS", str(order.num_threads))  # as Ray does when an actor starts
    from raysgd.workers.process.imports import EarlyImports  # not for the driver, which only removes entries

    with uncollected():
        EarlyImports().run([*order.modules, *_OWN])
    put_process(key, replace(found, is_ready=True))


# -- entries of the key-value store --------------------------------------------------------------------------------


def put_order(key: str, order: PreloadOrder) -> None:
    """Store what the process of this key is to import."""
    _put(f"preload/{key}", vars(order))


def get_order(key: str) -> PreloadOrder | None:
    """Return what the process of this key is to import; None if no process of this key is wanted any more."""
    found = _get(f"preload/{key}")
    return None if found is None else PreloadOrder(**found)


def put_process(key: str, process: PreloadedProcess) -> None:
    """Store where the process of this key is, and whether it is ready."""
    _put(f"preloaded/{key}", vars(process))


def get_process(key: str) -> PreloadedProcess | None:
    """Return the process of this key; None if it has not started."""
    found = _get(f"preloaded/{key}")
    return None if found is None else PreloadedProcess(**found)


def list_keys(name: str) -> list[str]:
    """Return the keys of the processes of a Trainer that have started."""
    found = internal_kv._internal_kv_list(f"preloaded/{name}/", namespace=NAMESPACE)
    return [key.decode().partition("/")[2] for key in found]


def forget_key(key: str) -> None:
    """Remove what is stored of a process: first the order, so that a process that is not ready yet ends itself."""
    for kind in ("preload", "preloaded"):
        internal_kv._internal_kv_del(f"{kind}/{key}", namespace=NAMESPACE)


def forget_keys(name: str) -> None:
    """Remove what is stored of all processes of a Trainer."""
    for kind in ("preload", "preloaded"):
        internal_kv._internal_kv_del(f"{kind}/{name}/", del_by_prefix=True, namespace=NAMESPACE)


def _put(key: str, value: Any) -> None:
    internal_kv._internal_kv_put(key, encode(value), namespace=NAMESPACE)


def _get(key: str) -> Any:
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return None if data is None else decode(data)
