"""What a Trainer leaves in the cluster's key-value store: its settings, the run it does, the name it can be found by.

The settings wait there for the TrainerActor, in which every process of it finds them, also the one that is started when
the one before has died. They are no arguments of its constructor: the first argument that a process pickles makes Ray
import NumPy, pyarrow and more, and in a cold start the driver would do so before the TrainerActor's process is even asked
for (doc/design/0010).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.experimental import internal_kv

from raysgd.controller.past import AttemptRecord
from raysgd.controller.requests import RunRequest, TrainerSettings
from raysgd.data.plan import NO_DATASETS
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.pickling import dumps, loads

#: Seconds after which settings that have no TrainerActor are nobody's: it is made right after they are laid down.
_ORPHAN_S = 3600.0
#: Seconds in which it is.
_ON_ITS_WAY_S = 30.0


@dataclass(frozen=True)
class RunRecord:
    """The run that a TrainerActor does, or did last.

    Attributes:
        run_dir: Its folder.
        request: All that it takes to go on with it but its data, where no driver will give that again.
        is_live: It has not been closed.
        has_data: The keeper has data of it.
    """

    run_id: str
    run_dir: str
    request: RunRequest | None = None
    is_live: bool = True
    has_data: bool = False


def put_settings(settings: TrainerSettings) -> None:
    """Lay them down, before the actor is made."""
    _put(_settings_of(settings.name), (time.time(), settings))


def get_settings(name: str) -> TrainerSettings:
    """Those of the Trainer of this unique name.

    Raises:
        LookupError: There are none.
    """
    found = _get(_settings_of(name))
    if found is None:
        raise LookupError(f"there are no settings of {name}")
    settings: TrainerSettings = found[1]
    return settings


def is_new(name: str) -> bool:
    """Whether the settings of this Trainer have been laid down so lately that its actor may be on its way."""
    found = _get(_settings_of(name))
    return found is not None and bool(found[0] > time.time() - _ON_ITS_WAY_S)


def put_run(name: str, record: RunRecord) -> None:
    """Lay down what this Trainer does."""
    if record.request is not None:
        state = record.request.initial_state
        small = state if isinstance(state, bytes) else None  # the keeper has what is larger
        has_data = bool(record.request.datasets.sources) or small is not state
        request = replace(record.request, datasets=NO_DATASETS, initial_state=small)
        record = replace(record, request=request, has_data=has_data)
    _put(_run_of(name), record)


def get_run(name: str) -> RunRecord | None:
    """What this Trainer does, or did last."""
    record: RunRecord | None = _get(_run_of(name))
    return record


def put_attempt(name: str, record: AttemptRecord) -> None:
    """Lay down which attempt this Trainer begins."""
    _put(f"attempt/{name}", record)


def get_attempt(name: str, run_id: str) -> AttemptRecord | None:
    """The last attempt of this Trainer's run."""
    record: AttemptRecord | None = _get(f"attempt/{name}")
    return record if record is not None and record.run_id == run_id else None


def claim_alias(alias: str, name: str) -> str | None:
    """Have the Trainer ``name`` found by an alias; the name of the one that is found by it already, and else None."""
    key = f"alias/{alias}"
    while internal_kv._internal_kv_put(key, dumps(name), overwrite=False, namespace=NAMESPACE):
        found: str | None = _get(key)
        if found is not None:  # else it has just been given up
            return found
    return None


def find_alias(alias: str) -> str | None:
    """The Trainer that is found by an alias."""
    name: str | None = _get(f"alias/{alias}")
    return name


def forget(name: str, alias: str | None = None) -> None:
    """The Trainer is over."""
    for key in (_settings_of(name), _run_of(name), f"attempt/{name}"):
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)
    if alias is not None and find_alias(alias) == name:
        internal_kv._internal_kv_del(f"alias/{alias}", namespace=NAMESPACE)


def forget_orphans() -> None:
    """Remove what Trainers have left whose driver ended without a word, and whose TrainerActor ended with it."""
    alive = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    for key in internal_kv._internal_kv_list("settings/", namespace=NAMESPACE):
        name = key.decode().partition("/")[2]
        found = _get(_settings_of(name))
        if found is not None and name not in alive and found[0] < time.time() - _ORPHAN_S:
            forget(name, found[1].alias)


def keeper_name(name: str, run_id: str) -> str:
    """Of the actor that has the data of a detached run."""
    return f"{name}-data-{run_id}"


def _settings_of(name: str) -> str:
    return f"settings/{name}"


def _run_of(name: str) -> str:
    return f"run/{name}"


def _put(key: str, value: Any) -> None:
    internal_kv._internal_kv_put(key, dumps(value), namespace=NAMESPACE)


def _get(key: str) -> Any:
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return None if data is None else loads(data)
