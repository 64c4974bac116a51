"""What a run does, as metrics of Ray, which its dashboard and Prometheus read. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from raysgd._util.logs import get_logger
from raysgd.goodput.ledger import WORDS, Ledger, goodput_of, now_event
from raysgd.result import Event

#: The counters: their names, without the end ``_total`` that they get in Prometheus, and their meanings.
COUNTERS = {
    "rounds": "Rounds of reports, repeated ones included",
    "restarts": "Attempts after the first, by cause",
    "failures": "Failures that count for max_failures",
    "checkpoints": "Checkpoints on storage",
    "checkpoint_seconds": "Seconds that checkpoints took to write: the slowest rank, from its own save, and the commit",
    "checkpoint_bytes": "Bytes of all checkpoints",
}
GAUGES = {
    "iteration": "The last complete round",
    "goodput_ratio": "Part of the workers' time, without pauses, that was training and evaluation",
    # No counter, which must not fall: a failure makes training repeated steps.
    "worker_seconds": "Seconds of all workers by what they were used for",
    "world_size": "Workers of the attempt; 0 while there is none",
}
#: Seconds between two exports, and the part of a processor that may add up the ledger: that of 1,000 workers takes 0.04 s.
_INTERVAL_S, _SHARE = 2.0, 0.01
#: Samples of a rank that the ledger keeps. The sums of the newest one are those of all before it.
_MAX_READINGS = 2
#: Labels of metrics in addition to ``run``.
_LABELS = {"restarts": ("cause",), "worker_seconds": ("use",)}


class RunMetrics:
    """The metrics of one run. Used in the event loop.

    Args:
        run: The label ``run`` of all of them.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._added: defaultdict[tuple[str, str], float] = defaultdict(float)  # by name and cause
        self._ledger = Ledger(_MAX_READINGS)
        self._counted = self._world_size = 0
        self._has_begun = False
        self._cause = "death"  # of the next restart; a TrainerActor that restarts has lost its workers
        self._is_hang = False
        self._exported: dict[str, Any] = {}

    def observe(self, event: Event, iteration: int) -> None:
        """Take an event of the run, and its last complete round at that time."""
        data = event.data
        self._ledger.add(event)
        self._follow_cause(event.kind, data)
        match event.kind:
            case "attempt_start":
                self._add("restarts", self._has_begun or data["attempt"] > 1, self._cause)
                self._has_begun = True
                self._world_size = data["world_size"]
                self._counted = data["iterations_before"]
            case "failure":
                self._add("failures", 1)
                self._world_size = 0
            case "regroup" | "paused" | "run_end":
                self._world_size = 0
            case "checkpoint":
                self._add("checkpoints", 1)
                self._add("checkpoint_seconds", data.get("seconds") or 0.0)
                self._add("checkpoint_bytes", data.get("size_bytes") or 0)
        self._add("rounds", max(0, iteration - self._counted))
        self._counted = iteration

    async def export_regularly(self) -> None:
        """Export until cancelled, and then once more; also while nothing happens, as Ray drops gauges that are not set again."""
        try:
            with contextlib.suppress(asyncio.CancelledError):
                totals: dict[str, float] = {}
                due_at = 0.0
                while True:
                    await asyncio.sleep(_INTERVAL_S)
                    if time.monotonic() >= due_at:
                        self._ledger.add(now_event())
                        totals, took_s = await asyncio.to_thread(self._add_up)
                        due_at = time.monotonic() + took_s / _SHARE
                    self.export(totals)
            self.export(self._ledger.totals())
        except Exception as error:  # a run must not fail because it is measured
            get_logger().warning("the run's metrics are no longer exported to Prometheus: %s", error)

    def _add_up(self) -> tuple[dict[str, float], float]:
        """Return the seconds of each use, and those of a processor that it took to add them up."""
        began = time.thread_time()
        return self._ledger.totals(), time.thread_time() - began

    def _add(self, name: str, amount: float, cause: str = "") -> None:
        if amount:
            self._added[name, cause] += amount

    def _follow_cause(self, kind: str, data: Mapping[str, Any]) -> None:
        """Remember why the next attempt will start, as the label ``cause`` says it."""
        match kind:
            case "hang":
                self._is_hang = True
            case "failure":
                self._cause = "hang" if self._is_hang else str(data["cause"])
            case "regroup":
                self._cause = str(data["cause"])
            case "paused":
                self._cause = "pause"
            case "controller_restart":
                self._cause = "controller"
            case "attempt_start":
                self._is_hang = False

    def export(self, totals: Mapping[str, float]) -> None:
        """Set the metrics of Ray to the state of the run, of whose workers' time these seconds are known by use."""
        if not self._exported:
            from ray.util.metrics import Counter, Gauge

            kinds = [(Counter, COUNTERS), (Gauge, GAUGES)]
            self._exported = {
                name: kind(f"raysgd_run_{name}", description, tag_keys=("run", *_LABELS.get(name, ())))
                for kind, named in kinds
                for name, description in named.items()
            }
        labels = {"run": self._run}
        for (name, cause), amount in self._added.items():
            self._exported[name].inc(amount, tags=labels | ({"cause": cause} if cause else {}))
        self._added.clear()
        for use in WORDS:
            self._exported["worker_seconds"].set(totals.get(use, 0.0), tags=labels | {"use": use})
        gauges = {
            "iteration": self._counted,
            "world_size": self._world_size,
            "goodput_ratio": goodput_of(totals) or 0.0,
        }
        for name, value in gauges.items():
            self._exported[name].set(float(value), tags=labels)
