"""Why all ranks leave an attempt for another group, and where they leave it. Pure: parts of the run's state machine.

There are three reasons: an elastic group grows (`Growth`), workers are preempted (`Preemption`), the run is paused
(`Pause`). All ranks leave at the same save, once its checkpoint is committed (`SavePoint`). For the first two reasons they leave
at once, wherever they are, if they have a live state. `Continuation` says how training continued from the memory of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

from raysgd.controller import commands as c
from raysgd.controller.policies.after_failure import Failure
from raysgd.controller.policies.growth import ScalingPolicy
from raysgd.controller.states import Running

if TYPE_CHECKING:
    from raysgd.controller.policies.live import CopiedStart, LiveStart

Emit = Callable[[c.Command], None]
#: Why a group forms again without a failure: it grows, is preempted or pauses, or the checkpoint it started from is damaged.
RegroupCause = Literal["resize", "preemption", "pause", "checkpoint"]

#: Seconds, at least, for ranks to leave from a save point. They leave by themselves, on a busy machine slowly: killing them
#: would cost a start of their processes. A rank that died or hangs is found in other ways.
SAVE_POINT_GRACE_S = 30.0
#: Seconds for the last ranks to reach the save point, once the checkpoint is committed.
REACH_S = 2.0
#: Seconds until ranks agree on another save point, after one whose checkpoint could not be written.
AGAIN_S = 1.0
#: Seconds of a node's remaining time that are kept for leaving the attempt and for writing what was saved.
LEAVE_S = 5.0

#: Seconds until ranks leave for preempted ones with what they hold in memory: all may be preempted, one after the other, and then
#: the state must be saved.
MORE_S = 1.0

#: The reason for a growth.
GROWS = "the group grows"
_PAUSE_REASON = "the run pauses"
_SIZE_IS_FIXED = (
    "the group does not grow: a checkpoint saved with all_ranks=True can be loaded only by as many ranks as saved it, unless "
    "it has arrays in shards and is otherwise the same on all ranks; save the whole state from rank 0 for elastic training"
)


class SavePoint:
    """The save after which all ranks leave the attempt.

    The steps: a part requests it with a reason; the ranks agree on a save that no rank has begun; each rank reports that it
    waits there; the checkpoint is committed; the attempt ends. A rank that has not arrived when the checkpoint is committed
    may be blocked by those that wait, so the others wait for it only for `REACH_S`.

    Attributes:
        why: The reason to leave the attempt; None while no save point is agreed on.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.why: str | None = None
        self._attempt = 0
        self._serial = 0
        self._point = 0
        self._number: int | None = None  # of the agreed checkpoint, known when the first rank waits
        self._waiting: set[int] = set()
        self._committed: set[int] = set()
        self._failed: set[int] = set()
        self._is_late = False

    def request(self, running: Running | None, why: str | None) -> None:
        """Make the ranks agree on a save. Nothing happens if they have agreed already, or without an attempt or a reason."""
        if running is None or why is None or self.why is not None:
            return
        self.why, self._attempt, self._serial = why, running.attempt, running.serial
        self._point += 1
        self._emit(c.AgreeOnSavePoint(running.attempt, self._point))

    def on_reached(self, rank: int, number: int, point: int) -> None:
        """A rank waits after the save of checkpoint ``number``, as request ``point`` has asked it to."""
        if self.why is None or point != self._point:  # cancelled in the meantime: the rank will be released
            return
        self._waiting.add(rank)
        if self._number is None:
            self._number = number
            self._check()

    def on_committed(self, number: int) -> None:
        """A checkpoint can be resumed from."""
        if self.why is not None:
            self._committed.add(number)
            self._check()

    def on_failed(self, number: int) -> None:
        """A checkpoint could not be written."""
        if self.why is not None:
            self._failed.add(number)
            self._check()

    def on_timeout(self) -> None:
        """Stop waiting for further ranks."""
        self._is_late = self._is_committed()

    def cancel(self) -> None:
        """Cancel the save point and release the ranks that wait."""
        if self.why is not None:
            self._emit(c.CancelSavePoint(self._attempt))
        self.reset()

    def is_due(self, active: Collection[int]) -> bool:
        """Return whether to end the attempt now: the checkpoint is committed and all active ranks wait."""
        return self._is_committed() and (self._is_late or set(active) <= self._waiting)

    def reset(self) -> None:
        """Forget the save point, because the attempt ends."""
        self.why, self._number, self._is_late = None, None, False
        for known in (self._waiting, self._committed, self._failed):
            known.clear()

    def _is_committed(self) -> bool:
        return self.why is not None and self._number in self._committed

    def _check(self) -> None:
        if self._number in self._failed:
            self.cancel()
            self._emit(c.SetTimer("grow", self._serial, AGAIN_S))
        elif self._is_committed():
            self._emit(c.SetTimer("save_point", self._serial, REACH_S))


class Growth:
    """Requests a save point when the scaling policy decides to grow. ``clock``: seconds since the epoch."""

    def __init__(self, save_point: SavePoint, clock: Callable[[], float], emit: Emit) -> None:
        self._save_point = save_point
        self._clock = clock
        self._emit = emit
        self._policy = ScalingPolicy()
        self._size: int | None = None
        self._has_warned = False

    def on_group_formed(self, running: Running, num_joining: int) -> None:
        """A group has formed, without ``num_joining`` workers that became ready in the meantime."""
        size = len(running.nodes)
        if self._size is not None and size > self._size:
            self._policy.on_grown(self._clock())
        else:
            self._policy.on_taken_in()
        self._size = size
        if num_joining:
            self.on_worker_ready(running)

    def on_worker_ready(self, running: Running | None) -> None:
        """A joining worker is ready. ``running``: the attempt that could be left for it, if there is one."""
        self._policy.on_worker_ready(self._clock())
        self._set_timer(running)

    def on_worker_lost(self) -> None:
        """A worker has died or was preempted."""
        self._policy.on_worker_lost(self._clock())

    def on_timeout(self, running: Running | None, *, is_bound_to_size: bool, is_at_once: bool = False) -> bool:
        """Grow, if it is time; return whether to end the attempt for that now.

        Args:
            running: The attempt that could be left, if there is one.
            is_bound_to_size: A larger group could not load the newest checkpoint.
            is_at_once: The ranks leave wherever they are, rather than after the next save.
        """
        due = self._policy.grow_at()
        if is_at_once and self._save_point.why == GROWS:
            self._save_point.cancel()
        if running is None or due is None or self._save_point.why is not None:
            return False
        if is_bound_to_size:
            self.refuse()
        elif self._clock() < due:
            self._set_timer(running)
        elif is_at_once:
            return True
        else:
            self._save_point.request(running, GROWS)
        return False

    def refuse(self) -> None:
        """Warn once that a larger group could not load the newest checkpoint."""
        if not self._has_warned:
            self._has_warned = True
            self._emit(c.warning(_SIZE_IS_FIXED))

    def _set_timer(self, running: Running | None) -> None:
        due = self._policy.grow_at()
        if running is not None and due is not None:
            self._emit(c.SetTimer("grow", running.serial, max(0.0, due - self._clock())))


class Preemption:
    """The ranks of an attempt whose processes got SIGTERM, or whose nodes will be taken away.

    All ranks are asked to leave in two ways, and leave by whichever comes first: ``should_stop()`` becomes true on all ranks
    at the same check, and they leave after the next save. The preempted processes are killed when the attempt is over, and
    the next group forms without them. None of this counts as a failure, nor does their death before that.

    Args:
        grace_s: Seconds to leave in, if it is not known when a process will be taken away.

    Attributes:
        why: The reason for the next group; None while no rank is preempted.
        saw_stop: A rank has found ``should_stop()`` true and returned.
    """

    def __init__(self, save_point: SavePoint, grace_s: float, emit: Emit) -> None:
        self._save_point = save_point
        self._grace_s = grace_s
        self._emit = emit
        self._ranks: set[int] = set()
        self._is_stop_requested = False
        self.why: str | None = None
        self.saw_stop = False

    def add(self, running: Running, ranks: Collection[int], why: str) -> bool:
        """Record that these ranks are preempted; returns whether any of them is new."""
        new = sorted(set(ranks) - self._ranks)
        for rank in new:
            data = {"attempt": running.attempt, "rank": rank, "node": running.nodes[rank], "why": why}
            self._emit(c.RecordEvent("preemption", data))
            self.why = self.why or f"rank {rank} is preempted: {why}"
        self._ranks.update(new)
        return bool(new)

    def ask_to_leave(self, running: Running, within_s: float | None) -> None:
        """Ask all ranks to leave. The attempt is ended if they have not left in time; ``within_s``: the node's time.

        If ranks that are not preempted hold the state in memory, the attempt is ended without asking.
        """
        delay_s = self._grace_s if within_s is None else max(0.0, within_s - LEAVE_S)
        if running.is_held and self._leaves_some(running):
            self._emit(c.SetTimer("notice", running.serial, min(delay_s, MORE_S)))
            return
        if not self._is_stop_requested:
            self._is_stop_requested = True
            self._emit(c.RequestStop(running.attempt, ends_reports=False))
            self._save_point.request(running, self.why)
        self._emit(c.SetTimer("preemption", running.serial, delay_s))

    def is_due(self, timer: str, running: Running) -> bool:
        """Return whether this timer ends the attempt, if it still runs."""
        return timer == "preemption" or (timer == "notice" and self._leaves_some(running))

    def _leaves_some(self, running: Running) -> bool:
        return len(self._ranks) < len(running.nodes)

    def on_returned(self, *, saw_stop: bool) -> None:
        """A rank returned from train_func. ``saw_stop``: it had found ``should_stop()`` true."""
        self.saw_stop |= saw_stop

    def explains(self, ranks: Collection[int]) -> bool:
        """Return whether all of these ranks are preempted."""
        return bool(ranks) and self._ranks.issuperset(ranks)

    def excuses(self, failure: Failure, attempt: int) -> bool:
        """Return whether a failure was announced. It is recorded as a reason to regroup then, not as a failure."""
        if not failure.is_announced and not self.explains(failure.ranks):
            return False
        self._emit(c.RecordEvent("regroup", {"attempt": attempt, "why": failure.what, "cause": "preemption"}))
        return True

    def kill_preempted(self) -> None:
        """Kill the preempted processes, because the attempt is over."""
        if self._ranks:
            self._emit(c.KillWorkers(tuple(sorted(self._ranks))))
        self._ranks.clear()
        self.why, self.saw_stop, self._is_stop_requested = None, False, False


class Pause:
    """A request to pause the run when its attempt is over.

    Attributes:
        is_requested: A pause was requested, and has neither begun nor been withdrawn.
    """

    def __init__(self, save_point: SavePoint) -> None:
        self._save_point = save_point
        self.is_requested = False

    @property
    def why(self) -> str | None:
        """The reason to leave an attempt; None while no pause is requested."""
        return _PAUSE_REASON if self.is_requested else None

    def request(self, running: Running | None) -> None:
        """Pause after the next save. ``running``: the attempt, if it can be left; None: pause before the next one."""
        self.is_requested = True
        self._save_point.request(running, _PAUSE_REASON)

    def withdraw(self, running: Running | None) -> None:
        """Do not pause: ranks that wait only for the pause resume. ``running``: the attempt, if it can be left."""
        self.is_requested = False
        if running is not None and self._save_point.why == _PAUSE_REASON:
            self._save_point.cancel()


class Continuation:
    """Records once from whose memory an attempt continues, when all its ranks have entered train_func.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float], emit: Emit) -> None:
        self._clock = clock
        self._emit = emit
        self._lost: tuple[int, ...] = ()
        self._ended_at = 0.0
        self._live: LiveStart | CopiedStart | None = None
        self._missing: set[int] = set()

    def on_end(self) -> None:
        """The ranks leave an attempt."""
        self._lost, self._ended_at = (), self._clock()

    def on_failure(self, failure: Failure) -> None:
        """The cause is known."""
        self._lost = failure.ranks if failure.cause == "death" else ()

    def begin(self, live: LiveStart | CopiedStart | None, world_size: int) -> None:
        """The next attempt begins, from a complete step if that is given."""
        self._live, self._missing = live, set(range(world_size))

    def on_entered(self, rank: int) -> None:
        """A rank has entered train_func."""
        self._missing.discard(rank)
        if self._live is not None and not self._missing:
            from raysgd.controller.policies.live import describe_continuation  # most runs need no live state

            data = describe_continuation(self._live, self._lost, round(self._clock() - self._ended_at, 3))
            self._emit(c.RecordEvent("continued", data))
            self._live = None
