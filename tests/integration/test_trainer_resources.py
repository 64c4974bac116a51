"""The resources that a Trainer requests, where they are visible, and the errors when they are not available."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.errors import ConfigError, InfeasibleError, StartTimeoutError, UsageError
from support.cluster import ClusterState
from support.project import ROOT
from support.runs import PATIENCE_S, are_gone, controller_pid, make_trainer, pids, quiet, travels_by_value

travels_by_value(__name__)

RAY_INIT = {"num_cpus": 8, "resources": {"licence": 4}}


def test_resources_are_taken_as_requested_and_released(ray_cluster: Any, tmp_path: Path) -> None:
    before, state = ray.available_resources(), ClusterState.now()
    asked = {"licence": 1.5}
    settings: dict[str, Any] = {"cpus_per_worker": 0.5, "resources_per_worker": asked}
    with make_trainer(tmp_path, 2, placement_strategy="STRICT_PACK", **settings) as trainer:
        lines = repr(trainer).splitlines()
        assert lines[0] == "Trainer: 2 x none worker (0.5 CPU + 1.5 licence)"
        assert lines[1].split() == ["worker", "node", "CPU", "GPU", "licence"]
        assert lines[3].split() == ["0", "-", "0.5", "0", "1.5"]
        assert lines[-1].split() == "total of the cluster 1 of 8 0 of 0 3 of 4".split()

        processes = pids(trainer)
        free = ray.available_resources()
        assert before["CPU"] - free["CPU"] == pytest.approx(1.0)
        assert before["licence"] - free["licence"] == pytest.approx(3.0)
        assert "STRICT_PACK" in strategies_in_use()

        node = f"{os.uname().nodename} ({ray.util.get_node_ip_address()})"
        assert repr(trainer).splitlines()[4].split() == ["1", *node.split(), "0.5", "0", "1.5"]
        html = trainer._repr_html_()
        assert html.count(node) == 2 and "1 of 8" in html
    assert asked == {"licence": 1.5}
    assert state.leftovers() == []
    assert are_gone(processes)


def test_repr_leaves_out_nodes_when_the_controller_does_not_answer(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 1) as trainer:
        pids(trainer)
        controller = controller_pid()
        os.kill(controller, signal.SIGSTOP)
        try:
            assert repr(trainer).splitlines()[3].split() == ["0", "-", "1", "0"]
        finally:
            os.kill(controller, signal.SIGCONT)


def test_workers_have_given_environment_and_spread_placement(ray_cluster: Any, tmp_path: Path) -> None:
    env = {"env_vars": {"FLAVOUR": "mint"}}
    with make_trainer(tmp_path, 1, runtime_env=env, placement_strategy="SPREAD", cpus_per_worker=0) as trainer:
        for _ in range(2):
            assert trainer.run(lambda: os.environ.pop("FLAVOUR"), callbacks=quiet()) == "mint"
        assert "SPREAD" in strategies_in_use()


def strategies_in_use() -> set[str]:
    return {table["strategy"] for table in ray.util.placement_group_table().values() if table["state"] == "CREATED"}


def test_infeasible_request_is_refused_with_the_arithmetic(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 8, cpus_per_worker=2) as trainer:
        with pytest.raises(InfeasibleError, match="needs 8 x 2 CPU = 16, the cluster has 8"):
            trainer.run(os.getpid, callbacks=quiet())
        with pytest.raises(InfeasibleError, match="needs 8 x 2 CPU = 16, the cluster has 8"):
            trainer.start()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gpus_per_worker": 1}, "needs 2 x 1 GPU = 2, the cluster has 0"),
        ({"resources_per_worker": {"tpu": 4}}, "needs 2 x 4 tpu = 8, the cluster has 0"),
        ({"placement_strategy": "STRICT_SPREAD"}, "STRICT_SPREAD needs 2 nodes"),
    ],
)
def test_worker_that_fits_no_node_is_refused(
    ray_cluster: Any, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with make_trainer(tmp_path, 2, **settings) as trainer, pytest.raises(InfeasibleError, match=says):
        trainer.run(os.getpid, callbacks=quiet())


def test_start_timeout_names_resources_held_by_others(ray_cluster: Any, tmp_path: Path) -> None:
    others = ray.util.placement_group([{"licence": 3}])
    ray.get(others.ready(), timeout=PATIENCE_S)
    settings: dict[str, Any] = {"cpus_per_worker": 0, "resources_per_worker": {"licence": 1}}
    try:
        with make_trainer(tmp_path, 2, failure_config=raysgd.FailureConfig(start_timeout_s=1.5), **settings) as trainer:
            says = r"within 1\.5 s: waiting for 2 licence \(1 licence free\); 3 are held by a placement group.*Free resources, or"
            with pytest.raises(StartTimeoutError, match=says):
                trainer.run(os.getpid, callbacks=quiet())
    finally:
        ray.util.remove_placement_group(others)


def test_ray_is_started_when_it_is_not_running(tmp_path: Path) -> None:
    script = """
import raysgd

def train_func(config):
    raysgd.report(x=config["x"])
    return raysgd.world_size()

with raysgd.Trainer(1, "none", run_config=raysgd.RunConfig(storage_path="runs")) as trainer:
    print(trainer.run(train_func, {"x": 1}))
    print(raysgd.load_run(trainer.run_dir).outcome)
"""
    (tmp_path / "train.py").write_text(script)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": "local",
    }  # not a cluster that is already running
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert [line for line in lines if not line.startswith("[run_001]")] == ["1", "done"]


def test_ray_client_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ray.util.client.ray.is_connected", lambda: True)
    with pytest.raises(UsageError, match="ray job submit"):
        make_trainer(tmp_path).run(os.getpid)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_workers": True}, "num_workers=True is a bool; give an int >= 1"),
        ({"num_workers": 2.0}, r"num_workers=2\.0 is a float"),
        ({"num_workers": "2"}, "num_workers='2' is a str"),
        ({"num_workers": 0}, "num_workers=0 is too small"),
        ({"num_workers": -1}, "num_workers=-1 is too small"),
        ({"num_workers": (8, 4)}, "has its minimum above its maximum"),
        ({"num_workers": (1, 2, 3)}, r"has 3 entries; give \(min, max\)"),
        ({"cpus_per_worker": -1}, "cpus_per_worker=-1 is out of range"),
        ({"cpus_per_worker": 2, "resources_per_worker": {"CPU": 4}}, r"did you mean cpus_per_worker=4\?"),
        ({"gpus_per_worker": 1.5}, "above 1 must be whole"),
        ({"resources_per_worker": ["licence"]}, "is not a dict"),
        ({"placement_strategy": "STRICT"}, "placement_strategy='STRICT' is not known"),
        ({"backend": "mxnet"}, "backend='mxnet' is not known; give one of 'torch', 'horovod'"),
        ({"backend": "torhc"}, r"did you mean 'torch'\?"),
        ({"backend": "torch", "backend_args": {"timeout": 1}}, r"no field 'timeout' \(did you mean 'timeout_s'\?\)"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"run_config": "name"}, r"run_config='name' is a str; give a RunConfig\(...\)"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        raysgd.Trainer(**settings)
