"""Who holds the cluster's resources: Trainers of any program, and placement groups. Read by processes that wait for resources.

Each driver describes its Trainer in the key-value store before it starts the TrainerActor. How much a Trainer holds is read
from Ray's placement groups, so it is right also while the Trainer grows or ends.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util import placement_group_table

from raysgd.config import ScalingConfig
from raysgd.controller.kv_store import Holder, get_run_dir, list_holders
from raysgd.controller.requests import TrainerSettings
from raysgd.workers.placement.capacity import Holding, explain_wait
from raysgd.workers.placement.cluster import list_nodes

#: States of a placement group that has its resources.
RESERVED = ("CREATED", "RESCHEDULING")


def describe_holder(settings: TrainerSettings) -> Holder:
    """Describe a Trainer of this process for those who wait for what it holds."""
    here = ray.get_runtime_context()
    return Holder(
        name=settings.name,
        alias=settings.alias,
        job_id=here.get_job_id(),
        program=_describe_program(),
        placement_id=None if settings.room is None else settings.room.placement.id.hex(),
    )


def explain_missing(own_name: str, scaling: ScalingConfig, count: int) -> str | None:
    """Say which resources ``count`` workers of the Trainer ``own_name`` wait for, and who holds them. Blocks.

    Returns:
        None if the cluster has room.
    """
    nodes = list_nodes()
    if explain_wait(scaling, count, nodes, ()) is None:
        return None
    return explain_wait(scaling, count, nodes, list(list_holdings(own_name)))


def list_holdings(own_name: str = "") -> Iterator[Holding]:
    """Yield what each Trainer in the cluster holds, of which one is named ``own_name``, and each other placement group."""
    job_id = ray.get_runtime_context().get_job_id()
    groups = {key: group for key, group in placement_group_table().items() if group["state"] in RESERVED}
    for holder in list_holders():
        held = [key for key, group in groups.items() if _belongs_to(key, str(group["name"]), holder)]
        amounts = _sum([groups.pop(key) for key in held])
        if amounts:
            is_own = holder.name == own_name
            yield Holding("this Trainer itself" if is_own else describe(holder, _run_of(holder.name), job_id), amounts)
    for group in groups.values():
        name = f"the placement group {group['name']!r}" if group["name"] else "a placement group without a name"
        yield Holding(name, _sum([group]))


def describe(holder: Holder, run: str | None, job_id: str) -> str:
    """Describe a Trainer for a message of this job, with its latest run, and with what makes it release its resources."""
    of_run = "without a run" if run is None else f"of run {run}"
    if holder.alias is not None:
        return f"the detached Trainer {holder.alias!r} {of_run} (Trainer.attach({holder.alias!r}).shutdown() ends it)"
    if holder.placement_id is not None:
        return f"a Trainer {of_run} that was made in a placement group, such as a Tune trial"
    if holder.job_id == job_id:
        return f"your Trainer {of_run} (its shutdown() releases them)"
    return f"the Trainer {of_run} in another program ({holder.program})"


def _belongs_to(key: str, name: str, holder: Holder) -> bool:
    return key == holder.placement_id or name == holder.name or name.startswith(f"{holder.name}-")


def _sum(groups: list[Mapping[str, Any]]) -> dict[str, float]:
    amounts: Counter[str] = Counter()
    for group in groups:
        for bundle in group["bundles"].values():
            amounts.update(bundle)
    return dict(amounts)


def _run_of(name: str) -> str | None:
    """Return the last two parts of the run's folder, which a user knows it by."""
    run_dir = get_run_dir(name)
    return None if run_dir is None else "/".join(run_dir.partition("?")[0].rstrip("/").split("/")[-2:])


def _describe_program() -> str:
    """Return what this process is, for users of other programs: ``train.py, pid 123 on node-7``."""
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    program = "a notebook" if script.startswith("ipykernel") else script
    return f"{program}, pid {os.getpid()} on {socket.gethostname()}"
