"""The worker processes of one Trainer, as the TrainerActor holds them. Runs in the TrainerActor's event loop.

It starts, prepares, replaces and ends processes; what they should be doing is the controller's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysgd.backends.base import BackendConfig, Member
from raysgd.checkpoint.storage import Storage
from raysgd.config import ScalingConfig
from raysgd.errors import ConfigError, InfeasibleError, StartTimeoutError, WorkerDiedError, WorkerError
from raysgd.session.base import Identity
from raysgd.session.events import WorkerEvent
from raysgd.workers.actor import NUM_THREADS, WorkerActor
from raysgd.workers.cluster import NAMESPACE, check_feasible, cluster_nodes
from raysgd.workers.deaths import death_reason, first_line
from raysgd.workers.orders import AttemptOrder, Blob, PrepareOrder, WorkerInfo
from raysgd.workers.placement import explain_busy
from raysgd.workers.ranks import assign_ranks, visible_gpus
from raysgd.workers.streams import WorkerDied, WorkerStreams

#: Seconds after a death in which another one counts as the same failure.
_DIE_TOGETHER_S = 0.2


@dataclass(eq=False)
class Worker:
    """One process and its place. ``loading`` tells of the framework's import; ``identity`` is set when the group is complete."""

    slot: int
    handle: Any
    loading: Any
    is_loaded: bool = False
    info: WorkerInfo | None = None
    identity: Identity | None = None


class WorkerGroup:
    """Processes in the bundles of one placement group.

    Args:
        name: Unique in the cluster; names the placement group and the actors.
        runtime_env: Ray runtime environment of the workers.
        start_timeout_s: Seconds for workers to be placed and up.
    """

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        backend: BackendConfig,
        *,
        runtime_env: Mapping[str, Any] | None,
        start_timeout_s: float,
        shares_gpus: bool,
    ) -> None:
        self._name = name
        self._scaling = scaling
        self._backend = backend
        self._runtime_env = dict(runtime_env or {})
        self._start_timeout_s = start_timeout_s
        self._shares_gpus = shares_gpus
        self._placement: PlacementGroup | None = None
        self._workers: list[Worker | None] = [None] * scaling.min_workers
        self._num_made = 0
        self.streams = WorkerStreams()

    @property
    def size(self) -> int:
        return len(self._workers)

    def info(self, slot: int) -> WorkerInfo | None:
        worker = self._workers[slot]
        return None if worker is None else worker.info

    def identity(self, slot: int) -> Identity:
        worker = self._workers[slot]
        assert worker is not None and worker.identity is not None
        return worker.identity

    # -- getting ready ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for the workers' processes, if that can be done now; `get_ready` waits for them, and tells what is wrong."""
        with contextlib.suppress(InfeasibleError, RayError):
            self._fill()

    async def get_ready(self) -> list[str]:
        """Bring every worker up and ready for a run; returns lines worth telling the user.

        Raises:
            InfeasibleError: The cluster can never hold them.
            StartTimeoutError: They were not up in time.
            WorkerDiedError: One died on the way.
            WorkerError: They are up and cannot serve, such as for a framework that is not installed.
        """
        try:
            return await asyncio.wait_for(self._get_ready(), self._start_timeout_s)
        except (asyncio.TimeoutError, GetTimeoutError):
            raise self._timeout_error() from None

    async def _get_ready(self) -> list[str]:
        self._fill()
        await self._locate()
        await self._finish_loading()
        stale = {slot: modules for slot, modules in enumerate(await self._prepare()) if modules}
        if not stale:
            return []
        modules = sorted({module for names in stale.values() for module in names})
        for slot in stale:
            self.kill(slot)
        self._fill()
        await self._locate()
        await self._finish_loading()
        await self._prepare()
        return [f"replaced {len(stale)} warm workers: {', '.join(modules)} changed since they loaded it"]

    def _fill(self) -> None:
        """Make an actor for every empty slot."""
        if self._placement is None:
            check_feasible(self._scaling)
            bundle = self._scaling.bundle() or {"CPU": 0.001}  # Ray refuses empty bundles
            self._placement = placement_group(
                [bundle] * self.size, strategy=self._scaling.placement_strategy, name=self._name
            )
        for slot, worker in enumerate(self._workers):
            if worker is None:
                handle = self._make_actor(slot)
                self._workers[slot] = Worker(slot, handle, handle.load.remote(self._backend, self._name))

    def _make_actor(self, slot: int) -> Any:
        assert self._placement is not None
        self._num_made += 1
        return (
            ray.remote(WorkerActor)
            .options(
                name=f"{self._name}-worker-{self._num_made}",
                namespace=NAMESPACE,
                num_cpus=self._scaling.cpus_per_worker,
                num_gpus=self._scaling.gpus_per_worker,
                resources=dict(self._scaling.resources_per_worker) or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement, placement_group_bundle_index=slot
                ),
                max_concurrency=NUM_THREADS,
                runtime_env=self._runtime_env or None,
            )
            .remote()
        )

    async def _locate(self) -> None:
        workers = self._all()
        infos = await self._gather([worker.handle.describe.remote() for worker in workers if worker.info is None])
        for worker in workers:
            if worker.info is None:
                worker.info = infos.pop(0)
        if any(worker.identity is None for worker in workers):
            self._assign(workers)

    async def _finish_loading(self) -> None:
        new = [worker for worker in self._all() if not worker.is_loaded]
        problems = await self._gather([worker.loading for worker in new])
        bad = {worker: problem for worker, problem in zip(new, problems, strict=True) if problem is not None}
        for worker in new:
            worker.is_loaded = worker not in bad
        for worker in bad:
            self.kill(worker.slot)  # the next run tries again, in a process of its own
        for worker, problem in bad.items():
            raise WorkerError(f"{problem} (worker on {worker.info.node if worker.info else 'an unknown node'})")

    def _assign(self, workers: list[Worker]) -> None:
        """Ranks by node at the first forming; later a replacement takes the rank of the one it replaces."""
        identities = assign_ranks([worker.info.node_id for worker in workers if worker.info is not None])
        known = [worker.identity for worker in workers if worker.identity is not None]
        if not known:
            for worker, identity in zip(workers, identities, strict=True):
                worker.identity = identity
            return
        taken = {identity.world_rank for identity in known}
        free = [rank for rank in range(len(workers)) if rank not in taken]
        for worker in workers:
            if worker.identity is None:
                worker.identity = Identity(world_rank=free.pop(0), world_size=len(workers))
        self._refresh_local_ranks(workers)

    def _refresh_local_ranks(self, workers: list[Worker]) -> None:
        by_rank = sorted(workers, key=lambda w: w.identity.world_rank if w.identity else 0)
        nodes = [worker.info.node_id for worker in by_rank if worker.info is not None]
        order = list(dict.fromkeys(nodes))
        for index, worker in enumerate(by_rank):
            worker.identity = Identity(
                world_rank=index,
                world_size=len(nodes),
                local_rank=nodes[:index].count(nodes[index]),
                local_world_size=nodes.count(nodes[index]),
                node_rank=order.index(nodes[index]),
            )

    async def _prepare(self) -> list[tuple[str, ...]]:
        workers = self._all()
        infos = [worker.info for worker in workers if worker.info is not None]
        gpus = visible_gpus(infos, shared=self._shares_gpus)
        orders = [
            PrepareOrder(*seen, rank=self.identity(worker.slot).world_rank)
            for worker, seen in zip(workers, gpus, strict=True)
        ]
        return await self._gather([w.handle.prepare.remote(o) for w, o in zip(workers, orders, strict=True)])

    async def _gather(self, refs: Sequence[Any]) -> list[Any]:
        answers = [asyncio.ensure_future(ref) for ref in refs]
        try:
            return list(await asyncio.gather(*answers))
        except RayActorError as error:
            await asyncio.wait(answers, timeout=_DIE_TOGETHER_S)
            ranks = self._drop_dead(answers)
            raise WorkerDiedError(f"a worker died while it was starting: {death_reason(error)}", ranks=ranks) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            raise WorkerError(f"a worker could not start: {type(cause).__name__}: {cause}") from error
        except RayError as error:
            raise WorkerError(f"a worker could not start: {first_line(error)}") from error

    def _drop_dead(self, answers: Sequence[asyncio.Future[Any]]) -> tuple[int, ...]:
        """Empty the slots of those who died before they answered; returns their ranks, as far as they had one."""
        errors = [answer.exception() for answer in answers if answer.done() and not answer.cancelled()]
        dead = {getattr(error, "actor_id", None) for error in errors if isinstance(error, RayActorError)}
        ranks = []
        for worker in self._all():
            if worker.handle._actor_id.hex() in dead:
                self._workers[worker.slot] = None
                ranks += [] if worker.identity is None else [worker.identity.world_rank]
        return tuple(sorted(ranks))

    def _timeout_error(self) -> StartTimeoutError:
        missing = [slot for slot, worker in enumerate(self._workers) if worker is None or worker.info is None]
        why = explain_busy(self._scaling, cluster_nodes()) if missing else None
        told = f"{len(missing)} of {self.size} workers were not up" if missing else "the workers did not get ready"
        return StartTimeoutError(
            f"{told} within {self._start_timeout_s:g} s"
            + (f": {why}, the rest is taken by others" if why else "")
            + ". Free resources, or raise FailureConfig(start_timeout_s=...)."
        )

    async def check_storage(self, storage: Storage) -> None:
        """Whether every node with a worker sees the run's folder; asked by a probe file where it is a local path.

        Raises:
            ConfigError: A node does not see it.
        """
        here = ray.get_runtime_context().get_node_id()
        others = {w.info.node_id: w for w in self._all() if w.info is not None and w.info.node_id != here}
        if not storage.is_local or not others:
            return
        storage.write_bytes("probe", b"")
        seen = await self._gather([w.handle.probe.remote(storage.uri, "probe") for w in others.values()])
        storage.delete_file("probe")
        blind = [w.info.node for w, sees in zip(others.values(), seen, strict=True) if not sees and w.info is not None]
        if blind:
            raise ConfigError(
                f"storage_path {storage.uri} is on one node's disk: {', '.join(blind)} cannot see it. "
                "Give RunConfig(storage_path=...) a folder all nodes share, or a URI such as s3://bucket/folder."
            )

    # -- an attempt -----------------------------------------------------------------------------------------------

    async def open_rendezvous(self) -> str:
        """Where the members of the next attempt meet; on rank 0."""
        first = next(worker for worker in self._all() if worker.identity and worker.identity.world_rank == 0)
        (rendezvous,) = await self._gather([first.handle.open_rendezvous.remote()])
        return str(rendezvous)

    def member(self, slot: int, rendezvous: str) -> Member:
        worker, identity = self._workers[slot], self.identity(slot)
        assert worker is not None and worker.info is not None
        return Member(
            rank=identity.world_rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            local_world_size=identity.local_world_size,
            node_rank=identity.node_rank,
            rendezvous=rendezvous,
            node_ip=worker.info.node_ip,
            has_gpu=self._scaling.gpus_per_worker > 0,
            shares_gpu=0 < self._scaling.gpus_per_worker < 1,
        )

    async def run(self, slot: int, run: Blob, order: AttemptOrder) -> AsyncIterator[list[WorkerEvent] | Any]:
        """What the worker says: batches of events, and references to large values.

        Raises:
            WorkerDied: The process is gone.
        """
        worker = self._workers[slot]
        assert worker is not None
        try:
            async for item in self.streams.read(worker.handle, run, order):
                yield item
        except WorkerDied:
            if self._workers[slot] is worker:
                self._workers[slot] = None
            raise

    def end(self, slot: int, attempt: int, why: str) -> None:
        self._tell(slot, "end", attempt, why)

    async def ask_to_stop(self, attempt: int) -> None:
        """Agree with all ranks on the place where they find ``should_stop()`` true; see `StopGate`."""
        with contextlib.suppress(RayError):  # a rank that died meanwhile ends the attempt anyway
            places = await self.call("hold", attempt)
            looks, reports = (max(place[i] for place in places) for i in (0, 1))
            await self.call("stop_from", attempt, looks, reports)

    async def leave(self) -> None:
        """All ranks have returned: leave the group."""
        with contextlib.suppress(RayError):
            await asyncio.gather(*[worker.handle.leave.remote() for worker in self._all()])

    async def call(self, method: str, *args: Any, slots: Sequence[int] | None = None) -> list[Any]:
        """Call a method of the worker actors; results by slot.

        Raises:
            WorkerDiedError: One of them died.
        """
        chosen = range(self.size) if slots is None else slots
        handles = [worker.handle for slot in chosen if (worker := self._workers[slot]) is not None]
        answers = [asyncio.ensure_future(getattr(handle, method).remote(*args)) for handle in handles]
        try:
            return list(await asyncio.gather(*answers))
        except RayActorError as error:
            await asyncio.wait(answers, timeout=_DIE_TOGETHER_S)
            ranks = self._drop_dead(answers)
            who = ", ".join(map(str, ranks))
            raise WorkerDiedError(
                f"the worker process of rank {who} died: {death_reason(error)}", ranks=ranks
            ) from None

    # -- the end --------------------------------------------------------------------------------------------------

    def kill(self, slot: int) -> None:
        """End a worker's process; a stopped or blocked one too."""
        worker, self._workers[slot] = self._workers[slot], None
        if worker is None:
            return
        if worker.info is not None and worker.info.node_id == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.info.pid, signal.SIGKILL)  # ray.kill of a stopped process takes 5 s
        ray.kill(worker.handle)

    def shutdown(self) -> None:
        """End all processes and give the resources back."""
        for slot in range(self.size):
            self.kill(slot)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _all(self) -> list[Worker]:
        return [worker for worker in self._workers if worker is not None]

    def _tell(self, slot: int, method: str, *args: Any) -> None:
        worker = self._workers[slot]
        if worker is not None:
            getattr(worker.handle, method).remote(*args)


__all__ = ["Worker", "WorkerDied", "WorkerGroup"]
