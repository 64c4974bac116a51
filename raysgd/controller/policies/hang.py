"""Which workers hang. Pure.

Two clocks decide. The heartbeat: a process that answers is alive. A process that does not answer may be in a C call that holds
the interpreter's lock; such a process uses its CPU or waits for one. A process that does neither is stopped or dead.
Progress: a process that answers may still be stuck in train_func. Only the time since its last report, checkpoint or batch
shows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raysgd.session.progress import Heartbeat
from raysgd.workers.liveness.silence import Silence

#: ``progress_timeout_s="auto"``: the limit is this factor times the longest pause so far, and at least this many seconds.
AUTO_FACTOR = 10.0
AUTO_MIN_S = 60.0


@dataclass(frozen=True)
class Hang:
    """A worker that must be killed.

    Attributes:
        kind: ``"silent"``, ``"lost"`` (its node does not answer) or ``"stuck"``.
        instead: Other ranks that may be the stuck one: they have come as far and make no progress either.
    """

    rank: int
    kind: str
    why: str
    instead: tuple[Hang, ...] = ()


@dataclass
class _Worker(Silence):
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


#: Parts of a stack whose rank waits for others in a collective.
_WAITING = (
    "torch/distributed",
    "raysgd/backends/torch_transfers.py",
    "_engine_run_backward",
    "horovod/",
    "tensorflow/python/distribute",
)
#: Part of every stack that shows the thread of train_func.
_INSIDE = "raysgd/workers/process/train_thread.py"


def blame(hang: Hang, stacks: Mapping[int, str]) -> Hang:
    """Return the first of the possibly stuck ranks whose stack is in train_func and does not wait for others."""
    for candidate in (hang, *hang.instead):
        stack = stacks.get(candidate.rank, "")
        if _INSIDE in stack and not any(sign in stack for sign in _WAITING):
            return candidate
    return hang


class HangPolicy:
    """Finds the hanging workers of one attempt.

    Args:
        heartbeat_timeout_s: Seconds without an answer and without CPU use after which a process counts as dead.
        progress_timeout_s: Seconds without progress after which a rank counts as stuck; ``"auto"`` or None: see `FailureConfig`.
        ranks: The ranks to watch.
        wait_s: Seconds to wait for ranks on nodes that do not answer, if nothing can replace them.
        now: The current time, in seconds of the clock that all calls use.
    """

    def __init__(
        self,
        heartbeat_timeout_s: float,
        progress_timeout_s: float | str | None,
        ranks: Iterable[int],
        now: float,
        wait_s: float = 0.0,
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._progress_timeout_s = progress_timeout_s
        self._wait_s = wait_s
        self._workers = {rank: _Worker(now) for rank in ranks}
        self._fewest_calls: int | None = None  # of the ranks in train_func, and since when
        self._fewest_since = now

    def on_heartbeat(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """A worker has answered."""
        if rank in self._workers:
            self._workers[rank] = _Worker(now, heartbeat=heartbeat)

    def on_process_checked(self, rank: int, used_s: float, waited_s: float, is_stopped: bool, now: float) -> None:
        """The agent of the worker's node has checked its process: seconds on a CPU, and waiting for one."""
        if worker := self._workers.get(rank):
            worker.add_check(used_s, waited_s, is_stopped, now, self._heartbeat_timeout_s)

    def on_unreachable(self, rank: int) -> None:
        """The agent of the worker's node does not answer either."""
        if worker := self._workers.get(rank):
            worker.is_reachable = False

    def skip(self, gap_s: float) -> None:
        """Leave out some seconds in which the TrainerActor itself did not run, so that it saw no heartbeats."""
        for worker in self._workers.values():
            worker.skip(gap_s)

    def remove(self, rank: int) -> None:
        """Stop watching a rank."""
        self._workers.pop(rank, None)

    def suspects(self, now: float) -> list[int]:
        """Return the ranks that are late with their answer, whose processes must be checked."""
        return [rank for rank, worker in self._workers.items() if worker.is_late(now, self._heartbeat_timeout_s)]

    @property
    def watched(self) -> set[int]:
        """The ranks that are watched."""
        return set(self._workers)

    def unreachable(self, now: float) -> list[int]:
        """Return the ranks that are late with their answer and whose nodes do not answer either."""
        return [rank for rank in self.suspects(now) if not self._workers[rank].is_reachable]

    def cut_off(self, now: float) -> list[int]:
        """Return the ranks that are late, as are their nodes, once one of them is over the limit.

        They run on if only the connection to them is cut. The others are counted because one cut reaches all of them, but
        they answered last at different times: without them, it would seem that the group can continue with them.
        """
        ranks = sorted(self.unreachable(now))
        limit_s = self._heartbeat_timeout_s
        return ranks if any(self._workers[rank].is_over_limit(now, limit_s) for rank in ranks) else []

    def find_hangs(self, now: float, *, can_replace: bool = True) -> list[Hang]:
        """Return the workers to kill now.

        Args:
            now: The current time.
            can_replace: The group can continue without the ranks in `cut_off`. Otherwise killing them gains nothing: they
                are waited for, and with them the others, which may be stuck in a collective.
        """
        silent = [self._silence(rank, worker, now) for rank, worker in sorted(self._workers.items())]
        found = [hang for hang in silent if hang is not None]
        if not can_replace and any(hang.kind == "lost" for hang in found):
            return [hang for hang in found if hang.kind != "lost" or self._has_waited(hang.rank, now)]
        if not found and (stuck := self._stuck(now)) is not None:
            found = [stuck]
        return found

    def _has_waited(self, rank: int, now: float) -> bool:
        return now - self._workers[rank].answered_at > self._heartbeat_timeout_s + self._wait_s

    def _silence(self, rank: int, worker: _Worker, now: float) -> Hang | None:
        if not worker.is_over_limit(now, self._heartbeat_timeout_s):
            return None
        return Hang(rank, "silent" if worker.is_reachable else "lost", worker.describe(now))

    def _stuck(self, now: float) -> Hang | None:
        """Return the rank inside train_func that has been behind the others, which wait for it, for longer than the limit."""
        inside = {rank: worker for rank, worker in self._workers.items() if worker.heartbeat.is_inside}
        limit = self._limit(worker.heartbeat for worker in inside.values())
        if limit is None or not inside:
            return None
        idle = {rank: worker.heartbeat.idle_s for rank, worker in inside.items() if now - worker.answered_at < limit}
        fewest = min((inside[rank].heartbeat.calls for rank in idle), default=None)
        if fewest != self._fewest_calls:
            # The rank that was behind has moved on. Those that waited for it were idle, and are behind only since now.
            self._fewest_calls, self._fewest_since = fewest, now
        if not idle or max(idle.values()) <= limit or now - self._fewest_since <= limit:
            return None
        behind = sorted((rank for rank in idle if inside[rank].heartbeat.calls == fewest), key=lambda rank: -idle[rank])
        if any(idle[rank] <= limit for rank in behind):  # it is slow but makes progress
            return None
        first, *others = [self._stuck_at(rank, inside[rank].heartbeat, limit) for rank in behind]
        return Hang(first.rank, first.kind, first.why, tuple(others))

    @staticmethod
    def _stuck_at(rank: int, heartbeat: Heartbeat, limit: float) -> Hang:
        since = f"since its last {heartbeat.phase}" if heartbeat.phase else "since it entered train_func"
        return Hang(rank, "stuck", f"made no progress for {heartbeat.idle_s:.1f} s {since} (limit {limit:g} s)")

    def _limit(self, heartbeats: Iterable[Heartbeat]) -> float | None:
        if self._progress_timeout_s is None or isinstance(self._progress_timeout_s, (int, float)):
            return self._progress_timeout_s
        longest = max((heartbeat.longest_pause_s for heartbeat in heartbeats), default=0.0)
        return max(AUTO_MIN_S, AUTO_FACTOR * longest) if longest else None
