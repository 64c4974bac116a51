"""A node is lost with its worker, and another node has room: training resumes from the newest checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raysgd
from raysgd.workers.liveness.own_processes import Processes, ProcessWatch
from raysgd.workers.liveness.watched import Watched, watched_actor
from raysgd.workers.placement.avoided_nodes import SAME_DEATH_S
from raysgd.workers.placement.cluster import NAMESPACE
from support.cluster import processes_of
from support.poll import until
from support.runs import (
    PATIENCE_S,
    actor_pids,
    are_gone,
    events_of,
    latest_run,
    make_trainer,
    quiet,
    travels_by_value,
)

pytestmark = pytest.mark.fault
travels_by_value(__name__)

#: A head node without CPUs, and three nodes with room for one worker each.
NODES = (0, 1, 1, 1)


#: Saves before a node is lost, and seconds for the copy of the last one: Ray retries a failed fetch after 10 s.
NUM_SAVES = 5
COPY_S = 15


def until_a_node_is_lost() -> dict[str, Any]:
    """Train until killed, or for three steps after a resume from a checkpoint."""
    state = raysgd.load_checkpoint()
    node = ray.get_runtime_context().get_node_id()
    start = 0 if state is None else state["step"] + 1
    for step in itertools.count(start) if state is None else range(start, start + 3):
        raysgd.report(step=step, node=node)
        raysgd.save_checkpoint({"step": step})
        time.sleep(0.05)
    return {"start": start, "node": node}


def run_until_file_exists(config: dict[str, Any]) -> None:
    node = ray.get_runtime_context().get_node_id()
    while not os.path.exists(config["file"]):
        raysgd.report(node=node, pid=os.getpid())
        time.sleep(0.05)


def num_answering_agents() -> int:
    """Return how many of the Trainer's agents answer."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "-agent-" in actor["name"]]
    num_answers = 0
    for name in names:
        with contextlib.suppress(ValueError, RayError):  # it is gone
            ray.get(ray.get_actor(name, NAMESPACE).sign_of_life.remote(), timeout=1)
            num_answers += 1
    return num_answers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_agents_are_replaced_and_watch_their_nodes_again(cluster: Cluster, tmp_path: Path, number: int) -> None:
    config = {"file": str(tmp_path / "go")}
    failure = raysgd.FailureConfig(max_failures=1, heartbeat_timeout_s=3)
    with make_trainer(tmp_path / "runs", 2, failure_config=failure) as trainer:
        stream = trainer.run_generator(run_until_file_exists, config, callbacks=quiet())
        next(stream)
        assert until(lambda: len(actor_pids("NodeAgent")) == 2, PATIENCE_S)
        agents = actor_pids("NodeAgent")
        for pid in agents:
            os.kill(pid, number)
        assert are_gone(agents, PATIENCE_S)
        assert until(lambda: num_answering_agents() == 2, PATIENCE_S)
        result = next(stream)
        assert result["attempt"] == 1
        os.kill(result.workers[1]["pid"], signal.SIGSTOP)
        assert next(result for result in stream if result["attempt"] == 2)
        (tmp_path / "go").touch()
        stream.get_returns()
        assert [hang["kind"] for hang in events_of(trainer, "hang")] == ["silent"], "its agent did not answer"
        warnings = [data["message"] for data in events_of(trainer, "warning")]
    assert sum("the agent on node" in message for message in warnings) == (2 if number == signal.SIGSTOP else 0)


def pid_of(actor: Any) -> int | None:
    """Return the process id of an actor; None while Ray starts it again."""
    with contextlib.suppress(ActorUnavailableError):
        return ray.get(actor.sign_of_life.remote(), timeout=PATIENCE_S)  # type: ignore[no-any-return]
    return None


def test_stopped_process_is_killed_though_the_agent_that_examines_it_is_stopped(cluster: Cluster) -> None:
    other = next(node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU"))
    options = {
        "num_cpus": 0,
        "max_restarts": 1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(other, soft=False),
    }
    actor = watched_actor(Watched).options(**options).remote()
    pid = ray.get(actor.sign_of_life.remote())
    watch, messages = ProcessWatch(timeout_s=2.0), []
    watch.report = messages.append
    with contextlib.closing(watch):
        watch.add("the process", lambda: actor, pid=pid)
        os.kill(pid, signal.SIGSTOP)
        assert until(lambda: actor_pids("NodeAgent"), PATIENCE_S)
        (agent,) = actor_pids("NodeAgent")
        os.kill(agent, signal.SIGSTOP)
        assert are_gone([pid, agent], PATIENCE_S)
        assert until(lambda: pid_of(actor) not in (None, pid), PATIENCE_S)
        assert until(lambda: not actor_pids("NodeAgent"), PATIENCE_S), "agents end when every process answers"
    assert len(messages) == 1 and "is killed and replaced" in messages[0]
    processes = Processes()
    place = processes.find(actor)
    assert place is not None and processes.check(place, PATIENCE_S) is not None
    (agent,) = actor_pids("NodeAgent")
    os.kill(agent, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        processes.check(place, 0.2)
    processes.close()
    assert are_gone([agent], PATIENCE_S), "a stopped agent ends although it has not answered its last call"


def test_node_with_repeated_deaths_is_avoided(cluster: Cluster, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "go")}
    with make_trainer(tmp_path / "runs", 2, failure_config=raysgd.FailureConfig(max_failures=2)) as trainer:
        stream = trainer.run_generator(run_until_file_exists, config, callbacks=quiet())
        nodes = []
        for attempt in (1, 2, 3):
            result = next(result for result in stream if result["attempt"] == attempt)
            (first, _), (node, pid) = [(metrics["node"], metrics["pid"]) for metrics in result.workers]
            nodes.append(node)
            if attempt < 3:
                time.sleep(SAME_DEATH_S * (attempt - 1))  # simultaneous deaths count as one
                os.kill(pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        stream.get_returns()
        warnings = [data["message"] for data in events_of(trainer, "warning")]
    assert nodes[0] == nodes[1] and nodes[2] not in (nodes[0], first)
    assert sum("is not used any more: workers have died there 2 times" in message for message in warnings) == 1


def test_worker_of_a_lost_node_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, checkpoint_config=raysgd.CheckpointConfig(num_to_keep=2)) as trainer:
        stream = trainer.run_generator(until_a_node_is_lost, callbacks=quiet(), returns="all")
        nodes = [metrics["node"] for metrics in next(stream).workers]
        # Ray chooses which node of this machine the driver belongs to, and the controller with it.
        rank = int(nodes[0] == ray.get_runtime_context().get_node_id())
        lost, kept = nodes[rank], nodes[1 - rank]
        assert kept != lost
        run_dir = Path(str(stream.run_dir))
        assert until(lambda: list(run_dir.glob("checkpoints/*/manifest.json")), PATIENCE_S)
        (node,) = [node for node in cluster.worker_nodes if node.node_id == lost]
        cluster.remove_node(node, allow_graceful=False)
        returned = stream.get_returns()
        failures = events_of(trainer, "failure")
        steps = list(latest_run(trainer).metrics["step"])
    assert [(failure["ranks"], failure["action"]) for failure in failures] == [([rank], "retry 1")]
    assert returned[0]["start"] == returned[1]["start"] > 0
    assert returned[1 - rank]["node"] == kept
    assert returned[rank]["node"] not in (kept, lost)
    assert steps == list(range(returned[0]["start"] + 3))


def reduce_until_a_node_is_lost() -> dict[str, Any]:
    """Train as in `until_a_node_is_lost`, with a collective in each step."""
    import torch
    import torch.distributed as dist

    state = raysgd.load_checkpoint()
    here = {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}
    start = 0 if state is None else state["step"] + 1
    for step in itertools.count(start) if state is None else range(start, start + 3):
        dist.all_reduce(torch.ones(100))
        raysgd.report(step=step, **here)
        raysgd.save_checkpoint({"step": step})
    return here


def test_worker_of_a_frozen_node_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """No connection closes, so the survivor waits in a collective for a peer that cannot be killed."""
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    failure = raysgd.FailureConfig(heartbeat_timeout_s=4, abort_grace_s=15)
    with make_trainer(tmp_path, 2, "torch", failure_config=failure) as trainer:
        stream = trainer.run_generator(reduce_until_a_node_is_lost, callbacks=quiet(), returns="all")
        before = [(metrics["node"], metrics["pid"]) for metrics in next(stream).workers]
        rank = int(before[0][0] == ray.get_runtime_context().get_node_id())
        run_dir = Path(str(stream.run_dir))
        assert until(lambda: list(run_dir.glob("checkpoints/*/manifest.json")), PATIENCE_S)
        (node,) = [node for node in cluster.worker_nodes if node.node_id == before[rank][0]]
        frozen = processes_of(node)
        try:
            for process in frozen:
                process.suspend()
            after = [(value["node"], value["pid"]) for value in stream.get_returns()]
            failures = events_of(trainer, "failure")
        finally:
            for process in frozen:
                process.kill()
            cluster.remove_node(node, allow_graceful=False)
            lost = node.node_id
            assert until(lambda: lost not in [each["NodeID"] for each in ray.nodes() if each["Alive"]], PATIENCE_S)
    assert [(failure["ranks"], failure["action"]) for failure in failures] == [([rank], "retry 1")]
    assert after[1 - rank] == before[1 - rank]  # the survivor kept its process
    assert after[rank][0] not in (before[0][0], before[1][0])


def parts_in_memory() -> dict[str, Any]:
    """Each rank's part is too large for Ray to inline, and none goes to storage."""
    state = raysgd.load_checkpoint()
    limit = time.monotonic() + PATIENCE_S
    node = ray.get_runtime_context().get_node_id()
    start = 0 if state is None else int(state["step"]) + 1
    for step in itertools.count(start) if state is None else range(start, start + 3):
        raysgd.report(step=step, node=node)
        assert time.monotonic() < limit, "nothing was loaded, or no node was lost"
        if step < NUM_SAVES or state is not None:
            raysgd.save_checkpoint({"step": step, "weights": np.full(300_000, raysgd.world_rank())}, all_ranks=True)
        time.sleep(0.2)
    assert state is not None
    return {"start": start, "node": node, "mine": float(state["weights"].mean())}


def test_checkpoint_part_of_a_lost_node_is_restored_from_its_copy(cluster: Cluster, tmp_path: Path) -> None:
    """Another node holds a copy of the part."""
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    memory = raysgd.CheckpointConfig(storage_interval=100_000)
    with make_trainer(tmp_path, 2, checkpoint_config=memory) as trainer:
        stream = trainer.run_generator(parts_in_memory, callbacks=quiet(), returns="all")
        nodes = [metrics["node"] for metrics in next(stream).workers]
        rank = int(nodes[0] == ray.get_runtime_context().get_node_id())
        while next(stream)["step"] < NUM_SAVES + COPY_S / 0.2:
            pass
        (node,) = [node for node in cluster.worker_nodes if node.node_id == nodes[rank]]
        cluster.remove_node(node, allow_graceful=False)
        returned = stream.get_returns()
        starts = events_of(trainer, "attempt_start")
    assert returned[0]["start"] == returned[1]["start"] == NUM_SAVES
    assert [value["mine"] for value in returned] == [0.0, 1.0]
    assert starts[-1]["memory"] is not None and starts[-1]["checkpoint"] is None
    assert returned[rank]["node"] not in nodes
