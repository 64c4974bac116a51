"""Which ranks are slower than the others, and in which phase. Pure.

Ranks that train together take equally long for a step, because the fast ranks wait for the slow one. So the policy compares
the *own* time of each rank: the time of a step without the time in which the rank was seen to wait for others. If no rank was
seen to wait and yet all are equally fast, they may wait unseen, as in the user's own DistributedDataParallel. Then only the
time for reading batches is certainly a rank's own. (The time in ``save_checkpoint`` is not: a ``state_dict()`` may gather.)
With GPUs not even that is certain: copying a batch waits for the GPU, which may itself wait for other ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from raysgd.session.progress import Heartbeat, Spent

#: A window ends when each rank has made this many steps, or after this many seconds if each rank has made `MIN_STEPS`.
WINDOW_STEPS = 20
WINDOW_S = 30.0
MIN_STEPS = 3
#: A window ends after this many seconds in any case; ranks with fewer than `MIN_STEPS` are left out.
MAX_WINDOW_S = 300.0
#: This many slow windows in a row make a straggler, and this many normal ones in a row end it.
NUM_WINDOWS = 3
#: A rank is slow if its own time exceeds the others' median by this factor, by these seconds and by this fraction of its step.
SLOW_FACTOR = 1.5
MIN_EXCESS_S = 0.005
MIN_EXCESS_SHARE = 0.1
#: Waiting below this fraction of a step counts as none, and steps that differ by less than that fraction are equally long.
UNSEEN_SHARE = 0.01
ALIKE_SHARE = 0.1


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others. Times are means over the windows that showed it.

    Attributes:
        phase: The phase with most of the difference: ``"compute"``, ``"data"`` or ``"checkpoint"``.
        own_s: Own seconds per step.
        others_s: The median of the other ranks' own seconds per step.
        step_s: Seconds per step.
        since_s: How many seconds ago the rank became slow.
    """

    rank: int
    phase: str
    own_s: float
    others_s: float
    step_s: float
    since_s: float

    def to_event(self, node: str) -> dict[str, Any]:
        """Return the data of the event. ``node``: the rank's node."""
        times = {name: round(getattr(self, name), 6) for name in ("own_s", "others_s", "step_s", "since_s")}
        return {"rank": self.rank, "node": node, "phase": self.phase, **times}

    def describe(self, node: str) -> str:
        """Return one line for the user. ``node``: the rank's node."""
        return (
            f"rank {self.rank} on {node} is slow: {_shown(self.own_s)} a step of its own, the others "
            f"{_shown(self.others_s)}; most of the difference in: {self.phase}"
        )


@dataclass(frozen=True)
class _Pace:
    """One rank in one window: seconds per step, by phase. ``own`` is what is compared."""

    step_s: float
    waiting_s: float
    own: Mapping[str, float]

    @property
    def own_s(self) -> float:
        return sum(self.own.values())


@dataclass(frozen=True)
class _Gap:
    """One rank compared with the others in one window."""

    own_s: float
    others_s: float
    step_s: float
    by_phase: Mapping[str, float]

    def is_wide(self, strictness: float = 1.0) -> bool:
        """Return whether the rank is slow. A ``strictness`` of 0.5 halves the thresholds."""
        above_s = self.own_s - self.others_s
        return (
            self.own_s >= (1 + (SLOW_FACTOR - 1) * strictness) * self.others_s
            and above_s >= MIN_EXCESS_S * strictness
            and above_s >= MIN_EXCESS_SHARE * strictness * self.step_s
        )


@dataclass
class _Record:
    """The history of one rank."""

    wide: deque[_Gap] = field(default_factory=lambda: deque(maxlen=NUM_WINDOWS))  # the latest in a row
    slow_from: float = 0.0
    num_calm: int = 0
    reported: set[str] = field(default_factory=set)  # phases

    def add(self, gap: _Gap, began: float) -> None:
        """Add the next window, which began at ``began``."""
        if gap.is_wide():
            self.slow_from = self.slow_from if self.wide else began
            self.wide.append(gap)
            self.num_calm = 0
            return
        self.wide.clear()
        self.num_calm = 0 if gap.is_wide(strictness=0.5) else self.num_calm + 1
        if self.num_calm >= NUM_WINDOWS:
            self.reported.clear()

    def news(self, rank: int, now: float) -> Straggler | None:
        """Return the straggler to report now, or None."""
        if len(self.wide) < NUM_WINDOWS:
            return None
        # A window in which ranks may have waited unseen has the data phase alone.
        known = [phase for phase in self.wide[-1].by_phase if all(phase in gap.by_phase for gap in self.wide)]
        excess = {phase: fmean(gap.by_phase[phase] for gap in self.wide) for phase in known}
        phase = max(excess, key=lambda name: excess[name])
        if phase in self.reported:
            return None
        self.reported.add(phase)
        own_s, others_s, step_s = (
            fmean(getattr(gap, name) for gap in self.wide) for name in ("own_s", "others_s", "step_s")
        )
        return Straggler(rank, phase, own_s, others_s, step_s, now - self.slow_from)


class StragglerPolicy:
    """Finds the stragglers of one attempt. Each is reported once per phase, and again after a recovery.

    Args:
        now: The current time, in seconds of the clock that all calls use.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._first: dict[int, Spent] = {}  # of the window
        self._last: dict[int, Spent] = {}
        self._records: dict[int, _Record] = {}
        self._has_gpus = False

    def on_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """A worker has answered."""
        if not heartbeat.is_inside:
            self.remove(rank)
        elif heartbeat.spent.steps:  # the time before the first step is set-up time
            self._first.setdefault(rank, heartbeat.spent)
            self._last[rank] = heartbeat.spent
            self._has_gpus |= heartbeat.has_gpu

    def remove(self, rank: int) -> None:
        """Stop comparing a rank."""
        self._first.pop(rank, None)
        self._last.pop(rank, None)

    def find_stragglers(self, now: float) -> list[Straggler]:
        """Return the stragglers to report now."""
        if not self._is_over(now - self._began):
            return []
        began, self._began = self._began, now
        spent = {rank: _since(first, self._last[rank]) for rank, first in self._first.items()}
        self._first = dict(self._last)
        gaps = _compare({rank: each for rank, each in spent.items() if each.steps >= MIN_STEPS}, self._has_gpus)
        for rank, gap in gaps.items():
            self._records.setdefault(rank, _Record()).add(gap, began)
        news = [self._records[rank].news(rank, now) for rank in sorted(gaps)]
        return [straggler for straggler in news if straggler is not None]

    def _is_over(self, age_s: float) -> bool:
        fewest = min((self._last[rank].steps - first.steps for rank, first in self._first.items()), default=0)
        return fewest >= WINDOW_STEPS or (age_s >= WINDOW_S and fewest >= MIN_STEPS) or age_s >= MAX_WINDOW_S


def _since(first: Spent, last: Spent) -> Spent:
    return Spent._make(after - before for before, after in zip(first, last, strict=True))


def _compare(spent: Mapping[int, Spent], has_gpus: bool) -> dict[int, _Gap]:
    """Compare each rank with the others; empty for a single rank."""
    if len(spent) < 2:
        return {}
    paces = {rank: _pace(each) for rank, each in spent.items()}
    if _may_wait_unseen(paces):
        if has_gpus:
            return {}
        paces = {rank: _Pace(pace.step_s, 0.0, {"data": pace.own["data"]}) for rank, pace in paces.items()}
    own_s = _Others([pace.own_s for pace in paces.values()])
    first = next(iter(paces.values()))
    phases = {phase: _Others([pace.own[phase] for pace in paces.values()]) for phase in first.own}
    return {rank: _gap(pace, own_s, phases) for rank, pace in paces.items()}


class _Others:
    """The medians of some values without one of them, for each of them; sorted once, because there may be a thousand."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sorted = sorted(values)

    def median_without(self, value: float) -> float:
        """Return the median of all values except one that equals ``value``."""
        left_out = bisect_left(self._sorted, value)
        middle, is_between = divmod(len(self._sorted) - 1, 2)
        upper = self._without(middle, left_out)
        return upper if is_between else (self._without(middle - 1, left_out) + upper) / 2

    def _without(self, index: int, left_out: int) -> float:
        return self._sorted[index + (index >= left_out)]


def _pace(spent: Spent) -> _Pace:
    step_s, data_s, checkpoint_s, waiting_s = (seconds / spent.steps for seconds in spent[1:])
    compute_s = step_s - data_s - checkpoint_s - waiting_s
    return _Pace(step_s, waiting_s, {"compute": compute_s, "data": data_s, "checkpoint": checkpoint_s})


def _may_wait_unseen(paces: Mapping[int, _Pace]) -> bool:
    steps_s = [pace.step_s for pace in paces.values()]
    are_alike = max(steps_s) <= (1 + ALIKE_SHARE) * min(steps_s)
    return are_alike and all(pace.waiting_s <= UNSEEN_SHARE * pace.step_s for pace in paces.values())


def _gap(pace: _Pace, own_s: _Others, phases: Mapping[str, _Others]) -> _Gap:
    by_phase = {phase: phases[phase].median_without(seconds) for phase, seconds in pace.own.items()}
    above = {phase: seconds - by_phase[phase] for phase, seconds in pace.own.items()}
    return _Gap(pace.own_s, own_s.median_without(pace.own_s), pace.step_s, above)


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
