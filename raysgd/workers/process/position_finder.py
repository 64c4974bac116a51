"""Finds where train_func is, and in which collectives, without delaying a rank that computes. Worker side."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from raysgd.backends.base import Backend
from raysgd.backends.flight_recorder import Collective, CollectiveId, numbers_only
from raysgd.session.worker import WorkerSession
from raysgd.workers.orders import Position
from raysgd.workers.process.train_thread import Place

#: Fraction of a core above which the training thread computes.
BUSY_SHARE = 0.05


def find_collectives(
    backend: Backend, asked: Collection[CollectiveId] = ()
) -> tuple[tuple[Collective, ...], tuple[Collective, ...] | None]:
    """Return the last collective of each group, and those that ``asked`` names, as far as this rank has begun them.

    Without a record of the backend, only the numbers of the last ones are known, and None is returned in the second place.
    Gloo's numbers count sends and receives, too, by which a rank would seem to have come further than it has.
    """
    record = backend.dump_flight_record()
    if record is None:
        return numbers_only(backend.count_collectives()), None
    return record.last, tuple(one for one in record.entries if any(map(one.is_asked_for, asked)))


class Thread(Protocol):
    """The training thread."""

    def place(self) -> Place: ...


class PositionFinder:
    """Finds the position of one attempt at each call of `find`, which are some seconds apart.

    Reading the backend's record of collectives may hold the interpreter's lock for 20 ms. So that is done only for a thread
    that has stayed where it was since the last call, or does not run train_func.

    Args:
        has_gpu: The rank has a GPU, for which it may wait by using its CPU.
    """

    def __init__(
        self,
        thread: Thread,
        backend: Backend,
        session: WorkerSession,
        *,
        has_gpu: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._backend = backend
        self._session = session
        self._has_gpu = has_gpu
        self._clock = clock
        self._at: tuple[int, Mapping[str, int]] | None = None  # the spot, and the numbers of collectives
        self._since = 0.0
        self._first_cpu_s = 0.0

    def find(self, asked: Collection[CollectiveId] = ()) -> Position:
        """Return the position.

        Args:
            asked: The collectives that other ranks wait in.
        """
        now, place, numbers = self._clock(), self._thread.place(), self._backend.count_collectives()
        at = place.spot, numbers
        if at != self._at or self._has_computed(place, now):
            self._at, self._since, self._first_cpu_s = at, now, place.cpu_s
        barriers = self._barriers()
        blocked_s = now - self._since
        may_read = blocked_s > 0 or not place.spot  # it delays nothing
        last, begun = find_collectives(self._backend, asked) if may_read else (numbers_only(numbers), None)
        collectives = *last, *barriers
        waited_ns = max((time.time_ns() - one.began_ns for one in collectives if not one.is_done), default=0)
        return Position(collectives, waited_ns / 1e9, blocked_s, place.line, begun)

    def _has_computed(self, place: Place, now: float) -> bool:
        return not self._has_gpu and place.cpu_s - self._first_cpu_s > BUSY_SHARE * (now - self._since)

    def _barriers(self) -> list[Collective]:
        return [
            Collective(f"raysgd.{what}()", number, "", (), is_done=since_ns is None, began_ns=since_ns or 0)
            for what, number, since_ns in self._session.barriers()
        ]
