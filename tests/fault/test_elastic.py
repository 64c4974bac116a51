"""Elastic groups: they start with what fits, continue with the remaining workers, and grow at a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import raysgd
from raysgd.backends.base import Backend
from raysgd.backends.none import NoneBackend, NoneConfig
from raysgd.errors import ConfigError
from raysgd.workers.group.joining import SEARCH_INTERVAL_S
from raysgd.workers.placement.cluster import list_nodes
from support.cluster import ClusterState
from support.poll import until
from support.runs import PATIENCE_S, are_gone, latest_run, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
travels_by_value(__name__)

#: A head node with room for two workers; tests add and remove nodes.
NODES = (2,)


def until_file_exists(config: dict[str, Any]) -> dict[str, Any]:
    """Make steps with a collective, a checkpoint and a report each, until the file ``enough`` exists."""
    import torch
    import torch.distributed as dist

    state = raysgd.load_checkpoint()
    step = 0 if state is None else state["step"] + 1
    while not raysgd.broadcast(Path(config["folder"], "enough").exists()):
        total = torch.ones(1)
        dist.all_reduce(total)
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step, total=total.item(), pid=os.getpid())
        step += 1
        time.sleep(0.02)
    return {"size": raysgd.world_size(), "rank": raysgd.world_rank(), "pid": os.getpid()}


def wait_for_size(stream: raysgd.ResultStream, size: int) -> raysgd.Result:
    """Return the first result of a round with this number of ranks."""
    deadline = time.monotonic() + PATIENCE_S
    for result in stream:
        assert result["total"] == result["world_size"] == len(result.workers)
        if result["world_size"] == size:
            return result
        assert time.monotonic() < deadline, f"{result['world_size']} workers still"
    raise AssertionError("the run has ended")


def finish(stream: raysgd.ResultStream, folder: Path) -> Any:
    Path(folder, "enough").touch()
    return stream.get_returns()


def kinds(trainer: raysgd.Trainer) -> list[tuple[int, int]]:
    """Return the changes of size in the latest run."""
    events = latest_run(trainer).events
    return [(data["old"], data["new"]) for data in events[events["kind"] == "resize"]["data"]]


def test_elastic_group_continues_after_a_death_and_grows_back(cluster: Cluster, tmp_path: Path) -> None:
    def note(old: int, new: int) -> None:
        Path(tmp_path, f"resized-{raysgd.world_rank()}-{old}-{new}").touch()

    failure = raysgd.FailureConfig(max_failures=1, on_resize=note, abort_grace_s=20)
    with make_trainer(tmp_path / "runs", (1, 2), "torch", failure_config=failure) as trainer:
        stream = trainer.run_generator(
            until_file_exists,
            {"folder": str(tmp_path)},
            callbacks=quiet(),
            returns="all",
        )
        first = wait_for_size(stream, 2)  # as many as fit, from the start
        assert first["training_iteration"] == 1
        before = [metrics["pid"] for metrics in first.workers]
        os.kill(before[1], signal.SIGKILL)
        small = wait_for_size(stream, 1)
        assert [metrics["pid"] for metrics in small.workers] == before[:1]
        grown = wait_for_size(stream, 2)
        after = [metrics["pid"] for metrics in grown.workers]
        assert after[0] == before[0] and after[1] not in before
        returned = finish(stream, tmp_path)
        assert returned == [{"size": 2, "rank": rank, "pid": pid} for rank, pid in enumerate(after)]
        run = latest_run(trainer)
        assert kinds(trainer) == [(2, 1), (1, 2)]
        assert len(run.events[run.events["kind"] == "failure"]) == 1
        assert run.metrics["step"].tolist() == list(range(len(run.metrics)))
        assert run.metrics["attempt"].max() == 3
    resized = {path.name for path in tmp_path.glob("resized-*")}
    assert resized == {"resized-0-2-1", "resized-0-1-2", "resized-1-1-2"}
    assert are_gone([*before, *after])


def test_elastic_group_grows_when_resources_become_free(cluster: Cluster, tmp_path: Path) -> None:
    other = ray.util.placement_group([{"CPU": 1}])
    assert other.wait(PATIENCE_S)
    with make_trainer(tmp_path / "runs", (1, 8), "torch") as trainer:
        stream = trainer.run_generator(until_file_exists, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        assert next(stream)["world_size"] == 1
        ray.util.remove_placement_group(other)
        wait_for_size(stream, 2)
        finish(stream, tmp_path)
        run = latest_run(trainer)
        assert run.events[run.events["kind"] == "failure"].empty
        assert run.metrics["step"].tolist() == list(range(len(run.metrics)))


def test_elastic_group_grows_onto_a_new_node_and_survives_its_loss(cluster: Cluster, tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(max_failures=1, abort_grace_s=20)  # the two workers of the node are lost together
    with make_trainer(tmp_path / "runs", (2, 4), "torch", failure_config=failure) as trainer:
        stream = trainer.run_generator(until_file_exists, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        wait_for_size(stream, 2)
        node = cluster.add_node(num_cpus=2)
        wait_for_size(stream, 4)
        cluster.remove_node(node, allow_graceful=False)
        wait_for_size(stream, 2)
        returned = finish(stream, tmp_path)
        assert [value["rank"] for value in returned] == [0, 1]
        run = latest_run(trainer)
        assert len(run.events[run.events["kind"] == "failure"]) == 1
        assert run.metrics["step"].tolist() == list(range(len(run.metrics)))


class SlowBackend(NoneBackend):
    """A backend that is not ready while the file ``slow`` exists in the folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def load(self) -> None:
        while Path(self.folder, "slow").exists():
            time.sleep(0.05)


@dataclass(frozen=True, kw_only=True)
class SlowConfig(NoneConfig):
    folder: str

    def make_backend(self) -> Backend:
        return SlowBackend(self.folder)


def count_until_file_exists(config: dict[str, Any]) -> str:
    """Save a checkpoint in each step until the file ``enough`` exists; return the id of the node."""
    step = (raysgd.load_checkpoint() or {"step": -1})["step"] + 1
    while not raysgd.broadcast(Path(config["folder"], "enough").exists()):
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
        step += 1
        time.sleep(0.02)
    return str(ray.get_runtime_context().get_node_id())


def free_cpus(node: Any) -> float | None:
    """Return the free CPUs of a node, or None while Ray does not know the node."""
    known = ray._private.state.available_resources_per_node().get(node.node_id)
    return None if known is None else float(known.get("CPU", 0))


@pytest.fixture
def one_cpu_is_taken(cluster: Cluster) -> Iterator[None]:
    """Reserve one of the two CPUs of the head node for another user."""
    other = ray.util.placement_group([{"CPU": 1}])
    assert other.wait(PATIENCE_S)
    yield
    ray.util.remove_placement_group(other)


def add_node_for_joining_worker(cluster: Cluster, folder: Path) -> Any:
    """Add a node on which a joining worker starts, and is not ready while the file ``slow`` exists."""
    Path(folder, "slow").touch()
    node = cluster.add_node(num_cpus=1)
    assert until(lambda: free_cpus(node) == 0, PATIENCE_S), "no worker was started on the new node"
    return node


@pytest.mark.usefixtures("one_cpu_is_taken")
def test_joining_worker_replaces_a_lost_worker(cluster: Cluster, tmp_path: Path) -> None:
    """The joining worker is starting, and holds the only CPU that could serve for a replacement."""
    first = cluster.add_node(num_cpus=1)
    backend = SlowConfig(folder=str(tmp_path))
    failure = raysgd.FailureConfig(max_failures=1, start_timeout_s=PATIENCE_S)
    with make_trainer(tmp_path / "runs", (2, 3), backend, failure_config=failure) as trainer:
        stream = trainer.run_generator(
            count_until_file_exists, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all"
        )
        assert next(stream)["world_size"] == 2
        second = add_node_for_joining_worker(cluster, tmp_path)
        cluster.remove_node(first, allow_graceful=False)
        assert until(lambda: trainer.status().num_failures == 1, PATIENCE_S)
        time.sleep(2 * SEARCH_INTERVAL_S)
        (tmp_path / "slow").unlink()
        (tmp_path / "enough").touch()
        nodes = stream.get_returns()
        assert set(nodes) == {cluster.head_node.node_id, second.node_id} and len(nodes) == 2
        assert kinds(trainer) == []
    cluster.remove_node(second)


@pytest.mark.usefixtures("one_cpu_is_taken")
def test_joining_worker_replaces_a_worker_whose_loss_ray_reported_first(cluster: Cluster, tmp_path: Path) -> None:
    """Between two runs, Ray itself requests the resources of the lost worker again, and finds none."""
    first = cluster.add_node(num_cpus=1)
    backend = SlowConfig(folder=str(tmp_path))
    failure = raysgd.FailureConfig(start_timeout_s=PATIENCE_S)
    with make_trainer(tmp_path / "runs", (2, 3), backend, failure_config=failure) as trainer:
        (tmp_path / "enough").touch()
        config = {"folder": str(tmp_path)}
        assert len(trainer.run(count_until_file_exists, config, callbacks=quiet(), returns="all")) == 2
        second = add_node_for_joining_worker(cluster, tmp_path)
        cluster.remove_node(first, allow_graceful=False)
        assert until(lambda: first.node_id not in {node.node_id for node in list_nodes()}, PATIENCE_S)
        stream = trainer.run_generator(count_until_file_exists, config, callbacks=quiet(), returns="all")
        time.sleep(2 * SEARCH_INTERVAL_S)
        (tmp_path / "slow").unlink()
        assert set(stream.get_returns()) == {cluster.head_node.node_id, second.node_id}
    cluster.remove_node(second)


def test_run_can_pause_and_resume_right_after_a_node_loss(cluster: Cluster, tmp_path: Path) -> None:
    """A placement group that Ray cannot place again keeps its name until it is removed."""
    node = cluster.add_node(num_cpus=1)
    other = ray.util.placement_group([{"CPU": 1}])
    assert other.wait(PATIENCE_S)
    with make_trainer(
        tmp_path, (1, 2), "none", failure_config=raysgd.FailureConfig(max_failures=1, num_spares=1)
    ) as trainer:
        stream = trainer.run_generator(count_until_file_exists, {"folder": str(tmp_path)}, callbacks=quiet())
        next(stream)
        assert until(lambda: free_cpus(node) == 0, PATIENCE_S), "neither the worker nor its spare is there"
        cluster.remove_node(node, allow_graceful=False)
        assert until(lambda: "RESCHEDULING" in states_of_groups(), PATIENCE_S)
        paused_at = trainer.pause().iteration
        trainer.resume()
        assert until(lambda: "PENDING" in states_of_groups(), PATIENCE_S), "no room was asked for"
        ray.util.remove_placement_group(other)
        assert until(lambda: trainer.status().iteration > paused_at, PATIENCE_S)
        finish(stream, tmp_path)


def states_of_groups() -> list[str]:
    return [str(group["state"]) for group in ray.util.placement_group_table().values()]


def test_invalid_bounds_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    for num_workers, says in [((0, 4), "too small"), ((4, 2), "above its maximum"), ((1, 2.5), "float")]:
        with pytest.raises(ConfigError, match=says):
            make_trainer(tmp_path, num_workers)
    with pytest.raises(ConfigError, match="cannot grow or shrink"):
        make_trainer(tmp_path, (1, 2), placement_strategy="STRICT_PACK")


def test_unused_elastic_group_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    before = ClusterState.now()
    with make_trainer(tmp_path, (1, 2)) as trainer:
        assert len(trainer.run(os.getpid, callbacks=quiet(), returns="all")) == 2
    assert before.leftovers() == []
    assert until(lambda: not ray.util.list_named_actors(all_namespaces=True), PATIENCE_S)
