"""What a run does, as metrics of Ray, which its dashboard and Prometheus read. Runs in the TrainerActor.

They are set when an event of the run is recorded; while workers train, each sends a sample every two seconds.
"""

from __future__ import annotations

import time
from typing import Any

from raysgd._util.logs import get_logger
from raysgd.controller.commands import RecordEvent

#: The counters: their names, without the end ``_total`` that they get in Prometheus, and their meanings.
COUNTERS = {
    "rounds": "Rounds of reports, repeated ones included",
    "restarts": "Attempts after the first",
    "failures": "Failures that count for max_failures",
    "checkpoints": "Checkpoints on storage",
    "checkpoint_seconds": "Seconds from a save to its commit, of all checkpoints",
    "checkpoint_bytes": "Bytes of all checkpoints",
}
GAUGES = {
    "iteration": "The last complete round",
    "world_size": "Workers of the attempt; 0 while there is none",
}
#: Seconds between two exports that only samples cause.
_INTERVAL_S = 2.0
_MINOR = frozenset({"worker_up", "entered", "left", "run_start", "checkpoint_deleted", "attempt_start"})


class RunMetrics:
    """The metrics of one run.

    Args:
        run: The label ``run`` of all of them.
    """

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._added = dict.fromkeys(COUNTERS, 0.0)
        self._gauges = dict.fromkeys(GAUGES, 0)
        self._has_begun = False
        self._counted = 0
        self._exported: dict[str, Any] | None = None
        self._exported_at = 0.0
        self._is_broken = False

    def observe(self, event: RecordEvent, iteration: int) -> None:
        """Take an event of the run, and its last complete round at that time; set the metrics."""
        data = event.data
        match event.kind:
            case "attempt_start":
                self._added["restarts"] += self._has_begun or data["attempt"] > 1
                self._has_begun = True
                self._gauges["world_size"] = data["world_size"]
                self._counted = data["iterations_before"]
            case "failure":
                self._added["failures"] += 1
                self._gauges["world_size"] = 0
            case "regroup" | "paused" | "run_end":
                self._gauges["world_size"] = 0
            case "checkpoint":
                self._added["checkpoints"] += 1
                self._added["checkpoint_seconds"] += data.get("seconds") or 0.0
                self._added["checkpoint_bytes"] += data.get("size_bytes") or 0
        now = time.monotonic()
        if event.kind in _MINOR:  # nothing that cannot wait for the next sample, such as a start
            return
        if event.kind == "sample" and now - self._exported_at < _INTERVAL_S:  # every rank sends them
            return
        self._exported_at = now
        self._added["rounds"] += max(0, iteration - self._counted)
        self._counted = self._gauges["iteration"] = iteration
        if self._is_broken:
            return
        try:
            self._export()
        except Exception as error:  # a run must not fail because it is measured
            self._is_broken = True
            get_logger().warning("the run's metrics are no longer exported to Prometheus: %s", error)

    def _export(self) -> None:
        if self._exported is None:
            from ray.util.metrics import Counter, Gauge

            kinds = [(Counter, COUNTERS), (Gauge, GAUGES)]
            self._exported = {
                name: kind(f"raysgd_run_{name}", description, tag_keys=("run",))
                for kind, named in kinds
                for name, description in named.items()
            }
        for name, amount in self._added.items():
            if amount:
                self._exported[name].inc(amount, tags=self._tags)
        self._added = dict.fromkeys(COUNTERS, 0.0)
        for name, value in self._gauges.items():
            self._exported[name].set(float(value), tags=self._tags)
