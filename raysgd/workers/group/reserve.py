"""The workers of a group that are not members: spares, and workers that join an elastic group. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection

from ray.exceptions import RayError

from raysgd.workers.group.joining import JoiningWorkers
from raysgd.workers.group.processes import Worker, WorkerStarter
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.slots import WorkerSlots

#: The time for a worker to answer when it is needed.
_ANSWER_S = 1.0
#: Seconds between two checks for joining workers that are ready.
_POLL_S = 0.1
#: Seconds after a new attempt has begun at which the spares that it used are replaced: a process that starts and imports a
#: framework takes seconds of a core, which the ranks need until they have loaded the checkpoint and done a first step.
_REPLACE_S = 3.0
#: Seconds after an attempt has begun, and between later times, at which spares import what a member has imported.
_IMPORT_S = (2.0, 4.0, 8.0, 16.0, 32.0)
_LATER_IMPORT_S = 120.0


class Reserve:
    """Provides replacements for members that have died.

    Args:
        num_spares: The number of workers that are kept ready only as replacements.
        joining: Workers that are ready to join the group; the replacement may be one of them.
        end: Ends a worker in any state.
        avoided: Nodes from which no worker is taken.
    """

    def __init__(
        self,
        slots: WorkerSlots,
        starter: WorkerStarter,
        num_spares: int,
        joining: JoiningWorkers,
        end: Callable[[Worker], None],
        avoided: AvoidedNodes,
    ) -> None:
        self._slots = slots
        self._starter = starter
        self._num_spares = num_spares
        self._joining = joining
        self._end = end
        self._avoided = avoided
        self._spares: list[Worker] = []
        self._has_spares = False  # they were started once
        self._task: asyncio.Task[None] | None = None
        joining.num_reserved = lambda: self._num_spares - len(self._spares)

    def count_outside(self, node_ids: Collection[str]) -> int:
        """Return the number of spares and joining workers, ready or starting, that are not on these nodes."""
        infos = [worker.info for worker in (*self._spares, *self._joining.all())]
        return sum(info is None or info.node_id not in node_ids for info in infos)

    async def take(self) -> Worker | None:
        """Take a worker that is ready, a spare first; dead ones and those on nodes to avoid are dropped."""
        while self._spares:
            spare = self._spares[0]
            is_usable = await self._is_usable(spare)
            self._spares.remove(spare)
            if is_usable:
                return spare
            self._end_spare(spare)
        return await self.take_joining_worker()

    async def take_joining_worker(self) -> Worker | None:
        """Take a joining worker that is ready, or None."""
        while (worker := self._joining.take()) is not None:
            is_usable = False
            try:
                is_usable = await self._is_usable(worker)
            finally:
                if not is_usable:  # also if this call is cancelled
                    self._end(worker)
                    self._slots.remove(worker.slot)
            if is_usable:
                return worker
        return None

    async def find(self) -> Worker:
        """Wait for a replacement: a joining worker that becomes ready, or a new worker in a slot that is found earlier."""
        finding = asyncio.ensure_future(self._slots.find(self._avoided))
        joining_worker: Worker | None = None
        try:
            while joining_worker is None and not finding.done():
                joining_worker = await self.take_joining_worker()
                if joining_worker is None:
                    await asyncio.wait([finding], timeout=_POLL_S)
        finally:
            finding.cancel()  # without effect if it is done
        if joining_worker is None:
            return await self._starter.start(finding.result())
        if finding.done():
            self._slots.remove(finding.result())
        return joining_worker

    async def replenish(self, member: Worker) -> None:
        """Start spares in free slots, later ones some seconds from now; all import what a member of the group imports."""
        self._end_task()
        if self._num_spares == 0:
            return
        if not self._has_spares:
            await self._start_spares()
        self._task = asyncio.ensure_future(self._keep(member, _REPLACE_S if self._has_spares else 0.0))
        self._has_spares = True

    async def _start_spares(self) -> None:
        while len(self._spares) < self._num_spares and (slot := await self._slots.take(self._avoided)) is not None:
            self._spares.append(await self._starter.start(slot, warm_up=True))

    def drop(self, worker: Worker) -> bool:
        """Forget a worker that has died; return True if it was a spare, whose slot the caller must release."""
        if worker in self._spares:
            self._spares.remove(worker)
            return True
        self._joining.drop(worker)
        return False

    def close(self) -> None:
        """End all spares and joining workers."""
        self._end_task()
        self._has_spares = False
        self._joining.close()
        for spare in self._spares:
            self._end_spare(spare)
        self._spares.clear()

    async def _keep(self, member: Worker, replace_s: float) -> None:
        """Start missing spares, and have all import the installed modules of a member, for which train_func would wait later."""
        await asyncio.sleep(replace_s)
        await self._start_spares()
        for pause_s in itertools.chain(_IMPORT_S, itertools.repeat(_LATER_IMPORT_S)):
            await asyncio.sleep(pause_s)
            try:
                names = await asyncio.wait_for(member.handle.list_imports.remote(), _ANSWER_S)
            except (RayError, asyncio.TimeoutError):
                continue
            for spare in self._spares:
                spare.handle.import_early.remote(names)  # its answer is not awaited: the spare may die

    def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _is_usable(self, worker: Worker) -> bool:
        try:
            await asyncio.wait_for(worker.locate(), _ANSWER_S)
        except (RayError, asyncio.TimeoutError):
            return False
        if worker.info is not None and worker.refusal is not None:
            self._avoided.refuse(worker.info, worker.refusal)
        return worker.info is not None and worker.info.node_id not in self._avoided

    def _end_spare(self, worker: Worker) -> None:
        self._end(worker)
        self._slots.release(worker.slot)
