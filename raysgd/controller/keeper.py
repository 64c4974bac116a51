"""The process that has the data of a detached run: in the object store, what a driver puts there goes with the driver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray

from raysgd.controller.lifeline import end_with
from raysgd.data.plan import DatasetPlan
from raysgd.workers.orders import Blob


@dataclass(frozen=True)
class Kept:
    """What a run needs and is too large for the key-value store."""

    datasets: DatasetPlan
    initial_state: Blob | None = None


class DataKeeper:
    """A Ray actor, one per detached run that has data. Takes one copy of it.

    Args:
        controller: Handle of the TrainerActor, with which it ends.
    """

    def __init__(self, controller: Any) -> None:
        end_with(controller)
        self._kept: Kept | None = None

    def keep(self, given: Kept) -> Kept:
        """Put all of it into the object store as this process's own; returns what refers to it from now on."""
        copies: dict[Any, Any] = {}

        def own(ref: Any) -> Any:
            if isinstance(ref, ray.ObjectRef) and ref not in copies:
                copies[ref] = ray.put(ray.get(ref))
            return copies.get(ref, ref)

        sources = {
            name: replace(source, blocks=tuple(map(own, source.blocks)))
            for name, source in given.datasets.sources.items()
        }
        self._kept = Kept(replace(given.datasets, sources=sources), own(given.initial_state))
        return self._kept

    def kept(self) -> Kept | None:
        """What it has."""
        return self._kept
