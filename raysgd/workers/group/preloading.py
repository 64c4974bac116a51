"""Keeps idle processes with the framework imported, for the replacements of members.

Each node with members has one if the user wants that. In any case, other nodes get some when a node no longer answers. Runs
in the TrainerActor. Ray starts such a process on request, and calls `raysgd.workers.process.preload.preload` in it. It
gives it to the first actor with the same runtime environment, which no other actor has. Ray has no public API for this, so
the request is guarded: without it, or without a process that is ready, a replacement starts as any other worker. Decision
0036 says how Ray chooses the process, and what it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raysgd._util.logs import get_logger
from raysgd.backends.base import BackendConfig
from raysgd.config import FailureConfig, ScalingConfig
from raysgd.workers.group.processes import Worker
from raysgd.workers.liveness.memory import MemoryPool
from raysgd.workers.liveness.node_agent import NodeAgents, NodeUnreachableError
from raysgd.workers.placement.capacity import order_by_placement, slot_bundle
from raysgd.workers.placement.cluster import list_nodes
from raysgd.workers.placement.slots import WorkerSlot, WorkerSlots
from raysgd.workers.process import preload
from raysgd.workers.process.preload import PreloadedProcess, PreloadOrder

#: Seconds after an attempt has begun: most short runs are over by then, and a run that fails early needs no process.
_DELAY_S = 10.0
#: Seconds between two checks that the processes live.
_CHECK_S = 10.0
#: The time for a node or a worker to answer.
_ANSWER_S = 5.0
#: Heartbeat timeouts after which processes that were requested for the loss of a node are ended, if it was not lost.
_KEEP_TIMEOUTS = 3
#: Ray may end an idle process after this time; it ends all of a job with the job.
_KEEP_S = 30 * 24 * 3600
#: A node gets a process if this much of its memory is free, and in addition this fraction of the whole.
_ROOM_BYTES = 2 << 30
_ROOM_FRACTION = 0.1
#: Values of ``RAY_BACKEND_LOG_LEVEL`` at which Ray 2.60 logs the missing process of a failed request, and crashes.
_FATAL_LEVELS = ("trace", "debug")


@dataclass(frozen=True)
class Environment:
    """The runtime environment of a replacement, as Ray's core makes it of the TrainerActor's and the workers' own.

    Args:
        parent: The TrainerActor's, as Ray's JSON.
        child: The workers' own, as given to the actor.
    """

    parent: str
    child: Mapping[str, Any]

    def has_hook(self) -> bool:
        """Return True if the user runs a function in new processes, which would be replaced."""
        both = [json.loads(self.parent or "{}"), self.child]
        return any("worker_process_setup_hook" in env or _hook_variable() in env.get("env_vars", {}) for env in both)

    def serialize(self, key: str) -> Any:
        """Return Ray's message for the process of this key."""
        from ray._private.utils import get_runtime_env_info, parse_runtime_env_for_task_or_actor

        info = get_runtime_env_info(parse_runtime_env_for_task_or_actor(add_key(self.child, key)))
        info.serialized_runtime_env = merge_environments(self.parent, info.serialized_runtime_env)
        return info


def add_key(environment: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the runtime environment of the process of this key, as it is given to an actor."""
    variables = {**environment.get("env_vars", {}), _hook_variable(): preload.HOOK, preload.VARIABLE: key}
    return {**environment, "env_vars": variables}


def merge_environments(parent: str, child: str) -> str:
    """Return what Ray's core makes of two runtime environments; it compares processes and actors by this very text."""
    above = json.loads(parent or "{}")
    if not above:
        return child
    own = json.loads(child)
    merged = {**above, **own}
    if "env_vars" in above and "env_vars" in own:
        merged["env_vars"] = {**above["env_vars"], **own["env_vars"]}
    return json.dumps(merged, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def has_room(pool: MemoryPool | None) -> bool:
    """Return True if a node with this fullest pool of memory can hold one more process with a framework."""
    if pool is None:
        return False
    return pool.limit_bytes - pool.used_bytes >= _ROOM_BYTES + _ROOM_FRACTION * pool.limit_bytes


def request_process(node_id: str, environment: Any) -> None:
    """Request an idle process on a node, with the message of `Environment.serialize`; blocks until the node has answered.

    Raises:
        Exception: This version of Ray cannot do it, or the node does not answer.
    """
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.worker import global_worker
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

    # Their names are made when they are imported.
    messages, common = (
        importlib.import_module(f"ray.core.generated.{name}_pb2") for name in ("node_manager", "common")
    )
    if os.environ.get("RAY_BACKEND_LOG_LEVEL", "").lower() in _FATAL_LEVELS:
        raise RuntimeError("at this log level, Ray's node manager ends if the process does not start")
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    channel = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    try:
        worker: Any = global_worker
        request = messages.PrestartWorkersRequest(
            language=common.PYTHON,
            job_id=worker.current_job_id.binary(),
            runtime_env_info=environment,
            keep_alive_duration_secs=_KEEP_S,
            num_workers=1,
        )
        metadata = (("cluster_id", worker.gcs_client.cluster_id.hex()),)
        NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_ANSWER_S, metadata=metadata)
    finally:
        channel.close()


def _hook_variable() -> str:
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

    return str(WORKER_PROCESS_SETUP_HOOK_ENV_VAR)


class Preloading:
    """The processes of a worker group that are preloaded, at most one on each node.

    Args:
        name: Name of the Trainer.
        runtime_env: The workers' runtime environment.
        agents: They check and end processes.

    Attributes:
        list_workers: Returns all workers of the group, those that join included.
    """

    def __init__(
        self,
        name: str,
        scaling: ScalingConfig,
        backend: BackendConfig,
        failure: FailureConfig,
        runtime_env: Mapping[str, Any] | None,
        slots: WorkerSlots,
        agents: NodeAgents,
    ) -> None:
        self._name = name
        self._scaling = scaling
        self._modules = backend.preload_modules
        # A backend that replaces all processes after a failure would need as many of them as workers.
        is_useful = bool(self._modules) and backend.can_rejoin and failure.num_spares == 0 and failure.max_failures != 0
        self._can_preload = is_useful and not slots.is_in_existing_placement
        self._is_wanted = failure.preload
        self._heartbeat_timeout_s = failure.heartbeat_timeout_s
        self._runtime_env = dict(runtime_env or {})
        self._agents = agents
        self.list_workers: Callable[[], Sequence[Worker]] = list
        self._keys: dict[str, str] = {}  # by node
        self._taken: list[PreloadedProcess] = []
        self._skipped: set[str] = set()  # nodes whose process died
        self._task: asyncio.Task[None] | None = None
        self._expected: set[str] = set()  # nodes that may be lost
        self._expecting: set[asyncio.Task[None]] = set()

    def replenish(self, members: Sequence[Worker]) -> None:
        """End the processes on other nodes some seconds from now; each node of these members gets one if the user wants that."""
        self._end_tasks()
        if self._can_preload:
            self._task = asyncio.ensure_future(self._keep(members))

    def expect_loss(self, silent: Sequence[Worker], others: Sequence[Worker], avoid: Collection[str]) -> None:
        """Request processes on nodes with room, because other nodes do not answer. They end if these nodes answer later.

        Args:
            silent: The members on nodes that do not answer.
            others: All others.
            avoid: Nodes on which no replacement starts.
        """
        lost = _group_by_node(silent).keys() - self._expected
        if not self._can_preload or not lost or not others:
            return
        self._expected |= lost
        count = sum(worker.info is not None and worker.info.node_id in lost for worker in silent)
        task = asyncio.ensure_future(self._prepare_for_loss(lost, count, others, {*avoid, *self._expected}))
        self._expecting.add(task)
        task.add_done_callback(self._expecting.discard)

    def take(self, slot: WorkerSlot) -> dict[str, Any] | None:
        """Return the runtime environment by which a new worker in a slot takes over a process; None if none is ready there."""
        if not self._keys:
            return None
        try:
            return self._take(slot.node_id())
        except Exception:  # then the worker starts in a new process, as without preloading
            get_logger().debug("it is unknown whether a process is preloaded", exc_info=True)
            return None

    def _take(self, node_id: str) -> dict[str, Any] | None:
        if (key := self._keys.get(node_id)) is None:
            return None
        process = preload.get_process(key)
        if process is None or not process.is_ready or not self._agents.may_live(node_id, process.pid):
            return None
        environment = add_key(self._runtime_env, key)
        del self._keys[node_id]
        preload.forget_key(key)
        self._taken.append(process)
        return environment

    def close(self) -> None:
        """End the processes."""
        self._end_tasks()
        self._end_all(self._keys)
        self._taken.clear()
        self._skipped.clear()

    async def _keep(self, members: Sequence[Worker]) -> None:
        await asyncio.sleep(_DELAY_S)
        try:
            await self._check_taken()
            await self._adopt()
            wanted = self._choose_wanted(members)
            self._end_all(self._keys.keys() - wanted.keys())
            rooms = {node_id: await self._read_room(node_id) for node_id in self._list_without_process(wanted)}
            await self._request({node_id: wanted[node_id] for node_id, room in rooms.items() if has_room(room)})
            while wanted and self._keys:
                await asyncio.sleep(_CHECK_S)
                for node_id, key in list(self._keys.items()):
                    await self._check(node_id, key)
        except Exception:  # parts of Ray that are not public
            get_logger().debug("no process could be preloaded", exc_info=True)

    def _choose_wanted(self, members: Sequence[Worker]) -> dict[str, Worker]:
        """Return the nodes that shall have a process at all times, each with a member."""
        return _group_by_node(members) if self._is_wanted and self._can_preload else {}

    async def _check_taken(self) -> None:
        """Stop preloading if Ray left a process idle that a worker was to take over: it would only cost time."""
        infos = [worker.info for worker in self.list_workers()]
        if None in infos:  # one that starts may be taking it over
            return
        pids = {info.pid for info in infos if info is not None}
        while self._taken:
            process = self._taken.pop()
            if process.pid not in pids and await self._is_alive(process):
                get_logger().debug("no worker took over process %d; no more processes are preloaded", process.pid)
                self._can_preload = False
                self._agents.end_idle(process.node_id, process.pid, process.created_s)

    async def _is_alive(self, process: PreloadedProcess) -> bool:
        """Return False if a process is known to be gone."""
        try:
            (status,) = await self._agents.check_processes(process.node_id, [process.pid], _ANSWER_S)
        except NodeUnreachableError:
            return True
        return status is not None

    async def _adopt(self) -> None:
        """Take over the processes of a TrainerActor that has died."""
        for key in set(preload.list_keys(self._name)) - set(self._keys.values()):
            process = preload.get_process(key)
            if process is not None and await self._is_alive(process):
                self._keys.setdefault(process.node_id, key)

    async def _prepare_for_loss(
        self, lost: Collection[str], count: int, others: Sequence[Worker], avoid: Collection[str]
    ) -> None:
        chosen: list[str] = []
        try:
            nodes = [node for node in await asyncio.to_thread(list_nodes) if node.node_id not in avoid]
            if self._scaling.placement_strategy == "STRICT_SPREAD":
                nodes = [node for node in nodes if node.node_id not in _group_by_node(others)]
            preferred = order_by_placement(nodes, slot_bundle(self._scaling))[:count]
            chosen = self._list_without_process([node.node_id for node in preferred])
            rooms = {node_id: await self._read_room(node_id) for node_id in chosen}
            # Nodes without an agent are not asked: the agent's start would take the time that is left.
            chosen = [node_id for node_id, room in rooms.items() if room is None or has_room(room)]
            await self._request(dict.fromkeys(chosen, others[0]))
        except Exception:  # parts of Ray that are not public
            get_logger().debug("no process could be preloaded for the loss of a node", exc_info=True)
        await asyncio.sleep(_KEEP_TIMEOUTS * self._heartbeat_timeout_s)
        self._expected -= set(lost)
        self._end_all(set(chosen) - self._choose_wanted(others).keys())

    def _list_without_process(self, nodes: Collection[str]) -> list[str]:
        return [node_id for node_id in nodes if node_id not in self._keys and node_id not in self._skipped]

    async def _read_room(self, node_id: str) -> MemoryPool | None:
        return await self._agents.read_room(node_id, _ANSWER_S)

    async def _request(self, members: Mapping[str, Worker]) -> None:
        """Request a process on each of these nodes, which imports what the member given for the node has imported."""
        environment = Environment(ray.get_runtime_context().get_runtime_env_string(), self._runtime_env)
        if environment.has_hook():
            return
        for node_id, member in members.items():
            modules = await self._list_modules(member)
            if node_id in self._keys:  # it was requested meanwhile
                continue
            key = f"{self._name}/{uuid.uuid4().hex[:8]}"
            preload.put_order(key, PreloadOrder(modules, self._num_threads()))
            self._keys[node_id] = key
            await asyncio.to_thread(request_process, node_id, environment.serialize(key))

    async def _list_modules(self, member: Worker) -> list[str]:
        if self._scaling.gpus_per_worker:  # other modules may look for GPUs when they are imported
            return list(self._modules)
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            imported = await asyncio.wait_for(member.handle.list_imports.remote(), _ANSWER_S)
            return [*self._modules, *imported]
        return list(self._modules)

    def _num_threads(self) -> int:
        return max(math.floor(self._scaling.cpus_per_worker), 1)

    async def _check(self, node_id: str, key: str) -> None:
        """Forget a process that has died; its node gets no other one, because Ray may have ended it."""
        process = preload.get_process(key)
        if process is not None and not await self._is_alive(process) and self._keys.get(node_id) == key:
            del self._keys[node_id]
            preload.forget_key(key)
            self._skipped.add(node_id)

    def _end_all(self, nodes: Collection[str]) -> None:
        for node_id in list(nodes):
            if (key := self._keys.pop(node_id, None)) is not None:
                self._end(key)

    def _end(self, key: str) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone; Ray ends the processes with the job
            process = preload.get_process(key)
            preload.forget_key(key)
            process = preload.get_process(key) or process
            if process is not None:
                self._agents.end_idle(process.node_id, process.pid, process.created_s)

    def _end_tasks(self) -> None:
        for task in (self._task, *self._expecting):
            if task is not None:
                task.cancel()
        self._task = None
        self._expected.clear()


def _group_by_node(members: Sequence[Worker]) -> dict[str, Worker]:
    """Return one of the members for each node."""
    return {worker.info.node_id: worker for worker in members if worker.info is not None}
