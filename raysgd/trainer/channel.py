"""The driver's connection to the TrainerActor. Driver side; the only module that calls its methods."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd._util.logs import get_logger
from raysgd.controller import frames
from raysgd.controller.commands import StopRequested
from raysgd.controller.frames import Frame
from raysgd.controller.holders import describe_holder
from raysgd.controller.journal.frame_streams import follow_frames
from raysgd.controller.journal.outcome import outcome_error
from raysgd.controller.kv_store import (
    claim_alias,
    data_holder_name,
    find_alias,
    forget,
    get_settings,
    is_new,
    put_holder,
    put_settings,
)
from raysgd.controller.requests import RunNotGiven, RunRequest, TrainerSettings, is_data_kept
from raysgd.controller.trainer_actor import TrainerActor
from raysgd.controller.watchdog import ASK_AGAIN_S, comes_back, prepare_process
from raysgd.errors import ConfigError, RaySGDError, TrainerClosedError, UsageError, WorkerError
from raysgd.result import ENDED
from raysgd.workers.liveness.death_reasons import explain_failed_start, first_line
from raysgd.workers.liveness.own_processes import CONTROLLER, ProcessWatch
from raysgd.workers.liveness.watched import watched_actor
from raysgd.workers.pickling import CallFailed, loads
from raysgd.workers.placement.cluster import NAMESPACE, current_session, place_near
from raysgd.workers.placement.slots import remove_placement_groups

#: Seconds in which an earlier Trainer of the same name must answer whether its run is over.
_STATUS_TIMEOUT_S = 10.0
#: Seconds that a warning may take to get into the run's files.
_WARN_TIMEOUT_S = 10.0
_ENDS = {frames.RUN_END, frames.RUN_CLOSED}
CLUSTER_IS_GONE = "the Ray cluster of this Trainer is gone: ray.shutdown() was called since; make a new Trainer."


class Channel:
    """Calls a TrainerActor.

    Args:
        settings: Its settings.
        actor: Its handle.

    Attributes:
        settings: As above.
        is_gone: Whether the TrainerActor has died; then this channel is of no more use.
    """

    def __init__(self, settings: TrainerSettings, actor: Any) -> None:
        self.settings = settings
        self.is_gone = False
        self._actor = actor
        self._request: RunRequest | None = None  # the live run, for an actor that was started again
        self._stops: dict[str, StopRequested] = {}  # of the latest run
        self._given: dict[int, tuple[Any, ...]] = {}  # to that run, as arguments of the call
        self._watch = _ControllerWatch(actor, settings.spec.failure_config.heartbeat_timeout_s)
        self._is_idle = threading.Event()  # the run that this process has begun is closed
        self._is_idle.set()
        self._has_outcome = True  # of that run
        self._session = current_session()
        self._returned: weakref.WeakSet[ReturnedValues] = weakref.WeakSet()  # they may still be asked for

    @classmethod
    def start(cls, settings: TrainerSettings) -> Channel:
        """Start the actor; returns at once.

        Raises:
            ConfigError: A detached Trainer of that name has a run that is not over.
        """
        # On the driver's node, whose disk holds a local storage_path. A detached Trainer may move if that node is lost.
        here = ray.get_runtime_context().get_node_id()
        is_detached = settings.alias is not None
        bound = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
        put_settings(settings)
        put_holder(describe_holder(settings))
        if settings.alias is not None:
            try:
                _claim(settings.alias, settings.name)
            except ConfigError:
                forget(settings.name)
                raise
        actor = (
            watched_actor(TrainerActor)
            .options(
                name=settings.name,
                namespace=NAMESPACE,
                max_concurrency=1000,
                max_restarts=-1,  # what a run survives is decided by its FailureConfig
                lifetime="detached" if is_detached else None,
                **(place_near(here) if is_detached else bound),
            )
            .remote()
        )
        return cls(settings, actor)

    @classmethod
    def attach(cls, alias: str) -> Channel:
        """Connect to the TrainerActor of a detached Trainer.

        Raises:
            ConfigError: This process cannot work with the Trainer, because its versions differ.
            UsageError: There is no Trainer of that name.
        """
        name = find_alias(alias)
        try:
            if name is not None:
                return cls(get_settings(name), ray.get_actor(name, namespace=NAMESPACE))
        except ConfigError:
            raise
        except (LookupError, ValueError):  # it was ended, or has died
            pass
        raise UsageError(
            f"no detached Trainer {alias!r} is in this cluster: it was shut down, or is in another one. "
            "Trainer.restore(run_dir) resumes from a run's folder."
        )

    def begin(self, request: RunRequest) -> None:
        """Start a run; returns at once, but for a detached run, which other drivers can find from then on."""
        if self.settings.alias is not None:
            request = self._keep_data(request)
        self._request = request
        self._is_idle.clear()
        self._has_outcome = False
        self._actor.run.remote(request)
        if self.settings.alias is not None:
            self.call("endpoint")

    def stream(self, run_id: str) -> Iterator[list[Frame]]:
        """Yield a run's frames as they come.

        Raises:
            RayActorError: The TrainerActor is gone.
        """
        try:
            with self._watch.waiting():
                for batch in follow_frames(self._actor, run_id, last=frames.RUN_CLOSED, send_again=self._send_again):
                    self._watch.on_message()
                    kinds = {frame.kind for frame in batch}
                    if not kinds.isdisjoint(_ENDS) and self._is_request(run_id):
                        self._has_outcome = True
                        if frames.RUN_CLOSED in kinds:
                            self._is_idle.set()
                    yield batch
        except RayActorError:
            self.is_gone = True
            self._tidy_up()
            raise
        finally:
            if self._is_request(run_id):
                self._request, self._given = None, {}  # they refer to the run's data
                self._is_idle.set()

    def frames(self, run_id: str, seq: int) -> list[Frame]:
        """Return frames from number ``seq`` on, for a reader that fell behind."""
        return list(self.call("frames", run_id, seq))

    def stop(self, run_id: str, request: StopRequested) -> None:
        """Ask a run to end, and again if the actor is restarted; returns at once."""
        self._stops = {run_id: request}
        self._actor.stop.remote(run_id, request)

    def give(self, run_id: str, number: int, piece: list[Any], kept_from: int) -> None:
        """Give a piece to the workers of a run, and again if the actor is restarted; see `ResultStream.give`."""
        kept = {old: each for old, each in self._given.items() if old >= kept_from}
        self._given = kept | {number: (run_id, number, piece, kept_from)}
        self.call("give", *self._given[number])

    def warn(self, run_id: str, message: str, source: str) -> None:
        """Add a warning that this process has logged to a run's files; does nothing if the run or the actor is gone."""
        with contextlib.suppress(RaySGDError, RayError):
            self.call("warn", run_id, message, source, timeout_s=_WARN_TIMEOUT_S)

    def values(self, run_id: str, *, first_only: bool) -> ReturnedValues:
        """Return what train_func returned on all ranks or the first."""
        returned = ReturnedValues(self.call("values", run_id, first_only), self.check_cluster)
        self._returned.add(returned)
        return returned

    def call(self, method: str, *args: Any, timeout_s: float | None = None, may_repeat: bool = True) -> Any:
        """Call a method of the TrainerActor and wait for its answer.

        Args:
            method: Its name.
            *args: Its arguments.
            timeout_s: Seconds to wait.
            may_repeat: Whether to call it again if the actor is restarted meanwhile. If not, a restart ends the actor: a
                user's function that is called may have run already.

        Raises:
            Exception: What the method raised, as its own type.
            TrainerClosedError: The Ray cluster is gone.
            WorkerError: The TrainerActor is gone.
        """
        self.check_cluster()
        while True:
            try:
                with self._watch.waiting():
                    return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)
            except RayTaskError as error:
                if not isinstance(error.cause, RunNotGiven) or not self._send_again():
                    raise_cause(error)
                time.sleep(ASK_AGAIN_S)
            except RayActorError as error:
                if may_repeat and self._comes_back():
                    self._send_again()
                    continue
                self.close()
                self.is_gone = True
                raise WorkerError(explain_failed_start(error) or f"{CONTROLLER} is gone: {error}") from None

    @property
    def has_lost_cluster(self) -> bool:
        """Whether this process is no longer connected to the cluster that the TrainerActor was started in."""
        return current_session() != self._session

    def check_cluster(self) -> None:
        """Check that the cluster of the TrainerActor is still there.

        Raises:
            TrainerClosedError: It is not.
        """
        if self.has_lost_cluster:
            raise TrainerClosedError(CLUSTER_IS_GONE)

    def cancel_live_run(self, why: str, patience_s: float) -> bool:
        """Wait until the run that this process has begun is closed; cancel it if it is live, and return whether it was."""
        request, is_live = self._request, not self._has_outcome
        if request is None:
            return False
        if is_live:
            self.stop(request.run_id, StopRequested(why, cancel=True))
        self._is_idle.wait(patience_s)
        return is_live

    def fetch_returned(self) -> None:
        """Fetch what runs returned, if it may still be asked for: large values end with the TrainerActor."""
        for returned in list(self._returned):
            returned.fetch()

    def close(self, timeout_s: float = 10) -> None:
        """End the TrainerActor and all its workers."""
        if self.has_lost_cluster:
            return  # they are gone, and this process may be connected to another cluster
        with contextlib.suppress(Exception), self._watch.waiting():
            ray.get(self._actor.shutdown.remote(), timeout=timeout_s)
        ray.kill(self._actor)
        self._tidy_up()

    def _comes_back(self) -> bool:
        with self._watch.waiting():
            return comes_back(self._actor)

    def _tidy_up(self) -> None:
        """Remove what the dead TrainerActor left: its placement groups would exist as long as the driver."""
        if not self.has_lost_cluster:
            with contextlib.suppress(Exception):  # the cluster may be gone as well
                remove_placement_groups(self.settings.name)
                forget(self.settings.name, self.settings.alias)

    def _is_request(self, run_id: str) -> bool:
        return self._request is not None and self._request.run_id == run_id

    def _send_again(self) -> bool:
        """Send the restarted actor the live run, and the request to stop it if there was one; return whether a run is live."""
        if self._request is None:
            return False
        self._actor.run.remote(self._request)
        for given in list(self._given.values()):
            self._actor.give.remote(*given)
        if (run_id := self._request.run_id) in self._stops:
            self._actor.stop.remote(run_id, self._stops[run_id])
        return True

    def _keep_data(self, request: RunRequest) -> RunRequest:
        """Let another process hold the run's data, so that the run can outlive this driver."""
        task = request.task
        if not is_data_kept(task):
            return request
        from raysgd.controller.processes.data_holder import DataHolder, Kept

        data_holder = prepare_process(DataHolder, data_holder_name(self.settings.name, request.run_id)).remote(
            self._actor
        )
        try:
            kept: Kept = ray.get(data_holder.keep.remote(Kept(task.datasets, task.initial_state)))
        except BaseException:
            ray.kill(data_holder)
            raise
        return replace(request, task=replace(task, datasets=kept.datasets, initial_state=kept.initial_state))


#: Those that may have a thread, which would start Ray again after its end.
_watches: weakref.WeakSet[ProcessWatch] = weakref.WeakSet()


@atexit.register  # after Ray's own function, so it is called before that
def _close_watches() -> None:
    for watch in list(_watches):
        watch.close()


class _ControllerWatch:
    """Watches the TrainerActor while this process waits for it, so that one that does not run stops nothing without a word.

    Args:
        actor: Its handle.
        timeout_s: See `ProcessWatch`.
    """

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._find = lambda: actor
        self._watch = ProcessWatch(timeout_s)
        #: Called when the TrainerActor has sent something.
        self.on_message = partial(self._watch.on_message, CONTROLLER)
        _watches.add(self._watch)
        weakref.finalize(self, self._watch.abandon).atexit = False
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._pid: int | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch in this block, in which the TrainerActor must answer."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._watch.add(
                    CONTROLLER, self._find, pid=self._pid, on_kill=self._report, on_cut_off=self._report_wait
                )
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._pid = self._watch.remove(CONTROLLER)

    @staticmethod
    def _report_wait(why: str) -> None:
        get_logger().warning("%s %s. This process waits for it; a run continues meanwhile if it can.", CONTROLLER, why)

    @staticmethod
    def _report(why: str) -> None:
        get_logger().warning(
            "%s %s. It is killed and starts again; its workers end with it, and a live run resumes from its newest "
            "checkpoint.",
            CONTROLLER,
            why,
        )


class ReturnedValues:
    """The values that train_func returned, by rank: pickles, or references to large ones, which end with the TrainerActor."""

    def __init__(self, values: Sequence[Any], check_cluster: Callable[[], None]) -> None:
        self._values = list(values)
        self._check_cluster = check_cluster

    def fetch(self) -> None:
        """Replace the references by copies of what they refer to."""
        self._values = [bytes(value) if isinstance(value, memoryview) else value for value in self._fetched()]

    def open(self) -> list[Any]:
        """Unpickle the values.

        Raises:
            TrainerClosedError: The Ray cluster is gone, and a large one with it.
            WorkerError: A large one is gone.
        """
        try:
            values = self._fetched()
        except RayError as error:
            raise WorkerError(
                f"what train_func returned is gone with the Trainer; call get_returns() before its end: {first_line(error)}"
            ) from None
        return [None if value is None else loads(value) for value in values]

    def _fetched(self) -> list[Any]:
        if any(isinstance(value, ray.ObjectRef) for value in self._values):
            self._check_cluster()  # without a cluster, Ray would start one
        return [memoryview(ray.get(value)) if isinstance(value, ray.ObjectRef) else value for value in self._values]


def raise_cause(error: RayTaskError) -> None:
    """Raise what a method of the TrainerActor raised, as its own type."""
    cause = error.cause
    if isinstance(cause, CallFailed):
        failed = outcome_error(cause.data) or cause
        raise failed from failed.__cause__
    if not isinstance(cause, Exception):
        raise error from None
    raise cause from None if isinstance(cause, RaySGDError) else error  # where in the user's code


def _claim(alias: str, name: str) -> None:
    """Register a Trainer under its alias; end an earlier Trainer of that alias whose run is over.

    Raises:
        ConfigError: The earlier Trainer's run is not over.
    """
    while (other := claim_alias(alias, name)) is not None:
        if (state := _end_if_over(other)) is not None:
            raise ConfigError(
                f"a detached Trainer {alias!r} is in this cluster already, and its run is {state}: "
                f"Trainer.attach({alias!r}) attaches to it; or give another RunConfig(name=...)."
            )
        forget(other, alias)


def _end_if_over(name: str) -> str | None:
    """End a Trainer that has no live run, and return None; otherwise return the state of its run."""
    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return "about to begin" if is_new(name) else None  # its driver has registered it, and starts the actor next
    try:
        channel = Channel(get_settings(name), actor)
        status: Any = channel.call("status", timeout_s=_STATUS_TIMEOUT_S)
    except ConfigError:  # another version of raysgd has it
        return "not known"
    except (LookupError, RaySGDError):  # it is gone by now
        return None
    except RayError:
        return "not known"
    if status is not None and status["state"] not in ENDED:
        return str(status["state"])
    channel.close()
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while time.monotonic() < deadline and name in [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]:
        time.sleep(0.05)
    return None
