"""Builds the attempts of a worker, from orders to objects. Worker side.

Imported by a worker once the framework is: nothing the TrainerActor needs in order to start workers.
"""

from __future__ import annotations

import socket
from typing import Any

import ray

from raysgd.backends.base import Backend
from raysgd.checkpoint.checkpoint import Checkpoint, load_state
from raysgd.checkpoint.retry import retry_of_writes
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, read_manifest
from raysgd.errors import AttemptEnded
from raysgd.session.base import Identity
from raysgd.session.generators import make_deterministic, seed_generators
from raysgd.session.outbox import Outbox
from raysgd.session.saving import CheckpointWriter
from raysgd.session.worker import Codec, WorkerSession
from raysgd.workers.attempt import Attempt
from raysgd.workers.cluster import NAMESPACE
from raysgd.workers.entry import Entry
from raysgd.workers.orders import AttemptOrder, Blob, RunOrder
from raysgd.workers.pickling import dumps, loads
from raysgd.workers.starting import FromCheckpoint, FromMemory, FromState
from raysgd.workers.worker_callbacks import WorkerCallbacks


def make_pool(run: RunOrder) -> StagingPool:
    """The staging buffers of a process."""
    return StagingPool(max_pending_bytes=run.checkpoint.max_pending_bytes)


def make_entry() -> Entry:
    """train_func, not entered yet."""
    return Entry()


def make_attempt(
    run: RunOrder, order: AttemptOrder, *, entry: Entry, controller: str, backend: Backend, pool: StagingPool
) -> Attempt:
    """An attempt that has not begun.

    Args:
        run: What stays the same for all attempts of the run.
        order: What this worker does in this one.
        entry: train_func, new or parked.
        controller: Name of the TrainerActor.
        backend: The process's own.
        pool: Staging buffers, reused from one attempt to the next.
    """
    member = order.member
    outbox = Outbox(order.flush_interval_s)
    writer = CheckpointWriter(
        CheckpointStore(Storage.from_uri(run.checkpoints_uri, retry=retry_of_writes(run.checkpoint.on_write_error))),
        attempt=order.attempt,
        rank=member.rank,
        first_number=order.first_number,
        pool=pool,
        put=outbox.put,
        is_held=run.checkpoint.keep_in_memory,
        stored_every=max(1, run.checkpoint.memory_only_between),
    )
    given = loads(resolve(run.callbacks)) if run.callbacks is not None else []
    callbacks = WorkerCallbacks(given, run, order, outbox)
    session = WorkerSession(
        Identity(member.rank, member.world_size, member.local_rank, member.local_world_size, member.node_rank),
        outbox=outbox,
        writer=writer,
        link=ControllerLink(controller, run.run_id, order.attempt, member.rank),
        codec=Codec(dumps, loads),
        start=_starting_point(run, order),
        load_path=_load_path,
        time_before_s=order.time_before_s,
        seed=run.seed,
        deterministic=run.deterministic,
        plan=run.datasets,
        fetch=ray.get,
        on_report=callbacks.hooks,
        attempt=order.attempt,
        iterations_before=order.iterations_before,
        broken_group=backend.broken_group,
    )
    writer.on_chunk = session.progress.wrote
    return Attempt(
        run,
        order,
        entry=entry,
        code=lambda: _open_code(run, member.rank),
        backend=backend,
        session=session,
        outbox=outbox,
        writer=writer,
        callbacks=callbacks,
        node=node_name(member.node_ip),
        on_resize=None if run.on_resize is None else lambda: loads(resolve(run.on_resize)),
    )


def _open_code(run: RunOrder, rank: int) -> tuple[Any, Any]:
    function, config = loads(resolve(run.code))
    if run.deterministic:
        make_deterministic()
    if run.seed is not None:
        seed_generators(run.seed, rank)
    return function, config


class ControllerLink:
    """What a session asks of the TrainerActor; each call is answered, or fails when the attempt ends."""

    def __init__(self, controller: str, run_id: str, attempt: int, rank: int) -> None:
        self._name = controller
        self._key = (run_id, attempt)
        self._rank = rank
        self._handle: Any = None

    def meet(self, what: str, index: int, payload: bytes | None) -> bytes | None:
        answer = ray.get(self._controller().meet.remote(*self._key, self._rank, what, index, payload))
        if answer is None:
            raise AttemptEnded("the attempt ended while ranks were waiting for each other")
        return bytes(answer)

    def newest_checkpoint(self, index: int, num_saves: int) -> FromCheckpoint | None:
        uri = ray.get(self._controller().newest_checkpoint.remote(*self._key, index, num_saves))
        return None if uri is None else FromCheckpoint(uri)

    def _controller(self) -> Any:
        """With the first question: a handle makes Ray import the TrainerActor's class and all it uses."""
        if self._handle is None:
            self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
        return self._handle


def _starting_point(run: RunOrder, order: AttemptOrder) -> FromMemory | FromCheckpoint | FromState | None:
    if order.held is not None:
        return FromMemory(order.held)
    if order.checkpoint is not None:
        return FromCheckpoint(order.checkpoint)
    return None if run.initial_state is None else FromState(resolve(run.initial_state))


def _load_path(path: Any, rank: int, world_size: int, trusted: bool) -> Any:
    folder = Storage.from_uri(Checkpoint.from_path(path).path or "")
    return load_state(folder, read_manifest(folder), rank, trusted=trusted, world_size=world_size)


def node_name(ip: str) -> str:
    """The node of this process, as users are told of it."""
    return f"{socket.gethostname()} ({ip})"


def resolve(blob: Blob) -> bytes:
    """The pickle that an order holds or refers to."""
    return bytes(ray.get(blob)) if isinstance(blob, ray.ObjectRef) else blob
