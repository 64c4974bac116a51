"""The processes that a Trainer has preloaded, as the cluster's key-value store lists them."""

from __future__ import annotations

from ray.experimental import internal_kv

from raysgd.workers.placement.cluster import NAMESPACE
from raysgd.workers.process.preload import PreloadedProcess, get_process


def list_started() -> list[PreloadedProcess]:
    """Return the processes that have started, until a worker takes them over."""
    keys = internal_kv._internal_kv_list("preloaded/", namespace=NAMESPACE)
    found = [get_process(key.decode().partition("/")[2]) for key in keys]
    return [process for process in found if process is not None]


def list_preloaded() -> list[PreloadedProcess]:
    """Return the processes that are ready."""
    return [process for process in list_started() if process.is_ready]
