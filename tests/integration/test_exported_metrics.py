"""A run is exported as metrics for Prometheus and Ray's dashboard; the dashboard for Grafana shows these metrics."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
import urllib.request
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.cli.main import main
from raysgd.controller.run.exported import COUNTERS, GAUGES
from raysgd.goodput.ledger import WORDS
from raysgd.workers.process.attempt import EXPORTED
from support.poll import until
from support.ports import free_port
from support.project import ROOT
from support.runs import PATIENCE_S, controller_pid, latest_run, make_trainer, once, quiet, travels_by_value

travels_by_value(__name__)


PORT = free_port()
RAY_INIT = {"_metrics_export_port": PORT, "_system_config": {"metrics_report_interval_ms": 2000}}
#: The values of a worker that makes a step in 0.05 s, or slower ones on a busy machine.
BOUNDS = {
    "rss_bytes": (10e6, 10e9),
    "reports_per_s": (1, 25),
    "time_per_report_s": (0.04, 1),
    "steps_per_s": (1, 25),
    "data_wait_fraction": (-1e-9, 0.9),
}
#: All metrics of raysgd, as Prometheus names them.
ALL = {
    *(f"ray_raysgd_worker_{name}" for name in EXPORTED),
    *(f"ray_raysgd_run_{name}_total" for name in COUNTERS),
    *(f"ray_raysgd_run_{name}" for name in GAUGES),
}


def metrics_page() -> str:
    """Return what Prometheus reads from the node's exporter."""
    import ray

    host = ray.util.get_node_ip_address()
    try:
        return str(urllib.request.urlopen(f"http://{host}:{PORT}/metrics", timeout=10).read().decode())
    except OSError:
        return ""


def exported(name: str) -> dict[tuple[str, str], float]:
    """Return the current values of a metric in the node's exporter, by run and rank; those of a run have no rank."""
    text = metrics_page()
    found = {}
    for labels, value in re.findall(rf"^ray_raysgd_{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[tags["run"], tags.get("rank", "")] = float(value)
    return found


def test_run_and_workers_are_exported_during_training(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        folder = Path(config["folder"])
        shard = raysgd.get_dataset().get_split()
        while not raysgd.should_stop():
            for _ in shard.iter_batches(batch_size=2):
                raysgd.report(pid=0)
                time.sleep(0.05)
            if once(str(folder), f"saved-{raysgd.world_rank()}"):
                raysgd.save_checkpoint({"x": list(range(1000))})
            if (folder / "checked").exists() and raysgd.world_rank() == 1 and once(str(folder), "died"):
                os.kill(os.getpid(), signal.SIGKILL)

    def are_plausible() -> bool:
        """Whether both workers' values are those of steps of 0.05 s."""
        ranks = {(run, "0"), (run, "1")}
        found = {name: exported(f"worker_{name}") for name in (*BOUNDS, "cpu_percent")}
        within = all(low < value < high for name, (low, high) in BOUNDS.items() for value in found[name].values())
        return within and all(set(values) == ranks for values in found.values())

    with make_trainer(tmp_path) as trainer:
        config = {"folder": str(tmp_path)}
        stream = trainer.run_generator(train_func, config, callbacks=quiet(), dataset=[{"x": i} for i in range(40)])
        next(stream)
        run = label_of(stream.run_dir)
        assert until(are_plausible, PATIENCE_S, interval_s=0.5), metrics_page()
        (tmp_path / "checked").touch()
        assert until(lambda: exported("run_restarts_total") == {(run, ""): 1}, PATIENCE_S, 0.5)
        assert re.search(r'^ray_raysgd_run_restarts_total{[^}]*cause="death"', metrics_page(), re.MULTILINE)
        assert 0 < exported("run_goodput_ratio")[run, ""] < 1
        assert until(lambda: exported("run_world_size") == {(run, ""): 2}, PATIENCE_S, 0.5)
        assert exported("run_failures_total") == exported("run_checkpoints_total") == {(run, ""): 1}
        assert exported("run_checkpoint_bytes_total")[run, ""] > 1000
        assert 0 < exported("run_checkpoint_seconds_total")[run, ""] < 60
        before = exported("run_rounds_total")[run, ""]
        assert until(lambda: exported("run_rounds_total")[run, ""] > before > 5, PATIENCE_S, 0.5)
        assert exported("run_iteration")[run, ""] > 5
        names = set(re.findall(r"^(ray_raysgd_\w+){", metrics_page(), re.MULTILINE))
        assert names == {name for name in ALL if "_gpu_" not in name}
        stream.cancel()
        samples = latest_run(trainer).samples
        assert until(lambda: exported("run_world_size") == {(run, ""): 0}, PATIENCE_S, 0.5)
    assert set(samples["rank"]) == {0, 1}
    assert (samples["rss_bytes"] > 10e6).all()


def label_of(run_dir: str | None) -> str:
    """Return the label of a run."""
    return "/".join(Path(str(run_dir)).parts[-2:])


def test_a_live_run_says_the_same_of_its_time_everywhere_during_restarts_and_a_pause(
    ray_cluster: Any, tmp_path: Path
) -> None:
    def train_func(config: dict[str, Any]) -> None:
        while not raysgd.should_stop():
            time.sleep(0.05)
            raysgd.report(step=0)
            if (Path(config["folder"]) / "saves").exists():
                raysgd.save_checkpoint({"x": 1})
            if (
                (Path(config["folder"]) / "kill").exists()
                and raysgd.world_rank() == 1
                and once(config["folder"], "died")
            ):
                os.kill(os.getpid(), signal.SIGKILL)

    def seconds_by_use() -> dict[str, float]:
        rows = re.findall(r"^ray_raysgd_run_worker_seconds{(.*)} (\S+)$", metrics_page(), re.MULTILINE)
        found = [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in rows]
        return {tags["use"]: value for tags, value in found if tags["run"] == label_of(stream.run_dir)}

    def why() -> dict[str, Any]:
        with redirect_stdout(io.StringIO()) as out:
            assert main(["why", "--json", str(stream.run_dir)]) == 0
        found: dict[str, Any] = json.loads(out.getvalue())
        return found

    def agree() -> bool:
        """Whether the command, the driver and the exporter have the same goodput, all of a moment ago."""
        by_command, by_driver = why()["goodput"], stream.run_info.goodput
        by_exporter = exported("run_goodput_ratio").get((label_of(stream.run_dir), ""), -1.0)
        return max(abs(by_command - each) for each in (by_driver, by_exporter)) < 0.05

    with make_trainer(tmp_path, failure_config=raysgd.FailureConfig(max_failures=2)) as trainer:
        began = time.time()
        stream = trainer.run_generator(train_func, {"folder": str(tmp_path)}, callbacks=quiet())
        next(stream)
        assert until(lambda: seconds_by_use().get("training", 0) > 4, PATIENCE_S, 0.5), metrics_page()
        assert until(agree, PATIENCE_S, 0.5)
        assert set(seconds_by_use()) == set(WORDS)
        (tmp_path / "kill").touch()
        assert until(lambda: seconds_by_use()["repeated"] > 4, PATIENCE_S, 0.5), "all of it was before any checkpoint"
        assert until(agree, PATIENCE_S, 0.5)
        (tmp_path / "saves").touch()
        trainer.pause()
        assert until(lambda: seconds_by_use().get("paused", 0) > 5, PATIENCE_S, 0.5), "it grows without events"
        goodput = stream.run_info.goodput
        assert until(lambda: seconds_by_use().get("paused", 0) > 12, PATIENCE_S, 0.5), (
            "a gauge that is not set again goes"
        )
        assert stream.run_info.goodput == pytest.approx(goodput, abs=1e-6) and agree()
        assert why()["seconds"]["paused"] > 10
        passed_s = time.time() - began
        assert until(lambda: sum(seconds_by_use().values()) > 2 * passed_s, PATIENCE_S, 0.5), "each second has a use"
        assert sum(seconds_by_use().values()) <= 2 * (time.time() - began), "and no other one"
        trainer.resume()
        next(stream)
        os.kill(controller_pid(), signal.SIGKILL)
        assert until(lambda: exported("run_world_size").get((label_of(stream.run_dir), ""), 0) == 0, PATIENCE_S, 0.5)
        assert until(lambda: seconds_by_use().get("paused", 0) > 12 and agree(), PATIENCE_S, 0.5), (
            "it counts from the start"
        )
        stream.cancel()


def test_documentation_names_every_exported_metric() -> None:
    page = (ROOT / "doc" / "guides" / "monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(ray_raysgd_\w+)`", page)) == ALL


def test_dashboard_for_grafana_shows_exported_metrics() -> None:
    document = json.loads((ROOT / "doc" / "guides" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]
    named = {name for query in queries for name in re.findall(r"\bray_raysgd_\w+", query)}
    assert named == ALL
    assert all('run=~"$run"' in query for query in queries)
    (variable,) = [each for each in document["templating"]["list"] if each["name"] == "run"]
    assert set(re.findall(r"ray_raysgd_\w+", json.dumps(variable))) <= ALL
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in document["panels"]]
    assert len(set(places)) == len(places) and all(x + w <= 24 for x, _, w, _ in places)
