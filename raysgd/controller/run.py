"""Executes the commands of a `RunMachine`: the one place where the controller acts. Runs in the TrainerActor's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from raysgd.backends.base import Member
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.framelog import FrameLog
from raysgd.controller.frames import Frame
from raysgd.controller.hang_policy import Hang
from raysgd.controller.journal import Journal
from raysgd.controller.loads import LoadAnswers
from raysgd.controller.machine import CALLBACK_NODE, RunMachine, RunPlan
from raysgd.controller.meetings import Meetings
from raysgd.controller.outcome import outcome_data
from raysgd.controller.requests import RunRequest, make_run_order
from raysgd.controller.states import Outcome
from raysgd.controller.straggler_policy import Straggler
from raysgd.controller.watch import Watch, Watched
from raysgd.data.plan import NO_DATASETS
from raysgd.errors import RaySGDError, WorkerDiedError
from raysgd.result import RunInfo
from raysgd.session import events as e
from raysgd.workers.orders import AttemptOrder, WorkerInfo

#: CPU seconds a batch costs the controller, and the share of one core that batches may take of it, each way.
_ITEM_COST_S = 0.0002
_STREAM_SHARE = 0.11
_MAX_INTERVAL_S = 2.0
_FLUSH_S = 0.5


class Fleet(Protocol):
    """What a run needs of the workers; `raysgd.workers.group.WorkerGroup`, or a fake."""

    @property
    def size(self) -> int: ...
    @property
    def vitals(self) -> Watched: ...
    async def get_ready(self) -> list[str]: ...
    async def check_storage(self, storage: Storage) -> None: ...
    async def open_rendezvous(self) -> str: ...
    def info(self, rank: int) -> WorkerInfo | None: ...
    def member(self, rank: int, rendezvous: str) -> Member: ...
    def run(self, rank: int, run: Any, order: AttemptOrder) -> AsyncIterator[Any]: ...
    def end(self, rank: int, attempt: int, why: str) -> None: ...
    async def ask_to_stop(self, attempt: int) -> None: ...
    async def leave(self) -> None: ...
    def kill(self, rank: int, *, is_lost: bool = False) -> None: ...


class Run:
    """One run, from its request to its last frame.

    Args:
        storage: The run's folder.
        share: Makes a reference of the order that all workers are given (``ray.put``).
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
    ) -> None:
        self._request = request
        self._info = info
        self._fleet = fleet
        self._storage = storage
        self._share = share
        self._checkpoint = checkpoint
        self._failure = failure
        self._store = CheckpointStore(storage.child("checkpoints"))
        self._journal = Journal(storage, request.secrets)
        self.log = FrameLog(self._journal, min_interval_s=stream_interval_s(1))
        plan = RunPlan(failure, checkpoint, request.start, request.reduce)
        self._machine = RunMachine(plan, uri_of=lambda n: self._store.directory(n).uri, clock=time.time)
        self._meetings = Meetings(0)
        self._loads = LoadAnswers()
        self._rendezvous = ""
        self._attempt = 0
        self._is_described = False
        self._inputs: deque[c.Input] = deque()
        self._is_acting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        # One thread: storage sees commits, amendments and deletions in the order in which they were decided.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="raysgd-commit")
        self._closed = asyncio.Event()
        self._values: dict[int, Any] = {}
        self._is_journal_broken = False
        self.before_close: Callable[[], Coroutine[Any, Any, e.Failed | None]] | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def execute(self) -> None:
        """Do the run; returns when it is closed."""
        loop = asyncio.get_running_loop()
        self._note(c.Note("run_start", {"name": self._info.name, "run_dir": self._info.run_dir}))
        flusher = loop.create_task(self._flush_regularly())
        self._act_all(self._machine.begin())
        await self._closed.wait()
        flusher.cancel()
        # It stays readable until the next run; its data is to be freed now.
        self._request = dataclasses.replace(self._request, datasets=NO_DATASETS)
        if self.before_close is not None:
            self._tell_late(await self.before_close())
        if self._attempt > 1 or not self._machine.has_ended_well:
            await self._sweep()
        await self._flush(self._writer)  # what is told to be over can be read
        self._say(c.Say(frames.RUN_CLOSED, self._attempt))
        await self._flush(self._writer)
        self._writer.shutdown(wait=False)

    def stop(self, why: str, *, cancel: bool, failed: e.Failed | None = None) -> None:
        """End the run early: in peace, or at once, which may be for the error of a callback."""
        self._feed(c.StopAsked(why, cancel, failed))

    def warn(self, message: str) -> None:
        """Something the user should know, from outside the run."""
        self._note(c.Note("warning", {"message": message}))

    def value(self, rank: int) -> Any:
        """What train_func returned on ``rank``: a pickle, a reference to one, or None."""
        return self._values.get(rank)

    async def meet(self, attempt: int, rank: int, what: str, index: int, payload: bytes | None) -> bytes | None:
        if attempt != self._attempt:
            return None
        return await self._meetings.join(rank, what, index, payload)

    def newest_checkpoint(self, attempt: int, index: int, num_saves: int) -> str | None:
        """URI of the newest committed checkpoint, the same for all ranks of an attempt; see `LoadAnswers`."""
        if attempt != self._attempt:
            return None
        number = self._loads.answer(index, num_saves, self._machine.newest_checkpoint)
        return None if number is None else self._store.directory(number).uri

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
                self._preparing = self._spawn(self._prepare(command.attempt))
            case c.Enter():
                self._enter(command)
            case c.EndRanks():
                self._meetings.end()
                for rank in command.ranks:
                    self._fleet.end(rank, command.attempt, command.why)
            case c.KillRanks():
                for rank in command.ranks:
                    self._fleet.kill(rank, is_lost=command.is_lost)
            case c.AskToStop():
                self._spawn(self._fleet.ask_to_stop(command.attempt))
            case c.LeaveGroup():
                self._spawn(self._fleet.leave())
            case c.SetTimer():
                timer = c.TimeUp(command.timer, command.serial)
                asyncio.get_running_loop().call_later(command.delay_s, self._feed, timer)
            case c.Commit():
                self._spawn(self._commit(command))
            case c.DeleteCheckpoint():
                if self._loads.may_go(command.number):
                    self._delete([command.number])
            case c.TellOutcome():
                self._say(c.Say(frames.RUN_END, self._attempt, data=outcome_data(command.outcome)))
                self._note(c.Note("run_end", {"kind": command.outcome.kind, "message": _message(command.outcome)}))
                if self._storage.is_local:  # a millisecond, before any reader is told: they look at the files next
                    self._flush_now()
            case c.Close():
                self._delete(self._loads.end())
                self._stop_watching()
                if self._preparing is not None:
                    self._preparing.cancel()
                self._closed.set()

    async def _prepare(self, attempt: int) -> None:
        try:
            for line in await self._fleet.get_ready():
                self._note(c.Note("warning", {"message": line}))
            await self._fleet.check_storage(self._storage)
            self._rendezvous = await self._fleet.open_rendezvous()
        except WorkerDiedError as error:
            self._feed(c.GroupFailed(type(error).__name__, str(error), can_retry=True, ranks=error.ranks))
            return
        except RaySGDError as error:
            self._feed(c.GroupFailed(type(error).__name__, str(error), can_retry=False))
            return
        except Exception as error:  # whatever it is, the user must hear of it rather than wait for ever
            self._feed(c.GroupFailed("WorkerError", f"workers could not start: {type(error).__name__}: {error}", False))
            return
        self._attempt = attempt
        self._meetings = Meetings(self._fleet.size)
        nodes = [self._describe_worker(rank) for rank in range(self._fleet.size)]
        if not self._is_described:  # with the first group that is up, which need not be that of the first attempt
            self._is_described = True
            self._spawn(self._in_writer(self._journal.write_run, self._description()))
        self._feed(c.GroupReady(tuple(nodes)))

    def _describe_worker(self, rank: int) -> str:
        info = self._fleet.info(rank)
        assert info is not None
        data = {"rank": rank, "node": info.node, "pid": info.pid, "gpus": list(info.gpu_ids)}
        self._note(c.Note("worker_up", data))
        return info.node

    def _description(self) -> dict[str, Any]:
        workers = []
        for rank in range(self._fleet.size):
            info = self._fleet.info(rank)
            workers.append({"rank": rank, **(info.shown() if info is not None else {})})
        info_fields = {**dataclasses.asdict(self._info), "workers": workers}
        return {**self._request.description, **info_fields, "started": time.time()}

    def _enter(self, command: c.Enter) -> None:
        self._values.clear()  # of ranks that had returned in an attempt that did not succeed
        self._delete(self._loads.end())
        self._loads = LoadAnswers(command.first_number)
        self._watch(command.attempt)
        shared = self._share(make_run_order(self._request, self._info, self._store.storage.uri, self._checkpoint))
        for rank in range(self._fleet.size):
            attempt_order = AttemptOrder(
                attempt=command.attempt,
                member=self._fleet.member(rank, self._rendezvous),
                checkpoint=command.checkpoint,
                first_number=command.first_number,
                iterations_before=command.iterations_before,
                time_before_s=command.time_before_s,
                flush_interval_s=stream_interval_s(self._fleet.size),
            )
            self._spawn(self._follow(rank, shared, attempt_order))

    def _watch(self, attempt: int) -> None:
        """Watch over the workers of an attempt until the next, or the end."""

        def hung(hang: Hang, stacks: dict[int, str]) -> None:
            self._feed(c.WorkerHung(hang.rank, attempt, hang.kind, hang.why, stacks))

        def lags(straggler: Straggler) -> None:
            info = self._fleet.info(straggler.rank)
            node = info.node if info is not None else "a lost node"
            self._note(c.Note("straggler", straggler.event(node)))
            self.warn(straggler.told(node))

        self._stop_watching()
        self._watching = self._spawn(Watch(self._fleet.vitals, self._failure, hung, lags).run())

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _follow(self, rank: int, order: Any, attempt_order: AttemptOrder) -> None:
        """Read a worker's stream to its end."""
        attempt = attempt_order.attempt
        died: str | None = None
        try:
            async for item in self._fleet.run(rank, order, attempt_order):
                if isinstance(item, list):
                    for event in item:
                        self._take_value(rank, event)
                        self._feed(c.WorkerSaid(rank, attempt, event))
                else:
                    self._values[rank] = item
        except Exception as error:
            died = str(error)
        self._feed(c.WorkerGone(rank, attempt, died))

    def _take_value(self, rank: int, event: e.WorkerEvent) -> None:
        if not isinstance(event, e.Returned):
            return
        self._meetings.left(rank)
        if event.value is not None:
            self._values[rank] = event.value

    async def _commit(self, command: c.Commit) -> None:
        manifest = command.manifest
        try:
            await self._in_writer(self._store.commit, manifest)
        except Exception as error:
            if not command.amend:
                self._feed(c.CommitFailed(manifest.number, f"{type(error).__name__}: {error}"))
            return
        if not command.amend:
            self._delete(self._loads.committed(manifest.number))
            self._feed(c.Committed(manifest))

    def _delete(self, numbers: list[int]) -> None:
        for number in numbers:
            self._spawn(self._in_writer(self._store.delete, number))

    async def _in_writer(self, function: Callable[..., Any], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)

    def _tell_late(self, failed: e.Failed | None) -> None:
        """A critical callback failed when training had ended well: then the run did not."""
        if failed is not None and self._machine.has_ended_well:
            self._act(c.TellOutcome(Outcome("error", failed=failed, node=CALLBACK_NODE)))

    async def _sweep(self) -> None:
        """Delete what attempts that were cut off had written of checkpoints that never came to be."""
        try:
            await self._in_writer(self._store.sweep_uncommitted)
        except Exception as error:  # the run itself is safe
            self.warn(f"parts of unfinished checkpoints are left in {self._store.storage.uri}: {error}")

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

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self._flush(None)

    async def _flush(self, executor: ThreadPoolExecutor | None) -> None:
        """A journal that cannot be written is no reason to end a run, nor to leave its readers waiting for the end."""
        try:
            await asyncio.get_running_loop().run_in_executor(executor, self._journal.flush)
        except OSError as error:
            self._journal_broke(error)

    def _flush_now(self) -> None:
        try:
            self._journal.flush()
        except OSError as error:
            self._journal_broke(error)

    def _journal_broke(self, error: OSError) -> None:
        if not self._is_journal_broken:
            self._is_journal_broken = True
            self._note(c.Note("warning", {"message": f"the run's files cannot be written: {error}"}))


def stream_interval_s(num_streams: int) -> float:
    """Least time between batches of a stream, of which the controller reads or writes ``num_streams``.

    Each costs it about 0.2 ms of CPU whatever it holds, so together they are kept to a share of one core.
    """
    return min(_MAX_INTERVAL_S, num_streams * _ITEM_COST_S / _STREAM_SHARE)


def _message(outcome: Any) -> str:
    if outcome.failed is not None:
        return f"rank {outcome.rank}: {outcome.failed.summary}"
    return str(outcome.message)
