"""A worker's vital signs: CPU, memory, GPU, pace of reports. Runs in the stream's thread of a worker, every few seconds."""

from __future__ import annotations

import time
from typing import Any

import psutil

from raysgd._util.imported import imported

SAMPLE_INTERVAL_S = 2.0


class Sampler:
    """Looks at its own process. `due` is cheap; `sample` reads /proc."""

    def __init__(self, identity: dict[str, Any]) -> None:
        self._identity = identity
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first reading is the zero of the next
        self._reports = 0
        self._sampled_at = time.monotonic()
        self._export: Any = None

    def due(self) -> bool:
        return time.monotonic() - self._sampled_at >= SAMPLE_INTERVAL_S

    def sample(self, num_reports: int) -> dict[str, Any]:
        """The values since the last sample; ``num_reports`` is the count so far."""
        now = time.monotonic()
        elapsed, self._sampled_at = now - self._sampled_at, now
        made, self._reports = num_reports - self._reports, num_reports
        values = {
            **self._identity,
            "cpu_percent": self._process.cpu_percent(),
            "rss_bytes": self._process.memory_info().rss,
            **_gpu(),
            "reports_per_s": made / elapsed,
            "time_per_report_s": elapsed / made if made else None,
        }
        self._publish(values)
        return values

    def _publish(self, values: dict[str, Any]) -> None:
        """Hand the numbers to Ray's metrics, from which its dashboard and Prometheus read them."""
        if self._export is None:
            from ray.util.metrics import Gauge

            keys = ("cpu_percent", "rss_bytes", "gpu_memory_bytes", "gpu_percent", "reports_per_s", "time_per_report_s")
            self._export = {
                key: Gauge(f"raysgd_worker_{key}", f"{key} of a raysgd worker", tag_keys=("run", "rank"))
                for key in keys
            }
        tags = {"run": str(values.get("run", "")), "rank": str(values["rank"])}
        for key, gauge in self._export.items():
            if values[key] is not None:
                gauge.set(float(values[key]), tags=tags)


def _gpu() -> dict[str, Any]:
    torch = imported("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {"gpu_memory_bytes": None, "gpu_percent": None}
    try:
        percent: int | None = torch.cuda.utilization()
    except Exception:  # needs NVIDIA's management library, which not every machine has
        percent = None
    return {"gpu_memory_bytes": torch.cuda.memory_reserved(), "gpu_percent": percent}
