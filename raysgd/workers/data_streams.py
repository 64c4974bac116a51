"""The actor in which a lazy `ray.data.Dataset` is executed while workers read it, and how these ask it.

One for each such dataset of a run; it takes no CPU of the cluster, and lives as long as the run refers to it.

`ray.data` is imported where it is used: the TrainerActor passes handles on, for which Ray imports this module.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.data.lazy import table_of
from raysgd.data.stream import Have, Known, PassKey, StreamGoneError, StreamLostError
from raysgd.data.stream_host import SAY_S, StreamHost

logger = logging.getLogger(__name__)

#: Seconds in one call of `ray.get`, between which a thread can be told to end.
_POLL_S = 0.5
#: Seconds in which a host that was lost is to be there again.
_RESTART_S = 60.0
#: Ranks that may be waiting for it at a time.
_MAX_WAITING = 100_000


class StreamActor(StreamHost):
    """A Ray actor.

    Args:
        dataset: The `ray.data.Dataset`.
    """

    def __init__(self, dataset: Any) -> None:
        from ray.data import DataContext

        DataContext._set_current(dataset.context)  # what Ray looks at while it executes
        # Ray warns of calls that would block the event loop, also where another thread makes them, as the executor's do.
        ray._private.worker.blocking_get_inside_async_warned = True
        super().__init__(dataset)
        self._has_said = False

    def waits_long(self) -> None:
        if self._has_said or ray.available_resources().get("CPU", 0.0) >= 1:
            return
        self._has_said = True
        total = ray.cluster_resources().get("CPU", 0.0)
        logger.warning(
            "raysgd: Ray executes the dataset while the workers train, and has waited %.0f s for a CPU: all %g of the cluster "
            "are taken, by the workers or by something else. Give fewer workers, or end what else takes them.",
            SAY_S,
            total,
        )

    async def dataset(self) -> Any:
        """What it executes."""
        return self._dataset


def fetch(ref: Any) -> Any:
    """A block that `execute` gave: a `pyarrow.Table`, in shared memory where Ray has it in Arrow's form.

    Raises:
        StreamLostError: It is lost, and cannot be made again.
    """
    block, rows = ref
    try:
        given = ray.get(block)  # at once: what comes from another node would begin anew with each try
    except (ObjectLostError, RayActorError):
        raise StreamLostError from None
    importlib.import_module("ray.data.block")  # what turns blocks into Tables
    return table_of(given, rows)


def start_host(dataset: Any) -> RemoteStream:
    """Have a lazy dataset executed by an actor near this process, as long as the stream is referred to."""
    near = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": _MAX_WAITING, "scheduling_strategy": near}
    return RemoteStream(ray.remote(StreamActor).options(**options).remote(dataset))


@dataclass(frozen=True)
class RemoteStream:
    """A stream whose host is an actor. Asked in any thread of a worker.

    Attributes:
        host: Its handle.
    """

    host: Any = field(repr=False)

    def look(self, key: PassKey) -> Known:
        """As `raysgd.data.stream.Stream.look`."""
        while True:
            with contextlib.suppress(StreamLostError):
                known: Known = self._ask("look", key)
                return known

    def extend(self, key: PassKey, rank: int, needed: int, upto: int, have: Have, is_over: Callable[[], bool]) -> Known:
        """As `raysgd.data.stream.Stream.extend`."""
        known: Known = self._ask("extend", key, rank, needed, upto, have, is_over=is_over)
        return known

    def blocks(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        """As `raysgd.data.stream.Stream.blocks`."""
        refs: list[Any] = self._ask("blocks", key, execution, list(numbers))
        return refs

    def fetch(self, ref: Any) -> Any:
        """As `raysgd.data.stream.Stream.fetch`."""
        return fetch(ref)

    def leave(self, key: PassKey, rank: int) -> None:
        """As `raysgd.data.stream.Stream.leave`; does not wait."""
        self.host.leave.remote(key, rank)

    def _ask(self, method: str, *args: Any, is_over: Callable[[], bool] = lambda: False) -> Any:
        try:
            answer = get(getattr(self.host, method).remote(*args), is_over)
        except RayActorError:
            self._wait_for_restart()
            answer = None
        if answer is None:
            raise StreamLostError
        return answer

    def _wait_for_restart(self) -> None:
        """Until the host is there again.

        Raises:
            StreamGoneError: It is gone for good, or for too long.
        """
        until = time.monotonic() + _RESTART_S
        while True:
            try:
                get(self.host.num_passes.remote(), lambda: False)
                return
            except RayActorError as error:
                if not isinstance(error, ActorUnavailableError) or time.monotonic() > until:
                    raise StreamGoneError(f"the process that executes it cannot be had: {error}") from error
                time.sleep(0.1)


def get(ref: Any, is_over: Callable[[], bool]) -> Any:
    """`ray.get` of what is small; a thread can be interrupted in it: it waits in Ray's own code half a second at a time.

    Raises:
        StreamLostError: ``is_over`` said so.
    """
    while True:
        try:
            return ray.get(ref, timeout=_POLL_S)
        except GetTimeoutError:
            if is_over():
                raise StreamLostError from None
