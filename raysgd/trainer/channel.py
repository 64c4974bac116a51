"""The driver's line to the TrainerActor. Driver side; the one place that knows its methods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raysgd.controller import frames
from raysgd.controller.actor import TrainerActor
from raysgd.controller.downlink import read_frames
from raysgd.controller.frames import Frame
from raysgd.controller.outcome import outcome_error
from raysgd.controller.requests import RunRequest, TrainerSettings
from raysgd.controller.settings_store import put_settings
from raysgd.errors import RaySGDError, WorkerError
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.pickling import loads
from raysgd.workers.returned import CallFailed


class Channel:
    """A TrainerActor, started with the first use."""

    def __init__(self, settings: TrainerSettings) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._name = settings.name
        self._is_gone = False
        # On the driver's node: its disk holds a local storage_path. An actor without CPUs is placed by chance if it is not
        # bound to a node; and were that node gone, so would be the driver.
        here = ray.get_runtime_context().get_node_id()
        put_settings(settings)
        self._actor: Any = (
            ray.remote(TrainerActor)
            .options(
                name=settings.name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=1000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=False),
            )
            .remote()
        )

    @property
    def is_gone(self) -> bool:
        """Whether the TrainerActor has died; then this line is of no more use."""
        return self._is_gone

    def begin(self, request: RunRequest) -> Any:
        """Start a run; returns at once with a reference that is ready when the run is closed."""
        return self._actor.run.remote(request)

    def stream(self, run_id: str) -> Iterator[list[Frame]]:
        """A run's frames, as they come.

        Raises:
            RayActorError: The TrainerActor is gone.
        """
        try:
            endpoint = ray.get(self._actor.endpoint.remote())
            yield from read_frames(self._actor, endpoint, run_id, last=frames.RUN_CLOSED)
        except RayActorError:
            self._tidy_up()
            raise

    def frames(self, run_id: str, seq: int) -> list[Frame]:
        """Frames from number ``seq`` on, for a reader that fell behind."""
        return list(self.call("frames", run_id, seq))

    def stop(self, run_id: str, why: str, *, cancel: bool) -> None:
        """Ask a run to end; returns at once."""
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

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the TrainerActor and wait for its answer.

        Raises:
            Exception: What the method raised, as its own type.
            WorkerError: The TrainerActor is gone.
        """
        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, CallFailed):
                failed = outcome_error(cause.data) or cause
                raise failed from failed.__cause__
            if not isinstance(cause, Exception):
                raise error from None
            raise cause from None if isinstance(cause, RaySGDError) else error  # where in the user's code
        except RayActorError as error:
            self._tidy_up()
            raise WorkerError(f"the Trainer's controller process is gone: {error}") from None

    def close(self, timeout_s: float = 10) -> None:
        """End the TrainerActor and all its workers."""
        try:
            ray.get(self._actor.shutdown.remote(), timeout=timeout_s)
        except Exception:
            pass
        ray.kill(self._actor)

    def _tidy_up(self) -> None:
        """The TrainerActor is gone, and its workers with it; their placement group would stay as long as the driver."""
        self._is_gone = True
        if not ray.is_initialized():
            return
        for group in ray.util.placement_group_table().values():
            name = group["name"]
            if group["state"] != "REMOVED" and (name == self._name or name.startswith(f"{self._name}-")):
                with contextlib.suppress(Exception):  # it is gone by now
                    ray.util.remove_placement_group(ray.util.get_placement_group(name))
