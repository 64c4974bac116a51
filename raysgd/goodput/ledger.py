"""The ledger of a run's time: what each second of each worker was used for, from the events of its journal. Pure.

A worker's time in an attempt is divided by what it measured itself (`raysgd.session.progress`), which comes with its samples and
when it leaves train_func. All other time belongs to what raysgd did: starting, recovering, and so on. A worker does not know
whether it waits for a rank that is late or for the data that they exchange; see `_Exchanges`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

from raysgd.result import Event

#: What workers measure as waiting, and the two uses that it is divided into.
WAITING, SKEW, TRANSFER = "waiting", "skew", "transfer"
#: The uses outside train_func, and of steps that a failure undid.
STARTING, RECOVERING, REGROUPING, ENDING, PAUSED, REPEATED = (
    "starting",
    "recovering",
    "regrouping",
    "ending",
    "paused",
    "repeated",
)
#: The uses that are what the user wants: goodput is their part of the time of workers, without pauses.
PRODUCTIVE = frozenset({"training", "evaluation"})
#: Every use, in the words and the order in which they are shown.
WORDS = {
    "training": "training",
    "evaluation": "evaluation",
    "data": "waiting for data",
    SKEW: "waiting for other ranks",
    TRANSFER: "exchanging with other ranks",
    "script": "waiting for the script",
    "compiling": "compiling",
    "checkpoint": "checkpoints",
    "callbacks": "callbacks",
    "garbage": "garbage collection",
    "setup": "set-up",
    STARTING: "start",
    REPEATED: "repeated steps",
    RECOVERING: "recovering",
    REGROUPING: "regrouping",
    ENDING: "end",
    PAUSED: "paused",
}
#: What ended an attempt, by the kind of its event, and the use of the time until ranks are in train_func again.
_ENDS = {
    "failure": RECOVERING,
    "controller_restart": RECOVERING,
    "regroup": REGROUPING,
    "paused": PAUSED,
    "run_end": ENDING,
}


#: So many readings of ranks are compared in an attempt at most, to divide their waiting.
_MAX_COMPARED = 50_000


class Slice(NamedTuple):
    """A rank's time from ``start`` to ``end``, in seconds since the epoch, and the seconds of each use in it."""

    rank: int
    start: float
    end: float
    uses: Mapping[str, float]


@dataclass
class _Stay:
    """A rank's time in train_func: when it entered and left, and what it had used its time for at each sample."""

    entered: float
    readings: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    left: float | None = None

    def used_until(self, moment: float) -> dict[str, float]:
        """Return what the time from the entry to ``moment`` was used for; between two readings in equal parts."""
        readings = [(self.entered, {}), *self.readings]
        later = bisect_right(readings, moment, key=lambda reading: reading[0])
        (at, before), after = readings[later - 1], readings[later : later + 1]
        part: dict[str, float] = {}
        if after:
            part = _difference(before, after[0][1])
        elif later > 1:
            part = _difference(readings[later - 2][1], before)  # no reading came since: as before it
        part = part or {"training" if before else "setup": 1.0}
        scale = (moment - at) / sum(part.values())
        return dict(Counter(before) + Counter({use: seconds * scale for use, seconds in part.items()}))


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {use: seconds for use in after if (seconds := after[use] - before.get(use, 0.0)) > 0}


@dataclass
class _Attempt:
    """An attempt: when the attempt or the start before it ended, and when and why it ended itself."""

    number: int
    size: int
    began: float
    joining: str
    trained_before_s: float
    stays: dict[int, _Stay] = field(default_factory=dict)
    end: float | None = None
    ending: str = ENDING


@dataclass(frozen=True)
class _Exchanges:
    """How much of the ranks' waiting in an attempt is exchanging, in pieces of its time.

    Where ranks exchange data, the last one to arrive waits too, as long as the data takes. So the least that any rank waits in a
    piece is exchanging, and what others wait longer is for late ranks. That is exact if one rank is the last in a piece; if ranks
    take turns, some waiting for them counts as exchanging. Before the last rank has entered train_func, all waiting is for it.

    Attributes:
        moments: The ends of the pieces.
        parts: Of each rank, the part of its waiting that is exchanging, by piece.
    """

    moments: Sequence[float] = ()
    parts: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, attempt: _Attempt, end: float) -> _Exchanges:
        stays = attempt.stays
        if len(stays) < attempt.size:
            return cls()
        start = max(stay.entered for stay in stays.values())
        end = min(end if stay.left is None else min(stay.left, end) for stay in stays.values())
        readings = max((stay.readings for stay in stays.values()), key=len)
        inside = [moment for moment, _ in readings if start < moment < end]
        stride = 1 + len(inside) * attempt.size // _MAX_COMPARED
        if end <= start:
            return cls()
        moments = [start, *inside[::stride], end]
        waits = {
            rank: [
                max(0.0, after - before)
                for before, after in pairwise(stay.used_until(moment).get(WAITING, 0.0) for moment in moments)
            ]
            for rank, stay in stays.items()
        }
        least = [min(each) for each in zip(*waits.values(), strict=True)]
        return cls(
            moments,
            {
                rank: [low / wait if wait else 0.0 for low, wait in zip(least, own, strict=True)]
                for rank, own in waits.items()
            },
        )

    def divide(self, rank: int, moment: float, uses: Mapping[str, float]) -> dict[str, float]:
        """Divide the waiting in a rank's time that begins at ``moment``, and is in one piece."""
        divided = dict(uses)
        if waiting_s := divided.pop(WAITING, 0.0):
            piece = bisect_right(self.moments, moment)
            part = self.parts[rank][piece - 1] if 0 < piece < len(self.moments) else 0.0
            parts = {SKEW: waiting_s * (1 - part), TRANSFER: waiting_s * part}
            divided |= {use: seconds for use, seconds in parts.items() if seconds > 0}
        return divided


class Ledger:
    """Adds up what a run's time was used for. Events are added in their order; a run may be live.

    Args:
        max_readings: How many samples of a rank in an attempt are kept, an even number; of more, every second one.

    Attributes:
        now: The time of the newest event.
    """

    def __init__(self, max_readings: int = 1024) -> None:
        self.now = 0.0
        self._max_readings = max_readings
        self._attempts: list[_Attempt] = []
        self._spans: list[tuple[float, float, str]] = []  # without an attempt: pauses, and the end
        self._run_began = self._began = 0.0
        self._joining = STARTING
        self._is_over = False

    @classmethod
    def of(cls, events: Sequence[Event]) -> Ledger:
        """Make the ledger of all events of a run so far."""
        ledger = cls()
        for event in events:
            ledger.add(event)
        return ledger

    def add(self, event: Event) -> None:
        """Add the next event; `now_event` for the time of a live run up to now. After the end of the run, none takes time."""
        if self._is_over or (event.kind == "now" and not self.now):  # such as a late warning; or nothing has begun
            return
        at, data = event.timestamp, event.data
        if not self.now:
            self._run_began = self._began = at
        self.now = max(self.now, at)
        match event.kind:
            case "attempt_start":
                self._start(data)
            case "entered":
                if (attempt := self._attempt(data)) is not None:
                    attempt.stays[data["rank"]] = _Stay(min(max(data.get("timestamp", at), attempt.began), at))
            case "sample" | "left":
                self._read(event.kind, at, data)
            case "failure" | "controller_restart" | "regroup" | "paused" | "run_end":
                self._end(at, _ENDS[event.kind])
                self._is_over = event.kind == "run_end"
            case "resumed":
                self._span(at, PAUSED)
                self._joining = STARTING

    def _start(self, data: Mapping[str, Any]) -> None:
        if self._attempts and self._attempts[-1].end is None:  # it ended without a word: the controller was lost
            self._end(self.now, RECOVERING)
        trained_s = float(data.get("time_before_s") or 0.0)
        self._attempts.append(_Attempt(data["attempt"], data["world_size"], self._began, self._joining, trained_s))

    def _attempt(self, data: Mapping[str, Any]) -> _Attempt | None:
        """Return the running attempt; None if there is none, or the data is that of another one."""
        running = self._attempts[-1] if self._attempts and self._attempts[-1].end is None else None
        return None if running is None or data.get("attempt", running.number) != running.number else running

    def _read(self, kind: str, at: float, data: Mapping[str, Any]) -> None:
        attempt = self._attempt(data)
        stay = None if attempt is None else attempt.stays.get(data["rank"])
        if stay is None or stay.left is not None:
            return
        if uses := data.get("uses"):
            # The rank's own clock says when the reading was: its uses add up to the time since it entered.
            moment = min(stay.entered + sum(uses.values()), at)
            if not stay.readings or moment > stay.readings[-1][0]:
                stay.readings.append((moment, uses))
            if len(stay.readings) >= self._max_readings:  # they add up since the entry: nothing is lost but when it was
                del stay.readings[::2]
        if kind == "left":
            stay.left = min(stay.readings[-1][0], at) if uses else at

    def _end(self, at: float, joining: str) -> None:
        if self._attempts and self._attempts[-1].end is None:
            self._attempts[-1].end = at
            self._attempts[-1].ending = REGROUPING if joining == PAUSED else joining
            self._began = at
        else:
            self._span(at, self._joining)
        self._joining = joining

    def _span(self, at: float, use: str) -> None:
        if at > self._began:
            self._spans.append((self._began, at, use))
        self._began = at

    def slices(self) -> Iterator[Slice]:
        """Return the time of each worker, in pieces that leave nothing out and do not overlap.

        A rank has a piece for each of its samples, and for those of the rank with most.
        """
        kept_s = float("inf")
        cuts: list[float] = []
        attempts = [*self._attempts]  # another thread may add events meanwhile
        for attempt in reversed(attempts):  # what a later attempt began from is what was kept of the earlier ones
            cuts.append(kept_s - attempt.trained_before_s)
            kept_s = min(kept_s, attempt.trained_before_s)
        for attempt, kept in zip(attempts, reversed(cuts), strict=True):
            end = self.now if attempt.end is None else attempt.end
            exchanges = _Exchanges.of(attempt, end)
            for rank in range(attempt.size):
                yield from _slices_of(attempt, rank, end, kept, exchanges)
        size = self._attempts[0].size if self._attempts else 1
        spans = [*self._spans]
        if not self._is_over and (not self._attempts or self._attempts[-1].end is not None) and self.now > self._began:
            spans.append((self._began, self.now, self._joining))
        for start, end, use in spans:
            before = [attempt.size for attempt in self._attempts if attempt.began <= start]
            for rank in range(before[-1] if before else size):
                yield Slice(rank, start, end, {use: end - start})

    @property
    def length_s(self) -> float:
        """Seconds from the first event to the newest."""
        return self.now - self._run_began

    def totals(self) -> dict[str, float]:
        """Return the seconds of all workers by use, in the order of `WORDS`; without uses that had none."""
        sums: Counter[str] = Counter()
        for each in self.slices():
            sums.update(each.uses)
        return {use: sums[use] for use in WORDS if sums[use] > 0}

    def by_rank(self) -> dict[int, dict[str, float]]:
        """Return the seconds of each rank by use."""
        sums: dict[int, Counter[str]] = {}
        for each in self.slices():
            sums.setdefault(each.rank, Counter()).update(each.uses)
        return {rank: dict(uses) for rank, uses in sorted(sums.items())}

    def goodput(self) -> float | None:
        """Return the part of the workers' time, without pauses, that was training and evaluation; None before there is any."""
        return goodput_of(self.totals())


def now_event() -> Event:
    """Return an event that says nothing but the time: a pause, or a wait for resources, has no other one meanwhile."""
    return Event("now", time.time())


def goodput_of(totals: Mapping[str, float]) -> float | None:
    """Return the part of `PRODUCTIVE` uses; see `Ledger.goodput`."""
    held_s = sum(seconds for use, seconds in totals.items() if use != PAUSED)
    return sum(totals.get(use, 0.0) for use in PRODUCTIVE) / held_s if held_s else None


def _slices_of(attempt: _Attempt, rank: int, end: float, kept_s: float, exchanges: _Exchanges) -> Iterator[Slice]:
    """Return the time of a rank in an attempt. Of the time in train_func, ``kept_s`` is not undone by a failure."""
    stay = attempt.stays.get(rank)
    entered = end if stay is None else min(stay.entered, end)
    left = end if stay is None or stay.left is None else max(entered, min(stay.left, end))
    if entered > attempt.began:
        yield Slice(rank, attempt.began, entered, {attempt.joining: entered - attempt.began})
    if stay is not None:
        kept = min(left, max(entered, entered + kept_s))
        cuts = chain((moment for moment, _ in stay.readings), exchanges.moments)
        moments = {entered, kept, left, *(moment for moment in cuts if entered < moment < left)}
        used = [(moment, stay.used_until(moment)) for moment in sorted(moments)]
        for (begin, before), (until, after) in pairwise(used):
            uses = exchanges.divide(rank, begin, _difference(before, after))
            yield Slice(rank, begin, until, uses if begin < kept else _undone(uses, attempt.ending))
    if end > left:
        yield Slice(rank, left, end, {attempt.ending: end - left})


def _undone(uses: Mapping[str, float], ending: str) -> dict[str, float]:
    """Return the uses of time after the newest step that is kept: waiting there is for ranks that are gone."""
    waiting_s = uses.get(SKEW, 0.0)
    undone = {REPEATED: sum(uses.values()) - waiting_s, ending: waiting_s}
    return {use: seconds for use, seconds in undone.items() if seconds > 0}
