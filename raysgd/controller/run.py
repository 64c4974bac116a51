"""Executes the commands of a `RunMachine`: the one place where the controller acts. Runs in the TrainerActor's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.retry import retry_of_writes
from raysgd.checkpoint.storage import Storage
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.fleet import Fleet
from raysgd.controller.framelog import FrameLog
from raysgd.controller.frames import Frame
from raysgd.controller.held import HeldParts
from raysgd.controller.intervals import stream_interval_s
from raysgd.controller.loads import LoadAnswers
from raysgd.controller.machine import RunMachine
from raysgd.controller.meetings import Meetings
from raysgd.controller.outcome import outcome_data
from raysgd.controller.past import AttemptRecord
from raysgd.controller.plan import RunPlan
from raysgd.controller.requests import RunRequest, describe_run, make_run_order
from raysgd.controller.run_files import RunFiles
from raysgd.controller.states import CALLBACK_NODE, Closed, Outcome, Paused, has_ended_well
from raysgd.controller.values import Values
from raysgd.controller.watches import Watches
from raysgd.data.plan import NO_DATASETS
from raysgd.errors import RaySGDError, WorkerDiedError, WorkerError
from raysgd.result import RunInfo
from raysgd.session import events as e
from raysgd.workers.deaths import was_told_to_end
from raysgd.workers.orders import AttemptOrder


class Run:
    """One run, from its request to its last frame.

    Args:
        storage: The run's folder.
        share: Makes a reference of the order that all workers are given (``ray.put``).
        goes_on: Another process of the controller began it: its files tell how far it came. Reading them blocks.
        last_attempt: The last one it began.
        begins: Lays an attempt down before anybody enters it.
    """

    def __init__(
        self,
        request: RunRequest,
        info: RunInfo,
        fleet: Fleet,
        storage: Storage,
        *,
        failure: FailureConfig,
        checkpoint: CheckpointConfig,
        share: Callable[[Any], Any],
        goes_on: bool = False,
        last_attempt: AttemptRecord | None = None,
        begins: Callable[[AttemptRecord], None] = lambda attempt: None,
    ) -> None:
        self._request = request
        self._info = info
        self._fleet = fleet
        self._share = share
        self._checkpoint = checkpoint
        self._failure = failure
        self._files = RunFiles(storage, request.secrets, self.warn, retry_of_writes(checkpoint.on_write_error))
        self._begins = begins
        self._past = past = self._files.past(last_attempt) if goes_on else None
        if past is not None and past.bound_size is not None:
            fleet.expect(past.bound_size)
        earlier, next_seq = ((), 0) if past is None else (past.frames, past.next_seq)
        self.log = FrameLog(
            self._files.journal, min_interval_s=stream_interval_s(1), earlier=earlier, next_seq=next_seq
        )
        plan = RunPlan(failure, checkpoint, request.start, request.reduce, past, fleet.recovers_inside)
        self._machine = RunMachine(plan, uri_of=self._files.uri_of, clock=time.time)
        self._meetings = Meetings(0)
        self._meetings.end()  # workers of an earlier process of the controller may still ask
        self._loads = LoadAnswers()
        self._rendezvous = ""
        self._attempt = past.attempt if past is not None else 0
        self._is_described = goes_on and storage.exists("run.json")
        self._size = past.size if past is not None else None
        self._previous_size: int | None = None
        self._inputs: deque[c.Input] = deque()
        self._is_acting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._watches = Watches(fleet, failure, storage.child("flight_recorder"), self._feed, self._note)
        self._leaving: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._rested = asyncio.Event()
        self._values = Values()
        self._held = HeldParts(fleet.memory, self._files.uri_of, lambda *said: self._feed(c.WorkerSaid(*said)))
        self.before_close: Callable[[], Coroutine[Any, Any, e.Failed | None]] | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def execute(self) -> None:
        """Do the run; returns when it is closed."""
        if self._past is None or not self._past.frames:
            self._note(c.Note("run_start", {"name": self._info.name, "run_dir": self._info.run_dir}))
        self._files.start()
        self._fleet.on_newcomer(lambda: self._feed(c.NewcomerUp()))
        self._act_all(self._machine.begin())
        self._note_rest()
        await self._closed.wait()
        self._fleet.on_newcomer(lambda: None)
        self._files.stop_flushing()
        # It stays readable until the next run; its data is to be freed now.
        self._request = dataclasses.replace(self._request, datasets=NO_DATASETS)
        if self.before_close is not None:
            self._tell_late(await self.before_close())
        may_go_on = self._attempt > 1 or self._checkpoint.on_write_error == "warn"
        if may_go_on or not has_ended_well(self._machine.state):
            await self._files.sweep()
        await self._files.flush()  # what is told to be over can be read
        self._say(c.Say(frames.RUN_CLOSED, self._attempt))
        await self._files.flush()
        self._files.close()

    async def stop(self, why: str, *, cancel: bool, failed: e.Failed | None = None) -> None:
        """End the run early: in peace, or at once, which may be for a callback's error; it is known for good then."""
        self._feed(c.StopAsked(why, cancel, failed))
        if not self.is_closed:
            await self._files.flush()

    def warn(self, message: str) -> None:
        self._note(c.Note("warning", {"message": message}))

    def pause(self) -> None:
        """Rest at the next checkpoint, with no workers."""
        self._feed(c.PauseAsked())

    async def resume(self) -> None:
        """Go on after a rest; returns when that is known for good."""
        self._feed(c.ResumeAsked())
        await self._files.flush()

    async def rests(self) -> None:
        """Wait until it rests, which is known for good by then, or is closed, or is not to rest any more."""
        await self._rested.wait()
        if not self.is_closed:
            await self._files.flush()

    def reading(self) -> dict[str, Any]:
        """What it takes to read it."""
        return {"run_id": self._request.run_id, "reduce": dict(self._request.reduce), "returns": self._request.returns}

    def status(self) -> dict[str, Any]:
        """What `raysgd.result.RunStatus` says of it."""
        standing = self._machine.standing()
        standing["iteration"] = max(standing["iteration"], self.log.iteration)
        return {"name": self._info.name, "run_dir": self._info.run_dir, "attempt": self._attempt, **standing}

    def values(self, *, first_only: bool) -> list[Any]:
        """What train_func returned, by rank: a pickle, a reference to one, or None.

        Raises:
            WorkerError: The process that had them is gone.
        """
        if self._past is not None and self._past.kind in ("done", "stopped"):
            raise WorkerError(
                "the run has ended, but what train_func returned was lost with the controller's process; its checkpoints "
                f"and metrics are in {self._info.run_dir}"
            )
        return self._values.first(1 if first_only else self._size or 0)

    async def meet(self, attempt: int, rank: int, what: str, index: int, payload: bytes | None) -> bytes | None:
        if attempt != self._attempt:
            return None
        return await self._meetings.join(rank, what, index, payload)

    def newest_checkpoint(self, attempt: int, index: int, num_saves: int) -> str | None:
        """URI of the newest committed checkpoint, the same for all ranks of an attempt; see `LoadAnswers`."""
        if attempt != self._attempt:
            return None
        number = self._loads.answer(index, num_saves, self._machine.desk.newest_number)
        return None if number is None else self._files.uri_of(number)

    # -- in -------------------------------------------------------------------------------------------------------

    def _feed(self, given: c.Input) -> None:
        """Step the machine; what a command's execution feeds back is taken after the command's siblings."""
        self._inputs.append(given)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._inputs:
                self._act_all(self._machine.step(self._inputs.popleft()))
        finally:
            self._is_acting = False
        self._note_rest()

    def _note_rest(self) -> None:
        rests = isinstance(self._machine.state, (Paused, Closed)) or not self._machine.is_to_rest
        (self._rested.set if rests else self._rested.clear)()

    def _act_all(self, commands: list[c.Command]) -> None:
        for command in commands:
            self._act(command)

    # -- out ------------------------------------------------------------------------------------------------------

    def _act(self, command: c.Command) -> None:  # noqa: C901  (a dispatch: a line or two a case)
        match command:
            case c.Say():
                self._say(command)
            case c.Note():
                self._note(command)
            case c.PrepareGroup():
                self._preparing = self._spawn(self._prepare(command))
            case c.Enter():
                self._enter(command)
            case c.EndRanks():
                self._meetings.end()
                for rank in command.ranks:
                    self._fleet.end(rank, command.attempt, command.why, goes_on=command.goes_on)
            case c.KillRanks():
                for rank in command.ranks:
                    self._fleet.kill(rank, is_lost=command.is_lost)
            case c.AskToStop():
                self._spawn(self._fleet.agreement.stop(command.attempt, ends_reports=command.ends_reports))
            case c.AgreeOnSave():
                self._spawn(self._fleet.agreement.save(command.attempt))
            case c.CallOffSave():
                self._spawn(self._fleet.agreement.call_off_save(command.attempt))
            case c.ChangeGroup():
                self._spawn(self._fleet.agreement.change_group(command.attempt, stops=command.stops))
            case c.ReleaseWorkers():
                if self._preparing is not None:
                    self._preparing.cancel()
                self._watches.end()
                self._fleet.release()
            case c.LeaveGroup():
                self._leaving = self._spawn(self._fleet.leave())
            case c.SetTimer():
                timer = c.TimeUp(command.timer, command.serial)
                asyncio.get_running_loop().call_later(command.delay_s, self._feed, timer)
            case c.Commit():
                self._spawn(self._commit(command))
            case c.Hold():
                self._held.forget_before(command.number)
                self._held.copy(command.number)
            case c.StoreHeld():
                self._spawn(self._store_held(command.manifest))
            case c.DeleteCheckpoint():
                if self._loads.may_go(command.number):
                    self._files.delete([command.number])
            case c.TellOutcome():
                self._say(c.Say(frames.RUN_END, self._attempt, data=outcome_data(command.outcome)))
                self._note(c.Note("run_end", {"kind": command.outcome.kind, "message": _message(command.outcome)}))
                self._files.flush_if_local()  # before any reader is told: they look at the files next
            case c.Close():
                self._files.delete(self._loads.end())
                self._watches.end()
                self._held.close()
                if self._preparing is not None:
                    self._preparing.cancel()
                for rank in range(self._fleet.size) if self._fleet.recovers_inside else ():
                    self._fleet.end(rank, self._attempt, "the run is over", goes_on=False)
                self._closed.set()

    async def _prepare(self, command: c.PrepareGroup) -> None:
        if self._leaving is not None:  # ranks that returned are still leaving the group they were in
            await asyncio.wait([self._leaving], timeout=self._failure.abort_grace_s)
        try:
            for line in await self._fleet.get_ready(keep_size=command.keep_size, parked=command.parked):
                self._note(c.Note("warning", {"message": line}))
            await self._fleet.check_storage(self._files.storage)
            self._rendezvous = await self._fleet.open_rendezvous()
            desk = self._machine.desk
            while (held := desk.newest_held) and not await self._held.is_reachable(held, is_alone=desk.has_unstored):
                self._feed(c.HeldLost(held.number))
        except WorkerDiedError as error:
            told, announced = str(error), was_told_to_end(str(error))
            self._feed(c.GroupFailed(type(error).__name__, told, True, ranks=error.ranks, is_announced=announced))
            return
        except RaySGDError as error:
            self._feed(c.GroupFailed(type(error).__name__, str(error), can_retry=False))
            return
        except Exception as error:  # whatever it is, the user must hear of it rather than wait for ever
            self._feed(c.GroupFailed("WorkerError", f"workers could not start: {type(error).__name__}: {error}", False))
            return
        self._attempt = command.attempt
        self._meetings = Meetings(self._fleet.size)
        nodes = [self._describe_worker(rank) for rank in range(self._fleet.size)]
        if not self._is_described:  # with the first group that is up, which need not be that of the first attempt
            self._is_described = True
            self._spawn(self._files.write_run(describe_run(self._request, self._info, self._fleet)))
        self._note_resize(self._fleet.size)
        self._feed(c.GroupReady(tuple(nodes), self._fleet.num_newcomers, self._fleet.num_parked))

    def _note_resize(self, size: int) -> None:
        if self._size not in (None, size):
            self._note(c.Note("resize", {"old": self._size, "new": size}))
        self._previous_size, self._size = self._size, size

    def _describe_worker(self, rank: int) -> str:
        info = self._fleet.info(rank)
        assert info is not None
        data = {"rank": rank, "node": info.node, "pid": info.pid, "gpus": list(info.gpu_ids)}
        self._note(c.Note("worker_up", data))
        return info.node

    def _enter(self, command: c.Enter) -> None:
        self._values.clear()
        self._files.delete(self._loads.end())
        self._loads = LoadAnswers(command.first_number)
        self._held.begin(command.attempt, command.first_number, command.held)
        self._begins(AttemptRecord(self._request.run_id, command.attempt, self._fleet.size, command.iterations_before))
        self._watches.begin(command.attempt)
        shared = self._share(make_run_order(self._request, self._info, self._files.store.storage.uri, self._checkpoint))
        for rank in range(self._fleet.size):
            attempt_order = AttemptOrder(
                attempt=command.attempt,
                member=self._fleet.member(rank, self._rendezvous),
                checkpoint=command.checkpoint,
                held=self._held.of(command.held, rank),
                first_number=command.first_number,
                previous_size=self._previous_size,
                iterations_before=command.iterations_before,
                time_before_s=command.time_before_s,
                flush_interval_s=stream_interval_s(self._fleet.size),
            )
            self._spawn(self._follow(rank, shared, attempt_order))

    async def _follow(self, rank: int, order: Any, attempt_order: AttemptOrder) -> None:
        """Read a worker's stream to its end."""
        attempt = attempt_order.attempt
        died: str | None = None
        try:
            async for item in self._fleet.run(rank, order, attempt_order):
                if isinstance(item, list):
                    for event in item:
                        if isinstance(event, e.Returned):
                            self._meetings.left(rank)
                            self._values.returned(rank, event)
                        if not self._held.said(rank, attempt, event):
                            self._feed(c.WorkerSaid(rank, attempt, event))
                else:
                    self._values.came(rank, item)
        except Exception as error:
            died = str(error)
        if died is None:
            await self._held.settle(rank)
        self._feed(c.WorkerGone(rank, attempt, died))

    async def _store_held(self, manifest: Manifest) -> None:
        try:
            said: c.Input = c.HeldStored(dataclasses.replace(manifest, parts=await self._held.store(manifest)))
        except Exception as error:
            said = c.HeldNotStored(manifest.number, f"{type(error).__name__}: {error}")
        self._feed(said)

    async def _commit(self, command: c.Commit) -> None:
        manifest = command.manifest
        try:
            await self._files.commit(manifest)
        except Exception as error:
            if not command.amend:
                self._feed(c.CommitFailed(manifest.number, f"{type(error).__name__}: {error}"))
            return
        if not command.amend:
            self._files.delete(self._loads.committed(manifest.number))
            self._feed(c.Committed(manifest))

    def _tell_late(self, failed: e.Failed | None) -> None:
        """A critical callback failed when training had ended well: then the run did not."""
        if failed is not None and has_ended_well(self._machine.state):
            self._act(c.TellOutcome(Outcome("error", failed=failed, node=CALLBACK_NODE)))

    def _say(self, say: c.Say) -> None:
        self.log.append(lambda seq: Frame(seq, say.kind, say.attempt, say.rank, say.data, say.rows))

    def _note(self, note: c.Note) -> None:
        data = {"kind": note.kind, "timestamp": time.time(), "data": note.data}
        self.log.append(lambda seq: Frame(seq, frames.EVENT, self._attempt, data=data))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task


def _message(outcome: Any) -> str:
    if outcome.failed is not None:
        return f"rank {outcome.rank}: {outcome.failed.summary}"
    return str(outcome.message)
