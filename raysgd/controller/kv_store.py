"""What a Trainer stores in the cluster's key-value store: its settings, its run, its alias.

The TrainerActor reads its settings there, also after a restart. They are not arguments of its constructor, because Ray imports
NumPy, pyarrow and more to pickle the first argument of an actor. In a cold start, the driver would do that before it requests
the TrainerActor's process (doc/design/0010).
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.experimental import internal_kv

from raysgd.controller.frames import Frame
from raysgd.controller.requests import RunRequest, TrainerSettings
from raysgd.controller.run_plan import AttemptRecord
from raysgd.data.plan import NO_DATASETS
from raysgd.errors import ConfigError
from raysgd.workers.pickling import dumps, loads
from raysgd.workers.placement.cluster import NAMESPACE
from raysgd.workers.versions import decisive_versions, why_refused

#: What drivers and TrainerActors send each other; their wire format is that of these classes.
SENT = (TrainerSettings, RunRequest, Frame)
#: Settings of this age without a TrainerActor are left over, because the actor is created right after they are stored.
_ORPHAN_S = 3600.0
#: The TrainerActor of settings that are younger may still be starting.
_ON_ITS_WAY_S = 30.0


@dataclass(frozen=True)
class RunRecord:
    """The run that a TrainerActor executes, or executed last.

    Attributes:
        run_dir: The run's folder.
        request: The request without its data, if no driver will send it again; None otherwise.
        is_live: The run is not closed.
        has_data: The data holder has data of the run.
    """

    run_id: str
    run_dir: str
    request: RunRequest | None = None
    is_live: bool = True
    has_data: bool = False


def put_settings(settings: TrainerSettings) -> None:
    """Store the settings, before the actor is made. A process with another version of raysgd can read all but the last item."""
    _put(f"settings/{settings.name}", (time.time(), settings.alias, dict(settings.versions), dumps(settings)))


@dataclass(frozen=True)
class Holder:
    """A Trainer, as those see it who wait for the resources that it holds.

    Attributes:
        name: Its unique name, a prefix of the names of its placement groups.
        alias: The name by which other drivers find it, if it is detached.
        job_id: Ray's id of the program that made it.
        program: That program, for a message.
        placement_id: The placement group of others, such as of a Tune trial, that its workers are in.
    """

    name: str
    alias: str | None
    job_id: str
    program: str
    placement_id: str | None = None


def put_holder(holder: Holder) -> None:
    """Store the description of a Trainer, as built-in types: another version of raysgd may read it."""
    _put(f"holder/{holder.name}", vars(holder))


def list_holders() -> list[Holder]:
    """Return the Trainers of all programs on the cluster, also of some that are over."""
    keys = internal_kv._internal_kv_list("holder/", namespace=NAMESPACE)
    held = [found for key in keys if (found := _get(key.decode())) is not None]
    known = Holder.__dataclass_fields__
    return [Holder(**{name: value for name, value in found.items() if name in known}) for found in held]


def get_settings(name: str, who: str = "this program") -> TrainerSettings:
    """Return the settings of the Trainer of this unique name. ``who`` is this process, for messages.

    Raises:
        LookupError: There are none.
        ConfigError: This process cannot work with the driver that stored them, because its versions differ.
    """
    found = _get(f"settings/{name}")
    if found is None:
        raise LookupError(f"there are no settings of {name}")
    _, _, versions, data = found
    if (why := why_refused(versions, decisive_versions(*SENT), f"{who} on {socket.gethostname()}")) is not None:
        raise ConfigError(why)
    settings: TrainerSettings = loads(data)
    return settings


def is_new(name: str) -> bool:
    """Return whether the settings were stored so recently that the actor may still be starting."""
    found = _get(f"settings/{name}")
    return found is not None and bool(found[0] > time.time() - _ON_ITS_WAY_S)


def put_run(name: str, record: RunRecord) -> None:
    """Store the run that this Trainer executes."""
    if record.request is not None:
        task = record.request.task
        state = task.initial_state
        small = state if isinstance(state, bytes) else None  # the data holder has larger states
        has_data = bool(task.datasets.sources) or small is not state
        request = replace(record.request, task=replace(task, datasets=NO_DATASETS, initial_state=small))
        record = replace(record, request=request, has_data=has_data)
    _put(f"run/{name}", (record.run_dir, dumps(record)))


def get_run(name: str) -> RunRecord | None:
    """Return the run that this Trainer executes, or executed last."""
    found = _get(f"run/{name}")
    record: RunRecord | None = None if found is None else loads(found[1])
    return record


def get_run_dir(name: str) -> str | None:
    """Return the folder of the run that a Trainer executes, or executed last. It may have another version of raysgd."""
    found = _get(f"run/{name}")
    return None if found is None else str(found[0])


def put_attempt(name: str, record: AttemptRecord) -> None:
    """Store the attempt that this Trainer begins."""
    _put(f"attempt/{name}", record)


def get_attempt(name: str, run_id: str) -> AttemptRecord | None:
    """Return the last attempt of this Trainer's run."""
    record: AttemptRecord | None = _get(f"attempt/{name}")
    return record if record is not None and record.run_id == run_id else None


def claim_alias(alias: str, name: str) -> str | None:
    """Register the alias for the Trainer ``name``; returns the Trainer that has the alias already, or None."""
    key = f"alias/{alias}"
    while internal_kv._internal_kv_put(key, dumps(name), overwrite=False, namespace=NAMESPACE):
        found: str | None = _get(key)
        if found is not None:  # otherwise the other Trainer has just released the alias
            return found
    return None


def find_alias(alias: str) -> str | None:
    """Return the Trainer that has an alias, or None."""
    name: str | None = _get(f"alias/{alias}")
    return name


def forget(name: str, alias: str | None = None) -> None:
    """Remove the entries of a Trainer that is over."""
    for key in (f"settings/{name}", f"holder/{name}", f"run/{name}", f"attempt/{name}"):
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)
    if alias is not None and find_alias(alias) == name:
        internal_kv._internal_kv_del(f"alias/{alias}", namespace=NAMESPACE)


def forget_orphans() -> None:
    """Remove the entries of Trainers whose driver and TrainerActor ended without removing them."""
    alive = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    for key in internal_kv._internal_kv_list("settings/", namespace=NAMESPACE):
        name = key.decode().partition("/")[2]
        found = _get(f"settings/{name}")
        if found is not None and name not in alive and found[0] < time.time() - _ORPHAN_S:
            forget(name, found[1])


def data_holder_name(name: str, run_id: str) -> str:
    """Return the name of the actor that holds the data of a detached run."""
    return f"{name}-data-{run_id}"


def _put(key: str, value: Any) -> None:
    internal_kv._internal_kv_put(key, dumps(value), namespace=NAMESPACE)


def _get(key: str) -> Any:
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return None if data is None else loads(data)
