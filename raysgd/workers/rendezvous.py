"""The process of a backend's coordinator, where it has one, as the TrainerActor sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.backends.base import BackendConfig, Coordinator, Member
from raysgd.errors import WorkerError
from raysgd.workers.cluster import NAMESPACE


class CoordinatorActor:
    """A Ray actor beside the TrainerActor, which imports no framework itself."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        self._coordinator: Coordinator | None = None

    def open(self, members: Sequence[Member]) -> str:
        if self._coordinator is None:
            self._coordinator = self._config.make_coordinator()
        return self._coordinator.open(ray.util.get_node_ip_address(), members)


class Rendezvous:
    """Starts the coordinator's process, and another one where it has died.

    Args:
        name: Begins the actor's name.
        runtime_env: That of the workers: the framework may be in it.
    """

    def __init__(self, name: str, config: BackendConfig, runtime_env: Mapping[str, Any] | None) -> None:
        self._name = name
        self._runtime_env = dict(runtime_env or {})
        self._config = config
        self._actor: Any = None
        self._num_started = 0

    def begin(self) -> None:
        """Start it, where the backend has one; it comes up beside the workers."""
        if self._config.is_coordinated and self._actor is None:
            self._actor = self._start()

    async def open(self, members: Sequence[Member]) -> str:
        """Make it ready for a group; returns where its members meet.

        Raises:
            WorkerError: It cannot serve, such as for a framework that is not installed.
        """
        self.begin()
        try:
            return await self._open(members)
        except RayActorError:  # it was killed: the group before had no more use of it
            self._actor = self._start()
            return await self._open(members)

    def close(self) -> None:
        """End it."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    async def _open(self, members: Sequence[Member]) -> str:
        try:
            return str(await self._actor.open.remote(list(members)))
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            where = ray.util.get_node_ip_address()
            raise WorkerError(f"the backend's coordinator on {where} cannot serve: {cause}") from error

    def _start(self) -> Any:
        self._num_started += 1
        here = ray.get_runtime_context().get_node_id()
        return (
            ray.remote(CoordinatorActor)
            .options(
                name=f"{self._name}-coordinator-{self._num_started}",
                namespace=NAMESPACE,
                num_cpus=0,
                runtime_env=self._runtime_env or None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(self._config)
        )
