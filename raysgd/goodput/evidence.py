"""What the rules look at: the ledger of a run, and how each rank's steps went. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from raysgd.goodput.ledger import PAUSED, Ledger
from raysgd.result import Event

#: Fewer steps of a rank say nothing about its steps.
MIN_STEPS = 5


@dataclass(frozen=True)
class Pace:
    """The steps of a rank in the newest attempt.

    Attributes:
        steps: How many were looked at.
        step_s: Seconds per step.
        uses: Seconds per step of each use.
        cpu_wait_s: Seconds per step in which the rank could have run, but others had the processors; 0 where nothing says it.
        memory_wait_s: Seconds per step in which its node waited for memory.
        has_first: The first steps are among them, which compile and fill caches.
    """

    steps: int
    step_s: float
    uses: Mapping[str, float]
    cpu_wait_s: float = 0.0
    memory_wait_s: float = 0.0
    has_first: bool = False

    @property
    def own_s(self) -> float:
        """Seconds per step that are the rank's own: without waiting for others."""
        return self.step_s - self.uses.get("waiting", 0.0)


@dataclass(frozen=True)
class Saving:
    """A checkpoint: the time of its commit, seconds of its writing, and training time up to it."""

    committed: float
    write_s: float


@dataclass(frozen=True)
class Evidence:
    """The evidence that rules look at: the events of a run, summed up.

    Attributes:
        ledger: Its ledger.
        nodes: The node of each rank, as users see it.
        paces: How the steps of each rank went, in the newest attempt that made some.
        savings: Its checkpoints on storage, oldest first.
        failures: The times of its failures.
        busy: The newest process that is not one of Ray's and used processors which a rank waited for, by rank.
    """

    ledger: Ledger
    nodes: Mapping[int, str] = field(default_factory=dict)
    paces: Mapping[int, Pace] = field(default_factory=dict)
    savings: Sequence[Saving] = ()
    failures: Sequence[float] = ()
    busy: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Evidence:
        """Collect what the events of a run say, oldest first."""
        nodes: dict[int, str] = {}
        readings: dict[int, list[Mapping[str, Any]]] = {}
        paces: dict[int, Pace] = {}
        savings: list[Saving] = []
        failures: list[float] = []
        busy: dict[int, str] = {}
        for event in events:
            data = event.data
            match event.kind:
                case "worker_up":
                    nodes[data["rank"]] = str(data.get("node", ""))
                case "attempt_start":
                    paces, readings = _paces(readings) or paces, {}
                case "sample" | "left" if "uses" in data:
                    readings.setdefault(data["rank"], []).append(data)
                    if given := data.get("busy"):
                        busy[data["rank"]] = f"{given['name']} (pid {given['pid']}, {given['processors']} processors)"
                case "checkpoint":
                    savings.append(Saving(event.timestamp, float(data.get("seconds") or 0.0)))
                case "failure":
                    failures.append(event.timestamp)
        return cls(Ledger.of(events), nodes, _paces(readings) or paces, savings, failures, busy)

    @cached_property
    def totals(self) -> dict[str, float]:
        """Seconds of all workers by use."""
        return self.ledger.totals()

    @cached_property
    def held_s(self) -> float:
        """Seconds of all workers, without pauses."""
        return sum(seconds for use, seconds in self.totals.items() if use != PAUSED)

    def share(self, *uses: str) -> float:
        """Return the part of the workers' time that was used so; 0 if there is no time."""
        return sum(self.totals.get(use, 0.0) for use in uses) / self.held_s if self.held_s else 0.0

    @cached_property
    def stepping_share(self) -> float:
        """The part of the workers' time in which steps were made."""
        return self.share(
            "training", "evaluation", "data", "waiting", "checkpoint", "callbacks", "garbage", "compiling"
        )

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step: the median over the ranks; 0 without any."""
        return median(pace.step_s for pace in self.paces.values()) if self.paces else 0.0

    def gain_without(self, use: str) -> float | None:
        """Return how many times as many steps are made in a time without a use, all else being equal; None without steps."""
        if not self.step_s:
            return None
        return gain_of(self.step_s, median(pace.uses.get(use, 0.0) for pace in self.paces.values()))


def gain_of(step_s: float, saved_s: float) -> float:
    """Return how many times as many steps are made in a time, if each takes ``saved_s`` less than ``step_s``."""
    return step_s / max(step_s - saved_s, 1e-9)


def _paces(readings: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, Pace]:
    """Return how the steps of each rank went, between its first and last readings after a step; of one reading, all its steps."""
    found: dict[int, Pace] = {}
    for rank, samples in readings.items():
        made = [each for each in samples if each["steps"] > 0]
        if has_first := len(made) == 1:
            setup_s = {use: seconds for use, seconds in made[0]["uses"].items() if use == "setup"}
            made.insert(0, {"steps": 0, "uses": setup_s})
        if len(made) < 2 or (steps := made[-1]["steps"] - made[0]["steps"]) < MIN_STEPS:
            continue
        first, last = made[0], made[-1]
        spent = {use: seconds - first["uses"].get(use, 0.0) for use, seconds in last["uses"].items()}
        uses = {use: seconds / steps for use, seconds in spent.items() if use != "script"}  # which is between steps
        cpu_wait_s, memory_wait_s = (_added(made, name) / steps for name in ("cpu_wait_s", "memory_wait_s"))
        found[rank] = Pace(steps, sum(uses.values()), uses, cpu_wait_s, memory_wait_s, has_first)
    return found


def _added(readings: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return by how much a number that only grows has grown between the first and the last reading that have it."""
    known = [reading[name] for reading in readings if reading.get(name) is not None]
    return float(known[-1] - known[0]) if known else 0.0
