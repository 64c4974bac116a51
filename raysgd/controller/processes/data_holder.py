"""The process that holds the data of a detached run, because objects that a driver puts into the object store end with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray

from raysgd.controller.watchdog import end_with
from raysgd.data.plan import DatasetPlan, Source
from raysgd.errors import ConfigError
from raysgd.workers.liveness.watched import Watched
from raysgd.workers.orders import Blob


@dataclass(frozen=True)
class Kept:
    """What a run needs and is too large for the key-value store."""

    datasets: DatasetPlan
    initial_state: Blob | None = None


class DataHolder(Watched):
    """A Ray actor, one per detached run that has data. It holds a copy of the data.

    Args:
        controller: Handle of the TrainerActor, with which it ends.
    """

    def __init__(self, controller: Any) -> None:
        end_with(controller)
        self._kept: Kept | None = None

    def keep(self, given: Kept) -> Kept:
        """Copy the data into objects that this process owns; returns the references to the copies."""
        copies: dict[Any, Any] = {}

        def own(ref: Any) -> Any:
            if isinstance(ref, ray.ObjectRef) and ref not in copies:
                copies[ref] = ray.put(ray.get(ref))
            return copies.get(ref, ref)

        sources = {
            name: replace(
                source,
                blocks=_own_stream(source) or tuple(map(own, source.blocks)),
                selection=source.selection and replace(source.selection, folds=own(source.selection.folds)),
            )
            for name, source in given.datasets.sources.items()
        }
        self._kept = Kept(replace(given.datasets, sources=sources), own(given.initial_state))
        return self._kept

    def kept(self) -> Kept | None:
        """Return what it holds."""
        return self._kept


def _own_stream(source: Source) -> tuple[Any, ...]:
    """Return the same stream with a host that ends with this process; nothing if the source is not a stream.

    Raises:
        ConfigError: The stream contains rows that the driver holds.
    """
    if source.kind != "stream":
        return ()
    from raysgd.workers.dataset_stream import start_host

    dataset = ray.get(source.blocks[0].host.dataset.remote())
    if not dataset.has_serializable_lineage():
        raise ConfigError(
            "a detached run outlives its driver, but this dataset contains rows that the driver holds, as with from_items or "
            "from_pandas: call ds.materialize(), or let Ray read the rows from storage."
        )
    return (start_host(dataset),)
