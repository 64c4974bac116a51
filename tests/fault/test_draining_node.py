"""A draining node: the run leaves it after a checkpoint, before Ray removes the node."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

import raysgd
from support.poll import until
from support.runs import PATIENCE_S, events_of, latest_run, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
travels_by_value(__name__)

#: A head node without CPUs; tests add nodes.
NODES = (0,)


def until_file_exists(config: dict[str, Any]) -> str:
    """Save in each step of 0.05 s until the file ``enough`` exists; return the id of the node."""
    state = raysgd.load_checkpoint()
    step = 0 if state is None else state["step"] + 1
    node = str(ray.get_runtime_context().get_node_id())
    while not raysgd.broadcast(os.path.exists(config["folder"] + "/enough")):
        raysgd.report(step=step, node=node)
        raysgd.save_checkpoint({"step": step})
        step += 1
        time.sleep(0.05)
    return node


def drain(node_id: str) -> None:
    """Drain a node as an autoscaler does for a spot instance that has a minute left."""
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(time.time() * 1000) + 60_000
    accepted, why_not = global_worker.gcs_client.drain_node(node_id, reason, "spot", deadline_ms)  # type: ignore[attr-defined]
    assert accepted, why_not


@pytest.mark.parametrize("num_workers", [2, (1, 2)], ids=["fixed", "elastic"])
def test_run_leaves_a_draining_node(cluster: Cluster, tmp_path: Path, num_workers: Any) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    failure = raysgd.FailureConfig(max_failures=0)
    with make_trainer(tmp_path / "runs", num_workers, failure_config=failure) as trainer:
        stream = trainer.run_generator(until_file_exists, {"folder": str(tmp_path)}, callbacks=quiet(), returns="all")
        before = next([w["node"] for w in result.workers] for result in stream if result["world_size"] == 2)
        # Ray chooses which node of this machine the driver belongs to, and the controller with it.
        rank = int(before[0] == ray.get_runtime_context().get_node_id())
        if num_workers == 2:
            nodes.append(cluster.add_node(num_cpus=1))
        drain(before[rank])
        after = next([w["node"] for w in result.workers] for result in stream if result["attempt"] > 1)
        assert before[rank] not in after and before[1 - rank] in after
        assert len(after) == (2 if num_workers == 2 else 1)
        Path(tmp_path, "enough").touch()
        assert stream.get_returns() == after
        (preemption,) = events_of(trainer, "preemption")
        assert (preemption["rank"], preemption["why"]) == (rank, "its node will be taken away")
        assert events_of(trainer, "failure") == []
        run = latest_run(trainer)
        assert run.metrics["step"].tolist() == list(range(len(run.metrics)))
    # Ray ends a draining node when nothing runs there.
    assert until(lambda: before[rank] not in {n["NodeID"] for n in ray.nodes() if n["Alive"]}, PATIENCE_S)
    for node in nodes:
        if node.node_id != before[rank]:
            cluster.remove_node(node)
