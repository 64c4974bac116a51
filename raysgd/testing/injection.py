"""Makes the faults of a plan happen in a worker: stands between train_func and its session for one attempt.

Nothing of raysgd knows of it. A train_func that was wrapped puts functions of its own in the place of some of its
session's (and of torch's, for collectives) when it is entered, and the old ones back when it leaves. What writes this
attempt's checkpoints stays as it is: it belongs to the attempt, and has still to write then.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from raysgd.checkpoint.manifest import MANIFEST_NAME
from raysgd.checkpoint.store import CheckpointStore
from raysgd.session import context
from raysgd.session.events import PartSafe, WorkerEvent
from raysgd.session.worker import WorkerSession
from raysgd.testing import collectives
from raysgd.testing.fault import IN_WRITER, Fault, Moment
from raysgd.testing.faults import NetworkCut
from raysgd.testing.faulty_files import FaultyStore
from raysgd.testing.marks import claim
from raysgd.testing.processes import connections, shut_down
from raysgd.testing.replacing import replace


@dataclass(frozen=True)
class WorkerPlan:
    """What of a plan goes to the workers.

    Attributes:
        folder: Where it is written down which faults have happened.
        faults: By their place in the plan.
    """

    folder: str
    seed: int
    faults: Mapping[int, Fault]


class FaultyFunction:
    """A train_func that a plan is in force in. Outside of workers it is the function itself."""

    def __init__(self, function: Callable[..., Any], plan: WorkerPlan) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._plan = plan
        # A worker opens its code before the group is formed: what comes after that is the group's.
        has_cut = any(isinstance(fault, NetworkCut) for fault in plan.faults.values())
        self._not_of_group = frozenset(connections()) if has_cut else frozenset[int]()

    def __call__(self, *args: Any) -> Any:
        session = context.installed()
        if not isinstance(session, WorkerSession):
            return self._function(*args)
        with contextlib.ExitStack() as undone:
            injection = Injection(session, self._plan, self._not_of_group)
            injection.install(undone)
            injection.reach("start")
            return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return FaultyFunction, (self._function, self._plan)


class Injection:
    """The faults of one rank in one attempt."""

    def __init__(self, session: WorkerSession, plan: WorkerPlan, not_of_group: frozenset[int]) -> None:
        self._session = session
        self._plan = plan
        self._not_of_group = not_of_group
        self._writer = session._writer
        self._store: CheckpointStore = self._writer._store
        self._pending = {index: fault for index, fault in plan.faults.items() if fault.rank == session.world_rank}
        self._lock = threading.Lock()  # the training thread and the one that writes
        self._seen: set[int] = set()
        self._delays: list[float] = []
        self._held: list[object] = []
        self._files = FaultyStore(self._store, self._reach_write)

    def install(self, undone: contextlib.ExitStack) -> None:
        """Take the places of those that are called; only where there is something to do."""
        if not self._pending:
            return
        undone.callback(self._held.clear)
        phases = {fault.where for fault in self._pending.values()}
        replace(undone, self._session, "report", self._report)
        replace(undone, self._session, "save_checkpoint", self._save)
        replace(undone, self._session, "load_checkpoint", self._load)
        replace(undone, self._session, "_meet", self._meet)
        if "collective" in phases:
            collectives.install(undone, lambda: self.reach("collective"))
        if "committed" in phases:
            self._seen = set(self._committed()[:-1])
        if phases & IN_WRITER:
            self._writer._store = self._files  # type: ignore[assignment]
            self._put = self._writer._put
            self._writer._put = self._put_part

    def reach(self, phase: str, checkpoint: int = 0, files: tuple[str, ...] = ()) -> None:
        """The rank has come to a place: what is planned for it happens."""
        step = self._session.iterations_before + self._session.num_reports
        moment = Moment(phase, step, checkpoint, files)
        for index, fault in self._take_due(moment):
            if claim(self._plan.folder, index, self._session.attempt):
                fault.act(_Scene(moment, self._store, Random(f"{self._plan.seed}/{index}"), self))

    # -- in the place of the session's ----------------------------------------------------------------------------

    def _report(self, metrics: Mapping[str, Any]) -> None:
        self._look()
        WorkerSession.report(self._session, metrics)
        self.reach("report")
        if self._delays:
            time.sleep(self._delays.pop())

    def _save(self, state: Any, **settings: Any) -> None:
        self._look()
        self.reach("save", self._writer._first_number + self._session._num_saves)
        WorkerSession.save_checkpoint(self._session, state, **settings)

    def _load(self, path: Any, **settings: Any) -> Any:
        self._look()
        self.reach("load")
        return WorkerSession.load_checkpoint(self._session, path, **settings)

    def _meet(self, what: str, payload: bytes | None) -> bytes | None:
        self._look()
        self.reach("collective")
        return WorkerSession._meet(self._session, what, payload)

    # -- in the place of the writer's -----------------------------------------------------------------------------

    def _put_part(self, event: WorkerEvent) -> None:
        if isinstance(event, PartSafe) and event.files:
            names = tuple(name for name, _, _ in event.files)
            self.reach("written", self._writer._first_number + event.call, names)
        self._put(event)

    def _reach_write(self, phase: str, number: int) -> None:
        self.reach(phase, number)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take_due(self, moment: Moment) -> list[tuple[int, Fault]]:
        with self._lock:
            due = [(index, fault) for index, fault in self._pending.items() if fault.is_due(moment)]
            for index, _ in due:
                del self._pending[index]
        return due

    def _look(self) -> None:
        """Look for checkpoints that have come to count."""
        if any(fault.where == "committed" for fault in self._pending.values()):
            for number in self._committed():
                if number not in self._seen:
                    self._seen.add(number)
                    self.reach("committed", number)

    def _committed(self) -> list[int]:
        return [number for number in self._store.numbers() if self._store.directory(number).exists(MANIFEST_NAME)]


@dataclass
class _Scene:
    """What a fault gets to see; see `raysgd.testing.fault.Scene`."""

    moment: Moment
    store: CheckpointStore
    random: Random
    injection: Injection

    @property
    def controller(self) -> str:
        return str(self.injection._session._link._name)  # type: ignore[attr-defined]

    def slow_down(self, delay_s: float, steps: int) -> None:
        self.injection._delays += [delay_s] * steps

    def slow_writes(self, delay_s: float, times: int) -> None:
        self.injection._files.slow_down(delay_s, times)

    def fail_writes(self, error: int, times: int, for_s: float | None) -> None:
        self.injection._files.fail(error, times, for_s)

    def hold(self, memory: object) -> None:
        self.injection._held.append(memory)

    def cut_group(self) -> int:
        found = {inode: fd for inode, fd in connections().items() if inode not in self.injection._not_of_group}
        shut_down(found.values())
        return len(found)
