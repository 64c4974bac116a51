"""Processes an elastic group could take in: looks for room, starts them there, brings them up. Runs in the TrainerActor.

Where nothing adds nodes to the cluster by itself, room is looked for in what is free, so that nothing waits in Ray's
queues in vain, and nobody else's request has to wait behind it. An autoscaler, though, must be asked: there the seats are
requested whether or not there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from raysgd.config import ScalingConfig
from raysgd.workers.cluster import cluster_nodes, may_be_scaled
from raysgd.workers.placement import room_for
from raysgd.workers.process import Worker, WorkerStarter
from raysgd.workers.seats import Seat, Seats, are_others_waiting

#: Seconds between two looks for room.
LOOK_S = 2.0
#: Seconds for which no trial must have waited before another one grows.
QUIET_S = 5.0
#: Seconds before processes are started again after one that did not come up; twice as long after each further one.
PAUSE_S = 2.0
MAX_PAUSE_S = 60.0
#: Processes of an autoscaled cluster that may wait for their nodes at once.
MAX_ASKED = 32
#: Seconds a process may wait for the resources of its seat, where no autoscaler brings them.
UNPLACED_S = 10.0
#: Seconds the first group waits for processes beyond its least size, once it is there without them.
TOGETHER_S = 15.0


class Newcomers:
    """Those on their way, and those who are up and wait to be taken.

    Args:
        seats: The group's.
        starter: Starts a process.
        bring_up: Waits until a process is up and loaded, and tells what is wrong with it, if anything is.
        end: Ends a process, wherever it stands.
        start_timeout_s: How long one may take, from the request of its seat.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        seats: Seats,
        starter: WorkerStarter,
        *,
        bring_up: Callable[[Worker], Any],
        end: Callable[[Worker], None],
        start_timeout_s: float,
    ) -> None:
        self._scaling = scaling
        self._seats = seats
        self._starter = starter
        self._bring_up = bring_up
        self._end = end
        self._start_timeout_s = start_timeout_s
        self._coming: dict[Worker, asyncio.Task[None]] = {}
        self._started: dict[Worker, float] = {}
        self._ready: list[Worker] = []
        self._num_wanted = 0.0
        self._avoid: set[str] = set()
        self._pause_s = PAUSE_S
        self._others_at = time.monotonic()
        self._looking: asyncio.Task[None] | None = None
        self._has_looked = asyncio.Event()
        self._has_begun = False  # the group trains: it does not wait for those who come from here on
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def all(self) -> list[Worker]:
        """Those who are up, and those on their way."""
        return [*self._ready, *self._coming]

    def want(self, count: float, avoid: set[str], *, after: Seat | None = None) -> None:
        """Have so many, as far as there is room for them; fewer are no more than that from here on.

        Args:
            count: How many; may be infinite.
            avoid: Nodes to start none on.
            after: A seat that was just asked for and comes first: they must not take its room.
        """
        self._num_wanted, self._avoid = count, avoid
        while len(self.all()) > count:
            self.drop(self.all()[-1])
        if len(self.all()) < count and after is None:
            self._look()
        self._go_on_looking(after)

    def take(self) -> Worker | None:
        """One who is up, and alive as far as is known; no other is looked for in its place."""
        if not self._ready:
            return None
        self._num_wanted -= 1
        return self._ready.pop(0)

    async def settle(self) -> None:
        """Wait for those for whom there is room from the beginning: they are on their way up."""
        if self._looking is not None:
            await self._has_looked.wait()
        self._has_begun = True
        here = [task for worker, task in self._coming.items() if worker.seat.is_placed()]
        if here:
            await asyncio.wait(here, timeout=TOGETHER_S)

    def drop(self, worker: Worker) -> None:
        """Let go of one: it has died, or nobody wants it."""
        if (task := self._coming.pop(worker, None)) is not None:
            task.cancel()
        elif worker in self._ready:
            self._ready.remove(worker)
        else:
            return
        self._started.pop(worker, None)
        self._end(worker)
        self._seats.remove(worker.seat)
        self._go_on_looking(None)

    def close(self) -> None:
        """End all, and look no further."""
        self._num_wanted = 0
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for worker in self.all():
            self.drop(worker)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _go_on_looking(self, after: Seat | None) -> None:
        if self._looking is None and (len(self.all()) < self._num_wanted or self._coming):
            self._looking = asyncio.ensure_future(self._look_regularly(after))

    async def _look_regularly(self, after: Seat | None) -> None:
        pause_s = 0.01
        while after is not None and not after.is_placed():
            await asyncio.sleep(pause_s)
            pause_s = min(LOOK_S, 2 * pause_s)
        while len(self.all()) < self._num_wanted or self._coming:
            with contextlib.suppress(RayError):
                self._look()
            self._has_looked.set()
            await asyncio.sleep(LOOK_S)
        self._looking = None

    def _look(self) -> None:
        if not may_be_scaled():
            self._drop_unplaced()
        missing = self._num_wanted - len(self.all())
        while missing > 0 and (seat := self._seats.take_placed(self._avoid)) is not None:
            self._start(self._starter.start(seat, warm_up=self._has_begun))
            missing -= 1
        for _ in range(self._room(missing)):
            self._start(self._starter.start(self._seats.add(self._avoid), warm_up=self._has_begun))

    def _drop_unplaced(self) -> None:
        """Others were faster, or the node is gone: the seat is looked for elsewhere."""
        now = time.monotonic()
        for worker, since in list(self._started.items()):
            if worker in self._coming and now - since > UNPLACED_S and not worker.seat.is_placed():
                self.drop(worker)
        self._seats.remove_unplaced()

    def _room(self, missing: float) -> int:
        """How many more seats to ask for."""
        if missing <= 0 or (self._seats.is_given and self._are_others_first()):
            return 0
        if may_be_scaled():
            return int(min(missing, max(0, MAX_ASKED - len(self._coming))))
        nodes = [node for node in cluster_nodes() if node.node_id not in self._avoid]
        unplaced = sum(not worker.seat.is_placed() for worker in self._coming)
        return int(max(0, min(missing, room_for(self._scaling.bundle(), nodes) - unplaced)))

    def _are_others_first(self) -> bool:
        """Of a trial: one that waits comes before one that grows, also if it has yet to say so."""
        now = time.monotonic()
        if are_others_waiting(self._seats.name, [node.total for node in cluster_nodes()]):
            self._others_at = now
        return now - self._others_at < QUIET_S

    def _start(self, worker: Worker) -> None:
        self._started[worker] = time.monotonic()
        self._coming[worker] = asyncio.ensure_future(self._come_up(worker))

    async def _come_up(self, worker: Worker) -> None:
        try:
            problem = await asyncio.wait_for(self._bring_up(worker), self._start_timeout_s)
        except (RayError, asyncio.TimeoutError) as error:
            problem = str(error)
        if worker not in self._coming:
            return
        if problem is None:
            del self._coming[worker], self._started[worker]
            self._ready.append(worker)
            self._pause_s = PAUSE_S
            self.on_ready()
            return
        await asyncio.sleep(self._pause_s)  # it is counted as on its way meanwhile: nothing takes its place
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        self.drop(worker)
        self.want(self._num_wanted, self._avoid)


def newcomers_of(
    scaling: ScalingConfig, seats: Seats, starter: WorkerStarter, end: Callable[[Worker], None], start_timeout_s: float
) -> Newcomers | None:
    """Those of an elastic group; None for one that keeps its size."""
    if not scaling.is_elastic:
        return None
    return Newcomers(scaling, seats, starter, bring_up=Worker.bring_up, end=end, start_timeout_s=start_timeout_s)
