"""The worker group of a Trainer: places, starts, calls and replaces the worker processes. Runs in the TrainerActor.

Members are ordered by rank. When a member dies, a spare, a joining worker or a new process takes its rank. All others keep
their processes and their ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raysgd._util.logs import get_logger
from raysgd.backends.base import BackendConfig, Member
from raysgd.config import FailureConfig, ScalingConfig
from raysgd.errors import ConfigError, InfeasibleError, StartTimeoutError, WorkerDiedError, WorkerError
from raysgd.session.events import LiveReport, WorkerEvent
from raysgd.workers.group.agreement import RankAgreement
from raysgd.workers.group.checkpoint_memory import ClusterMemory
from raysgd.workers.group.event_streams import WorkerDied, WorkerStreams
from raysgd.workers.group.joining import JoiningWorkers
from raysgd.workers.group.kept_group import KeptGroup
from raysgd.workers.group.monitor import DrainMonitor, GroupMonitor, LostNodes
from raysgd.workers.group.processes import CoordinatorProcess, Worker, WorkerStarter
from raysgd.workers.group.ranks import (
    assign_ranks,
    assign_visible_gpus,
    choose_rendezvous_ips,
    close_gaps,
    join_opened,
    make_members,
)
from raysgd.workers.group.reserve import Reserve
from raysgd.workers.liveness.death_reasons import DEATHS, explain_failed_start, first_line
from raysgd.workers.liveness.node_agent import NodeAgents
from raysgd.workers.liveness.own_processes import ProcessWatch
from raysgd.workers.orders import AttemptOrder, Blob, Prepared, PrepareOrder, WorkerInfo
from raysgd.workers.placement.avoided_nodes import AvoidedNodes
from raysgd.workers.placement.calls import call_cluster, post_to_cluster
from raysgd.workers.placement.capacity import count_fitting, explain_timeout, slot_bundle
from raysgd.workers.placement.cluster import check_feasible, has_autoscaler, list_nodes, wait_until_feasible
from raysgd.workers.placement.slots import ExistingPlacement, WorkerSlots
from raysgd.workers.process.worker_actor import WorkerActor
from raysgd.workers.versions import VersionCheck, Versions

if TYPE_CHECKING:
    from raysgd.checkpoint.storage.storage import Storage

#: Deaths within this time of each other, such as those of a node's workers, are handled together.
_DIE_TOGETHER_S = 0.2
#: The same during the start, because workers reach the same fatal place at different times.
_START_TOGETHER_S = 15.0
#: The time to find out what a group has waited for in vain.
_EXPLAIN_S = 5.0
#: The time to find out which nodes are draining, before a replacement is placed.
_DRAINS_S = 0.5
#: What a group waits for is reported after this time, and looked for in such intervals.
WAIT_REPORT_S = 2.0


class WorkerGroup:
    """Worker processes in the bundles of placement groups.

    Args:
        name: Unique in the cluster; prefix of the names of placement groups and actors.
        controller: Name of the TrainerActor.
        existing: An existing placement group with enough room for the first workers.
        versions: The driver's versions.
        explain_missing: Says which resources a number of workers wait for, and who holds them; None if there is room. Blocks.

    The attributes ``slots``, ``agents``, ``kept``, ``streams``, ``monitor``, ``watch``, ``drains``, ``agreement`` and ``memory``
    are the group's parts; their classes say what they do.

    Attributes:
        on_wait: Called with what the group waits for, if resources are missing or nodes are still to join the cluster.
    """

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        backend: BackendConfig,
        failure: FailureConfig,
        *,
        controller: str,
        runtime_env: Mapping[str, Any] | None,
        existing: ExistingPlacement | None = None,
        explain_missing: Callable[[int], str | None] = lambda count: None,
        versions: Versions,
    ) -> None:
        self._scaling = scaling
        self._multiple = scaling.workers_per_replica
        self._failure = failure
        self._backend = backend
        # By rank; None for a rank without a process. The group's parts share this list, so it is changed in place.
        self._members: list[Worker | None] = [None] * scaling.min_workers
        self._has_formed = False
        self.kept = KeptGroup(backend)
        self._opened: str | None = None  # the rendezvous that rank 0 opened when it was prepared
        self._explain_missing = explain_missing
        self.on_wait: Callable[[str], None] = get_logger().warning
        self._avoided = AvoidedNodes(scaling.bundle())
        self._versions = VersionCheck(versions, WorkerActor)
        self._beginning: asyncio.Future[None] | None = None
        self.watch = ProcessWatch(failure.heartbeat_timeout_s)
        self.agents = NodeAgents(name, self.watch, runtime_env)
        self.slots = WorkerSlots(name, slot_bundle(scaling), scaling.placement_strategy, existing)
        self._starter = WorkerStarter(
            name, scaling, backend, runtime_env, controller, self.slots.remove, self._versions.judge
        )
        self._coordinator = CoordinatorProcess(name, backend, runtime_env, self.watch)
        self._joining = JoiningWorkers(
            scaling,
            self.slots,
            self._starter,
            self._avoided,
            end=self._end_process,
            start_timeout_s=failure.start_timeout_s,
            warn=lambda line: self.on_wait(line),
        )
        self._reserve = Reserve(
            self.slots, self._starter, failure.num_spares, self._joining, self._end_process, self._avoided
        )
        self.streams = WorkerStreams()
        self.monitor = GroupMonitor(self.agents, self._members)
        self._lost_nodes = LostNodes(self.agents, self._avoided)
        self.drains = DrainMonitor(self._members, self._joining, self._avoided)
        self.agreement = RankAgreement(self.call)
        self.memory = ClusterMemory(self.agents, self._members)

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def num_joining(self) -> int:
        """The number of workers that can join the group: those that are ready, in whole replicas, up to the largest size."""
        num_ready = min(self._joining.num_ready, self._scaling.max_workers - self.size)
        return int(num_ready - num_ready % self._multiple)

    def info(self, rank: int) -> WorkerInfo | None:
        """Return where a member runs; None if it has no process that has answered."""
        return None if (worker := self._members[rank]) is None else worker.info

    @property
    def live_reports(self) -> dict[int, LiveReport]:
        """The answers of the processes about the run's live state, by rank."""
        found = {rank: worker.live for rank, worker in enumerate(self._members) if worker is not None}
        return {rank: report for rank, report in found.items() if report is not None}

    def on_joining_worker(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a worker becomes ready, if with it a whole replica can join."""
        self._joining.on_ready = lambda: callback() if self.num_joining else None

    # -- starting -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Request the workers' processes without waiting; `get_ready` waits for them and raises the errors."""
        self._beginning = asyncio.ensure_future(self._begin())

    async def _begin(self) -> None:
        with contextlib.suppress(InfeasibleError, RayError):
            await self._start_missing()

    def expect(self, size: int) -> None:
        """Form with ``size`` members, because only that size can load the run's checkpoint. A formed group stays as it is."""
        if not self._has_formed:
            self._members[:] = [None] * size

    async def get_ready(self, *, keep_size: bool = False, run_id: str = "") -> list[str]:
        """Make every worker ready for a run, or for the class API; return messages for the user.

        An elastic group continues with the surviving members if they are enough, and adds workers that are ready to join.

        Args:
            keep_size: The group neither shrinks nor grows.
            run_id: The run that follows; empty for the class API.

        Raises:
            InfeasibleError: The cluster cannot hold the workers, and no nodes joined it in the time that the user allows.
            StartTimeoutError: They were not ready in time.
            WorkerDiedError: A worker died while it was starting.
            WorkerError: A worker cannot work, for example because the framework is not installed.
        """
        if self._beginning is not None:
            await asyncio.wait([self._beginning], timeout=self._failure.start_timeout_s)
            self._beginning = None
        if not self.slots.is_open and not self.slots.is_in_existing_placement:
            spares, timeout_s = self._failure.num_spares, self._failure.wait_for_nodes_s
            await wait_until_feasible(self._scaling, spares, timeout_s, self.on_wait)
        if self._avoided.lost:
            self._lost_nodes.ask()
        reporting = asyncio.ensure_future(self._report_wait())
        try:
            messages = await asyncio.wait_for(self._get_ready(keep_size, run_id), self._failure.start_timeout_s)
        except (asyncio.TimeoutError, GetTimeoutError):
            raise await self._make_timeout_error() from None
        finally:
            reporting.cancel()
        await self._reserve.replenish(self._workers()[0])
        self.expect_loss(())
        self.agents.watch_workers(self._infos())
        return [*messages, *self._avoided.take_warnings(), *self._versions.take_warnings()]

    async def _get_ready(self, keep_size: bool, run_id: str) -> list[str]:
        await self._form(keep_size)
        await self.kept.settle(self._workers() if run_id else [])
        stale = {rank: why for rank, why in enumerate(await self._prepare(run_id)) if why is not None}
        if not stale:
            return []
        for rank in stale:
            self.kill(rank)
        await self._form(keep_size=True)
        await self.kept.settle(self._workers())
        await self._prepare(run_id)
        return [f"replaced {len(stale)} warm workers: {'; '.join(sorted(set(stale.values())))}"]

    async def _form(self, keep_size: bool) -> None:
        """Give every rank a loaded process, and every process its place in the group."""
        if self._has_formed and None in self._members:
            with contextlib.suppress(asyncio.TimeoutError):  # the GCS is away; the next attempt polls for them as well
                await asyncio.wait_for(self.drains.ranks(), _DRAINS_S)
        for rank in self._vacant_ranks():
            self._members[rank] = await self._reserve.take()
        if not keep_size:
            self._members[:], surplus = close_gaps(self._members, self._scaling.min_workers, self._multiple)
            for worker in surplus:
                self._joining.put_back(worker)
            await self._take_joining_workers()
        await self._replace_used_processes()
        await self._start_missing()
        while True:
            for rank in self._vacant_ranks():
                self._members[rank] = await self._reserve.find()
            await self._wait_loaded()
            if not self._vacant_ranks():
                break
        if not self._has_formed and not keep_size:
            await self._joining.wait_for_first()
            await self._take_joining_workers()
        self._assign_members()

    async def _take_joining_workers(self) -> None:
        """Take in joining workers in whole replicas, up to the largest size."""
        while self.size < self._scaling.max_workers and self._joining.num_ready >= self._multiple:
            taken: list[Worker] = []
            while len(taken) < self._multiple and (worker := await self._reserve.take_joining_worker()) is not None:
                taken.append(worker)
            if len(taken) < self._multiple:  # others have died
                for worker in taken:
                    self._joining.put_back(worker)
                return
            self._members += taken

    def expect_loss(self, ranks: Collection[int]) -> None:
        """Start workers where there is room, one for each of these ranks, whose nodes do not answer; end those of earlier calls.

        A replacement is then ready, or nearly so, when the silent nodes are given up. A node on which another rank answers is not
        silent: a process has died there, and Ray does not know it while a child of it lives, such as that of a loader.
        """
        nodes: dict[bool, set[str]] = {True: set(), False: set()}
        for rank, worker in enumerate(self._members):
            if worker is not None and worker.info is not None:
                nodes[rank in ranks].add(worker.info.node_id)
        self._avoided.set_silent(nodes[True] - nodes[False])
        self._joining.want(self._scaling.max_workers - self.size + len(ranks))

    async def _start_missing(self) -> None:
        is_new = not self.slots.is_open
        if is_new:
            self._coordinator.begin()
            if not self.slots.is_in_existing_placement:
                await call_cluster(check_feasible, self._scaling, self._failure.num_spares)
            await self.slots.open(self.size + self._failure.num_spares)
        for rank in self._vacant_ranks():
            must_have_node = self._scaling.is_elastic and not is_new
            if (slot := await self.slots.take(self._avoided, must_have_node=must_have_node)) is not None:
                self._members[rank] = await self._starter.start(slot)
        if is_new:
            first = self._members[0]
            self._joining.want(self._scaling.max_workers - self.size, after=None if first is None else first.slot)

    async def _replace_used_processes(self) -> None:
        """End processes that were in a process group, if they can join no other; their ranks become vacant."""
        if self._backend.can_rejoin:
            return
        for rank, worker in enumerate(self._members):
            if worker is not None and worker.has_joined:
                self.kill(rank)
                self._members[rank] = await self._reserve.take()

    async def _wait_loaded(self) -> None:
        """Wait until every process has answered where it runs and has imported the framework.

        A replacement whose versions do not fit to the driver's leaves its rank vacant, and its node is avoided.
        """
        new = [worker for worker in self._workers() if worker.info is None or not worker.is_loaded]
        # All at once: what kills one worker during its import may kill others too, and that is one failure.
        problems = await self._gather(new, [worker.wait_loaded() for worker in new])
        failed = {worker: problem for worker, problem in zip(new, problems, strict=True) if problem is not None}
        if self._has_formed:
            for worker in list(failed):
                if worker.info is not None and worker.refusal is not None:
                    self._avoided.refuse(worker.info, worker.refusal)
                    self._discard(worker)
                    del failed[worker]
            for warning in self._avoided.take_warnings():  # at once: its ranks may wait for room elsewhere
                self.on_wait(warning)
        for worker in failed:  # the next run tries again in a new process
            self._discard(worker)
        if failed:
            first, problem = next(iter(failed.items()))
            raise WorkerError(f"{problem} (worker on {first.node})" if first.refusal is None else problem)

    def _assign_members(self) -> None:
        """Give every process its ranks; once the group has formed, a replacement has the rank of the worker it replaces."""
        if not self._has_formed:
            workers = self._workers()
            self._members[:] = [workers[i] for i in assign_ranks([info.node_id for info in self._infos()])]
            self._has_formed = True
        members = make_members(self._infos(), self._scaling.gpus_per_worker, self._multiple)
        for worker, member in zip(self._workers(), members, strict=True):
            worker.member = member

    async def _prepare(self, run_id: str) -> list[str | None]:
        """Reset every process for what follows; return by rank why a process cannot be used again, or None."""
        workers = self._workers()
        gpus = assign_visible_gpus(self._infos(), shows_all=self._backend.shows_node_gpus)
        kept = self.kept.rendezvous is not None
        orders = [
            PrepareOrder(visible, index, rank, bool(run_id), kept, run_id=run_id)
            for rank, (visible, index) in enumerate(gpus)
        ]
        if run_id and not kept and not self._backend.has_coordinator:
            for rank, ip in enumerate(choose_rendezvous_ips(self._infos(), self._backend)):
                orders[rank] = replace(orders[rank], rendezvous_ip=ip)
        calls = [worker.handle.prepare.remote(order) for worker, order in zip(workers, orders, strict=True)]
        answers: list[Prepared] = await self._gather(workers, calls)
        for worker, answer in zip(workers, answers, strict=True):
            worker.live = answer.live
        self._opened = join_opened(
            self._backend, [answer.rendezvous for answer in answers if answer.rendezvous is not None]
        )
        return [answer.stale for answer in answers]

    async def _gather(self, workers: Sequence[Worker], refs: Sequence[Any]) -> list[Any]:
        answers = [asyncio.ensure_future(ref) for ref in refs]
        try:
            with self.watching(workers, is_starting=True):
                return list(await asyncio.gather(*answers))
        except DEATHS as error:
            await asyncio.wait(answers, timeout=_START_TOGETHER_S)
            ranks, why = await self._remove_dead(workers, answers)
            if (failed := explain_failed_start(error)) is not None:
                raise WorkerError(failed) from error
            raise WorkerDiedError(f"a worker died while it was starting: {why}", ranks=ranks) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            raise WorkerError(f"a worker could not start: {type(cause).__name__}: {cause}") from error
        except RayError as error:
            raise WorkerError(f"a worker could not start: {first_line(error)}") from error

    @contextlib.contextmanager
    def watching(self, workers: Sequence[Worker] | None = None, *, is_starting: bool = False) -> Iterator[None]:
        """Kill members that do not run, while they are called outside of an attempt, in which `WorkerWatch` does that.

        Args:
            workers: The workers that are called; None: all members.
            is_starting: They may load a framework: see `ProcessWatch.add`.
        """
        called = set(self._workers() if workers is None else workers)
        watched = {f"the worker process {w.handle._actor_id.hex()[:8]} on {w.node}": w for w in called}
        for name, worker in watched.items():
            self.watch.add(name, partial(getattr, worker, "handle"), is_starting=is_starting)
        try:
            yield
        finally:
            for name in watched:
                self.watch.remove(name)

    async def _report_wait(self) -> None:
        """Report once what the group waits for, if resources are missing."""
        why: str | None = None
        while why is None:
            await asyncio.sleep(WAIT_REPORT_S)
            with contextlib.suppress(Exception):  # nothing depends on it, and the next look may succeed
                why = await self._explain_wait()
        self.on_wait(why)

    async def _num_unplaced(self) -> int:
        """Return the number of workers, spares included, that wait for resources."""
        await self.slots.look()
        waiting = [worker.slot for worker in self._workers() if worker.info is None]
        by_group = {slot.placement: slot for slot in waiting}
        unplaced = {placement for placement, slot in by_group.items() if not self.slots.is_placed(slot)}
        num_unplaced = sum(slot.placement in unplaced for slot in waiting)
        num_spares = self._failure.num_spares if num_unplaced and not self._has_formed else 0
        return num_unplaced + num_spares + len(self._vacant_ranks())

    async def _make_timeout_error(self) -> StartTimeoutError:
        missing = sum(worker is None or worker.info is None for worker in self._members)
        why: str | None = None
        if missing:
            with contextlib.suppress(asyncio.TimeoutError):  # the cluster cannot be reached
                why = await asyncio.wait_for(self._explain_wait(), _EXPLAIN_S)
        return StartTimeoutError(explain_timeout(missing, self.size, self._failure.start_timeout_s, why))

    async def _explain_wait(self) -> str | None:
        """Say which resources the group waits for, and who holds them; None if it waits for none."""
        if not (count := await self._num_unplaced()):
            return None
        why = await call_cluster(self._explain_missing, count)
        self._avoided.remove_gone(await call_cluster(list_nodes))
        avoided = self._avoided.describe()
        if why is None and avoided is not None:
            why = f"waiting for room for {count} worker{'s' * (count > 1)}"
        return why if avoided is None else f"{why}; {avoided}"

    async def check_storage(self, storage: Storage) -> None:
        """Check that one worker on each other node sees a probe file, if the run's folder is a local path.

        Raises:
            ConfigError: A node does not see the folder.
        """
        own_node = ray.get_runtime_context().get_node_id()
        others = {w.info.node_id: w for w in self._workers() if w.info is not None and w.info.node_id != own_node}
        if not storage.is_local or not others:
            return
        workers = list(others.values())
        storage.write_bytes("probe", b"")
        seen = await self._gather(workers, [worker.handle.probe.remote(storage.uri, "probe") for worker in workers])
        storage.delete_file("probe")
        if blind := [worker.node for worker, sees in zip(workers, seen, strict=True) if not sees]:
            raise ConfigError(
                f"storage_path {storage.path_of('')} is on one node's disk: {', '.join(blind)} cannot see it. "
                "Give RunConfig(storage_path=...) a folder that all nodes share, or a URI such as s3://bucket/folder."
            )

    # -- an attempt -----------------------------------------------------------------------------------------------

    async def open_rendezvous(self) -> str:
        """Open the rendezvous of the next attempt; return the value of `Member.rendezvous`."""
        if (kept := self.kept.take()) is not None:
            return kept
        opened, self._opened = self._opened, None
        self.kept.opened = await self._open_rendezvous() if opened is None else opened
        return self.kept.opened

    async def _open_rendezvous(self) -> str:
        if self._backend.has_coordinator:
            return await self._coordinator.open_rendezvous([self.member(rank, "") for rank in range(self.size)])
        ips = choose_rendezvous_ips(self._infos(), self._backend)
        workers = self._workers()[: len(ips)]
        calls = [worker.handle.open_rendezvous.remote(ip) for worker, ip in zip(workers, ips, strict=True)]
        return str(join_opened(self._backend, await self._gather(workers, calls)))

    def member(self, rank: int, rendezvous: str) -> Member:
        """Return a rank's place in the process group that its worker is to join now."""
        worker = self._worker(rank)
        assert worker.member is not None, f"rank {rank} is not ready"
        worker.has_joined = True
        return replace(worker.member, rendezvous=rendezvous)

    async def run(self, rank: int, run: Blob, order: AttemptOrder) -> AsyncIterator[list[WorkerEvent] | Any]:
        """Start an attempt in a worker, and yield its batches of events and references to large values.

        Raises:
            WorkerDied: The process is gone.
        """
        worker = self._worker(rank)
        try:
            why = partial(self.agents.explain_death, info=worker.info)
            async for item in self.streams.read(worker.handle, run, order, why):
                yield item
        except WorkerDied:
            await self._remove(worker)
            raise
        except RayTaskError as error:  # raysgd's own code failed in the worker, and train_func may still run
            self._discard(worker)
            raise WorkerDied(f"it was ended because its event stream failed: {error.cause!r}") from error

    def end(self, rank: int, attempt: int, why: str) -> None:
        """End a worker's attempt; does not wait."""
        if (worker := self._members[rank]) is not None:
            worker.handle.end.remote(attempt, why)

    async def leave(self) -> None:
        """Make all members leave the process group, after all ranks have returned, or keep the group if its backend does."""
        await self.kept.leave(self._workers())

    async def call(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method of the worker actors; return the results by rank.

        Raises:
            WorkerDiedError: A worker died.
        """
        chosen = range(self.size) if ranks is None else ranks
        workers = [worker for rank in chosen if (worker := self._members[rank]) is not None]
        answers = [asyncio.ensure_future(getattr(worker.handle, method).remote(*args)) for worker in workers]
        try:
            return list(await asyncio.gather(*answers))
        except DEATHS:
            await asyncio.wait(answers, timeout=_DIE_TOGETHER_S)
            dead, why = await self._remove_dead(workers, answers)
            listed = ", ".join(map(str, dead))
            raise WorkerDiedError(f"the worker process of rank {listed} died: {why}", ranks=dead) from None

    async def can_replace(self, ranks: Collection[int]) -> bool:
        """Return whether the group can continue without the nodes of these ranks: with fewer members, or with other workers.

        This waits for as long as the GCS is away, without which no process can be started.
        """
        infos = [worker.info for rank in ranks if (worker := self._members[rank]) is not None]
        excluded = {*self._avoided, *(info.node_id for info in infos if info is not None)}
        num_left = self.size - len(ranks)
        num_missing = len(ranks) - self._reserve.count_outside(excluded)
        is_enough = num_left - num_left % self._multiple >= self._scaling.min_workers or num_missing <= 0
        if is_enough or await call_cluster(has_autoscaler):
            return True
        nodes = [node for node in await call_cluster(list_nodes) if node.node_id not in excluded]
        return count_fitting(self._scaling.bundle(), nodes) >= num_missing

    # -- ending ---------------------------------------------------------------------------------------------------

    def kill(self, rank: int, *, is_lost: bool = False) -> None:
        """End a worker's process, even a stopped one, and ignore its events.

        If ``is_lost``, the worker's node is lost, and no other process is started there.
        """
        if (worker := self._members[rank]) is None:
            return
        if is_lost and worker.info is not None:
            self._lose(worker.info)
        self._discard(worker)

    def _lose(self, info: WorkerInfo) -> None:
        self._avoided.lose(info)
        self._lost_nodes.ask()

    def _discard(self, worker: Worker) -> None:
        self._drop(worker)
        self._end_process(worker)

    def _end_process(self, worker: Worker) -> None:
        """Ask a worker's process to exit, and ignore what it still sends; SIGKILL follows if it stays."""
        # The process exits by itself: Ray reports what SIGKILL ends as unexpected.
        post_to_cluster(ray.kill, worker.handle)
        if worker.info is not None:
            self.agents.expect_exit(worker.info)
        self.streams.abandon(worker.handle)

    def release(self) -> None:
        """End all processes and return the resources to the cluster; `get_ready` requests them again."""
        if self._beginning is not None:
            self._beginning.cancel()
            self._beginning = None
        for worker in self._workers():
            self._discard(worker)
        self._lost_nodes.close()
        self._reserve.close()
        self._coordinator.close()
        self.agents.close()
        self.slots.close()
        self._has_formed = False

    def _drop(self, worker: Worker) -> None:
        """Forget a process that is gone, or will be, and free its slot; a slot on a node to avoid is removed."""
        if worker in self._members:
            self._members[self._members.index(worker)] = None
        elif not self._reserve.drop(worker):
            return
        is_avoided = worker.info is not None and worker.info.node_id in self._avoided
        (self.slots.remove if is_avoided else self.slots.release)(worker.slot)

    async def _remove(self, worker: Worker) -> None:
        """Drop a process that has died; its node is avoided if it is gone too, or if workers keep dying there."""
        if worker.info is not None and worker.info.node_id in self._avoided:  # that is known; Ray need not be asked
            self._drop(worker)
            return
        if await self.agents.is_node_gone(worker.info) and worker.info is not None:
            self._lose(worker.info)
        elif worker.info is not None and self._avoided.record_death(worker.info):
            self._avoided.avoid_faulty(worker.info, await call_cluster(list_nodes))
        self._drop(worker)

    async def _remove_dead(
        self, workers: Sequence[Worker], answers: Sequence[asyncio.Future[Any]]
    ) -> tuple[tuple[int, ...], str]:
        """Remove the workers that died before they answered; return their known ranks, and why the first one died."""
        done = [(w, a.exception()) for w, a in zip(workers, answers, strict=True) if a.done() and not a.cancelled()]
        dead = {worker: error for worker, error in done if isinstance(error, DEATHS)}
        for worker in dead:
            await self._remove(worker)
        ranks = sorted(worker.member.rank for worker in dead if worker.member is not None)
        first, error = next(iter(dead.items()))
        return tuple(ranks), await self.agents.explain_death(error, first.info)

    def _worker(self, rank: int) -> Worker:
        worker = self._members[rank]
        assert worker is not None, f"rank {rank} has no process"
        return worker

    def _vacant_ranks(self) -> list[int]:
        return [rank for rank, worker in enumerate(self._members) if worker is None]

    def _workers(self) -> list[Worker]:
        return [worker for worker in self._members if worker is not None]

    def _infos(self) -> list[WorkerInfo]:
        return [worker.info for worker in self._workers() if worker.info is not None]
