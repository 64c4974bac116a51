"""What a run does, as metrics of Ray, which its dashboard and Prometheus read. Runs in the TrainerActor.

They are set when an event of the run is recorded; while workers train, each sends a sample every two seconds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from raysgd._util.logs import get_logger
from raysgd.controller.commands import RecordEvent
from raysgd.controller.run.goodput import Goodput

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
    "goodput_fraction": "Fraction of the time that made progress which was kept",
    "world_size": "Workers of the attempt; 0 while there is none",
}
#: Seconds between two exports that only samples cause.
_INTERVAL_S = 2.0
#: Labels of metrics in addition to ``run``.
_LABELS = {"restarts": ("cause",)}
_MINOR = frozenset({"worker_up", "entered", "left", "run_start", "checkpoint_deleted", "attempt_start"})


class RunMetrics:
    """The metrics of one run.

    Args:
        run: The label ``run`` of all of them.
        clock: Seconds.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._added: defaultdict[tuple[str, str], float] = defaultdict(float)  # by name and cause
        self._gauges: dict[str, float] = dict.fromkeys(GAUGES, 0.0)
        self._goodput = Goodput(clock())
        self._has_begun = False
        self._cause = "death"  # of the next restart; a TrainerActor that restarts has lost its workers
        self._is_hang = False
        self._counted = 0
        self._exported: dict[str, Any] | None = None
        self._exported_at = 0.0
        self._is_broken = False

    def observe(self, event: RecordEvent, iteration: int) -> None:
        """Take an event of the run, and its last complete round at that time; set the metrics."""
        data, now = event.data, self._clock()
        self._goodput.observe(event.kind, data, iteration, now)
        self._follow_cause(event.kind, data)
        match event.kind:
            case "attempt_start":
                self._add("restarts", self._has_begun or data["attempt"] > 1, self._cause)
                self._has_begun = True
                self._gauges["world_size"] = data["world_size"]
                self._counted = data["iterations_before"]
            case "failure":
                self._add("failures", 1)
                self._gauges["world_size"] = 0
            case "regroup" | "paused" | "run_end":
                self._gauges["world_size"] = 0
            case "checkpoint":
                self._add("checkpoints", 1)
                self._add("checkpoint_seconds", data.get("seconds") or 0.0)
                self._add("checkpoint_bytes", data.get("size_bytes") or 0)
        if event.kind in _MINOR:  # nothing that cannot wait for the next sample, such as a start
            return
        if event.kind == "sample" and now - self._exported_at < _INTERVAL_S:  # every rank sends them
            return
        self._exported_at = now
        self._add("rounds", max(0, iteration - self._counted))
        self._counted = iteration
        self._gauges["iteration"] = iteration
        self._gauges["goodput_fraction"] = self._goodput.fraction(now)
        if self._is_broken:
            return
        try:
            self._export()
        except Exception as error:  # a run must not fail because it is measured
            self._is_broken = True
            get_logger().warning("the run's metrics are no longer exported to Prometheus: %s", error)

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

    def _export(self) -> None:
        if self._exported is None:
            from ray.util.metrics import Counter, Gauge

            kinds = [(Counter, COUNTERS), (Gauge, GAUGES)]
            self._exported = {
                name: kind(f"raysgd_run_{name}", description, tag_keys=("run", *_LABELS.get(name, ())))
                for kind, named in kinds
                for name, description in named.items()
            }
        for (name, cause), amount in self._added.items():
            labels = {"run": self._run} | ({"cause": cause} if cause else {})
            self._exported[name].inc(amount, tags=labels)
        self._added.clear()
        for name, value in self._gauges.items():
            self._exported[name].set(float(value), tags={"run": self._run})
