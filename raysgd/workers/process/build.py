"""Builds the attempts of a worker from their orders. Worker side.

A worker imports this module once its framework is loaded. The TrainerActor does not need it to start workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from raysgd._util import media
from raysgd._util.imports import uncollected
from raysgd.backends.base import Backend, Member
from raysgd.checkpoint.checkpoint import Checkpoint, load_state
from raysgd.checkpoint.format.parts import MemoryPart
from raysgd.checkpoint.resharding import load_parts
from raysgd.checkpoint.snapshot import StagingPool
from raysgd.checkpoint.storage.storage import Retry, Storage, retry_of_writes
from raysgd.checkpoint.store import CheckpointStore, read_manifest
from raysgd.errors import AttemptEnded, CheckpointNotFoundError
from raysgd.goodput import spans
from raysgd.session import rank_state
from raysgd.session.base import Identity
from raysgd.session.event_queue import EventQueue
from raysgd.session.events import Warned, describe_checkpoint
from raysgd.session.media import ImageFolder
from raysgd.session.rank_state import make_deterministic, seed_generators, use_one_thread
from raysgd.session.saving import CheckpointWriter
from raysgd.session.worker import Codec, WorkerSession
from raysgd.workers.events_connection import MarkSender
from raysgd.workers.orders import AttemptOrder, Blob, HeldCheckpoint, RunOrder, WorkerInfo
from raysgd.workers.pickling import dumps, loads, loads_call
from raysgd.workers.placement.cluster import NAMESPACE
from raysgd.workers.process.attempt import Attempt, WorkerCallbacks
from raysgd.workers.process.first_snapshot import FirstSnapshot
from raysgd.workers.process.live import FromSurvivor, LiveHolder
from raysgd.workers.process.step_file import StepFile

#: Seconds before a call to the TrainerActor is made again. An `AttemptEnded` arrives after them at the latest.
_ASK_AGAIN_S = 0.5


@dataclass(frozen=True)
class FromCheckpoint:
    """A starting point: a committed checkpoint on storage."""

    uri: str

    def load(
        self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        folder = Storage.from_uri(self.uri)
        manifest = read_manifest(folder)
        state = load_state(
            folder, manifest, rank, world_size=world_size, allow_pickle=allow_pickle, on_unusable=on_unusable
        )
        return state, rank_state.inherit(manifest.rank_states, rank, is_same_size=manifest.world_size == world_size)


@dataclass(frozen=True)
class FromMemory:
    """A starting point: a checkpoint in the cluster's memory, which this node has fetched. Its state is a copy."""

    held: HeldCheckpoint

    def load(
        self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        manifest = self.held.manifest
        state = load_parts(
            manifest,
            {rank: MemoryPart(partial(self._get, part)) for rank, part in self.held.parts.items()},
            rank,
            world_size=world_size,
            where=describe_checkpoint(manifest.number),
            allow_pickle=allow_pickle,
            on_unusable=on_unusable,
        )
        return state, rank_state.inherit(manifest.rank_states, rank, is_same_size=manifest.world_size == world_size)

    def _get(self, part: Any) -> Any:
        try:
            return ray.get(part)
        except RayError as error:
            what = describe_checkpoint(self.held.manifest.number)
            raise CheckpointNotFoundError(f"{what} is no longer in memory: {error}") from error


@dataclass(frozen=True)
class FromState:
    """A starting point: a state given as ``run(resume_from=...)``."""

    data: bytes

    def load(
        self, rank: int, world_size: int, *, allow_pickle: bool, on_unusable: Callable[[Exception], None]
    ) -> tuple[Any, dict[str, Any]]:
        return loads(self.data), {}


class AttemptBuilder:
    """Builds all attempts of this process.

    Args:
        controller: Name of the TrainerActor.
        place: Where this process runs.

    Attributes:
        live: The state of a complete step, from one attempt to the next.
    """

    def __init__(self, backend: Backend, controller: str, place: WorkerInfo) -> None:
        self._backend = backend
        self._controller = controller
        self._node = place.node
        self.live = LiveHolder(place.node_ip)
        self._pool: StagingPool | None = None  # reused from one attempt to the next

    def make(self, run: RunOrder, order: AttemptOrder) -> Attempt:
        """Return an attempt that has not begun."""
        if self._pool is None:
            self._pool = StagingPool(max_pending_bytes=run.checkpoint.max_pending_bytes)
        member, task = order.member, run.task
        self.live.begin(task.run_id, order.live)
        marks = MarkSender(order.inbox)
        storage = Storage.from_uri(run.checkpoints_uri, retry=retry_of_writes(run.checkpoint.on_write_error))
        images = ImageFolder(
            storage.parent().child(media.FOLDER).with_retry(Retry(tries=1)), lambda text: event_queue.put(Warned(text))
        )
        event_queue = EventQueue(order.flush_interval_s, keep_image=images.keep)
        writer = CheckpointWriter(
            CheckpointStore(storage),
            attempt=order.attempt,
            rank=member.rank,
            first_number=order.first_number,
            pool=self._pool,
            put=event_queue.put,
            is_held=run.checkpoint.keep_in_memory,
            stored_every=max(1, run.checkpoint.storage_interval),
        )
        given = loads(resolve(task.callbacks)) if task.callbacks is not None else []
        callbacks = WorkerCallbacks(given, run, order, event_queue)
        session = WorkerSession(
            identity_of(member),
            event_queue=event_queue,
            writer=writer,
            link=ControllerLink(self._controller, task.run_id, order.attempt, member.rank),
            codec=Codec(dumps, loads),
            gather=self._backend.gather,
            start=self._starting_point(run, order),
            time_before_s=order.time_before_s,
            seed=task.seed,
            deterministic=task.deterministic,
            logical_workers=task.logical_workers,
            plan=task.datasets,
            fetch=ray.get,
            on_report=callbacks.hooks,
            attempt=order.attempt,
            iterations_before=order.iterations_before,
            send_mark=marks.send,
            release_start=self.live.release,
            was_settled=order.live is not None and order.live.is_settled,
            known_pieces=None if order.live is None else order.live.held.pieces,
        )
        writer.on_chunk = session.progress.wrote
        first_snapshot = FirstSnapshot(
            self._pool,
            rank=member.rank,
            num_local=member.local_world_size,
            expects_save=lambda: session.expects_save,
        )
        return Attempt(
            run,
            order,
            code=lambda: _open_code(run, member.rank),
            backend=self._backend,
            session=session,
            event_queue=event_queue,
            writer=writer,
            callbacks=callbacks,
            first_snapshot=first_snapshot,
            node=self._node,
            step_file=StepFile(
                storage.parent().child(spans.FOLDER).with_retry(Retry(tries=1)),
                session.progress,
                attempt=order.attempt,
                rank=member.rank,
                node=self._node,
                iterations_before=order.iterations_before,
            ),
            on_left=partial(self._on_left, order, session, marks),
            on_resize=None if task.on_resize is None else lambda old, new: loads(resolve(task.on_resize))(old, new),
            load_retry_on=lambda: () if task.retry_on is None else loads(resolve(task.retry_on)),
        )

    def _on_left(self, order: AttemptOrder, session: WorkerSession, marks: MarkSender) -> None:
        marks.close()
        self.live.on_left(order.member.rank, order.attempt, session.live, session.live_problem)

    def _starting_point(
        self, run: RunOrder, order: AttemptOrder
    ) -> FromSurvivor | FromMemory | FromCheckpoint | FromState | None:
        if order.live is not None:
            return FromSurvivor(order.live, self.live)
        if order.held is not None:
            return FromMemory(order.held)
        if order.checkpoint is not None:
            return FromCheckpoint(order.checkpoint)
        return None if run.task.initial_state is None else FromState(resolve(run.task.initial_state))


def _open_code(run: RunOrder, rank: int) -> tuple[Any, Any]:
    with uncollected():  # it imports what the function's module imports
        function, config = loads_call(resolve(run.task.code))
    if run.task.deterministic:
        make_deterministic()
    if run.task.logical_workers:
        use_one_thread()
        seed_generators(run.task.seed or 0, 0)  # what all ranks draw outside the steps is equal
    elif run.task.seed is not None:
        seed_generators(run.task.seed, rank)
    return function, config


class ControllerLink:
    """The calls that a session makes to the TrainerActor; see `raysgd.session.worker.Link`."""

    def __init__(self, controller: str, run_id: str, attempt: int, rank: int) -> None:
        self._name = controller
        self._key = (run_id, attempt)
        self._rank = rank
        self._handle: Any = None

    def join_barrier(self, what: str, index: int, payload: bytes | None) -> bytes | None:
        answer = self._ask("join_barrier", self._rank, what, index, payload)
        if answer is None:
            raise AttemptEnded("the attempt ended while ranks were waiting for each other")
        return bytes(answer)

    def take(self, number: int) -> Any:
        found = self._ask("take", number)
        return None if found is None else loads(resolve(found[0]))

    def newest_checkpoint(self, index: int, num_saves: int) -> FromCheckpoint | None:
        uri = self._ask("newest_checkpoint", index, num_saves)
        return None if uri is None else FromCheckpoint(uri)

    def list_checkpoints(self, index: int, num_saves: int) -> list[Checkpoint]:
        listed = self._ask("list_checkpoints", index, num_saves)
        return [] if listed is None else list(listed)

    def _ask(self, method: str, *args: Any) -> Any:
        """Call the TrainerActor, again if no answer comes: a cut connection does not end train_func.

        The TrainerActor notices a cut that is too long, and ends the attempt. Each of these calls may be made twice.
        """
        while True:
            try:
                if self._handle is None:  # not before the first call, because Ray imports the actor's class for it
                    self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
                return ray.get(getattr(self._handle, method).remote(*self._key, *args))
            except (ActorUnavailableError, GetTimeoutError):
                time.sleep(_ASK_AGAIN_S)


def identity_of(member: Member) -> Identity:
    """Return the ranks and sizes that a session shows to the user's code."""
    return Identity(
        member.rank,
        member.world_size,
        member.local_rank,
        member.local_world_size,
        member.node_rank,
        member.workers_per_replica,
    )


def resolve(blob: Blob) -> bytes:
    """Return the pickle that an order holds or refers to."""
    return bytes(ray.get(blob)) if isinstance(blob, ray.ObjectRef) else blob
