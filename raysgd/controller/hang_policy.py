"""Which workers hang? Pure: what was seen of each, and when, in; verdicts out.

Two clocks. The heartbeat: a process that answers is alive. One that does not may be in a C call that holds the interpreter's
lock, and then uses its CPU, or waits for one; one that does none of this is stopped or dead. Progress: a process that answers
may still be stuck in train_func, which only the time since its last report, checkpoint or batch tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raysgd.session.progress import Pulse

#: Share of a core above which a process that does not answer is busy. Ray's own threads use a fifth of that.
BUSY_SHARE = 0.05
#: Share of the time above which it is starved: it wants to run, and the machine does not let it. Those of Ray's threads
#: that wake up now and then stay below it.
STARVED_SHARE = 0.5
#: Seconds over which both are told, at least.
MIN_WINDOW_S = 1.0
#: ``progress_timeout_s="auto"``: this many times the longest pause of the run so far, and at least that many seconds.
AUTO_FACTOR = 10.0
AUTO_MIN_S = 60.0


@dataclass(frozen=True)
class Hang:
    """A worker that must be ended.

    Attributes:
        kind: ``"silent"``, ``"lost"`` (its node is) or ``"stuck"``.
        instead: Others that may be the ones who are stuck: as far as it, and not moving either.
    """

    rank: int
    kind: str
    why: str
    instead: tuple[Hang, ...] = ()


class _Look(NamedTuple):
    """When a process was looked at, and the times it had used a CPU and waited for one until then, in seconds."""

    at: float
    used_s: float
    waited_s: float


@dataclass
class _Seen:
    answered_at: float
    pulse: Pulse = field(default_factory=Pulse)
    looks: deque[_Look] = field(default_factory=deque)  # within the window
    is_stopped: bool = False
    is_reachable: bool = True

    def is_busy(self) -> bool:
        """Whether it used its CPU lately, or would have if it had got one."""
        if self.is_stopped or len(self.looks) < 2:
            return False
        first, last = self.looks[0], self.looks[-1]
        span_s, used_s, waited_s = (end - begin for begin, end in zip(first, last, strict=True))
        return used_s > BUSY_SHARE * span_s or used_s + waited_s > STARVED_SHARE * span_s


#: What a stack has in it while its rank waits for others in a collective.
_WAITING = ("torch/distributed", "_engine_run_backward", "horovod/", "tensorflow/python/distribute")


#: What it has in it in any case, where the thread of train_func can be seen.
_INSIDE = "workers/entry.py"


def blame(hang: Hang, stacks: Mapping[int, str]) -> Hang:
    """Of those that may be stuck, the first whose stack shows it inside train_func and not waiting for others."""
    for candidate in (hang, *hang.instead):
        stack = stacks.get(candidate.rank, "")
        if _INSIDE in stack and not any(sign in stack for sign in _WAITING):
            return candidate
    return hang


class HangPolicy:
    """The workers of one attempt.

    Args:
        heartbeat_timeout_s: Seconds without an answer, and without work, after which a process is dead.
        progress_timeout_s: Seconds without progress after which it is stuck; ``"auto"`` or None: see `FailureConfig`.
        ranks: The ranks to watch.
        now: The time, in seconds of a clock that all calls use.
    """

    def __init__(
        self, heartbeat_timeout_s: float, progress_timeout_s: float | str | None, ranks: Iterable[int], now: float
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._progress_timeout_s = progress_timeout_s
        # A machine that is overloaded lets a busy process run only now and then.
        self._window_s = max(MIN_WINDOW_S, heartbeat_timeout_s / 3)
        self._seen = {rank: _Seen(now) for rank in ranks}

    def answered(self, rank: int, pulse: Pulse, now: float) -> None:
        """A worker has answered."""
        if rank in self._seen:
            self._seen[rank] = _Seen(now, pulse)

    def looked(self, rank: int, used_s: float, waited_s: float, is_stopped: bool, now: float) -> None:
        """Its node's agent has looked at its process."""
        seen = self._seen.get(rank)
        if seen is None:
            return
        seen.looks.append(_Look(now, used_s, waited_s))
        while len(seen.looks) > 2 and now - seen.looks[1].at >= self._window_s:
            seen.looks.popleft()
        seen.is_stopped, seen.is_reachable = is_stopped, True

    def unreachable(self, rank: int) -> None:
        """Its node's agent does not answer either."""
        if seen := self._seen.get(rank):
            seen.is_reachable = False

    def left(self, rank: int) -> None:
        """It needs no watching any more."""
        self._seen.pop(rank, None)

    def suspects(self, now: float) -> list[int]:
        """The ranks whose processes are to be looked at: those that are late with their answer."""
        return [rank for rank, seen in self._seen.items() if now - seen.answered_at > self._heartbeat_timeout_s / 3]

    def judge(self, now: float) -> list[Hang]:
        """The workers to end now."""
        silent = [self._silence(rank, seen, now) for rank, seen in sorted(self._seen.items())]
        found = [hang for hang in silent if hang is not None]
        if not found and (stuck := self._stuck(now)) is not None:
            found = [stuck]
        return found

    def _silence(self, rank: int, seen: _Seen, now: float) -> Hang | None:
        silent_s = now - seen.answered_at
        if silent_s <= self._heartbeat_timeout_s or (seen.is_reachable and seen.is_busy()):
            return None
        told = f"gave no sign of life for {silent_s:.1f} s"
        if not seen.is_reachable:
            return Hang(rank, "lost", f"{told}, nor did its node: it is lost or cut off")
        return Hang(
            rank, "silent", f"{told}; " + ("it was stopped (SIGSTOP)" if seen.is_stopped else "it does not run")
        )

    def _stuck(self, now: float) -> Hang | None:
        """Of the ranks inside, the one that is behind: the others wait for it."""
        inside = {rank: seen for rank, seen in self._seen.items() if seen.pulse.is_inside}
        limit = self._limit(seen.pulse for seen in inside.values())
        if limit is None or not inside:
            return None
        idle = {rank: seen.pulse.idle_s for rank, seen in inside.items() if now - seen.answered_at < limit}
        if not idle or max(idle.values()) <= limit:
            return None
        fewest = min(inside[rank].pulse.calls for rank in idle)
        behind = sorted((rank for rank in idle if inside[rank].pulse.calls == fewest), key=lambda rank: -idle[rank])
        if any(idle[rank] <= limit for rank in behind):  # it is behind and moves: slow as it is, it does not hang
            return None
        first, *others = [self._stuck_at(rank, inside[rank].pulse, limit) for rank in behind]
        return Hang(first.rank, first.kind, first.why, tuple(others))

    @staticmethod
    def _stuck_at(rank: int, pulse: Pulse, limit: float) -> Hang:
        since = f"since its last {pulse.phase}" if pulse.phase else "since it entered train_func"
        return Hang(rank, "stuck", f"made no progress for {pulse.idle_s:.1f} s {since} (limit {limit:g} s)")

    def _limit(self, pulses: Iterable[Pulse]) -> float | None:
        if self._progress_timeout_s is None or isinstance(self._progress_timeout_s, (int, float)):
            return self._progress_timeout_s
        longest = max((pulse.longest_pause_s for pulse in pulses), default=0.0)
        return max(AUTO_MIN_S, AUTO_FACTOR * longest) if longest else None
