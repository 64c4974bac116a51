"""The worker processes of a Trainer: places them, starts them, calls them. Runs in the TrainerActor.

Members stand in the order of their ranks. A member that dies leaves its rank to a spare, or to a new process; all others
keep their processes and their ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raysgd.backends.base import BackendConfig, Member
from raysgd.config import FailureConfig, ScalingConfig
from raysgd.errors import InfeasibleError, StartTimeoutError, WorkerDiedError, WorkerError
from raysgd.session.events import WorkerEvent
from raysgd.workers.agents import Agents
from raysgd.workers.agreement import Agreement
from raysgd.workers.cluster import check_feasible, cluster_nodes
from raysgd.workers.cluster_memory import ClusterMemory
from raysgd.workers.deaths import DEATHS, first_line
from raysgd.workers.drains import Drains
from raysgd.workers.faulty_nodes import FaultyNodes
from raysgd.workers.newcomers import newcomers_of
from raysgd.workers.orders import AttemptOrder, Blob, PrepareOrder, WorkerInfo
from raysgd.workers.placement import explain_busy, explain_timeout, seat_bundle
from raysgd.workers.process import Worker, WorkerStarter, mark_parked
from raysgd.workers.ranks import assign_ranks, identify, oldest_first, shrunk, visible_gpus
from raysgd.workers.rendezvous import Rendezvous
from raysgd.workers.reserve import Reserve
from raysgd.workers.seats import Room, Seat, Seats
from raysgd.workers.storage_check import check_storage
from raysgd.workers.streams import WorkerDied, WorkerStreams
from raysgd.workers.vitals import Vitals

if TYPE_CHECKING:
    from raysgd.checkpoint.storage import Storage

#: Seconds in which workers that die together, such as with their node, are seen to.
_DIE_TOGETHER_S = 0.2
#: The same while they start, each at its own time: what kills one may kill the next at the same place.
_START_TOGETHER_S = 15.0


class WorkerGroup:
    """Processes in the bundles of placement groups.

    Args:
        name: Unique in the cluster; names the placement groups and the actors.
        controller: Name of the TrainerActor.
        runtime_env: Ray runtime environment of the workers.
        room: Where the first of them are, and there is enough of it.

    Attributes:
        seats: Where they are.
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
        room: Room | None = None,
    ) -> None:
        self._scaling = scaling
        self._failure = failure
        self._backend = backend
        self.recovers_inside = backend.recovers_inside
        self.seats = Seats(name, seat_bundle(scaling), scaling.placement_strategy, room)
        self._starter = WorkerStarter(name, scaling, backend, runtime_env, controller)
        self._members: list[Worker | None] = [None] * scaling.min_workers
        self._lost_nodes: set[str] = set()  # and those that will be, or are faulty
        self._faulty = FaultyNodes(self._lost_nodes, scaling.bundle(), cluster_nodes)
        newcomers = newcomers_of(scaling, self.seats, self._starter, self._end, failure.start_timeout_s)
        self._reserve = Reserve(self.seats, self._starter, failure.spares, newcomers, self._end, self._lost_nodes)
        self._has_formed = False
        self._agents = Agents(name)
        self._rendezvous = Rendezvous(name, backend, runtime_env)
        self.drains = Drains(lambda: self._members, self._reserve, self._lost_nodes)
        self.streams = WorkerStreams()
        self.agreement = Agreement(self.call)
        self.memory = ClusterMemory(self._agents, lambda: self._members)
        self.vitals = Vitals(self._agents, lambda: self._members)

    @property
    def size(self) -> int:
        return len(self._members)

    def info(self, rank: int) -> WorkerInfo | None:
        """Where a member is; None for one that is not up. Before the group has formed ``rank`` is but a number."""
        return None if (worker := self._members[rank]) is None else worker.info

    # -- getting ready ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for the workers' processes, if that can be done now; `get_ready` waits for them, and tells what is wrong."""
        with contextlib.suppress(InfeasibleError, RayError):
            self._start_missing()

    def expect(self, size: int) -> None:
        """Be as many when the group forms: a run goes on from what only so many ranks can load."""
        self._members = self._members if self._has_formed else [None] * size

    @property
    def num_newcomers(self) -> int:
        """Processes that are up and could be taken in."""
        return self._reserve.num_ready

    def on_newcomer(self, told: Callable[[], None]) -> None:
        """Have ``told`` called for each that comes up."""
        self._reserve.on_newcomer(told)

    @property
    def num_parked(self) -> int:
        """Members whose train_func is inside, and goes on in the next attempt; they are the first ones."""
        return sum(worker.is_parked for worker in self._all())

    async def get_ready(self, *, keep_size: bool = False, parked: Collection[int] | None = ()) -> list[str]:
        """Bring every worker up and ready for a run; returns lines worth telling the user.

        An elastic group goes on with those who are left, if they are enough, and takes in those who are up.

        Args:
            keep_size: It does neither.
            parked: Ranks whose train_func goes on; None: those of the last call that are left.

        Raises:
            InfeasibleError: The cluster can never hold them.
            StartTimeoutError: They were not up in time.
            WorkerDiedError: One died on the way.
            WorkerError: They are up and cannot serve, such as for a framework that is not installed.
        """
        mark_parked(self._members, parked)
        self.agreement.forget()
        try:
            told = await asyncio.wait_for(self._get_ready(keep_size), self._failure.start_timeout_s)
        except (asyncio.TimeoutError, GetTimeoutError):
            raise self._timeout_error() from None
        self._reserve.replenish()
        self._seek_newcomers()
        self._agents.settle([worker.info for worker in self._all() if worker.info is not None])
        return [*told, *self._faulty.take_told()]

    async def _get_ready(self, keep_size: bool) -> list[str]:
        await self._form(keep_size)
        stale = {rank: why for rank, why in enumerate(await self._prepare()) if why is not None}
        if not stale:
            return []
        for rank in stale:
            self.kill(rank)
        await self._form(keep_size=True)
        await self._prepare()
        return [f"replaced {len(stale)} warm workers: {'; '.join(sorted(set(stale.values())))}"]

    async def _form(self, keep_size: bool) -> None:
        """A process for every rank, up and loaded, that knows its place."""
        if self._has_formed and None in self._members:
            await self.drains.ranks()
        for rank in self._vacant():
            self._members[rank] = await self._reserve.take()
        if self._scaling.is_elastic and not keep_size:
            self._members = shrunk(self._members, self._scaling.min_workers)
            await self._take_newcomers()
        self._members = oldest_first(self._members, attrgetter("is_parked"))
        await self._retire()
        self._start_missing()
        for rank in self._vacant():
            self._members[rank] = await self._reserve.find()
        await self._come_up()
        if self._reserve.newcomers is not None and not self._has_formed and not keep_size:
            await self._reserve.newcomers.settle()
            await self._take_newcomers()
        self._identify()

    async def _take_newcomers(self) -> None:
        while self.size < self._scaling.max_workers and (worker := await self._reserve.take_newcomer()) is not None:
            self._members.append(worker)

    def _seek_newcomers(self, after: Seat | None = None) -> None:
        if self._reserve.newcomers is not None:
            self._reserve.newcomers.want(self._scaling.max_workers - self.size, self._lost_nodes, after=after)

    def _start_missing(self) -> None:
        is_new = not self.seats.is_open
        if is_new:
            self._rendezvous.begin()
            if not self.seats.is_given:
                check_feasible(self._scaling, self._failure.spares)
            self.seats.open(self.size + self._failure.spares)
        if self._lost_nodes:  # those that Ray knows of are used no more by themselves
            self._lost_nodes &= {node.node_id for node in cluster_nodes()}
        for rank in self._vacant():
            is_somewhere = self._scaling.is_elastic and not is_new
            if (seat := self.seats.take(self._lost_nodes, is_somewhere=is_somewhere)) is not None:
                self._members[rank] = self._starter.start(seat)
        if is_new:
            self._seek_newcomers(after=None if (first := self._members[0]) is None else first.seat)

    async def _come_up(self) -> None:
        """Wait until every process has said where it is, and has loaded the framework."""
        new = [worker for worker in self._all() if worker.info is None or not worker.is_loaded]
        # Together: what kills one in its import may kill the next there, and that is one failure.
        answers = await self._gather(new * 2, [w.loading for w in new] + [w.locate() for w in new])
        self._note_loaded(dict(zip(new, answers, strict=False)))

    def _note_loaded(self, problems: Mapping[Worker, str | None]) -> None:
        bad = {worker: problem for worker, problem in problems.items() if problem is not None}
        for worker in problems:
            worker.is_loaded = worker not in bad
        for worker in bad:  # the next run tries again, in a process of its own
            self._drop(worker)
            self._end(worker)
        for worker, problem in bad.items():
            raise WorkerError(f"{problem} (worker on {worker.node})")

    def _identify(self) -> None:
        workers = self._all()
        nodes = [worker.info.node_id for worker in workers if worker.info is not None]
        if not self._has_formed:  # later a replacement has the rank of the one it replaces
            workers = [workers[index] for index in assign_ranks(nodes)]
            nodes = [worker.info.node_id for worker in workers if worker.info is not None]
            self._members, self._has_formed = list(workers), True
        for worker, identity in zip(workers, identify(nodes), strict=True):
            worker.identity = identity

    async def _prepare(self) -> list[str | None]:
        workers = self._all()
        gpus = visible_gpus([w.info for w in workers if w.info is not None], shared=self._backend.shares_gpus)
        orders = [
            PrepareOrder(*seen, rank=rank, is_parked=worker.is_parked)
            for rank, (worker, seen) in enumerate(zip(workers, gpus, strict=True))
        ]
        return await self._gather(workers, [w.handle.prepare.remote(o) for w, o in zip(workers, orders, strict=True)])

    async def _gather(self, workers: Sequence[Worker], refs: Sequence[Any]) -> list[Any]:
        answers = [asyncio.ensure_future(ref) for ref in refs]
        try:
            return list(await asyncio.gather(*answers))
        except DEATHS as error:
            await asyncio.wait(answers, timeout=_START_TOGETHER_S)
            ranks, why = await self._drop_dead(workers, answers)
            raise WorkerDiedError(f"a worker died while it was starting: {why}", ranks=ranks) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            raise WorkerError(f"a worker could not start: {type(cause).__name__}: {cause}") from error
        except RayError as error:
            raise WorkerError(f"a worker could not start: {first_line(error)}") from error

    async def _drop_dead(
        self, workers: Sequence[Worker], answers: Sequence[asyncio.Future[Any]]
    ) -> tuple[tuple[int, ...], str]:
        """Let go of those who died before they answered: their ranks, as far as they had one, and why the first died."""
        done = [(w, a.exception()) for w, a in zip(workers, answers, strict=True) if a.done() and not a.cancelled()]
        dead = {worker: error for worker, error in done if isinstance(error, DEATHS)}
        for worker in dead:
            await self._bury(worker)
        ranks = sorted(worker.identity.world_rank for worker in dead if worker.identity is not None)
        first, error = next(iter(dead.items()))
        return tuple(ranks), await self._agents.why_died(error, first.info)

    def _timeout_error(self) -> StartTimeoutError:
        missing = sum(worker is None or worker.info is None for worker in self._members)
        why = explain_busy(self._scaling, cluster_nodes(), self._failure.spares) if missing else None
        return StartTimeoutError(explain_timeout(missing, self.size, self._failure.start_timeout_s, why))

    async def check_storage(self, storage: Storage) -> None:
        """Raises a ConfigError where a node with a worker does not see the run's folder."""
        await check_storage(storage, self._all(), self._gather)

    # -- an attempt -----------------------------------------------------------------------------------------------

    async def open_rendezvous(self) -> str:
        """Where the members of the next attempt meet."""
        if self._backend.is_coordinated:
            return await self._rendezvous.open([self.member(rank, "") for rank in range(self.size)])
        first = self._member(0)
        return str((await self._gather([first], [first.handle.open_rendezvous.remote()]))[0])

    def member(self, rank: int, rendezvous: str) -> Member:
        return self._member(rank).as_member(rank, rendezvous, self._scaling.gpus_per_worker)

    async def _retire(self) -> None:
        """End those who were in a group and can join no other; others take their ranks, and the size stays."""
        for rank in () if self._backend.reforms_in_process else range(self.size):
            if (worker := self._members[rank]) is not None and worker.has_joined:
                self.kill(rank)
                self._members[rank] = await self._reserve.take()

    async def run(self, rank: int, run: Blob, order: AttemptOrder) -> AsyncIterator[list[WorkerEvent] | Any]:
        """What the worker says: batches of events, and references to large values.

        Raises:
            WorkerDied: The process is gone.
        """
        worker = self._member(rank)
        try:
            why = partial(self._agents.why_died, info=worker.info)
            async for item in self.streams.read(worker.handle, run, order, why):
                yield item
        except WorkerDied:
            await self._bury(worker)
            raise
        except RayTaskError as error:  # raysgd's own code failed there, and train_func may still run
            self._drop(worker)
            self._end(worker)
            raise WorkerDied(f"it was ended, since its stream broke off: {error.cause!r}") from error

    def end(self, rank: int, attempt: int, why: str, *, goes_on: bool = True) -> None:
        """Tell a worker that its attempt is over. ``goes_on``: another one follows."""
        if (worker := self._members[rank]) is not None:
            worker.handle.end.remote(attempt, why, goes_on)

    async def leave(self) -> None:
        """All ranks have returned: leave the group."""
        with contextlib.suppress(RayError):
            await asyncio.gather(*[worker.handle.leave.remote() for worker in self._all()])

    async def call(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method of the worker actors; results by rank.

        Raises:
            WorkerDiedError: One of them died.
        """
        chosen = range(self.size) if ranks is None else ranks
        workers = [worker for rank in chosen if (worker := self._members[rank]) is not None]
        answers = [asyncio.ensure_future(getattr(worker.handle, method).remote(*args)) for worker in workers]
        try:
            return list(await asyncio.gather(*answers))
        except DEATHS:
            await asyncio.wait(answers, timeout=_DIE_TOGETHER_S)
            dead, why = await self._drop_dead(workers, answers)
            who = ", ".join(map(str, dead))
            raise WorkerDiedError(f"the worker process of rank {who} died: {why}", ranks=dead) from None

    # -- the end --------------------------------------------------------------------------------------------------

    def kill(self, rank: int, *, is_lost: bool = False) -> None:
        """End a worker's process, a stopped one too, and hear no more of it. ``is_lost``: no other is put on its node."""
        if (worker := self._members[rank]) is None:
            return
        if is_lost and worker.info is not None:
            self._lost_nodes.add(worker.info.node_id)
        self._drop(worker)
        self._end(worker)

    def _end(self, worker: Worker) -> None:
        if worker.info is not None:
            self._agents.kill(worker.info)  # ray.kill of a stopped process takes 5 s
        ray.kill(worker.handle)
        self.streams.abandon(worker.handle)

    def release(self) -> None:
        """End all processes and give the resources back; `get_ready` asks for them anew."""
        for worker in self._all():
            self._drop(worker)
            self._end(worker)
        self._reserve.close()
        self._rendezvous.close()
        self._agents.close()
        self.seats.close()
        self._has_formed = False

    def _drop(self, worker: Worker) -> None:
        """Let go of a process that is gone, or will be: its seat is free for another."""
        if worker in self._members:
            self._members[self._members.index(worker)] = None
        elif not self._reserve.drop(worker):
            return
        is_lost = worker.info is not None and worker.info.node_id in self._lost_nodes
        (self.seats.give_up if is_lost else self.seats.give_back)(worker.seat)

    async def _bury(self, worker: Worker) -> None:
        """Drop a process that has died; where its node is gone with it, no other is put there."""
        if await self._agents.is_node_gone(worker.info) and worker.info is not None:
            self._lost_nodes.add(worker.info.node_id)
        elif worker.info is not None:
            self._faulty.died(worker.info)
        self._drop(worker)

    def _member(self, rank: int) -> Worker:
        worker = self._members[rank]
        assert worker is not None, f"rank {rank} has no process"
        return worker

    def _vacant(self) -> list[int]:
        """The ranks that have no process."""
        return [rank for rank, worker in enumerate(self._members) if worker is None]

    def _all(self) -> list[Worker]:
        return [worker for worker in self._members if worker is not None]
