"""The processes that a worker group starts: workers, and the backend's coordinator. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.backends.base import BackendConfig, Coordinator, Member
from raysgd.config import ScalingConfig
from raysgd.errors import WorkerError
from raysgd.session.events import LiveReport
from raysgd.workers.liveness.own_processes import ProcessWatch
from raysgd.workers.liveness.watched import Watched, watched_actor
from raysgd.workers.orders import WorkerInfo
from raysgd.workers.placement.calls import call_cluster, post_to_cluster
from raysgd.workers.placement.cluster import NAMESPACE
from raysgd.workers.placement.slots import WorkerSlot
from raysgd.workers.process.worker_actor import NUM_THREADS, WorkerActor
from raysgd.workers.versions import Versions

#: What messages call the coordinator's process.
COORDINATOR = "the backend's coordinator"


@dataclass(eq=False)
class Worker:
    """A worker process in its slot.

    Attributes:
        loading: The answer to its first call, which imports the framework: None, or what is wrong.
        check: See `WorkerStarter`.
        info: Where it runs, once it has answered.
        refusal: Why its versions do not fit to the driver's, once it has answered; None if they do.
        member: Its place in the group, once the group is complete; without a rendezvous.
        has_joined: It was given a place in a process group.
        live: What it has of the live state of the run that it is ready for.
        requested_at_s: When its start was requested, on the monotonic clock.
    """

    slot: WorkerSlot
    handle: Any
    loading: Any
    check: Callable[[Versions, str], str | None] = lambda versions, node: None
    is_loaded: bool = False
    info: WorkerInfo | None = None
    refusal: str | None = None
    member: Member | None = None
    has_joined: bool = False
    live: LiveReport | None = None
    requested_at_s: float = field(default_factory=time.monotonic)

    @property
    def node(self) -> str:
        return "an unknown node" if self.info is None else self.info.node

    async def locate(self) -> None:
        """Ask the process where it runs, and which versions it has."""
        answer = await self.handle.describe.remote()
        self.info = WorkerInfo(**{name: answer[name] for name in WorkerInfo.__dataclass_fields__ if name in answer})
        self.refusal = self.check(answer["versions"], self.info.node)

    async def wait_loaded(self) -> str | None:
        """Wait until the process has imported the framework; return what is wrong, or None."""
        await self.locate()
        if self.refusal is not None:  # what else it answers means nothing
            return self.refusal
        problem: str | None = await self.loading
        self.is_loaded = problem is None
        return problem


class WorkerStarter:
    """Starts worker processes, each of which begins at once to import the framework.

    Args:
        name: Prefix of the actors' names.
        controller: Name of the TrainerActor.
        remove_slot: Called with a slot whose start was given up.
        check: Returns why a process with these versions, on the node of that name, cannot be used; None if it can.
    """

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        backend: BackendConfig,
        runtime_env: Mapping[str, Any] | None,
        controller: str,
        remove_slot: Callable[[WorkerSlot], None],
        check: Callable[[Versions, str], str | None],
    ) -> None:
        self._name = name
        self._scaling = scaling
        self._backend = backend
        self._runtime_env = dict(runtime_env or {})
        self._controller = controller
        self._remove_slot = remove_slot
        self._check = check
        self._num_started = 0

    async def start(self, slot: WorkerSlot, *, warm_up: bool = False) -> Worker:
        """Request a process in ``slot``; Ray starts it when the slot has its resources.

        With ``warm_up``, the process also imports what training loops import later, because no rank waits for it.
        """
        self._num_started += 1
        name = f"{self._name}-worker-{self._num_started}"
        try:
            handle = await call_cluster(self._request, name, slot, on_abandoned=ray.kill)
        except BaseException:  # cancelled, or Ray refuses it
            self._remove_slot(slot)
            raise
        return Worker(slot, handle, handle.load.remote(self._backend, self._controller, warm_up), self._check)

    def _request(self, name: str, slot: WorkerSlot) -> Any:
        return (
            watched_actor(WorkerActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=self._scaling.cpus_per_worker,
                num_gpus=self._scaling.gpus_per_worker,
                resources=dict(self._scaling.resources_per_worker) or None,
                scheduling_strategy=slot.scheduling_strategy(),
                max_concurrency=NUM_THREADS,
                runtime_env=self._runtime_env or None,
            )
            .remote()
        )


class CoordinatorActor(Watched):
    """The Ray actor in which a backend's coordinator runs, because the TrainerActor imports no framework."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        self._coordinator: Coordinator | None = None

    def open_rendezvous(self, members: Sequence[Member]) -> str:
        if self._coordinator is None:
            self._coordinator = self._config.make_coordinator()
        return self._coordinator.open_rendezvous(ray.util.get_node_ip_address(), members)


class CoordinatorProcess:
    """Starts the coordinator's process on the TrainerActor's node, and a new one if it has died.

    Args:
        name: Prefix of the actor's name.
        runtime_env: The workers' Ray runtime environment, which may contain the framework.
        watch: Watches the process; one that it kills is replaced when the next group forms.
    """

    def __init__(
        self, name: str, config: BackendConfig, runtime_env: Mapping[str, Any] | None, watch: ProcessWatch
    ) -> None:
        self._name = name
        self._watch = watch
        self._runtime_env = dict(runtime_env or {})
        self._config = config
        self._starting: asyncio.Future[Any] | None = None
        self._num_started = 0

    def begin(self) -> None:
        """Start the process without waiting, if the backend has a coordinator."""
        if self._config.has_coordinator and self._starting is None:
            self._starting = asyncio.ensure_future(self._start())

    async def open_rendezvous(self, members: Sequence[Member]) -> str:
        """Open the rendezvous of a new group; return the value of `Member.rendezvous`.

        Raises:
            WorkerError: The coordinator cannot start, for example because the framework is not installed.
        """
        self.begin()
        try:
            return await self._call(members)
        except RayActorError:  # it died after the previous group had formed
            self._starting = None
            self.begin()
            return await self._call(members)

    def close(self) -> None:
        """End the process."""
        self._watch.remove(COORDINATOR)
        starting, self._starting = self._starting, None
        if starting is not None and not starting.cancel() and not starting.cancelled() and not starting.exception():
            post_to_cluster(ray.kill, starting.result())

    async def _call(self, members: Sequence[Member]) -> str:
        try:
            assert self._starting is not None
            actor = await asyncio.shield(self._starting)
            return str(await actor.open_rendezvous.remote(list(members)))
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            node_ip = ray.util.get_node_ip_address()
            raise WorkerError(f"the backend's coordinator on {node_ip} failed: {cause}") from error

    async def _start(self) -> Any:
        self._num_started += 1
        actor = await call_cluster(self._request, on_abandoned=ray.kill)
        self._watch.add(COORDINATOR, lambda: actor)
        return actor

    def _request(self) -> Any:
        own_node = ray.get_runtime_context().get_node_id()
        return (
            watched_actor(CoordinatorActor)
            .options(
                name=f"{self._name}-coordinator-{self._num_started}",
                namespace=NAMESPACE,
                num_cpus=0,
                runtime_env=self._runtime_env or None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(own_node, soft=False),
            )
            .remote(self._config)
        )
