"""The TrainerActor, an async Ray actor without CPUs; each Trainer has one.

Its methods are what drivers and workers can call. They use `Run` and `WorkerGroup`; the actor decides nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from raysgd.controller.gcs_watch import describe_outage, watch_gcs
from raysgd.controller.group_instances import GroupInstances
from raysgd.controller.holders import explain_missing
from raysgd.controller.journal import frame_streams as downlink
from raysgd.controller.journal.frame_streams import serve_frames
from raysgd.controller.kv_store import (
    RunRecord,
    data_holder_name,
    forget,
    forget_orphans,
    get_attempt,
    get_run,
    get_settings,
    put_attempt,
    put_run,
)
from raysgd.controller.loop_watch import LoopWatch
from raysgd.controller.requests import RunNotGiven, RunRequest, is_data_kept
from raysgd.controller.watchdog import ControllerGuard, PlacementGuard, ask, prepare_process
from raysgd.errors import TrainerBusyError, UsageError, WorkerError
from raysgd.result import RunInfo
from raysgd.transport import Endpoint, Listener
from raysgd.workers import events_connection as uplink
from raysgd.workers.group.group import WorkerGroup
from raysgd.workers.liveness.own_processes import DATA_HOLDER
from raysgd.workers.liveness.watched import Watched
from raysgd.workers.orders import Blob
from raysgd.workers.placement.calls import call_cluster, post_to_cluster
from raysgd.workers.placement.cluster import NAMESPACE, is_tls_enabled
from raysgd.workers.placement.slots import remove_placement_groups

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint
    from raysgd.controller.commands import StopRequested
    from raysgd.controller.frames import Frame
    from raysgd.controller.processes.hosting import CallbackHosting
    from raysgd.controller.run.executor import Run
    from raysgd.controller.run.exported import RunMetrics


class TrainerActor(Watched):
    """Executes one run at a time, for any number of readers."""

    def __init__(self) -> None:
        here = ray.get_runtime_context()
        self._settings = settings = get_settings(here.get_actor_name() or "", "the TrainerActor")
        self._me = here.current_actor
        with warnings.catch_warnings():  # Ray itself uses a name here that it has deprecated
            warnings.simplefilter("ignore")
            self._is_restarted = here.was_current_actor_reconstructed
        if self._is_restarted:  # the workers died with the earlier process; their placement groups are still reserved
            remove_placement_groups(settings.name)
        self._group = WorkerGroup(
            f"{settings.name}-{uuid.uuid4().hex[:4]}" if self._is_restarted else settings.name,
            settings.spec.scaling,
            settings.spec.backend,
            settings.spec.failure_config,
            controller=settings.name,
            runtime_env=settings.spec.runtime_env,
            existing=settings.room,
            versions=settings.versions,
            explain_missing=partial(explain_missing, settings.name, settings.spec.scaling),
        )
        self._guards: dict[str, Any] = {}
        self._group.slots.on_slot_added = partial(
            self._start_guard, "placement guard", PlacementGuard, settings.name, self._me
        )
        if settings.alias is not None:  # its driver may be gone
            # At once, although it takes time from the start of the workers: a TrainerActor that is stopped cannot start it.
            timeout_s = settings.spec.failure_config.heartbeat_timeout_s
            self._start_guard("controller guard", ControllerGuard, self._me, timeout_s)
        self._record = record = get_run(settings.name) if self._is_restarted else None
        if record is not None and record.request is not None:
            # Ray warns of calls that block the event loop, even if another thread makes them, like this one.
            ray._private.worker.blocking_get_inside_async_warned = True
            threading.Thread(
                target=ask, args=(self._me, "resume_previous_run"), name="raysgd-resume", daemon=True
            ).start()
        elif settings.alias is None and not self._is_restarted:
            self._group.begin()
        self._accepted: set[str] = set()
        will_resume = record is not None and (record.is_live or record.request is not None)
        self._last_asked = record.run_id if record is not None and will_resume else None
        self._runs: dict[str, asyncio.Future[Run]] = {}
        self._forgotten: set[str] = set()
        self._turn = asyncio.Lock()
        self._instances = GroupInstances(self._group, settings.spec.failure_config.abort_grace_s)
        self._hosting: CallbackHosting | None = None
        self._listener = Listener(
            {downlink.KIND: partial(serve_frames, self._read), uplink.KIND: self._group.streams.inboxes.handle}
        )
        self._opening: asyncio.Future[Endpoint | None] | None = None
        self._no_listener = ""

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> None:
        """Execute a run, or resume it after a restart of this actor; returns when it is closed.

        The call waits until the run before it is closed. A detached Trainer refuses the run instead: its readers get the error.
        """
        if request.run_id in self._accepted:
            return
        self._accepted.add(request.run_id)
        announced = self._announced(request.run_id)
        if announced.done():  # `resume_previous_run` has failed, and its readers have the error
            return
        if self._settings.alias is not None and self._turn.locked():  # any driver that is attached may begin a run
            announced.set_exception(
                TrainerBusyError("another run of this Trainer is live; wait for it, or cancel() it.")
            )
            return
        self._last_asked = request.run_id
        async with self._turn:
            try:
                run, info, metrics = await self._make_run(request)
            except Exception as error:  # such as a storage path that cannot be written: every reader of the run gets it
                announced.set_exception(error)
                return
            announced.set_result(run)
            self._group.watch.report = partial(_warn_in_loop, asyncio.get_running_loop(), run)
            self._group.streams.endpoint = await self.endpoint()
            if self._no_listener:  # the warning must follow the run's first events
                asyncio.get_running_loop().call_soon(run.warn, self._no_listener)
            record = self._record_of(request.run_id)
            is_over = record is not None and not record.is_live
            if request.host_callbacks is not None and not is_over:
                run.before_close = self._follow_on_host(run, request, info)
            self._watch_data(request)
            watch = LoopWatch(run.record_blocked)
            gcs = ray.get_runtime_context().gcs_address
            watching = asyncio.ensure_future(
                watch_gcs(
                    gcs, lambda away_s: run.warn(describe_outage(gcs, away_s, info.run_dir), run_dir=info.run_dir)
                )
            )
            exporting = asyncio.ensure_future(metrics.export_regularly())
            try:
                await run.execute()
            finally:
                watch.close()
                watching.cancel()
                exporting.cancel()
            self._unwatch_data(request)
            kept = request if self._settings.alias is not None else None
            over = RunRecord(request.run_id, info.run_dir, kept, is_live=False)
            await call_cluster(put_run, self._settings.name, over)
            self._forget_all_but(request.run_id)
            if kept is not None:  # the driver may be gone, so that no further run may come: release the resources
                await self._group.kept.end()
                self._group.release()
                self._end_data_holder(request.run_id)

    async def resume_previous_run(self) -> None:
        """Resume the detached run of the process before this one; returns at once."""
        assert self._record is not None and self._record.request is not None
        request = self._record.request
        try:
            if self._record.is_live and self._record.has_data:
                self._watch_data_holder(request.run_id)
                holder = await call_cluster(self._data_holder, request.run_id)
                kept = await holder.kept.remote()
                state = kept.initial_state or request.task.initial_state
                task = replace(request.task, datasets=kept.datasets, initial_state=state)
                request = replace(request, task=task)
        except Exception as error:  # readers would otherwise wait for ever
            why = WorkerError(f"the process that has the run's data is gone: {error}")
            self._announced(request.run_id).set_exception(why)
            return
        self._resuming = asyncio.ensure_future(self.run(request))

    async def wait_for_end(self) -> None:
        """Never return. A caller notices the end of this process, because the call fails."""
        await asyncio.Event().wait()

    async def status(self) -> dict[str, Any] | None:
        """Return the state of the latest run; None without one, or if it ended in an earlier process of this actor."""
        try:
            run = await self._latest_run()
        except Exception:  # the run could not begin; its readers get the error
            return {"state": "error"}
        return None if run is None else run.status()

    async def latest(self) -> dict[str, Any] | None:
        """Return what is needed to read the latest run."""
        run = await self._latest_run()
        return None if run is None else run.reading()

    async def _latest_run(self) -> Run | None:
        return None if self._last_asked is None else await self._announced(self._last_asked)

    async def pause(self, run_id: str) -> None:
        """Pause a run at its next checkpoint; returns when it is paused or over."""
        run = await self._announced(run_id)
        run.pause()
        await run.wait_paused()

    async def resume(self, run_id: str) -> None:
        """Resume a run that is paused."""
        await (await self._announced(run_id)).resume()

    async def endpoint(self) -> Endpoint | None:
        """Return where workers and readers connect to; None if everything goes through Ray."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._listen())
        return await self._opening

    async def stream(self, run_id: str, seq: int) -> AsyncIterator[Any]:
        """Yield batches of a run's frames, from number ``seq`` on."""
        async for batch in await self._read(run_id, seq):
            yield batch

    async def frames(self, run_id: str, seq: int) -> list[Any]:
        """Return one batch of frames from number ``seq`` on, for a reader that fell behind."""
        async for batch in await self._read(run_id, seq):
            return batch
        return []

    async def _read(self, run_id: str, seq: int) -> AsyncIterator[list[Frame]]:
        return (await self._announced(run_id)).log.read(seq)

    async def stop(self, run_id: str, request: StopRequested) -> None:
        """End a run early."""
        await (await self._announced(run_id)).stop(request)

    async def warn(self, run_id: str, message: str, source: str | None = None) -> None:
        """Add a warning to a run's events, also after its end; see `Run.add_warning`."""
        await (await self._announced(run_id)).add_warning(message, source)

    async def give(self, run_id: str, number: int, piece: list[Any], kept_from: int) -> None:
        """Give a piece to the workers of a live run; see `GivenPieces`."""
        await (await self._announced(run_id)).given.give(number, piece, kept_from)

    async def delete_checkpoint(self, run_id: str, number: int) -> None:
        """Delete a checkpoint that the driver of a closed run does not want."""
        await (await self._announced(run_id)).delete_checkpoint(number)

    async def values(self, run_id: str, first_only: bool) -> list[Any]:
        """Return what train_func returned on all ranks or the first: pickles, or references to large ones."""
        return (await self._announced(run_id)).values(first_only=first_only)

    # -- calls of workers ---------------------------------------------------------------------------------------------

    async def join_barrier(
        self, run_id: str, attempt: int, rank: int, what: str, index: int, payload: bytes | None
    ) -> bytes | None:
        run = await self._announced(run_id)
        return await run.join_barrier(attempt, rank, what, index, payload)

    async def take(self, run_id: str, attempt: int, number: int) -> Any:
        return await (await self._announced(run_id)).given.take(number)

    async def newest_checkpoint(self, run_id: str, attempt: int, index: int, num_saves: int) -> str | None:
        return (await self._announced(run_id)).newest_checkpoint(attempt, index, num_saves)

    async def list_checkpoints(self, run_id: str, attempt: int, index: int, num_saves: int) -> list[Checkpoint] | None:
        return (await self._announced(run_id)).list_checkpoints(attempt, index, num_saves)

    # -- the class API ------------------------------------------------------------------------------------------------

    async def start_class(self, blob: Blob, has_class: bool) -> None:
        """Start the workers; with a class, form a group and make its instances."""
        async with self._turn:
            await self._group.get_ready()
            if has_class:
                await self._instances.make(blob)

    async def execute(self, blob: Blob, first_only: bool, has_class: bool) -> list[bytes]:
        """Call a function on the workers, with their instances if ``has_class``; returns pickles of the values, by rank."""
        async with self._turn:
            return await self._instances.execute(blob, first_only=first_only, has_class=has_class)

    async def drop_class(self) -> None:
        """Drop the instances."""
        async with self._turn:
            await self._instances.drop()

    # -- workers ------------------------------------------------------------------------------------------------------

    async def workers(self) -> list[dict[str, Any] | None]:
        """Return where each worker is, by rank; None for one that has not started."""
        infos = [self._group.info(rank) for rank in range(self._group.size)]
        return [None if info is None else info.to_dict() for info in infos]

    async def shutdown(self) -> None:
        """End all workers and release the resources."""
        if self._hosting is not None:
            self._hosting.close()
        self._group.watch.close()
        for run_id in self._accepted:
            self._end_data_holder(run_id)
        await self._group.kept.end()
        self._group.release()
        await self._group.agents.wait_for_exits()
        await self._group.slots.wait_removed()
        for guard in self._guards.values():  # one that is stopped cannot end itself
            await call_cluster(ray.kill, guard)
        await call_cluster(forget, self._settings.name, self._settings.alias)
        with contextlib.suppress(Exception):  # the entries belong to other Trainers; the next shutdown tries again
            await call_cluster(forget_orphans)

    # -- private ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> Endpoint | None:
        if is_tls_enabled():  # the own connections are not encrypted
            return None
        try:
            return await self._listener.open(ray.util.get_node_ip_address())
        except OSError as error:
            self._no_listener = (
                f"the controller cannot listen on its node's address ({error}), so everything goes through Ray"
            )
            return None

    def _announced(self, run_id: str) -> asyncio.Future[Run]:
        """Return the future of a run: a reader may ask for the run before the call that begins it arrives."""
        if run_id in self._forgotten:
            raise UsageError(
                "this run's results can no longer be read, because the Trainer has executed another run since"
            )
        if run_id not in self._runs:
            if self._is_restarted and run_id not in self._accepted:
                self._check_to_come(run_id)
            self._runs[run_id] = asyncio.get_running_loop().create_future()
        return self._runs[run_id]

    def _record_of(self, run_id: str) -> RunRecord | None:
        """Return the record of a run that an earlier process of this actor began, or None."""
        return self._record if self._record is not None and self._record.run_id == run_id else None

    def _check_to_come(self, run_id: str) -> None:
        """Raise if this restarted process will never execute the run, so that no reader waits for it."""
        record = self._record_of(run_id)
        if record is None or (record.is_live and record.request is None):
            raise RunNotGiven("this run is not known any more, because the controller was restarted")
        if record.request is None:
            raise UsageError("this run's results can no longer be read, because the controller was restarted")

    async def _make_run(self, request: RunRequest) -> tuple[Run, RunInfo, RunMetrics]:
        if self._instances.are_live:
            raise UsageError(
                "instances of the class API are live on the workers; call start() without a class to drop them"
            )
        settings = self._settings
        # Imported here and not above: by now, the processes of the workers are being started.
        from raysgd.checkpoint.storage.storage import Storage
        from raysgd.controller.run.earlier import find_earlier
        from raysgd.controller.run.executor import Run
        from raysgd.controller.run.exported import RunMetrics
        from raysgd.controller.run.run_files import new_run_folder

        record = self._record_of(request.run_id)
        if record is not None:
            storage = Storage.from_uri(record.run_dir)
        else:
            storage = new_run_folder(Storage.from_uri(request.runs_uri))
            kept = request if settings.alias is not None else None
            await call_cluster(put_run, settings.name, RunRecord(request.run_id, storage.uri, kept))
        info = RunInfo(
            name=storage.name,
            run_dir=storage.uri,
            config=request.config,
            num_workers=self._group.size,
            backend=settings.spec.backend.name,
            resources=[settings.spec.scaling.bundle()] * self._group.size,
        )
        checkpoint_config = request.checkpoint_config or settings.spec.checkpoint_config
        earlier = await asyncio.to_thread(find_earlier, storage, checkpoint_config)
        last_attempt = None if record is None else await call_cluster(get_attempt, settings.name, request.run_id)
        metrics = RunMetrics(info.label)
        run = Run(
            request,
            info,
            self._group,
            storage,
            failure=settings.spec.failure_config,
            checkpoint=checkpoint_config,
            grows_without_save=settings.spec.backend.grows_without_save,
            workers_per_replica=settings.spec.scaling.workers_per_replica,
            share=ray.put,
            is_resumed=record is not None,
            last_attempt=last_attempt,
            begins=partial(call_cluster, put_attempt, settings.name),
            earlier=earlier,
            observe=metrics.observe,
        )
        return run, info, metrics

    def _follow_on_host(self, run: Run, request: RunRequest, info: RunInfo) -> Any:
        if self._hosting is None:
            # Imported here and not above, so that a cold start does not load the callbacks.
            from raysgd.controller.processes.hosting import CallbackHosting

            timeout_s = self._settings.spec.failure_config.callback_timeout_s
            self._hosting = CallbackHosting(self._settings.name, self._me, self._group.watch, timeout_s)
        return self._hosting.follow(request, info, run.warn)

    def _start_guard(self, what: str, kind: type, *args: Any) -> None:
        """Start a guard on this node; when it dies, another one is started."""
        guard = prepare_process(kind, f"{self._settings.name}-{what.replace(' ', '-')}").remote(*args)
        self._guards[what] = guard
        self._group.watch.add(f"the {what}", lambda: guard, on_gone=partial(self._start_guard, what, kind, *args))

    def _watch_data(self, request: RunRequest) -> None:
        """Watch the processes that workers get the run's data from."""
        task = request.task
        for name, source in task.datasets.sources.items():
            if source.kind == "stream":
                self._group.watch.add(_describe_stream(name), partial(getattr, source.blocks[0], "host"))
        if self._settings.alias is not None and is_data_kept(task):
            self._watch_data_holder(request.run_id)

    def _unwatch_data(self, request: RunRequest) -> None:
        for name in request.task.datasets.sources:
            self._group.watch.remove(_describe_stream(name))
        self._group.watch.remove(DATA_HOLDER)

    def _watch_data_holder(self, run_id: str) -> None:
        def on_kill(why: str) -> None:
            self._group.watch.report(
                f"{DATA_HOLDER} {why}. It is killed: data that the workers have not fetched yet is lost."
            )

        self._group.watch.add(DATA_HOLDER, partial(self._data_holder, run_id), on_kill=on_kill)

    def _data_holder(self, run_id: str) -> Any:
        return ray.get_actor(data_holder_name(self._settings.name, run_id), namespace=NAMESPACE)

    def _end_data_holder(self, run_id: str) -> None:
        self._group.watch.remove(DATA_HOLDER)
        post_to_cluster(lambda: ray.kill(self._data_holder(run_id)))  # without one, it is an error that is logged

    def _forget_all_but(self, run_id: str) -> None:
        """Drop finished runs except the last, which can still be read. The files of the others are on storage."""
        for other, run in list(self._runs.items()):
            if other != run_id and run.done() and (run.exception() is not None or run.result().is_closed):
                del self._runs[other]
                self._forgotten.add(other)


def _warn_in_loop(loop: asyncio.AbstractEventLoop, run: Run, message: str) -> None:
    loop.call_soon_threadsafe(run.warn, message)


def _describe_stream(name: str) -> str:
    return f"the process that executes the dataset {name!r}"
