"""Starts the workers that join an elastic group later, where there is room for them. Runs in the TrainerActor.

Without an autoscaler, workers are started only where resources are free: a request that waits in Ray's queues in vain
delays the requests of others. An autoscaler adds nodes only for requests that wait. With one, slots are therefore requested
even if there is no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection

from ray.exceptions import RayError

from raysgd.config import ScalingConfig
from raysgd.workers.group.processes import Worker, WorkerStarter
from raysgd.workers.liveness.death_reasons import explain_failed_start
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.calls import call_cluster
from raysgd.workers.placement.capacity import count_fitting
from raysgd.workers.placement.cluster import has_autoscaler, list_nodes
from raysgd.workers.placement.slots import WorkerSlot, WorkerSlots, has_waiting_groups

#: Seconds between two searches for room.
SEARCH_INTERVAL_S = 2.0
#: How long no other Tune trial must have waited for resources before a trial's group grows.
QUIET_S = 5.0
#: Seconds before workers are started again after one that failed to start; doubled with each further failure.
RETRY_DELAY_S = 2.0
MAX_RETRY_DELAY_S = 60.0
#: The number of workers that may wait for nodes of an autoscaler at the same time.
MAX_REQUESTED = 32
#: How long a worker may wait for its slot's resources if there is no autoscaler.
PLACEMENT_TIMEOUT_S = 10.0
#: How long the first group, once it has its minimum size, waits for further workers.
FIRST_GROUP_WAIT_S = 15.0


class JoiningWorkers:
    """Workers that are starting or are ready, and are not members of the group yet. A group of fixed size wants none.

    Args:
        avoided: Nodes to start no worker on.
        end: Ends a worker in any state.
        start_timeout_s: The time for a worker to start, from the request of its slot.
        warn: Called with a line for the user.

    Attributes:
        on_ready: Called for each worker that has become ready.
        num_reserved: Returns how many free slots are for spares that are still to be started.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        slots: WorkerSlots,
        starter: WorkerStarter,
        avoided: AvoidedNodes,
        *,
        end: Callable[[Worker], None],
        start_timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._scaling = scaling
        self._slots = slots
        self._starter = starter
        self._avoided = avoided
        self._end = end
        self._start_timeout_s = start_timeout_s
        self._warn = warn
        self._starting: dict[Worker, asyncio.Task[None]] = {}
        self._ready: list[Worker] = []
        self._num_wanted = 0.0
        self._retry_delay_s = RETRY_DELAY_S
        self._reported: set[str] = set()  # problems that the user knows
        self._others_waited_at = time.monotonic()
        self._search: asyncio.Task[None] | None = None
        self._has_searched = asyncio.Event()
        self._has_begun = False  # the first group has formed and does not wait for later workers
        self.on_ready: Callable[[], None] = lambda: None
        self.num_reserved: Callable[[], int] = lambda: 0

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def all(self) -> list[Worker]:
        """Return the workers that are ready, then those that are starting."""
        return [*self._ready, *self._starting]

    def want(self, count: float, *, after: WorkerSlot | None = None) -> None:
        """Keep ``count`` workers if there is room for them, and drop those beyond.

        Args:
            count: May be infinite.
            after: A slot that was just requested and has priority: the search for room starts when it has its resources.
        """
        self._num_wanted = count
        while len(self.all()) > count:
            self.drop(self.all()[-1])
        self._ensure_search(after)

    def take(self) -> Worker | None:
        """Take a worker that is ready, or None; no other is started in its place."""
        if not self._ready:
            return None
        self._num_wanted -= 1
        return self._ready.pop(0)

    def put_back(self, worker: Worker) -> None:
        """Keep a loaded worker, which the group cannot use now, as one that is ready to join; see `take`."""
        self._num_wanted += 1
        self._ready.append(worker)

    async def wait_for_first(self) -> None:
        """Wait until the workers for which there was room at the beginning are ready."""
        if self._search is not None:
            await self._has_searched.wait()
        self._has_begun = True
        await self._slots.look()
        placed = [task for worker, task in self._starting.items() if self._slots.is_placed(worker.slot)]
        if placed:
            await asyncio.wait(placed, timeout=FIRST_GROUP_WAIT_S)

    def drop(self, worker: Worker) -> None:
        """End a worker that has died or is not wanted, and remove its slot."""
        if (task := self._starting.pop(worker, None)) is not None:
            task.cancel()
        elif worker in self._ready:
            self._ready.remove(worker)
        else:
            return
        self._end(worker)
        self._slots.remove(worker.slot)
        self._ensure_search(None)

    def drop_on(self, node_ids: Collection[str]) -> None:
        """End the workers on these nodes."""
        for worker in self.all():
            if worker.info is not None and worker.info.node_id in node_ids:
                self.drop(worker)

    def close(self) -> None:
        """End all workers and stop the search."""
        self._num_wanted = 0
        if self._search is not None:
            self._search.cancel()
            self._search = None
        for worker in self.all():
            self.drop(worker)

    def _ensure_search(self, after: WorkerSlot | None) -> None:
        if self._search is None and (len(self.all()) < self._num_wanted or self._starting):
            self._search = asyncio.ensure_future(self._search_regularly(after))

    async def _search_regularly(self, after: WorkerSlot | None) -> None:
        delay_s = 0.01
        while after is not None and not self._slots.is_placed(after):
            await asyncio.sleep(delay_s)
            delay_s = min(SEARCH_INTERVAL_S, 2 * delay_s)
            await self._slots.look()
        while len(self.all()) < self._num_wanted or self._starting:
            with contextlib.suppress(RayError):
                await self._start_where_room()
            self._has_searched.set()
            await asyncio.sleep(SEARCH_INTERVAL_S)
        self._search = None

    async def _start_where_room(self) -> None:
        is_scaling = await call_cluster(has_autoscaler)
        if not is_scaling:
            await self._drop_unplaced()
        while self._is_missing() and (slot := await self._take_placed()) is not None:
            await self._start(slot)
        num_slots = await self._num_slots_to_add(is_scaling=is_scaling)
        while num_slots > 0 and self._is_missing():
            await self._start(await self._slots.add(self._avoided))
            num_slots -= 1

    def _is_missing(self) -> bool:
        return len(self.all()) < self._num_wanted

    async def _take_placed(self) -> WorkerSlot | None:
        return await self._slots.take_placed(self._avoided, num_left=self.num_reserved())

    async def _drop_unplaced(self) -> None:
        # Others took the resources, or the node is gone; the search continues on other nodes.
        await self._slots.remove_unplaced()
        now = time.monotonic()
        for worker in list(self._starting):
            if now - worker.requested_at_s > PLACEMENT_TIMEOUT_S and not self._slots.is_placed(worker.slot):
                self.drop(worker)

    async def _num_slots_to_add(self, *, is_scaling: bool) -> int:
        missing = self._num_wanted - len(self.all())
        if missing <= 0 or (self._slots.is_in_existing_placement and await call_cluster(self._should_wait_for_others)):
            return 0
        if is_scaling:
            return int(min(missing, max(0, MAX_REQUESTED - len(self._starting))))
        nodes = [node for node in await call_cluster(list_nodes) if node.node_id not in self._avoided]
        num_unplaced = sum(not self._slots.is_placed(worker.slot) for worker in self._starting)
        return int(max(0, min(missing, count_fitting(self._scaling.bundle(), nodes) - num_unplaced)))

    def _should_wait_for_others(self) -> bool:
        # A Tune trial that waits for resources has priority over one that grows. It may need a moment to request them.
        now = time.monotonic()
        if has_waiting_groups(self._slots.name, [node.total for node in list_nodes()]):
            self._others_waited_at = now
        return now - self._others_waited_at < QUIET_S

    async def _start(self, slot: WorkerSlot) -> None:
        worker = await self._starter.start(slot, warm_up=self._has_begun)
        self._starting[worker] = asyncio.ensure_future(self._wait_until_ready(worker))
        if len(self.all()) > self._num_wanted:  # fewer are wanted since
            self.drop(worker)

    async def _wait_until_ready(self, worker: Worker) -> None:
        try:
            problem = await asyncio.wait_for(worker.wait_loaded(), self._start_timeout_s)
        except (RayError, asyncio.TimeoutError) as error:
            failed = explain_failed_start(error)
            problem = failed or str(error)
            if failed is not None and failed not in self._reported:
                self._reported.add(failed)
                self._warn(f"a worker cannot join: {failed}")
        if worker not in self._starting:
            return
        if problem is None:
            del self._starting[worker]
            self._ready.append(worker)
            self._retry_delay_s = RETRY_DELAY_S
            self.on_ready()
            return
        if worker.info is not None and worker.refusal is not None:  # others are started elsewhere
            self._avoided.refuse(worker.info, worker.refusal)
            for warning in self._avoided.take_warnings():
                self._warn(warning)
            self.drop(worker)
            return
        # Until the delay is over, the failed worker counts as starting, so that no other one is started in its place.
        await asyncio.sleep(self._retry_delay_s)
        self._retry_delay_s = min(MAX_RETRY_DELAY_S, 2 * self._retry_delay_s)
        self.drop(worker)
        self.want(self._num_wanted)
