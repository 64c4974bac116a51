"""Samples of the workers are exported as metrics for Prometheus and Ray's dashboard."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import raysgd
from support.poll import until
from support.project import ROOT
from support.runs import PATIENCE_S, latest_run, make_trainer, quiet, travels_by_value

travels_by_value(__name__)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


PORT = _free_port()
RAY_INIT = {"_metrics_export_port": PORT, "_system_config": {"metrics_report_interval_ms": 500}}


def metrics_page() -> str:
    """Return what Prometheus reads from the node's exporter."""
    import ray

    host = ray.util.get_node_ip_address()
    try:
        return str(urllib.request.urlopen(f"http://{host}:{PORT}/metrics", timeout=10).read().decode())
    except OSError:
        return ""


def exported(name: str) -> dict[tuple[str, str], float]:
    """Return the current values of a gauge in the node's exporter, by run and rank."""
    text = metrics_page()
    found = {}
    for labels, value in re.findall(rf"^ray_{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[tags["run"], tags["rank"]] = float(value)
    return found


def test_worker_metrics_are_exported_during_training(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        while not raysgd.should_stop():
            raysgd.report(pid=0)
            time.sleep(0.05)

    with make_trainer(tmp_path) as trainer:
        stream = trainer.run_generator(train_func, {}, callbacks=quiet())
        next(stream)
        name = Path(str(stream.run_dir)).name
        assert until(lambda: len(exported("raysgd_worker_rss_bytes")) == 2, PATIENCE_S, interval_s=0.5)
        memory = exported("raysgd_worker_rss_bytes")
        assert set(memory) == {(name, "0"), (name, "1")}
        assert all(10e6 < value < 10e9 for value in memory.values())
        assert until(lambda: all(5 < value < 25 for value in exported("raysgd_worker_reports_per_s").values()), 20, 0.5)
        assert set(exported("raysgd_worker_cpu_percent")) == set(memory)
        times = exported("raysgd_worker_time_per_report_s")
        assert set(times) == set(memory) and all(0.04 < value < 0.2 for value in times.values())
        names = set(re.findall(r"^ray_raysgd_worker_\w+", metrics_page(), re.MULTILINE))
        documented = set(re.findall(r"ray_raysgd_worker_\w+", (ROOT / "doc/guides/monitoring.md").read_text()))
        assert names == {name for name in documented if "_gpu_" not in name}, "doc/guides/monitoring.md lists others"
        stream.cancel()
        samples = latest_run(trainer).samples
    assert set(samples["rank"]) == {0, 1}
    assert (samples["rss_bytes"] > 10e6).all()
