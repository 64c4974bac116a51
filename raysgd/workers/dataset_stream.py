"""The actor that executes a lazy `ray.data.Dataset` while workers read it, and the workers' access to it.

Each lazy dataset of a run has one such actor. It takes no CPU of the cluster and lives as long as the run refers to it.

`ray.data` is imported inside functions only: the TrainerActor, which passes the handles on, imports this module too.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd._util.logs import get_logger
from raysgd.data.streams.host import WAIT_WARNING_S, StreamHost
from raysgd.data.streams.stream import PassKey, PassState, ReaderState, StreamGoneError, StreamLostError, table_of
from raysgd.workers.liveness.watched import Watched, watched_actor

#: The timeout of one call of `ray.get`; between calls a thread can be interrupted.
_POLL_S = 0.5
#: The time for a lost host to restart.
_RESTART_TIMEOUT_S = 60.0
#: The number of ranks that may wait for the host at the same time.
_MAX_WAITING = 100_000


class StreamActor(Watched, StreamHost):
    """The Ray actor that executes one `ray.data.Dataset`."""

    def __init__(self, dataset: Any) -> None:
        from ray.data import DataContext

        DataContext._set_current(dataset.context)  # Ray reads the current context while it executes
        # Ray warns of calls that block the event loop, even if another thread makes them, like the executor's threads.
        ray._private.worker.blocking_get_inside_async_warned = True
        super().__init__(dataset)
        self._has_warned = False

    def on_long_wait(self) -> None:
        if self._has_warned or ray.available_resources().get("CPU", 0.0) >= 1:
            return
        self._has_warned = True
        total = ray.cluster_resources().get("CPU", 0.0)
        get_logger().warning(
            "Ray executes the dataset while the workers train, and has waited %.0f s for a CPU: all %g of the cluster "
            "are in use. Give fewer workers, or stop other users of the cluster.",
            WAIT_WARNING_S,
            total,
        )

    async def dataset(self) -> Any:
        """Return the dataset that it executes."""
        return self._dataset


def start_host(dataset: Any) -> RemoteStream:
    """Execute a lazy dataset in an actor, on this node if possible, until nothing refers to the stream any more."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": _MAX_WAITING, "scheduling_strategy": this_node}
    return RemoteStream(watched_actor(StreamActor).options(**options).remote(dataset))


@dataclass(frozen=True)
class RemoteStream:
    """A `raysgd.data.streams.stream.Stream` whose host is a `StreamActor`; may be used in any thread of a worker."""

    host: Any = field(repr=False)

    def inspect(self, key: PassKey) -> PassState:
        while True:
            with contextlib.suppress(StreamLostError):
                state: PassState = self._ask("inspect", key)
                return state

    def wait_for_rows(
        self, key: PassKey, rank: int, needed: int, upto: int, have: ReaderState, is_over: Callable[[], bool]
    ) -> PassState:
        state: PassState = self._ask("wait_for_rows", key, rank, needed, upto, have, is_over=is_over)
        return state

    def block_refs(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        refs: list[Any] = self._ask("block_refs", key, execution, list(numbers))
        return refs

    def fetch(self, ref: Any) -> Any:
        """Return a block as a `pyarrow.Table`, in shared memory if Ray holds it in Arrow's format.

        Raises:
            StreamLostError: The block is lost and cannot be computed again.
        """
        block, rows = ref
        try:
            fetched = ray.get(block)  # without a timeout: a transfer from another node would start again with each try
        except (ObjectLostError, RayActorError):
            raise StreamLostError from None
        importlib.import_module("ray.data.block")  # needed to turn blocks into Tables
        return table_of(fetched, rows)

    def leave(self, key: PassKey, rank: int) -> None:
        """Leave a pass; does not wait."""
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
        """Wait until the host has restarted.

        Raises:
            StreamGoneError: The host cannot restart, or takes too long.
        """
        deadline = time.monotonic() + _RESTART_TIMEOUT_S
        while True:
            try:
                get(self.host.num_passes.remote(), lambda: False)
                return
            except RayActorError as error:
                if not isinstance(error, ActorUnavailableError) or time.monotonic() > deadline:
                    raise StreamGoneError(f"the process that executes the dataset is gone: {error}") from error
                time.sleep(0.1)


def get(ref: Any, is_over: Callable[[], bool]) -> Any:
    """Return `ray.get` of a small value; the thread can be interrupted, because each wait in Ray's code is short.

    Raises:
        StreamLostError: ``is_over`` returned True.
    """
    while True:
        try:
            return ray.get(ref, timeout=_POLL_S)
        except GetTimeoutError:
            if is_over():
                raise StreamLostError from None
