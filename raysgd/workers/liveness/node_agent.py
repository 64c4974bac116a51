"""Node agents: observe and kill worker processes from outside, on the processes' own nodes.

The TrainerActor is the agent of its own node; every other node with workers has an actor without a CPU for it. An agent
knows whether processes are alive, how much memory they use and what their threads do, and keeps copies of checkpoint parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.transport import shorten_retransmissions
from raysgd.workers.liveness.death_reasons import describe_death, may_be_memory
from raysgd.workers.liveness.memory_use import MemoryEvidence, MemoryWatch
from raysgd.workers.liveness.stacks import read_stacks
from raysgd.workers.liveness.watched import ActorWatch, Watched, watched_actor
from raysgd.workers.placement.calls import call_cluster
from raysgd.workers.placement.cluster import NAMESPACE, is_node_reachable

if TYPE_CHECKING:
    from raysgd.workers.orders import WorkerInfo

#: Seconds between two samples of the processes' memory.
_MEMORY_INTERVAL_S = 0.5
#: The time for a copy of a checkpoint part to arrive.
_COPY_TIMEOUT_S = 30.0
#: The time for a process to exit by itself after it was asked to.
EXIT_GRACE_S = 1.0
#: The time for the kernel to end a process after SIGKILL.
_KILL_TIMEOUT_S = 5.0
#: Two readings of a process's start differ by less, even if the clock is corrected in between.
_SAME_START_S = 1.0
#: The time for an agent to confirm, before it is stopped, that the processes on its node are gone. A lost node never answers.
CLOSE_TIMEOUT_S = 3.0
#: The time for a node to return what it knows of a dead worker's memory; the worker's last events are read meanwhile.
_EVIDENCE_TIMEOUT_S = 0.2

#: The time to find out whether a node can be reached.
_REACH_S = 2.0

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class ProcessStatus:
    """The state of a process at one moment.

    Attributes:
        cpu_s: CPU time of all its threads so far.
        is_stopped: It was sent SIGSTOP, or a debugger holds it.
        waited_s: How long its runnable threads have waited for a CPU so far; 0 if the kernel does not say.
    """

    cpu_s: float
    is_stopped: bool
    waited_s: float = 0.0


class NodeAgent(Watched):
    """The agent on one node. All calls return at once, except `stacks`, `kill_unless_exited` and `wait_for_exits`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix="raysgd-stacks")
        self._memory = MemoryWatch()
        self._sampler: threading.Thread | None = None
        self._closing = threading.Event()
        self._wanted: list[Any] = []
        self._copies: list[Any] = []
        self._is_fetching = False
        self._lock = threading.Lock()
        self._exits: list[threading.Thread] = []

    def check_processes(self, pids: Sequence[int]) -> list[ProcessStatus | None]:
        """Return the status of each process; None for one that is gone."""
        shorten_retransmissions()
        return [read_status(pid) for pid in pids]

    def expect_exit(self, pid: int) -> None:
        """Call `kill_unless_exited` in a thread of its own, so that the agent continues to answer calls."""
        thread = threading.Thread(target=self.kill_unless_exited, args=(pid,), name="raysgd-exit", daemon=True)
        self._exits = [*(exit_ for exit_ in self._exits if exit_.is_alive()), thread]
        thread.start()

    def wait_for_exits(self) -> None:
        """Block until the processes given to `expect_exit` are gone, or have not ended some seconds after SIGKILL."""
        for thread in self._exits:
            thread.join()

    def kill_unless_exited(self, pid: int) -> None:
        """Block until a process that was asked to exit is gone; send it SIGKILL after a grace period.

        A stopped process cannot exit and is killed at once, for which Ray itself would need 5 s.
        """
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(0 if process.status() in _STOPPED else EXIT_GRACE_S)
                return
            process.kill()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(_KILL_TIMEOUT_S)

    def keep_copies(self, parts: Sequence[Any]) -> None:
        """Keep copies of these checkpoint parts on this node instead of the previous ones; returns at once."""
        with self._lock:
            self._wanted = list(parts)
            if not self._is_fetching:  # otherwise the running fetch copies these next
                self._is_fetching = True
                self._pool.submit(self._fetch_wanted)

    def _fetch_wanted(self) -> None:
        while True:
            with self._lock:
                wanted = self._wanted
                if wanted is self._copies:
                    self._is_fetching = False
                    return
            if wanted:
                # Even if this fetch fails, later ones must run.
                with contextlib.suppress(Exception):
                    ray.wait(wanted, num_returns=len(wanted), timeout=_COPY_TIMEOUT_S, fetch_local=True)
            self._copies = wanted

    def stacks(self, processes: Sequence[tuple[int, int]]) -> list[str]:
        """Return the stacks of processes, each given by its id and its stacks descriptor; see `read_stacks`."""
        return list(self._pool.map(lambda process: read_stacks(*process), processes))

    def watch_memory(self, pids: Sequence[int]) -> None:
        """Sample the memory of these processes from now on, and of no others."""
        self._memory.watch(pids)
        if self._sampler is None:
            self._sampler = threading.Thread(target=self._sample_regularly, name="raysgd-memory", daemon=True)
            self._sampler.start()

    def memory(self, pid: int) -> MemoryEvidence | None:
        """Return what was seen of the memory of a process that has just died; None if it was not watched."""
        return self._memory.evidence(pid)

    def close(self) -> None:
        """Stop the sampling thread."""
        self._closing.set()
        if self._sampler is not None:
            self._sampler.join()
            self._sampler = None
        self._closing.clear()

    def _sample_regularly(self) -> None:
        while not self._closing.wait(_MEMORY_INTERVAL_S):
            self._memory.sample()


def read_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process of this node; None if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            status, times = process.status(), process.cpu_times()
            if status == psutil.STATUS_ZOMBIE:
                return None
            return ProcessStatus(times.user + times.system, status in _STOPPED, _read_waited_s(pid))
    except psutil.NoSuchProcess:
        return None


def _read_waited_s(pid: int) -> float:
    """Sum the second number of each thread's ``schedstat`` (Linux): nanoseconds in a run queue."""
    waited_ns = 0
    for path in glob.iglob(f"/proc/{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread may end meanwhile
            waited_ns += int(Path(path).read_text().split()[1])
    return waited_ns / 1e9


class NodeUnreachableError(Exception):
    """A node's agent does not answer."""


class NodeAgents:
    """The agents of all nodes that have workers. Runs in the TrainerActor.

    Args:
        name: Prefix of the actors' names.
        watch: Watches the actors.
        runtime_env: The workers' Ray runtime environment: a node may have no raysgd but this one.

    Attributes:
        own_node: The id of this process's node.
    """

    def __init__(self, name: str, watch: ActorWatch, runtime_env: Mapping[str, Any] | None = None) -> None:
        self._name = name
        self._runtime_env = dict(runtime_env or {})
        self._watch = watch
        self.own_node = ray.get_runtime_context().get_node_id()
        self._own = NodeAgent()
        self._actors: dict[str, Any] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}  # by node
        self._pids: dict[str, list[int]] = {}  # the workers of each node with an agent
        self._num_started = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def nodes(self) -> list[str]:
        """The nodes that have an agent, the TrainerActor's own first."""
        return [self.own_node, *self._actors]

    def watch_workers(self, workers: Iterable[WorkerInfo]) -> None:
        """Start an agent on each node of these workers, and watch their memory; returns at once."""
        self._loop = asyncio.get_running_loop()
        pids_by_node: dict[str, list[int]] = {}
        for info in workers:
            pids_by_node.setdefault(info.node_id, []).append(info.pid)
        for node_id, pids in pids_by_node.items():
            if node_id == self.own_node:
                self._own.watch_memory(pids)
                continue
            self._pids[node_id] = pids
            if node_id in self._actors:
                self._actors[node_id].watch_memory.remote(pids)
            elif node_id not in self._starting:
                self._start(node_id)

    def _start(self, node_id: str) -> None:
        self._starting[node_id] = task = asyncio.get_running_loop().create_task(self._start_agent(node_id))
        task.add_done_callback(
            lambda done: self._starting.pop(node_id) if self._starting.get(node_id) is done else None
        )

    async def _start_agent(self, node_id: str) -> None:
        self._num_started += 1  # the node's previous agent may still be closing under its own name
        name = f"{self._name}-agent-{node_id[:12]}-{self._num_started}"
        actor = await call_cluster(self._request, name, node_id, on_abandoned=ray.kill)
        actor.watch_memory.remote(self._pids[node_id])
        self._actors[node_id] = actor
        self._watch.add(_describe_agent(node_id), lambda: actor, on_gone=lambda: self._replace(node_id, actor))

    def _request(self, name: str, node_id: str) -> Any:
        return (
            watched_actor(NodeAgent)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                runtime_env=self._runtime_env or None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote()
        )

    def _replace(self, node_id: str, dead: Any) -> None:
        """Start another agent on the node of one that has died, unless the node is gone. Called in the thread of the watch."""
        assert self._loop is not None
        if is_node_reachable(node_id):  # blocks for a moment, in which the agents may be closed
            self._loop.call_soon_threadsafe(self._start_instead, node_id, dead)

    def _start_instead(self, node_id: str, dead: Any) -> None:
        if self._actors.get(node_id) is dead:
            self._start(node_id)

    async def check_processes(self, node_id: str, pids: Sequence[int], timeout_s: float) -> list[ProcessStatus | None]:
        """Return the status of processes of a node; None for those that are gone.

        Raises:
            NodeUnreachableError: The node does not answer in time.
        """
        statuses: list[ProcessStatus | None] = await self._ask(
            node_id, "check_processes", list(pids), timeout_s=timeout_s
        )
        return statuses

    async def answers(self, node_id: str, timeout_s: float) -> bool:
        """Return whether a node's agent answers in time; one is started on a node that has none."""
        if node_id != self.own_node and node_id not in self._actors and node_id not in self._starting:
            self._pids.setdefault(node_id, [])
            self._start(node_id)
        with contextlib.suppress(NodeUnreachableError):
            await self._ask(node_id, "check_processes", [], timeout_s=timeout_s)
            return True
        return False

    async def stacks(self, node_id: str, processes: Sequence[tuple[int, int]], timeout_s: float) -> list[str]:
        """Return the stacks of processes of a node, each given by its id and its stacks descriptor.

        Raises:
            NodeUnreachableError: The node does not answer in time.
        """
        if node_id == self.own_node:  # reading them takes seconds
            return await asyncio.to_thread(self._own.stacks, processes)
        stacks: list[str] = await self._ask(node_id, "stacks", list(processes), timeout_s=timeout_s)
        return stacks

    def keep_copies(self, parts: Sequence[tuple[str, Any]]) -> None:
        """Keep each part of a checkpoint on a second node that has an agent, instead of the copies kept so far.

        Args:
            parts: Each part with the node that it is on.
        """
        nodes = self.nodes
        copies: dict[str, list[Any]] = {node_id: [] for node_id in nodes}
        for node_id, part in parts:
            if other := next((node for node in nodes if node != node_id), None):
                copies[other].append(part)
        self._own.keep_copies(copies.pop(self.own_node))
        for node_id, on_node in copies.items():
            self._actors[node_id].keep_copies.remote(on_node)

    def expect_exit(self, info: WorkerInfo) -> None:
        """Kill a process that was asked to exit, if it does not do so soon; returns at once."""
        if info.node_id == self.own_node:
            self._own.expect_exit(info.pid)
        elif (actor := self._actors.get(info.node_id)) is not None:
            actor.expect_exit.remote(info.pid)
        elif (starting := self._starting.get(info.node_id)) is not None:
            starting.add_done_callback(lambda _: self.expect_exit(info))

    async def wait_for_exits(self) -> None:
        """Wait, for some seconds at most, until processes that were asked to exit and agents that were closed are gone."""
        await asyncio.gather(asyncio.to_thread(self._own.wait_for_exits), *self._closing)

    async def explain_death(self, error: BaseException, info: WorkerInfo | None) -> str:
        """Return why a worker died: Ray's reason, or that memory was the cause."""
        memory = await self._memory(info) if info is not None and may_be_memory(error) else None
        return describe_death(error, memory)

    async def is_node_gone(self, info: WorkerInfo | None) -> bool:
        """Return True if the node of a dead worker is gone as well; False if that cannot be found out."""
        if info is None or info.node_id == self.own_node:
            return False
        with contextlib.suppress(asyncio.TimeoutError):  # the GCS does not answer
            return not await asyncio.wait_for(call_cluster(is_node_reachable, info.node_id), _REACH_S)
        return False

    def close(self) -> None:
        """Stop the agents, once the processes that were asked to exit are gone."""
        self._own.close()
        for starting in self._starting.values():
            starting.cancel()
        for node_id, actor in self._actors.items():
            self._watch.remove(_describe_agent(node_id))
            task = asyncio.get_running_loop().create_task(_close_agent(actor))
            self._closing.add(task)  # the loop holds tasks weakly
            task.add_done_callback(self._closing.discard)
        self._actors.clear()

    async def _memory(self, info: WorkerInfo) -> MemoryEvidence | None:
        with contextlib.suppress(NodeUnreachableError):
            evidence: MemoryEvidence | None = await self._ask(
                info.node_id, "memory", info.pid, timeout_s=_EVIDENCE_TIMEOUT_S
            )
            return evidence
        return None

    async def _ask(self, node_id: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if node_id == self.own_node:
            return getattr(self._own, method)(*arguments)
        if (actor := self._actors.get(node_id)) is None:
            raise NodeUnreachableError(node_id)
        try:
            return await asyncio.wait_for(getattr(actor, method).remote(*arguments), timeout_s)
        except (RayError, asyncio.TimeoutError) as error:
            raise NodeUnreachableError(node_id) from error


def _describe_agent(node_id: str) -> str:
    return f"the agent on node {node_id[:12]}"


async def _close_agent(actor: Any) -> None:
    with contextlib.suppress(RayError, asyncio.TimeoutError):
        await asyncio.wait_for(actor.wait_for_exits.remote(), CLOSE_TIMEOUT_S)
    await call_cluster(ray.kill, actor)
