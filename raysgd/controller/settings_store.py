"""Where a Trainer's settings wait for its TrainerActor: the cluster's key-value store, under the actor's name.

Not arguments of its constructor: the first argument that a process pickles makes Ray import NumPy, pyarrow and more, and
in a cold start the driver would do so before the TrainerActor's process is even asked for (doc/design/0010).
"""

from __future__ import annotations

from ray.experimental import internal_kv

from raysgd.controller.requests import TrainerSettings
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.pickling import dumps, loads


def put_settings(settings: TrainerSettings) -> None:
    """Lay them down, before the actor is made."""
    internal_kv._internal_kv_put(settings.name, dumps(settings), namespace=NAMESPACE)


def take_settings(name: str) -> TrainerSettings:
    """What was laid down for the actor of this name; nothing stays behind.

    Raises:
        LookupError: Nothing was.
    """
    data = internal_kv._internal_kv_get(name, namespace=NAMESPACE)
    if data is None:
        raise LookupError(f"no settings wait for {name}")
    internal_kv._internal_kv_del(name, namespace=NAMESPACE)
    settings: TrainerSettings = loads(data)
    return settings
