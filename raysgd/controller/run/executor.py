"""Executes the commands of a `RunMachine`: the one place where the controller acts. Runs in the TrainerActor's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from raysgd._util.logs import get_logger
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.links import make_links
from raysgd.checkpoint.storage.storage import Storage, retry_of_writes
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.checkpoints.index import CheckpointReads
from raysgd.controller.checkpoints.memory_copies import MemoryCheckpoints
from raysgd.controller.journal.frame_log import FrameLog, stream_interval_s
from raysgd.controller.journal.outcome import outcome_data
from raysgd.controller.requests import RunRequest
from raysgd.controller.rounds import AwaitedMetrics
from raysgd.controller.run.barriers import Barriers
from raysgd.controller.run.earlier import EarlierCheckpoints
from raysgd.controller.run.given import GivenPieces
from raysgd.controller.run.run_files import RunFiles
from raysgd.controller.run.worker_watch import WorkerWatch
from raysgd.controller.run_plan import AttemptRecord, PreviousState, RunPlan
from raysgd.controller.state_machine.run_machine import RunMachine
from raysgd.controller.states import CALLBACK_NODE, Outcome, has_succeeded
from raysgd.data.plan import NO_DATASETS
from raysgd.errors import RaySGDError, UsageError, WorkerDiedError, WorkerError
from raysgd.result import Event, RunInfo
from raysgd.session import events as e
from raysgd.workers.liveness.death_reasons import was_sigterm
from raysgd.workers.orders import AttemptOrder, RunOrder

if TYPE_CHECKING:
    from raysgd.workers.group.group import WorkerGroup


#: The time for the cluster to record an attempt, before the ranks enter it without the record.
_RECORD_S = 1.0


class Run:
    """One run, from its request to its last frame.

    Args:
        storage: The run's folder.
        grows_without_save: See `raysgd.backends.base.BackendConfig`.
        share: Makes a reference to the order that all workers get (``ray.put``).
        is_resumed: An earlier controller process began the run; its files hold the progress, and reading them blocks.
        last_attempt: The last attempt of the earlier process.
        begins: Records an attempt before any rank enters it, if that takes no longer than a moment.
        earlier: Checkpoints of earlier runs that count with those of this run.
        observe: Called with each event, those of an earlier controller process first, and the last complete round at that time.

    Attributes:
        before_close: Awaited before the last frame; returns the error of a callback that failed after training, or None.
    """

    def __init__(
        self,
        request: RunRequest,
        info: RunInfo,
        group: WorkerGroup,
        storage: Storage,
        *,
        failure: FailureConfig,
        checkpoint: CheckpointConfig,
        grows_without_save: bool = False,
        workers_per_replica: int = 1,
        share: Callable[[Any], Any],
        is_resumed: bool = False,
        last_attempt: AttemptRecord | None = None,
        begins: Callable[[AttemptRecord], Coroutine[Any, Any, None]] | None = None,
        earlier: EarlierCheckpoints | None = None,
        observe: Callable[[Event, int], None] = lambda event, iteration: None,
    ) -> None:
        self._request = request
        self._group = group
        self._share = share
        self._checkpoint = checkpoint
        self._failure = failure
        self._files = RunFiles(
            storage,
            request.secrets,
            self.warn,
            retry_of_writes(checkpoint.on_write_error),
            make_links(storage, checkpoint),
            earlier,
        )
        self._begins = begins
        self._observe = observe
        self._previous = previous = (
            self._files.previous(request.reduce, last_attempt) if is_resumed else PreviousState()
        )
        self._info = dataclasses.replace(info, started_s=previous.started_s or time.time())
        if previous.bound_size is not None:
            group.expect(previous.bound_size)
        self.log = FrameLog(
            self._files.journal,
            min_interval_s=stream_interval_s(1),
            earlier=previous.frames,
            next_seq=previous.next_seq,
        )
        for frame in previous.frames:
            if frame.kind == frames.EVENT:
                observe(Event(**frame.data), self.log.iteration)
        self._awaited = AwaitedMetrics(request.reduce)
        if is_resumed and request.reduce:
            for frame in self._files.journal.frames_from(0, previous.next_seq):
                if not self._awaited.missing:  # the first rounds have them as a rule, and a journal may have gigabytes
                    break
                self._awaited.feed(frame.rows)
        plan = RunPlan(
            failure,
            checkpoint,
            request.start,
            request.reduce,
            previous if is_resumed else None,
            grows_without_save,
            workers_per_replica,
            () if earlier is None else earlier.records,
        )
        self._machine = RunMachine(plan, uri_of=self._files.uri_of, clock=time.time)
        self.given = GivenPieces()
        self._barriers = Barriers(0)
        self._barriers.end()  # workers of an earlier controller process may still call it
        self._reads = CheckpointReads()
        self._rendezvous = ""
        self._attempt = previous.attempt
        self._is_described = is_resumed and storage.exists("run.json")
        self._size = previous.size
        self._previous_size: int | None = None
        self._inputs: deque[c.Input] = deque()
        self._is_acting = self._has_failed = self._has_outcome = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._watch: WorkerWatch | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._paused = asyncio.Event()  # no pause is to begin
        self._paused.set()
        self._values: dict[int, Any] = {}  # what train_func returned in the attempt, by rank
        self._held = MemoryCheckpoints(
            group.memory, self._files.uri_of, lambda *given: self._feed(c.EventReceived(*given))
        )
        self.before_close: Callable[[], Coroutine[Any, Any, e.Failed | None]] | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def execute(self) -> None:
        """Execute the run; returns when it is closed."""
        if not self._previous.frames:
            start = {"name": self._info.name, "run_dir": self._info.run_dir, "resumed_from": self._request.start.uri}
            start["train_func"] = self._request.description.get("train_func")
            self._record_event(c.RecordEvent("run_start", {**start, "backend": self._info.backend}))
            for line in self._request.start.skipped:
                self.warn(line)
        self._files.start()
        self._group.on_joining_worker(lambda: self._feed(c.JoiningWorkerReady()))
        self._group.on_wait = self.warn
        self._feed(c.RunBegins())
        if self._previous.next_seq:  # another restart must not use the numbers of these frames again
            await self._files.flush()
        await self._closed.wait()
        self._group.on_joining_worker(lambda: None)
        self._group.on_wait = get_logger().warning
        self._files.stop_flushing()
        # The run stays readable until the next one begins, but its data is released now.
        task = dataclasses.replace(self._request.task, datasets=NO_DATASETS)
        self._request = dataclasses.replace(self._request, task=task)
        if self.before_close is not None:
            try:
                self._publish_late_error(await self.before_close())
            except Exception as error:  # readers would wait for the end for ever
                self.warn(
                    f"the end of the controller's callbacks could not be awaited: {type(error).__name__}: {error}"
                )
        may_have_leftovers = self._attempt > 1 or self._checkpoint.on_write_error == "warn"
        if may_have_leftovers or not has_succeeded(self._machine.state):
            await self._files.sweep()
        await self._files.flush()  # readers of the last frame can read all files
        if (lost := self._files.describe_lost()) is not None:
            self.warn(lost)
        await self.log.close(self._attempt, self._files.flush)
        self._files.close()

    async def stop(self, request: c.StopRequested) -> None:
        """End the run early; returns when that is recorded."""
        self._feed(request)
        if not self.is_closed:
            await self._files.flush()

    def warn(self, message: str, **data: Any) -> None:
        self._record_event(c.warning(message, **data))

    def record_blocked(self, seconds: float, stack: str) -> None:
        """Record that the event loop stood still, and in what."""
        if not self.is_closed:
            self._record_event(c.RecordEvent("blocked_loop", {"seconds": seconds, "stack": stack}))

    async def add_warning(self, message: str, source: str | None) -> None:
        """Add a warning of another process, also to a run that is closed; returns when it is on storage.

        Args:
            message: For the user.
            source: Which process has shown it to the user already; None: none has.
        """
        self.warn(message, **({} if source is None else {"source": source}))
        await self._files.flush()

    async def delete_checkpoint(self, number: int) -> None:
        """Delete a checkpoint of a run that is closed; returns when that is recorded.

        Raises:
            UsageError: The run is live.
            CheckpointError: It could not be deleted.
        """
        if not self.is_closed:
            raise UsageError("the run is live, and decides itself which checkpoints it keeps; wait for its end.")
        await asyncio.to_thread(self._files.store.delete, number)
        await asyncio.to_thread(self._files.repair_links)
        self._record_event(c.RecordEvent("checkpoint_deleted", {"number": number}))
        await self._files.flush()

    def pause(self) -> None:
        """Pause at the next checkpoint. A paused run holds no workers."""
        self._paused.clear()
        self._feed(c.PauseRequested())
        if not self._machine.pause.is_requested:  # it is paused now, or over
            self._paused.set()

    async def resume(self) -> None:
        """Resume after a pause; returns when that is recorded."""
        self._feed(c.ResumeRequested())
        self._paused.set()
        await self._files.flush()

    async def wait_paused(self) -> None:
        """Wait until a pause is recorded, the pause is withdrawn, or the run is closed."""
        await self._paused.wait()
        if not self.is_closed:
            await self._files.flush()

    def reading(self) -> dict[str, Any]:
        """Return what a reader of the run needs to know."""
        return {
            "run_id": self._request.run_id,
            "reduce": dict(self._request.reduce),
            "returns": self._request.task.returns,
            "info": self._info,
        }

    def status(self) -> dict[str, Any]:
        """Return the fields of `raysgd.result.RunStatus`."""
        status = self._machine.status()
        status["iteration"] = max(status["iteration"], self.log.iteration)
        return {"name": self._info.name, "run_dir": self._info.run_dir, "attempt": self._attempt, **status}

    def values(self, *, first_only: bool) -> list[Any]:
        """Return what train_func returned, by rank: a pickle, a reference to one, or None.

        Raises:
            WorkerError: An earlier controller process had the values.
        """
        if self._previous.published is not None and self._previous.published.is_success:
            raise WorkerError(
                "the run has ended, but what train_func returned was lost with the controller's process; its checkpoints "
                f"and metrics are in {self._info.run_dir}"
            )
        return [self._values.get(rank) for rank in range(1 if first_only else self._size or 0)]

    async def join_barrier(self, attempt: int, rank: int, what: str, index: int, payload: bytes | None) -> bytes | None:
        if attempt != self._attempt:
            return None
        return await self._barriers.join(rank, what, index, payload)

    def newest_checkpoint(self, attempt: int, index: int, num_saves: int) -> str | None:
        """Return the URI of the newest committed checkpoint, the same for all ranks of an attempt; see `CheckpointReads`."""
        if attempt != self._attempt:
            return None
        number = self._reads.newest_for(index, num_saves, self._machine.checkpoints.newest_number)
        return None if number is None else self._files.uri_of(number)

    def list_checkpoints(self, attempt: int, index: int, num_saves: int) -> list[Checkpoint] | None:
        """Return the checkpoints on storage, oldest first, the same for all ranks of an attempt; see `CheckpointReads`."""
        if attempt != self._attempt:
            return None
        listed = self._reads.list_for(index, num_saves, self._machine.checkpoints.stored)
        return [Checkpoint.of_manifest(self._files.uri_of(manifest.number), manifest) for manifest in listed]

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _feed(self, given: c.Input) -> None:
        """Step the machine. An input that arrives while commands are executed waits until they are done.

        An error of the controller itself ends the run: taken for one of the worker that sent the input, it would be tried again.
        """
        self._inputs.append(given)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._inputs:
                given = self._inputs.popleft()
                try:
                    for command in self._machine.step(given):
                        self._act(command)
                except Exception as error:
                    self._on_fault(type(given).__name__, error)
        finally:
            self._is_acting = False

    def _on_fault(self, what: str, error: Exception) -> None:
        """End the run because of an error of the controller itself, in order if that is possible.

        Args:
            what: What the controller was handling.
            error: Its error.
        """
        message = f"raysgd itself failed in its controller, on {what}"
        get_logger().error(message, exc_info=error)
        if self.is_closed:
            return
        where = "".join(traceback.format_exception(error))
        stop = c.StopRequested(f"{message}; please report this:\n{where}", cancel=True, is_fault=True)
        if not self._has_failed:
            self._has_failed = True
            self._inputs.appendleft(stop)
            if not self._is_acting:
                self._feed(self._inputs.popleft())
            return
        try:
            if not self._has_outcome:  # readers would wait for one for ever
                self._act(c.PublishOutcome(stop.outcome))
            self._act(c.ReleaseWorkers())
            self._act(c.CloseRun())
        finally:
            self._closed.set()

    # -- commands -----------------------------------------------------------------------------------------------------

    def _act(self, command: c.Command) -> None:  # noqa: C901  (a dispatch: a line or two a case)
        match command:
            case c.EmitFrame():
                self._emit_frame(command)
            case c.RecordEvent():
                self._record_event(command)
                if self._watch is not None and command.kind in ("sample", "left"):
                    self._watch.on_reading(command)
            case c.PrepareGroup():
                self._end_watch()  # the ranks may change; until the next attempt, the group watches its members
                self._preparing = self._spawn(self._prepare(command))
            case c.StartAttempt():
                self._enter(command)
            case c.EndAttempt():
                self._barriers.end()
                for rank in command.ranks:
                    self._group.end(rank, command.attempt, command.why)
            case c.KillWorkers():
                for rank in command.ranks:
                    self._group.kill(rank, is_lost=command.is_lost)
            case c.RequestStop():
                self._spawn(self._group.agreement.stop(command.attempt, ends_reports=command.ends_reports))
            case c.AgreeOnSavePoint():
                self._spawn(self._group.agreement.save(command.attempt, command.point))
            case c.CancelSavePoint():
                self._spawn(self._group.agreement.call_off_save(command.attempt))
            case c.ReleaseWorkers():
                self._stop_preparing()
                self._end_watch()
                self._group.release()
                self._paused.set()
            case c.LeaveGroup():
                self._leaving = self._spawn(self._group.leave())
            case c.SetTimer():
                timer = c.TimerFired(command.timer, command.serial)
                asyncio.get_running_loop().call_later(command.delay_s, self._feed, timer)
            case c.CommitCheckpoint():
                self._spawn(self._commit(command.manifest))
            case c.WriteRound():
                self._spawn(self._write_round(command.manifest))
            case c.KeepInMemory():
                self._held.keep(command.number)
            case c.StoreFromMemory():
                self._spawn(self._store_held(command.manifest))
            case c.DeleteCheckpoint():
                if self._reads.can_delete(command.number):
                    self._files.delete([command.number])
            case c.DeleteEarlier():
                self._files.delete_earlier(command.numbers)
            case c.PublishOutcome():
                self._has_outcome = True
                if command.outcome.is_success and (missing := self._awaited.warn_of_run()) is not None:
                    self.warn(missing)
                # The event first: callbacks get it, and with it the time of the end, before their own end.
                self._record_event(
                    c.RecordEvent("run_end", {"kind": command.outcome.kind, "message": command.outcome.describe()})
                )
                self._emit_frame(c.EmitFrame(frames.RUN_END, self._attempt, data=outcome_data(command.outcome)))
                self._files.flush_if_local()  # readers that get the outcome may read the files next
            case c.CloseRun():
                self._files.delete(self._reads.end())
                self._end_watch()
                self._held.close()
                self._stop_preparing()
                self._paused.set()
                self._closed.set()

    async def _prepare(self, command: c.PrepareGroup) -> None:
        if self._leaving is not None:  # ranks that returned may still be leaving the last process group
            await asyncio.wait([self._leaving], timeout=self._failure.abort_grace_s)
        try:
            # Why the last attempt ended is on storage before the next one begins, also for a controller that dies meanwhile.
            await asyncio.gather(self._form_group(keep_size=command.keep_size), self._files.flush())
        except Exception as error:
            self._feed(_group_failed(error))
            return
        self._attempt = command.attempt
        self._barriers = Barriers(self._group.size)
        nodes = [self._record_worker(rank) for rank in range(self._group.size)]
        if not self._is_described:  # run.json lists the first group that was ready, even if no rank entered train_func
            self._is_described = True
            self._spawn(self._files.write_run(describe_run(self._request, self._info, self._group)))
        self._record_resize(self._group.size)
        self._feed(c.GroupReady(tuple(nodes), self._group.num_joining, self._group.live_reports))

    async def _form_group(self, *, keep_size: bool) -> None:
        for message in await self._group.get_ready(keep_size=keep_size, run_id=self._request.run_id):
            self.warn(message)
        await self._group.check_storage(self._files.storage)
        self._rendezvous = await self._group.open_rendezvous()
        checkpoints = self._machine.checkpoints
        live = checkpoints.find_live(self._group.live_reports, self._group.size)
        if live is not None and not isinstance(live, str):  # the checkpoints in memory are not needed
            return
        while (held := checkpoints.in_memory) and not await self._held.is_reachable(
            held, is_unstored=checkpoints.has_unstored or e.is_copy(held.number)
        ):
            self._feed(c.MemoryCopyLost(held.number))

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()

    def _record_resize(self, size: int) -> None:
        if self._size not in (None, size):
            self._record_event(c.RecordEvent("resize", {"old": self._size, "new": size}))
        self._previous_size, self._size = self._size, size

    def _record_worker(self, rank: int) -> str:
        info = self._group.info(rank)
        assert info is not None
        data = {"rank": rank, "node": info.node, "node_id": info.node_id, "pid": info.pid, "gpus": list(info.gpu_ids)}
        self._record_event(c.RecordEvent("worker_up", data))
        return info.node

    def _enter(self, command: c.StartAttempt) -> None:
        attempt, start, size = command.attempt, command.start, self._group.size
        self._values.clear()
        self._files.delete(self._reads.end())
        self._reads = CheckpointReads(command.first_number)
        self._held.begin_attempt(attempt, command.first_number, self._machine.checkpoints.numbers_in_memory)
        recording = asyncio.ensure_future(
            self._record_attempt(AttemptRecord(self._request.run_id, attempt, size, start.iteration))
        )
        self._start_watch(attempt)
        shared = self._share(RunOrder(self._request.task, self._info, self._files.store.storage.uri, self._checkpoint))
        for rank in range(size):
            attempt_order = AttemptOrder(
                attempt=attempt,
                member=dataclasses.replace(self._group.member(rank, self._rendezvous), attempt=attempt),
                checkpoint=start.uri,
                held=self._held.for_rank(start.held, rank),
                live=None if start.live is None else start.live.order_for(rank),
                first_number=command.first_number,
                previous_size=self._previous_size,
                iterations_before=start.iteration,
                time_before_s=start.time_total_s,
                flush_interval_s=stream_interval_s(size),
            )
            self._spawn(self._follow(rank, shared, attempt_order, recording))

    async def _record_attempt(self, attempt: AttemptRecord) -> None:
        if self._begins is not None:
            # Not longer: while the GCS, which keeps the record, is away, this attempt must begin nevertheless.
            done, _ = await asyncio.wait([self._spawn(self._begins(attempt))], timeout=_RECORD_S)
            for recorded in done:
                recorded.result()

    def _start_watch(self, attempt: int) -> None:
        self._end_watch()
        records = self._files.storage.child("flight_recorder").child(f"attempt_{attempt}").uri
        self._watch = WorkerWatch(self._group, self._failure, records, attempt, self._feed, self._record_event)
        self._watch.start()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()

    async def _follow(self, rank: int, order: Any, attempt_order: AttemptOrder, recording: Awaitable[None]) -> None:
        """Read a worker's event stream to its end, once the attempt is recorded."""
        attempt = attempt_order.attempt
        died: str | None = None
        try:
            await recording
            async for item in self._group.run(rank, order, attempt_order):
                if not isinstance(item, list):  # a large value comes as a reference of its own
                    self._values[rank] = item
                    continue
                try:
                    for event in item:
                        if isinstance(event, e.Returned):
                            self._on_returned(rank, event)
                        if isinstance(event, e.Reports) or not self._held.intercept(rank, attempt, event):
                            self._feed(c.EventReceived(rank, attempt, event))
                except Exception as error:  # not of the stream, and no death of the worker
                    self._on_fault(f"events of rank {rank}", error)
        except Exception as error:
            died = str(error)
        if died is None:
            await self._held.settle(rank)
        self._feed(c.StreamEnded(rank, attempt, died))

    def _on_returned(self, rank: int, event: e.Returned) -> None:
        self._barriers.left(rank)
        if self._watch is not None:
            self._watch.mismatches.on_returned(rank)
        if event.value is not None:
            self._values[rank] = event.value

    async def _store_held(self, manifest: Manifest) -> None:
        try:
            given: c.Input = c.MemoryCopyStored(dataclasses.replace(manifest, parts=await self._held.store(manifest)))
        except Exception as error:
            given = c.MemoryCopyNotStored(manifest.number, f"{type(error).__name__}: {error}")
        self._feed(given)

    async def _commit(self, manifest: Manifest) -> None:
        began = time.monotonic()
        try:
            await self._files.commit(manifest)
        except Exception as error:
            self._feed(c.CommitFailed(manifest.number, f"{type(error).__name__}: {error}"))
            return
        self._files.delete(self._reads.on_committed(manifest.number))
        self._feed(c.CheckpointCommitted(manifest, time.monotonic() - began))

    async def _write_round(self, manifest: Manifest) -> None:
        with contextlib.suppress(Exception):  # the journal has it, and the checkpoint may be deleted
            await self._files.write_round(manifest)

    def _publish_late_error(self, failed: e.Failed | None) -> None:
        """Publish an error after a success: a critical callback failed once training had ended."""
        if failed is not None and has_succeeded(self._machine.state):
            self._act(c.PublishOutcome(Outcome("error", failed=failed, node=CALLBACK_NODE)))

    def _emit_frame(self, given: c.EmitFrame) -> None:
        self.log.append(given.kind, given.attempt, given.rank, given.data, given.rows)
        if given.rows and self._awaited.missing:
            self._awaited.feed(given.rows)
            is_round_complete = self.log.iteration > self._request.start.iteration
            if is_round_complete and (missing := self._awaited.warn_of_first_round()) is not None:
                self.warn(missing)

    def _record_event(self, event: c.RecordEvent) -> None:
        made = Event(event.kind, time.time(), event.data)
        self.log.append(frames.EVENT, self._attempt, data=dict(vars(made)))
        self._observe(made, self.log.iteration)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task


def _group_failed(error: Exception) -> c.GroupFailed:
    name, message = type(error).__name__, str(error)
    if isinstance(error, WorkerDiedError):
        return c.GroupFailed(name, message, can_retry=True, ranks=error.ranks, is_announced=was_sigterm(message))
    if isinstance(error, RaySGDError):
        return c.GroupFailed(name, message, can_retry=False)
    # An unexpected error must reach the user as well, who would otherwise wait for ever.
    return c.GroupFailed("WorkerError", f"workers could not start: {name}: {message}", can_retry=False)


_NOT_SHOWN = ("started_s", "warnings", "read_earlier", "read_goodput")


def describe_run(request: RunRequest, info: RunInfo, group: WorkerGroup) -> dict[str, Any]:
    """Return the content of ``run.json``, secrets included."""
    found = [group.info(rank) for rank in range(group.size)]
    workers = [{"rank": rank, **(worker.to_dict() if worker is not None else {})} for rank, worker in enumerate(found)]
    shown = {name: value for name, value in dataclasses.asdict(info).items() if name not in _NOT_SHOWN}
    more = {"reduce": dict(request.reduce), "workers": workers, "started": info.started_s}
    more["resumed_from"] = request.start.uri
    return {**request.description, **shown, **more}
