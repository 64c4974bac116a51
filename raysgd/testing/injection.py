"""Makes the faults of a plan happen in a worker, between train_func and its session, for one attempt. Runs in workers.

No other module of raysgd knows about faults. When a wrapped train_func is entered, it replaces some methods of its session
(and functions of torch, for collectives) by its own; when it leaves, it restores them. The writer of the attempt's
checkpoints is not restored: it belongs to the attempt, and writes until the attempt's end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from raysgd.checkpoint.format.manifest import MANIFEST_NAME
from raysgd.session import context
from raysgd.session.events import PartSafe, WorkerEvent
from raysgd.session.worker import WorkerSession
from raysgd.testing.faults import (
    WRITER_PHASES,
    Connection,
    Fault,
    FaultContext,
    Moment,
    NetworkCut,
    list_connections,
)
from raysgd.testing.faulty_files import FaultyStore


def replace(restore: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, a class or an object until ``restore`` is closed."""
    if name in vars(owner):
        restore.callback(setattr, owner, name, vars(owner)[name])
    else:
        restore.callback(delattr, owner, name)
    setattr(owner, name, value)


# -- records of injected faults, a file each, so that a fault happens once over all processes and attempts ---------------


def claim(folder: str, index: int, attempt: int) -> bool:
    """Record that fault ``index`` of a plan happens now in this process; return False if it has happened already."""
    target = Path(folder, f"fault-{index:05d}.json")
    if target.exists():
        return False
    temporary = Path(folder, f".{secrets.token_hex(8)}")
    temporary.write_text(json.dumps({"index": index, "attempt": attempt, "timestamp": time.time(), "pid": os.getpid()}))
    try:
        os.link(temporary, target)  # atomic, and fails if the file exists
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def read_records(folder: str) -> list[dict[str, Any]]:
    """Return what `claim` recorded in a plan's folder, in the order of time."""
    records = [json.loads(path.read_text()) for path in Path(folder).glob("fault-*.json")]
    return sorted(records, key=lambda record: (record["timestamp"], record["index"]))


# -- collectives of torch ----------------------------------------------------------------------------------------------

#: Functions of ``torch.distributed``; other functions call these, or are not covered.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def hook_collectives(restore: contextlib.ExitStack, hook: Callable[[], None]) -> None:
    """Call ``hook`` before each collective until ``restore`` is closed; do nothing without torch or a process group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            replace(restore, dist, name, _with_hook(getattr(dist, name), hook))
    _hook_reductions(restore, hook)


def _hook_reductions(restore: contextlib.ExitStack, hook: Callable[[], None]) -> None:
    # DistributedDataParallel reduces from C++, in the first backward pass after a forward pass with gradients.
    import torch
    from torch.nn.parallel import DistributedDataParallel

    forward: Callable[..., Any] = DistributedDataParallel.forward
    backward: Callable[..., Any] = torch.autograd.backward
    is_due = False

    @functools.wraps(forward)
    def hooked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        is_due = is_due or (torch.is_grad_enabled() and self.require_backward_grad_sync)
        return forward(self, *args, **kwargs)

    @functools.wraps(backward)
    def hooked_backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        if is_due:
            is_due = False
            hook()
        return backward(*args, **kwargs)

    replace(restore, DistributedDataParallel, "forward", hooked_forward)
    replace(restore, torch.autograd, "backward", hooked_backward)


def _with_hook(function: Callable[..., Any], hook: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        hook()
        return function(*args, **kwargs)

    return hooked


# -- the faults of one rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPlan:
    """The part of a plan that is sent to the workers.

    Attributes:
        folder: The folder of the fault records.
        faults: The faults by their place in the plan.
    """

    folder: str
    seed: int
    faults: Mapping[int, Fault]


class FaultyFunction:
    """A train_func with the faults of a plan; outside of workers it behaves like the original function."""

    def __init__(self, function: Callable[..., Any], plan: WorkerPlan) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._plan = plan
        # A worker unpickles its code before the group forms: later connections belong to the group.
        has_cut = any(isinstance(fault, NetworkCut) for fault in plan.faults.values())
        self._earlier_connections = frozenset(list_connections()) if has_cut else frozenset[Connection]()

    def __call__(self, *args: Any) -> Any:
        session = context.installed()
        if not isinstance(session, WorkerSession):
            return self._function(*args)
        with contextlib.ExitStack() as restore:
            injection = Injection(session, self._plan, self._earlier_connections)
            injection.install(restore)
            injection.reach("start")
            return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return FaultyFunction, (self._function, self._plan)


class Injection:
    """The faults of one rank in one attempt."""

    def __init__(self, session: WorkerSession, plan: WorkerPlan, earlier_connections: frozenset[Connection]) -> None:
        self._session = session
        self._plan = plan
        self._earlier_connections = earlier_connections
        self._writer = session._writer
        self._store = self._writer._store
        self._faulty_store = FaultyStore(self._store, self.reach)
        self._pending = {index: fault for index, fault in plan.faults.items() if fault.rank == session.world_rank}
        self._lock = threading.Lock()  # between the training thread and the writer's thread
        self._seen: set[int] = set()
        self._delays_s: list[float] = []
        self._held: list[object] = []

    def install(self, restore: contextlib.ExitStack) -> None:
        """Replace the methods in which faults can happen, if faults are planned for this rank."""
        if not self._pending:
            return
        restore.callback(self._held.clear)
        phases = {fault.planned_phase for fault in self._pending.values()}
        replace(restore, self._session, "report", self._report)
        replace(restore, self._session, "save_checkpoint", self._save)
        replace(restore, self._session, "load_checkpoint", self._load)
        replace(restore, self._session, "_join_barrier", self._join_barrier)
        if "collective" in phases:
            hook_collectives(restore, lambda: self.reach("collective"))
        if "committed" in phases:
            self._seen = set(self._committed()[:-1])
        if phases & WRITER_PHASES:
            self._writer._store = self._faulty_store  # type: ignore[assignment]
            self._put = self._writer._put
            self._writer._put = self._put_part

    def reach(self, phase: str, checkpoint: int = 0, files: tuple[str, ...] = ()) -> None:
        """Inject the faults that are planned for the place that the rank has reached."""
        step = self._session.iterations_before + self._session.num_reports
        moment = Moment(phase, step, checkpoint, files)
        for index, fault in self._take_due(moment):
            if claim(self._plan.folder, index, self._session.attempt):
                fault.inject(
                    FaultContext(
                        moment=moment,
                        session=self._session,
                        store=self._store,
                        writes=self._faulty_store,
                        random=Random(f"{self._plan.seed}/{index}"),
                        earlier_connections=self._earlier_connections,
                        delays_s=self._delays_s,
                        held=self._held,
                    )
                )

    # -- replaced methods of the session --------------------------------------------------------------------------

    def _report(self, metrics: Mapping[str, Any]) -> None:
        self._check_committed()
        WorkerSession.report(self._session, metrics)
        self.reach("report")
        if self._delays_s:
            time.sleep(self._delays_s.pop())

    def _save(self, state: Any, **settings: Any) -> None:
        self._check_committed()
        self.reach("save", self._writer._first_number + self._session._num_saves)
        WorkerSession.save_checkpoint(self._session, state, **settings)

    def _load(self, path: Any, **settings: Any) -> Any:
        self._check_committed()
        self.reach("load")
        return WorkerSession.load_checkpoint(self._session, path, **settings)

    def _join_barrier(self, what: str, payload: bytes | None) -> bytes | None:
        self._check_committed()
        self.reach("collective")
        return WorkerSession._join_barrier(self._session, what, payload)

    # -- replaced methods of the writer ---------------------------------------------------------------------------

    def _put_part(self, event: WorkerEvent) -> None:
        if isinstance(event, PartSafe) and event.files:
            names = tuple(entry.name for entry in event.files)
            self.reach("written", self._writer._first_number + event.call, names)
        self._put(event)

    def _take_due(self, moment: Moment) -> list[tuple[int, Fault]]:
        with self._lock:
            due = [(index, fault) for index, fault in self._pending.items() if fault.is_due(moment)]
            for index, _ in due:
                del self._pending[index]
        return due

    def _check_committed(self) -> None:
        """Inject the faults of checkpoints that have been committed since the last check."""
        if any(fault.planned_phase == "committed" for fault in self._pending.values()):
            for number in self._committed():
                if number not in self._seen:
                    self._seen.add(number)
                    self.reach("committed", number)

    def _committed(self) -> list[int]:
        return [number for number in self._store.numbers() if self._store.directory(number).exists(MANIFEST_NAME)]
