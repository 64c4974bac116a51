"""What the rules look at: the ledger of a run, and how each rank's steps went. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

from raysgd.goodput.ledger import PAUSED, WAITING, Ledger
from raysgd.result import Event

#: Fewer steps of a rank say nothing about its steps.
MIN_STEPS = 5
#: The first steps compile, and fill caches: what comes after a reading within them is not as later steps are.
FIRST_STEPS = 2
#: A process that uses less than this part of a processor takes none from a rank.
MIN_BUSY = 0.25
#: The first steps are looked at too, where this part of all steps came after the first reading at most.
FEW_LATER = 0.25
#: The time of an attempt is looked at in so many windows at most, in which each rank has a reading.
MAX_WINDOWS = 32
#: So many standard errors lie between what batches show about their cost, and what is taken to be certain.
STANDARD_ERRORS = 3


@dataclass(frozen=True)
class Batches:
    """The batches of a rank. A value is a number in their arrays: larger batches and longer rows have more.

    Attributes:
        rows, values: Means of a batch.
        spread: The standard deviation of the values of a batch.
        fixed_s: Seconds of computing with a batch that certainly do not depend on its values.
        value_s: Seconds of computing that each value certainly adds. Both are 0 where all batches are of one size.
    """

    rows: float
    values: float
    spread: float = 0.0
    fixed_s: float = 0.0
    value_s: float = 0.0

    @classmethod
    def of(cls, sums: Sequence[float]) -> Batches | None:
        """Find a line through computing times by values; see `raysgd.session.progress.BatchSizes.sums`."""
        count, rows, values, seconds, squares, products, seconds_squared = sums
        if count < MIN_STEPS:
            return None
        mean, mean_s = values / count, seconds / count
        variance = squares / count - mean**2
        if variance <= (1e-3 * mean) ** 2:
            return cls(rows / count, mean)
        slope = (products / count - mean * mean_s) / variance
        unexplained = max(0.0, seconds_squared / count - mean_s**2 - slope**2 * variance)
        error = STANDARD_ERRORS * sqrt(unexplained / variance / max(1, count - 2))
        fixed_s = max(0.0, mean_s - max(0.0, slope + error) * mean)
        return cls(rows / count, mean, sqrt(variance), fixed_s, max(0.0, slope - error))


@dataclass(frozen=True)
class Pace:
    """The steps of a rank in the newest attempt.

    Attributes:
        steps: How many were looked at.
        step_s: Seconds per step.
        uses: Seconds per step of each use that workers measure.
        cpu_wait_s: Seconds per step in which the rank could have run, but others had the processors; 0 where nothing says it.
        memory_wait_s: Seconds per step in which its node waited for memory.
        sent_bytes: Bytes of gradients per step that it averaged with other ranks; 0 where that is not seen.
        batches: Its batches; None where raysgd did not read them.
        gpu_share: The part of the time in which its GPU computed; None without a GPU.
        has_first: The first steps are among them, which compile and fill caches.
    """

    steps: int
    step_s: float
    uses: Mapping[str, float]
    cpu_wait_s: float = 0.0
    memory_wait_s: float = 0.0
    sent_bytes: float = 0.0
    batches: Batches | None = None
    gpu_share: float | None = None
    has_first: bool = False

    @property
    def waiting_s(self) -> float:
        """Seconds per step of waiting for other ranks and for what they exchange."""
        return self.uses.get(WAITING, 0.0)

    @property
    def own_s(self) -> float:
        """Seconds per step that are the rank's own: without waiting for others."""
        return self.step_s - self.waiting_s

    @property
    def computing_s(self) -> float:
        """Seconds per step that nothing else is known to have: computing."""
        known = ("data", "evaluation", "checkpoint", "callbacks", "compiling", "garbage")
        return self.own_s - sum(self.uses.get(use, 0.0) for use in known)


class Saving(NamedTuple):
    """A checkpoint on storage: the seconds of its writing, when it was there, and how many attempts had begun."""

    write_s: float
    at: float
    attempt: int


class Window(NamedTuple):
    """A part of the newest attempt's time: when it began, and how the ranks' steps went in it."""

    began: float
    paces: Mapping[int, Pace]


@dataclass(frozen=True)
class Evidence:
    """The evidence that rules look at: the events of a run, summed up.

    Attributes:
        ledger: Its ledger.
        totals: Seconds of all workers by use.
        nodes: The node of each rank, as users see it.
        paces: How the steps of each rank went, in the newest attempt that made some.
        windows: The same for parts of the time, oldest first; none of an attempt that is too short.
        savings: Its checkpoints on storage, oldest first.
        num_failures: How many failures it had.
        busy: The newest process that is not one of Ray's and used processors which a rank waited for, by rank.
        backend: The name of its backend, if that is known.
    """

    ledger: Ledger
    totals: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    paces: Mapping[int, Pace] = field(default_factory=dict)
    windows: Sequence[Window] = ()
    savings: Sequence[Saving] = ()
    num_failures: int = 0
    busy: Mapping[int, str] = field(default_factory=dict)
    backend: str = ""

    @classmethod
    def of(cls, events: Sequence[Event]) -> Evidence:
        """Collect what the events of a run say, oldest first."""
        nodes: dict[int, str] = {}
        readings, newest = Readings(), Readings()
        savings: list[Saving] = []
        failures, attempts, backend = 0, 0, ""
        for event in events:
            data = event.data
            match event.kind:
                case "run_start":
                    backend = data.get("backend", "")
                case "worker_up":
                    nodes[data["rank"]] = str(data.get("node", ""))
                case "attempt_start":
                    attempts += 1
                    newest, readings = readings if readings.paces() else newest, Readings()
                case "sample" | "left" if "uses" in data:
                    readings.add(event.timestamp, data)
                case "checkpoint":
                    savings.append(Saving(float(data.get("seconds") or 0.0), event.timestamp, attempts))
                case "failure":
                    failures += 1
        used = readings if readings.paces() else newest
        ledger = Ledger.of(events)
        return cls(ledger, ledger.totals(), nodes, used.paces(), used.windows(), savings, failures, used.busy, backend)

    def within(self, window: Window) -> Evidence:
        """Return the evidence with the steps of a window only."""
        return replace(self, paces=window.paces, windows=())

    @property
    def held_s(self) -> float:
        """Seconds of all workers, without pauses."""
        return sum(seconds for use, seconds in self.totals.items() if use != PAUSED)

    @property
    def num_workers(self) -> int:
        return max(1, len(self.nodes))

    @property
    def stall_s(self) -> float:
        """Seconds that the rank which saves longest stands in a ``save_checkpoint``: the others wait for it."""
        mean_s = self.totals.get("checkpoint", 0.0) / self.num_workers / max(1, len(self.savings))
        spent = [pace.uses.get("checkpoint", 0.0) for pace in self.paces.values()]
        return mean_s * max(spent) / fmean(spent) if any(spent) else mean_s

    @property
    def writing_share(self) -> float:
        """The part of the time of steps in which a checkpoint was being written to storage."""
        stepping_s = self.held_s * self.stepping_share / self.num_workers
        return min(1.0, sum(each.write_s for each in self.savings) / stepping_s) if stepping_s else 0.0

    @property
    def processor_wait(self) -> float:
        """The part of a step in which even the rank that waits least was ready to run and had no processor."""
        return min((pace.cpu_wait_s / pace.step_s for pace in self.paces.values() if pace.step_s), default=0.0)

    def share(self, *uses: str) -> float:
        """Return the part of the workers' time that was used so; 0 if there is no time."""
        return sum(self.totals.get(use, 0.0) for use in uses) / self.held_s if self.held_s else 0.0

    @property
    def stepping_share(self) -> float:
        """The part of the workers' time in which steps were made."""
        return self.share(
            "training", "evaluation", "data", "skew", "transfer", "checkpoint", "callbacks", "garbage", "compiling"
        )

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step: the median over the ranks; 0 without any."""
        return median(pace.step_s for pace in self.paces.values()) if self.paces else 0.0

    @cached_property
    def exchange_s(self) -> float:
        """Seconds per step in which even the rank waited that waited least; see `raysgd.goodput.ledger`."""
        least = [
            (_least_wait_s(window.paces), fmean(pace.steps for pace in window.paces.values()))
            for window in self.windows
        ]
        if not least:
            return _least_wait_s(self.paces)
        return sum(wait_s * steps for wait_s, steps in least) / sum(steps for _, steps in least)

    @cached_property
    def uneven_s(self) -> float:
        """Seconds per step of waiting for the rank with the largest batch, where each rank's batches differ from step to step.

        The largest of n values lies above their mean by a number of standard deviations that Blom gives ("Statistical estimates
        and transformed beta-variables", 1958).
        """
        known = [(pace.batches, pace.waiting_s) for pace in self.paces.values() if pace.batches is not None]
        if len(known) < max(2, len(self.paces)):
            return 0.0
        number = len(known)
        deviations = NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
        expected_s = deviations * fmean(batches.value_s * batches.spread for batches, _ in known)
        return min(expected_s, fmean(waiting_s for _, waiting_s in known))

    @property
    def sees_own_data(self) -> bool:
        """Whether the time of reading is certainly a rank's own: copying to a GPU may wait for what it waits for."""
        paces = self.paces.values()
        return all(pace.gpu_share is None for pace in paces) or any(pace.waiting_s for pace in paces)

    def cost_of(self, use: str) -> tuple[float, float | None]:
        """Return the part of the workers' time that a use within steps costs, and the gain without it; None without steps.

        It is that of the rank which has most of it: the others wait for that one.
        """
        if not self.step_s:
            return self.share(use), None
        longest_s = max(pace.uses.get(use, 0.0) for pace in self.paces.values())
        return self.stepping_share * longest_s / self.step_s, gain_of(self.step_s, longest_s)

    def place_of(self, rank: int) -> str:
        """Return a rank and its node, for a text."""
        return f"rank {rank} on {node}" if (node := self.nodes.get(rank)) else f"rank {rank}"


def gain_of(step_s: float, saved_s: float) -> float:
    """Return how many times as many steps are made in a time, if each takes ``saved_s`` less than ``step_s``."""
    return step_s / max(step_s - saved_s, 1e-9)


def _least_wait_s(paces: Mapping[int, Pace]) -> float:
    return min((pace.waiting_s for pace in paces.values()), default=0.0) if len(paces) > 1 else 0.0


class Readings:
    """What the ranks of an attempt had used their time for at each sample after the first steps.

    Args:
        only_ends: Keep the first and the newest of each rank only: then there are no windows.

    Attributes:
        busy: As in `Evidence`.
    """

    def __init__(self, *, only_ends: bool = False) -> None:
        self.busy: dict[int, str] = {}
        self._only_ends = only_ends
        self._of_rank: dict[int, list[Mapping[str, Any]]] = {}
        self._moments: dict[int, list[float]] = {}

    def add(self, at: float, data: Mapping[str, Any]) -> None:
        """Add the data of a sample, or of a rank that has left, without what came after its last step."""
        if after := data.get("after"):
            data = {**data, "uses": {use: spent_s - after.get(use, 0.0) for use, spent_s in data["uses"].items()}}
        if data.get("steps", 0) > FIRST_STEPS:
            made, moments = self._of_rank.setdefault(data["rank"], []), self._moments.setdefault(data["rank"], [])
            if self._only_ends:
                del made[1:], moments[1:]
            made.append(data)
            moments.append(at)
        if (busy := data.get("busy")) and busy["processors"] >= MIN_BUSY:
            self.busy[data["rank"]] = f"{busy['name']} (pid {busy['pid']}, {busy['processors']} processors)"

    def remove(self, rank: int) -> None:
        """Forget a rank."""
        self._of_rank.pop(rank, None)
        self._moments.pop(rank, None)

    def newest(self) -> Readings:
        """Return the newest reading of each rank, from which later ones are counted."""
        newest = Readings(only_ends=self._only_ends)
        newest.busy = self.busy
        newest._of_rank = {rank: readings[-1:] for rank, readings in self._of_rank.items()}
        newest._moments = {rank: moments[-1:] for rank, moments in self._moments.items()}
        return newest

    def fewest_steps(self) -> int:
        """Return the steps of the rank that has made fewest between its first and newest reading."""
        return min((made[-1]["steps"] - made[0]["steps"] for made in self._of_rank.values()), default=0)

    def paces(self, *, from_start: bool = True) -> dict[int, Pace]:
        """Return how the steps of each rank went; ``from_start``: the first ones too, where there are few others."""
        found = {rank: _pace(made, may_have_first=from_start) for rank, made in self._of_rank.items()}
        return {rank: pace for rank, pace in found.items() if pace is not None}

    def windows(self) -> list[Window]:
        """Return the steps in parts of the time in which all ranks have readings."""
        if not self._moments:
            return []
        start = max(moments[0] for moments in self._moments.values())
        end = min(moments[-1] for moments in self._moments.values())
        number = min(MAX_WINDOWS, min(map(len, self._moments.values())) - 1)
        cuts = [start + (end - start) * part / max(number, 1) for part in range(number + 1)]
        found = [Window(begin, self._paces_between(begin, until)) for begin, until in pairwise(cuts)]
        return [window for window in found if len(window.paces) == len(self._of_rank)]

    def _paces_between(self, begin: float, until: float) -> dict[int, Pace]:
        found: dict[int, Pace] = {}
        for rank, moments in self._moments.items():
            first, last = (bisect_left(moments, moment) for moment in (begin, until))
            if first < last and (pace := _pace(self._of_rank[rank][first : last + 1])) is not None:
                found[rank] = pace
        return found


def _pace(made: Sequence[Mapping[str, Any]], *, may_have_first: bool = False) -> Pace | None:
    """Return the steps between the first and last readings, or all up to the last, where nearly all came before the first."""
    first, last = made[0], made[-1]
    if has_first := may_have_first and last["steps"] - first["steps"] < max(MIN_STEPS, last["steps"] * FEW_LATER):
        setup_s = {use: seconds for use, seconds in last["uses"].items() if use == "setup"}
        first = {"steps": 0, "uses": setup_s, "sent_bytes": 0}
        made = [first, *made]
    steps = last["steps"] - first["steps"]
    if steps < MIN_STEPS:
        return None
    spent = {use: seconds - first["uses"].get(use, 0.0) for use, seconds in last["uses"].items()}
    uses = {use: seconds / steps for use, seconds in spent.items() if use != "script"}  # which is between steps
    cpu_wait_s, memory_wait_s, sent_bytes = (
        _added(made, name) / steps for name in ("cpu_wait_s", "memory_wait_s", "sent_bytes")
    )
    gpu = [each["gpu_percent"] / 100 for each in made[1:] if each.get("gpu_percent") is not None]
    return Pace(
        steps,
        sum(uses.values()),
        uses,
        cpu_wait_s,
        memory_wait_s,
        sent_bytes,
        _batches(first.get("batches", {}), last.get("batches", {})),
        fmean(gpu) if gpu else None,
        has_first,
    )


def _batches(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Batches | None:
    """Return the batches of the dataset with which the rank has computed longest."""
    added = [
        [each - less for each, less in zip(sums, before.get(name, [0] * 7), strict=True)]
        for name, sums in after.items()
    ]
    longest = max(added, key=lambda sums: sums[3], default=None)
    return None if longest is None else Batches.of(longest)


def _added(readings: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return by how much a number that only grows has grown between the first and the last reading that have it."""
    known = [reading[name] for reading in readings if reading.get(name) is not None]
    return float(known[-1] - known[0]) if known else 0.0
