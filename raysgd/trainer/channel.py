"""The driver's line to the TrainerActor. Driver side; the one place that knows its methods."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysgd.controller import frames
from raysgd.controller.actor import TrainerActor
from raysgd.controller.belongings import (
    claim_alias,
    find_alias,
    forget,
    get_settings,
    is_new,
    keeper_name,
    put_settings,
)
from raysgd.controller.downlink import follow_frames
from raysgd.controller.frames import Frame
from raysgd.controller.lifeline import ASK_AGAIN_S, comes_back
from raysgd.controller.outcome import outcome_error
from raysgd.controller.requests import RunNotGiven, RunRequest, TrainerSettings
from raysgd.errors import ConfigError, RaySGDError, UsageError, WorkerError
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.pickling import loads
from raysgd.workers.returned import CallFailed
from raysgd.workers.seats import remove_placements

#: Seconds for the TrainerActor of a run that is over to tell so, when another Trainer wants its name.
_TELL_S = 10.0
#: States of a run that are its end.
OVER = ("done", "stopped", "cancelled", "error")


class Channel:
    """A TrainerActor.

    Args:
        settings: Its settings.
        actor: Its handle.
    """

    def __init__(self, settings: TrainerSettings, actor: Any) -> None:
        self._settings = settings
        self._actor = actor
        self._is_gone = False
        self._request: RunRequest | None = None  # the live run, for an actor that was started again
        self._stops: dict[str, tuple[str, bool]] = {}  # of the latest run

    @classmethod
    def start(cls, settings: TrainerSettings) -> Channel:
        """Make the actor; returns at once.

        Raises:
            ConfigError: A detached Trainer of that name has a run that is not over.
        """
        # On the driver's node: its disk holds a local storage_path. An actor without CPUs is placed by chance if it is not
        # bound to a node; and were that node gone, so would be the driver, unless that does not matter.
        here = ray.get_runtime_context().get_node_id()
        is_detached = settings.alias is not None
        put_settings(settings)
        if settings.alias is not None:
            try:
                _claim(settings.alias, settings.name)
            except ConfigError:
                forget(settings.name)
                raise
        actor = (
            ray.remote(TrainerActor)
            .options(
                name=settings.name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=1000,
                max_restarts=-1,  # what a run survives is decided by its FailureConfig
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=is_detached),
                lifetime="detached" if is_detached else None,
            )
            .remote()
        )
        return cls(settings, actor)

    @classmethod
    def attach(cls, alias: str) -> Channel:
        """That of a detached Trainer.

        Raises:
            UsageError: There is none of that name.
        """
        name = find_alias(alias)
        try:
            if name is not None:
                return cls(get_settings(name), ray.get_actor(name, namespace=NAMESPACE))
        except (LookupError, ValueError):  # it was ended, or has died
            pass
        raise UsageError(
            f"no detached Trainer {alias!r} is in this cluster: it was shut down, or is in another one. "
            "Trainer.restore(run_dir) goes on from a run's folder."
        )

    @property
    def settings(self) -> TrainerSettings:
        return self._settings

    @property
    def is_gone(self) -> bool:
        """Whether the TrainerActor has died; then this line is of no more use."""
        return self._is_gone

    def begin(self, request: RunRequest) -> None:
        """Start a run; returns at once, but for a detached one, which is found by others from then on."""
        if self._settings.alias is not None:
            request = self._keep_data(request)
        self._request = request
        self._actor.run.remote(request)
        if self._settings.alias is not None:
            self.call("endpoint")

    def stream(self, run_id: str) -> Iterator[list[Frame]]:
        """A run's frames, as they come.

        Raises:
            RayActorError: The TrainerActor is gone.
        """
        try:
            yield from follow_frames(self._actor, run_id, last=frames.RUN_CLOSED, give_again=self._give_again)
        except RayActorError:
            self._is_gone = True
            self._tidy_up()
            raise
        finally:
            if self._request is not None and self._request.run_id == run_id:
                self._request = None  # it refers to the run's data

    def frames(self, run_id: str, seq: int) -> list[Frame]:
        """Frames from number ``seq`` on, for a reader that fell behind."""
        return list(self.call("frames", run_id, seq))

    def stop(self, run_id: str, why: str, *, cancel: bool) -> None:
        """Ask a run to end, and again if the actor has to be started again; returns at once."""
        self._stops = {run_id: (why, cancel)}
        self._actor.stop.remote(run_id, why, cancel)

    def values(self, run_id: str, *, first_only: bool) -> list[Any]:
        """What train_func returned on all ranks or the first, as `open_value` takes it; large values stay where they are."""
        return list(self.call("values", run_id, first_only))

    @staticmethod
    def open_value(value: Any) -> Any:
        """The object that a worker returned."""
        if value is None:
            return None
        return loads(value if isinstance(value, bytes) else memoryview(ray.get(value)))

    def call(self, method: str, *args: Any, timeout_s: float | None = None, may_repeat: bool = True) -> Any:
        """Call a method of the TrainerActor and wait for its answer.

        Args:
            method: Its name.
            *args: Its arguments.
            timeout_s: Seconds to wait.
            may_repeat: It is called again where the actor had to be started again. What cannot be, such as a function of the
                user's that may have run, ends the actor.

        Raises:
            Exception: What the method raised, as its own type.
            WorkerError: The TrainerActor is gone.
        """
        while True:
            try:
                return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)
            except RayTaskError as error:
                if not isinstance(error.cause, RunNotGiven) or not self._give_again():
                    raise_cause(error)
                time.sleep(ASK_AGAIN_S)
            except RayActorError as error:
                if may_repeat and comes_back(self._actor):
                    self._give_again()
                    continue
                self.close()
                self._is_gone = True
                raise WorkerError(f"the Trainer's controller process is gone: {error}") from None

    def close(self, timeout_s: float = 10) -> None:
        """End the TrainerActor and all its workers."""
        try:
            ray.get(self._actor.shutdown.remote(), timeout=timeout_s)
        except Exception:
            pass
        ray.kill(self._actor)
        self._tidy_up()

    def _tidy_up(self) -> None:
        """Its workers are gone with the TrainerActor; their placement group would stay as long as the driver."""
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # the cluster may be gone as well
                remove_placements(self._settings.name)
                forget(self._settings.name, self._settings.alias)

    def _give_again(self) -> bool:
        """The actor was started again: it gets the live run, and what was to become of it. Whether there is one."""
        if self._request is None:
            return False
        self._actor.run.remote(self._request)
        if (run_id := self._request.run_id) in self._stops:
            self._actor.stop.remote(run_id, *self._stops[run_id])
        return True

    def _keep_data(self, request: RunRequest) -> RunRequest:
        """The request of a run that its driver need not outlive: its data are another process's."""
        if not request.datasets.sources and not isinstance(request.initial_state, ray.ObjectRef):
            return request
        from raysgd.controller.keeper import DataKeeper, Kept

        keeper: Any = (
            ray.remote(DataKeeper)
            .options(
                name=keeper_name(self._settings.name, request.run_id),
                namespace=NAMESPACE,
                num_cpus=0,
                lifetime="detached",
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
            )
            .remote(self._actor)
        )
        try:
            kept: Kept = ray.get(keeper.keep.remote(Kept(request.datasets, request.initial_state)))
        except BaseException:
            ray.kill(keeper)
            raise
        return replace(request, datasets=kept.datasets, initial_state=kept.initial_state)


def raise_cause(error: RayTaskError) -> None:
    """What a method of the TrainerActor raised, as its own type."""
    cause = error.cause
    if isinstance(cause, CallFailed):
        failed = outcome_error(cause.data) or cause
        raise failed from failed.__cause__
    if not isinstance(cause, Exception):
        raise error from None
    raise cause from None if isinstance(cause, RaySGDError) else error  # where in the user's code


def _claim(alias: str, name: str) -> None:
    """Have a Trainer found by its alias; one that was, and whose run is over, is ended.

    Raises:
        ConfigError: Its run is not over.
    """
    while (other := claim_alias(alias, name)) is not None:
        if (state := _end_if_over(other)) is not None:
            raise ConfigError(
                f"a detached Trainer {alias!r} is in this cluster already, and its run is {state}: "
                f"Trainer.attach({alias!r}) takes hold of it; or give another RunConfig(name=...)."
            )
        forget(other, alias)


def _end_if_over(name: str) -> str | None:
    """End a Trainer without a live run; the state of its run if that is not over."""
    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return "about to begin" if is_new(name) else None
    try:
        status: Any = Channel(get_settings(name), actor).call("status", timeout_s=_TELL_S)
    except (LookupError, RaySGDError):  # it is gone by now
        return None
    except RayError:
        return "not known"
    if status is not None and status["state"] not in OVER:
        return str(status["state"])
    with contextlib.suppress(LookupError):
        Channel(get_settings(name), actor).close()
    deadline = time.monotonic() + _TELL_S
    while time.monotonic() < deadline and name in [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]:
        time.sleep(0.05)
    return None
