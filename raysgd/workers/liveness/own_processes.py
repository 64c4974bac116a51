"""Watches raysgd's own processes, such as the TrainerActor and the callback host, and kills one that does not run.

`ProcessWatch` is a thread of the process that watches: the driver, the TrainerActor, or a detached Trainer's guard. It asks
each watched actor for a sign of life. A late process is examined from outside, as late workers are. What does not run is killed
by its process id, so that what follows is the same as after its death: doc/protocol.md says for each process what that is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state  # without Ray's dashboard no public API has an actor's process id
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd._util.logs import get_logger
from raysgd.workers.liveness.node_agent import NodeAgent, ProcessStatus, read_status
from raysgd.workers.liveness.silence import Silence
from raysgd.workers.liveness.watched import watched_actor

#: What messages call the TrainerActor, the callback host and the process that holds a detached run's data.
CONTROLLER = "the Trainer's controller process"
CALLBACK_HOST = "the process of the controller's callbacks"
DATA_HOLDER = "the process that holds the run's data"

#: Signs of life that a process is asked for within the timeout.
_ASKS = 4
_MAX_TICK_S = 0.5
#: Answers in a row by which Ray says that an actor is dead, after which it is not asked again. The first may come from a
#: call to a process whose actor Ray starts again.
_MAX_DEATHS = 2
#: The time after which an agent on another node that has not answered is replaced; starting it takes a part of it.
_AGENT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Place:
    """The place of an actor's process."""

    node_id: str
    pid: int


@dataclass
class _Agent:
    actor: Any
    answered_at: float  # or started


class Processes:
    """The access of a `ProcessWatch` to the cluster: it asks actors, and finds, checks and kills their processes."""

    def __init__(self) -> None:
        self._own_node = ray.get_runtime_context().get_node_id()
        self._agents: dict[str, _Agent] = {}

    def ask(self, actor: Any) -> Future[int]:
        """Ask an actor for a sign of life, which is its process id; does not wait."""
        future: Future[int] = actor.sign_of_life.remote().future()
        return future

    def find(self, actor: Any) -> Place | None:
        """Return where the process of an actor runs, as Ray knows it; None if there is none."""
        known = state.actor_table(actor._actor_id.hex())
        if not known or not known["Pid"] or known["State"] == "DEAD":
            return None
        return Place(known["Address"]["NodeID"], known["Pid"])

    def check(self, place: Place, timeout_s: float) -> ProcessStatus | None:
        """Return the status of a process; None if it is gone.

        Raises:
            TimeoutError: The node does not answer in time.
        """
        if place.node_id == self._own_node:
            return read_status(place.pid)
        (status,) = self._call(place.node_id, "check_processes", [place.pid], timeout_s)
        found: ProcessStatus | None = status
        return found

    def kill(self, place: Place, timeout_s: float) -> None:
        """Kill a process; the death of a process that is gone already, or of a node, is not waited for."""
        if place.node_id == self._own_node:
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)
            return
        with contextlib.suppress(TimeoutError):
            self._call(place.node_id, "kill_unless_exited", place.pid, timeout_s)

    def close(self) -> None:
        """End the agents that were started; later calls start them again."""
        while self._agents:
            _, agent = self._agents.popitem()
            if ray.is_initialized():  # otherwise a call would start Ray again, and the agents have ended with it
                ray.kill(agent.actor)  # without a handle, one that is stopped would stay until it answers its last call

    def _call(self, node_id: str, method: str, argument: Any, timeout_s: float) -> Any:
        """Call an agent on another node; it is started for this, since the node's own agent may be what is late."""
        if node_id not in self._agents:
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            actor = watched_actor(NodeAgent).options(num_cpus=0, scheduling_strategy=on_node).remote()
            self._agents[node_id] = _Agent(actor, time.monotonic())
        agent = self._agents[node_id]
        try:
            answer = getattr(agent.actor, method).remote(argument).future().result(timeout_s)
        except (RayError, FutureTimeoutError) as error:
            if time.monotonic() - agent.answered_at > _AGENT_TIMEOUT_S or isinstance(error, RayActorError):
                ray.kill(self._agents.pop(node_id).actor)  # nobody watches the agent itself: it may be stopped
            raise TimeoutError(f"node {node_id} does not answer") from error
        agent.answered_at = time.monotonic()
        return answer


@dataclass
class _Watched:
    find: Callable[[], Any]
    silence: Silence
    pid: int | None  # of the process that answered last
    is_starting: bool
    on_kill: Callable[[str], None] | None
    on_gone: Callable[[], None]
    on_cut_off: Callable[[str], None]
    asked_at: float
    actor: Any = None
    asked: Future[int] | None = None
    deaths: int = 0
    cut_off: Silence | None = None  # of which `on_cut_off` was called
    examined: Place | None = None


class ProcessWatch:
    """Watches actors that have `raysgd.workers.liveness.watched.Watched` among their bases. Called from any thread.

    A process counts as not running after ``timeout_s`` without a sign of life and without use of a CPU, nor waiting for one.
    A process that has never answered may be starting from a slow disk: it is only killed if it was stopped.

    Args:
        timeout_s: As above.
        processes: The access to the cluster; made in the thread if None.

    Attributes:
        report: Called with a sentence for the user when a process is killed; in the thread.
    """

    def __init__(self, timeout_s: float, processes: Processes | None = None) -> None:
        self._timeout_s = timeout_s
        self._tick_s = min(_MAX_TICK_S, timeout_s / 8)
        self._processes = processes
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self.report: Callable[[str], None] = get_logger().warning

    def add(
        self,
        name: str,
        find: Callable[[], Any],
        *,
        pid: int | None = None,
        is_starting: bool = False,
        on_kill: Callable[[str], None] | None = None,
        on_gone: Callable[[], None] = lambda: None,
        on_cut_off: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Watch an actor from now on, instead of an earlier one of that name.

        Args:
            name: What messages call the process.
            find: Returns the actor's handle; called when the actor is first asked.
            pid: Its process id, if it is known to run.
            is_starting: It may import modules from a slow disk, which stops all its threads: it is only killed if it was stopped.
            on_kill: Called before its process is killed, with the reason, instead of `report`; in the thread.
            on_gone: Called when Ray says that the actor is dead and will not come back; it is watched no longer. In the thread.
            on_cut_off: Called with the reason, once for each time that neither the process nor its node answers for
                ``timeout_s``, instead of killing it. In the thread.
        """
        with self._lock:
            now = time.monotonic()
            self._watched[name] = _Watched(
                find, Silence(now), pid, is_starting, on_kill, on_gone, on_cut_off, asked_at=now
            )
            if self._thread is None and not self._closing.is_set():  # it ends when there is nothing to watch
                self._thread = threading.Thread(target=self._run, name="raysgd-watch", daemon=True)
                self._thread.start()

    def remove(self, name: str) -> int | None:
        """Stop watching an actor; return the id of its process if it has answered."""
        with self._lock:
            watched = self._watched.pop(name, None)
        return None if watched is None else watched.pid

    def on_message(self, name: str) -> None:
        """The process has sent something, which is a sign of life as well."""
        with self._lock:
            if (watched := self._watched.get(name)) is not None:
                watched.silence = Silence(time.monotonic())

    def close(self) -> None:
        """Stop watching, for good; waits for a moment until the thread has ended."""
        self._closing.set()
        with self._lock:
            self._watched.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._tick_s)

    def abandon(self) -> None:
        """Stop watching soon; for the garbage collector, which may interrupt a thread that holds a lock, also of this object."""
        self._is_abandoned = True

    def step(self, now: float, gap_s: float = 0.0) -> None:
        """Ask, examine and kill what is due; called by the thread.

        Args:
            now: The time, on the monotonic clock.
            gap_s: The time in which this process itself did not run.
        """
        with self._lock:
            watched = list(self._watched.items())
        for name, each in watched:
            try:
                self._step_one(name, each, now, gap_s)
            except Exception:  # Ray's global control service may be away; the next step tries again
                get_logger().debug("the state of %s could not be read", name, exc_info=True)
        if self._processes is not None and not any(self._is_late(each, now) for _, each in watched):
            self._processes.close()

    def _step_one(self, name: str, watched: _Watched, now: float, gap_s: float) -> None:
        if gap_s > self._timeout_s / _ASKS:
            watched.silence.skip(gap_s)
        self._collect(name, watched, now)
        if self._is_due(watched, now):
            self._ask(watched, now)
        if self._is_late(watched, now):
            self._examine(name, watched, now)

    def _is_late(self, watched: _Watched, now: float) -> bool:
        """Return whether the process must be examined from outside."""
        return now - watched.silence.answered_at > self._timeout_s / 2

    def _run(self) -> None:
        try:
            while ray.is_initialized():  # otherwise a call would start Ray again
                begun = time.monotonic()
                self._closing.wait(self._tick_s)
                if self._is_over():
                    return
                now = time.monotonic()
                self._processes = self._processes or Processes()
                self.step(now, now - begun - self._tick_s)
        finally:
            if self._processes is not None:
                self._processes.close()

    def _is_over(self) -> bool:
        """Return whether there is nothing to watch, so that the thread ends; `add` starts another one."""
        with self._lock:
            is_over = not self._watched or self._is_abandoned
            if is_over:
                self._thread = None
        return is_over

    def _is_due(self, watched: _Watched, now: float) -> bool:
        """Return whether the process must be asked: it is silent, or its process id is unknown."""
        since = watched.asked_at if watched.pid is None else watched.silence.answered_at
        return watched.asked is None and now - since >= self._timeout_s / _ASKS

    def _ask(self, watched: _Watched, now: float) -> None:
        assert self._processes is not None
        watched.asked_at = now
        with contextlib.suppress(ValueError):  # there is no such actor yet, or no longer
            watched.actor = watched.actor if watched.actor is not None else watched.find()
            watched.asked = self._processes.ask(watched.actor)

    def _collect(self, name: str, watched: _Watched, now: float) -> None:
        """Take the answer, if there is one."""
        if watched.asked is None or not watched.asked.done():
            return
        error, asked, watched.asked = watched.asked.exception(), watched.asked, None
        if error is None:
            watched.pid, watched.deaths, watched.silence = asked.result(), 0, Silence(now)
            return
        watched.pid = None  # of another process next, if there is one
        if isinstance(error, ActorUnavailableError):
            return
        watched.deaths += 1
        watched.asked_at = float("-inf")
        if watched.deaths >= _MAX_DEATHS and self._forget(name, watched):
            watched.on_gone()

    def _forget(self, name: str, watched: _Watched) -> bool:
        with self._lock:
            is_current = self._watched.get(name) is watched
            if is_current:
                del self._watched[name]
        return is_current

    def _examine(self, name: str, watched: _Watched, now: float) -> None:
        assert self._processes is not None
        if watched.actor is None or (place := self._processes.find(watched.actor)) is None:
            return
        if place != watched.examined:
            watched.examined = place
            watched.silence.cpu_times.clear()
        try:
            status = self._processes.check(place, self._timeout_s / 3)
        except TimeoutError:  # Ray will notice that the node is lost
            silence = watched.silence
            silence.is_reachable = False
            if silence.is_over_limit(now, self._timeout_s) and watched.cut_off is not silence:
                watched.cut_off = silence
                watched.on_cut_off(silence.describe(now))
            return
        if status is None:  # it is gone; Ray will notice
            return
        silence = watched.silence
        silence.add_check(status.cpu_s, status.waited_s, status.is_stopped, now, self._timeout_s)
        if not silence.is_over_limit(now, self._timeout_s) or self._watched.get(name) is not watched:
            return
        # A process must have had time to answer: what kept this thread, such as a lost node, has kept the question as well.
        has_been_asked = watched.asked is not None and now - watched.asked_at >= self._timeout_s / 2
        may_be_busy = len(silence.cpu_times) < 2
        may_be_starting = place.pid != watched.pid or watched.is_starting
        if not has_been_asked or (not status.is_stopped and (may_be_busy or may_be_starting)):
            return
        why = silence.describe(now)
        watched.silence, watched.pid = Silence(now), None
        if watched.on_kill is not None:
            watched.on_kill(why)
        else:
            self.report(f"{name} {why}. It is killed and replaced.")
        self._processes.kill(place, self._timeout_s / 3)
