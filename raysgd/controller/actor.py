"""The TrainerActor: what Ray sees of the control plane. One per Trainer; an async actor that takes no CPU.

Its methods hand on to `Run` and `WorkerGroup`; it decides nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from raysgd.controller import downlink
from raysgd.controller.belongings import (
    RunRecord,
    forget,
    forget_orphans,
    get_attempt,
    get_run,
    get_settings,
    keeper_name,
    put_attempt,
    put_run,
)
from raysgd.controller.downlink import FrameServer
from raysgd.controller.instances import Instances
from raysgd.controller.lifeline import ask
from raysgd.controller.requests import RunNotGiven, RunRequest
from raysgd.errors import TrainerBusyError, UsageError, WorkerError
from raysgd.result import RunInfo
from raysgd.session.events import Failed
from raysgd.transport import Endpoint, Listener
from raysgd.workers import uplink
from raysgd.workers.cluster import NAMESPACE, uses_tls
from raysgd.workers.group import WorkerGroup
from raysgd.workers.orders import Blob
from raysgd.workers.seats import remove_placements

if TYPE_CHECKING:
    from raysgd.controller.run import Run


class TrainerActor:
    """Runs one run at a time, for any number of readers."""

    def __init__(self) -> None:
        here = ray.get_runtime_context()
        self._settings = settings = get_settings(here.get_actor_name() or "")
        self._me = here.current_actor
        with warnings.catch_warnings():  # Ray warns of its own use of a deprecated name
            warnings.simplefilter("ignore")
            self._is_restarted = here.was_current_actor_reconstructed
        if self._is_restarted:  # its workers have died with it; their room is still reserved
            remove_placements(settings.name)
        self._group = WorkerGroup(
            f"{settings.name}-{uuid.uuid4().hex[:4]}" if self._is_restarted else settings.name,
            settings.scaling,
            settings.backend,
            settings.failure,
            controller=settings.name,
            runtime_env=settings.runtime_env,
            room=settings.room,
        )
        self._group.seats.on_added = self._guard_seats
        self._record = get_run(settings.name) if self._is_restarted else None
        if self._record is not None and self._record.request is not None:
            threading.Thread(target=ask, args=(self._me, "go_on"), name="raysgd-go-on", daemon=True).start()
        elif settings.alias is None and not self._is_restarted:
            self._group.begin()
        self._accepted: set[str] = set()
        is_to_come = self._record is not None and (self._record.is_live or self._record.request is not None)
        self._last_asked = self._record.run_id if self._record is not None and is_to_come else None
        self._runs: dict[str, asyncio.Future[Run]] = {}
        self._forgotten: set[str] = set()
        self._turn = asyncio.Lock()
        self._instances = Instances(self._group, settings.failure.abort_grace_s)
        self._host: Any = None
        frame_server = FrameServer(self.stream)
        self._listener = Listener({downlink.KIND: frame_server.handle, uplink.KIND: self._group.streams.inboxes.handle})
        self._opening: asyncio.Future[Endpoint | None] | None = None
        self._no_listener = ""

    # -- runs -----------------------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> None:
        """Do a run, or go on with it in this process; returns when it is closed. Waits until the one before is."""
        if request.run_id in self._accepted:
            return
        self._accepted.add(request.run_id)
        announced = self._announced(request.run_id)
        if self._settings.alias is not None and self._turn.locked():  # whoever has hold of it may begin one
            announced.set_exception(
                TrainerBusyError("another run of this Trainer is live; wait for it, or cancel() it.")
            )
            return
        self._last_asked = request.run_id
        async with self._turn:
            try:
                run, info = self._make_run(request)
            except Exception as error:  # such as a storage path that cannot be written: all who ask for the run hear it
                announced.set_exception(error)
                return
            announced.set_result(run)
            self._group.streams.endpoint = await self.endpoint()
            if self._no_listener:  # told when the run has begun
                asyncio.get_running_loop().call_soon(run.warn, self._no_listener)
            is_over = self._record is not None and self._record.run_id == request.run_id and not self._record.is_live
            if request.host_callbacks is not None and not is_over:
                run.before_close = self._follow_on_host(run, request, info)
            await run.execute()
            kept = request if self._settings.alias is not None else None
            put_run(self._settings.name, RunRecord(request.run_id, info.run_dir, kept, is_live=False))
            self._forget_all_but(request.run_id)
            if kept is not None:  # its driver may be gone: nothing is held for a run that may never come
                self._group.release()
                self._end_keeper(request.run_id)

    async def go_on(self) -> None:
        """Go on with the run of the process before this one, whose driver need not be there; returns at once."""
        assert self._record is not None and self._record.request is not None
        request = self._record.request
        try:
            if self._record.is_live and self._record.has_data:
                name = keeper_name(self._settings.name, request.run_id)
                keeper: Any = ray.get_actor(name, namespace=NAMESPACE)
                kept = await keeper.kept.remote()
                state = kept.initial_state or request.initial_state
                request = replace(request, datasets=kept.datasets, initial_state=state)
        except Exception as error:  # readers must hear of it rather than wait for ever
            why = WorkerError(f"the process that has the run's data is gone: {error}")
            self._announced(request.run_id).set_exception(why)
            return
        self._going_on = asyncio.ensure_future(self.run(request))

    async def live_on(self) -> None:
        """Does not return: a caller hears of the end of this process."""
        await asyncio.Event().wait()

    async def status(self) -> dict[str, Any] | None:
        """How the latest run stands; None if there was none, or it is over and another process did it."""
        try:
            run = await self._latest_run()
        except Exception:  # it could not be made; those who read it hear why
            return {"state": "error"}
        return None if run is None else run.status()

    async def latest(self) -> dict[str, Any] | None:
        """What it takes to read the latest run."""
        run = await self._latest_run()
        return None if run is None else run.reading()

    async def _latest_run(self) -> Run | None:
        return None if self._last_asked is None else await self._announced(self._last_asked)

    async def pause(self, run_id: str) -> None:
        """Have a run rest at its next checkpoint; returns when it does, or when it is over."""
        run = await self._announced(run_id)
        run.pause()
        await run.rests()

    async def resume(self, run_id: str) -> None:
        """Go on with a run that rests."""
        await (await self._announced(run_id)).resume()

    async def endpoint(self) -> Endpoint | None:
        """Where workers and readers connect to; None where all is to go through Ray."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._listen())
        return await self._opening

    async def stream(self, run_id: str, seq: int) -> AsyncIterator[Any]:
        """Batches of a run's frames, from number ``seq`` on."""
        run = await self._announced(run_id)
        async for batch in run.log.read(seq):
            yield batch

    async def frames(self, run_id: str, seq: int) -> list[Any]:
        """One batch of frames from number ``seq`` on; for a reader that fell behind."""
        run = await self._announced(run_id)
        async for batch in run.log.read(seq):
            return batch
        return []

    async def stop(self, run_id: str, why: str, cancel: bool, failed: Failed | None = None) -> None:
        """End a run early: in peace, or at once."""
        await (await self._announced(run_id)).stop(why, cancel=cancel, failed=failed)

    async def warn(self, run_id: str, message: str) -> None:
        """Make a warning an event of a run."""
        (await self._announced(run_id)).warn(message)

    async def values(self, run_id: str, first_only: bool) -> list[Any]:
        """What train_func returned on all ranks or the first: pickles, and where they are large references to them."""
        return (await self._announced(run_id)).values(first_only=first_only)

    # -- what workers ask -----------------------------------------------------------------------------------------

    async def meet(
        self, run_id: str, attempt: int, rank: int, what: str, index: int, payload: bytes | None
    ) -> bytes | None:
        run = await self._announced(run_id)
        return await run.meet(attempt, rank, what, index, payload)

    async def newest_checkpoint(self, run_id: str, attempt: int, index: int, num_saves: int) -> str | None:
        return (await self._announced(run_id)).newest_checkpoint(attempt, index, num_saves)

    # -- the class API --------------------------------------------------------------------------------------------

    async def start_class(self, blob: Blob, has_class: bool) -> None:
        """Bring the workers up; with a class, form a group and make its instances."""
        async with self._turn:
            await self._group.get_ready()
            if has_class:
                await self._instances.make(blob)

    async def execute(self, blob: Blob, first_only: bool, has_class: bool) -> list[bytes]:
        """Call a function on the workers; pickles of the values by rank. ``has_class``: it is given their instances."""
        async with self._turn:
            return await self._instances.execute(blob, first_only=first_only, has_class=has_class)

    async def drop_class(self) -> None:
        """Forget the instances."""
        async with self._turn:
            await self._instances.drop()

    # -- life -----------------------------------------------------------------------------------------------------

    async def workers(self) -> list[dict[str, Any] | None]:
        """Where each worker is, by rank; None for one that is not up."""
        infos = [self._group.info(rank) for rank in range(self._group.size)]
        return [None if info is None else info.shown() for info in infos]

    async def shutdown(self) -> None:
        """End all workers and give the resources back."""
        if self._host is not None:
            ray.kill(self._host)
        for run_id in self._accepted:
            self._end_keeper(run_id)
        self._group.release()
        await self._group.seats.removed()
        forget(self._settings.name, self._settings.alias)
        with contextlib.suppress(Exception):  # it is others' that would be removed
            await asyncio.to_thread(forget_orphans)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _listen(self) -> Endpoint | None:
        if uses_tls():  # what Ray encrypts must not go in the clear beside it
            return None
        try:
            return await self._listener.open(ray.util.get_node_ip_address())
        except OSError as error:
            self._no_listener = f"the controller cannot listen on its node's address ({error}); all goes through Ray"
            return None

    def _announced(self, run_id: str) -> asyncio.Future[Run]:
        """The run of this id, now or when it has begun: a reader may ask before the run's own call arrives."""
        if run_id in self._forgotten:
            raise UsageError("this run's results can no longer be read: the Trainer has done another run since")
        if run_id not in self._runs:
            if self._is_restarted and run_id not in self._accepted:
                self._check_to_come(run_id)
            self._runs[run_id] = asyncio.get_running_loop().create_future()
        return self._runs[run_id]

    def _check_to_come(self, run_id: str) -> None:
        """Of a process that was started again: nobody is to wait for ever for this run."""
        record = self._record
        if record is None or record.run_id != run_id or (record.is_live and record.request is None):
            raise RunNotGiven("this run is not known any more: the controller has been started again since")
        if record.request is None:
            raise UsageError("this run's results can no longer be read: the controller has been started again since")

    def _make_run(self, request: RunRequest) -> tuple[Run, RunInfo]:
        if self._instances.are_live:
            raise UsageError("instances of the class API are live")
        settings = self._settings
        # With the first run: the workers' processes are asked for before.
        from raysgd.checkpoint.storage import Storage
        from raysgd.controller.run import Run
        from raysgd.controller.run_files import new_run_folder

        goes_on = self._record is not None and self._record.run_id == request.run_id
        if self._record is not None and goes_on:
            storage = Storage.from_uri(self._record.run_dir)
        else:
            storage = new_run_folder(Storage.from_uri(request.runs_uri))
            kept = request if settings.alias is not None else None
            put_run(settings.name, RunRecord(request.run_id, storage.uri, kept))
        info = RunInfo(
            name=storage.name,
            run_dir=storage.uri,
            config=request.config,
            num_workers=self._group.size,
            backend=settings.backend.name,
            resources=[settings.scaling.bundle()] * self._group.size,
        )
        run = Run(
            request,
            info,
            self._group,
            storage,
            failure=settings.failure,
            checkpoint=settings.checkpoint,
            share=ray.put,
            goes_on=goes_on,
            last_attempt=get_attempt(settings.name, request.run_id) if goes_on else None,
            begins=lambda attempt: put_attempt(settings.name, attempt),
        )
        return run, info

    def _follow_on_host(self, run: Run, request: RunRequest, info: RunInfo) -> Any:
        if self._host is None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            from raysgd.controller.host import CallbackHost  # with the callbacks: not in the way of a cold start

            # Here: its files go to the same disk.
            strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(CallbackHost).options(
                name=f"{self._settings.name}-callbacks",
                namespace=NAMESPACE,
                num_cpus=0,
                scheduling_strategy=strategy,
                lifetime="detached",  # for the next process of this actor
                get_if_exists=True,
            )
            self._host = actor.remote(self._me)
        done = self._host.follow.remote(request.run_id, info, request.host_callbacks, dict(request.reduce))

        async def wait() -> Failed | None:
            try:
                return await done  # type: ignore[no-any-return]
            except ray.exceptions.RayTaskError as error:
                run.warn(
                    f"the callbacks on the controller's side got no calls: {type(error.cause).__name__}: {error.cause}"
                )
            except ray.exceptions.RayError as error:
                self._host = None
                run.warn(f"the process of the controller's callbacks is gone: {error}")
            return None

        return wait

    def _guard_seats(self) -> None:
        from raysgd.controller.seat_guard import start_guard  # for trials that grow

        start_guard(self._settings.name, self._me)

    def _end_keeper(self, run_id: str) -> None:
        with contextlib.suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(keeper_name(self._settings.name, run_id), namespace=NAMESPACE))

    def _forget_all_but(self, run_id: str) -> None:
        """Of finished runs only the last can still be read: what others held in memory is on storage."""
        for other, run in list(self._runs.items()):
            if other != run_id and run.done() and (run.exception() is not None or run.result().is_closed):
                del self._runs[other]
                self._forgotten.add(other)
