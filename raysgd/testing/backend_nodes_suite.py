"""A conformance suite for backends on two nodes, third-party backends included.

Its tests need a fixture ``cluster`` that starts a `ray.cluster_utils.Cluster` of two nodes with two CPUs each, calls
``ray.init`` and yields the cluster. Otherwise it is used as `raysgd.testing.backend_suite`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from raysgd.session import api as session
from raysgd.testing.backend_suite import SLOW_STEP_S, TIMEOUT_S, BackendUnderTest, quiet, run_all


class BackendOnNodesSuite(BackendUnderTest):
    """Subclass it as ``Test...`` with `make_config` and `make_total`; pytest runs its tests."""

    def test_two_workers_on_each_of_two_nodes(self, cluster: Any, tmp_path: Path) -> None:
        seen = self._run(tmp_path, 4, "PACK")
        assert [each["node_rank"] for each in seen] == [0, 0, 1, 1]
        assert [each["local_rank"] for each in seen] == [0, 1, 0, 1]

    def test_one_worker_on_each_of_two_nodes(self, cluster: Any, tmp_path: Path) -> None:
        seen = self._run(tmp_path, 2, "STRICT_SPREAD")
        assert [each["node_rank"] for each in seen] == [0, 1]
        assert [each["local_rank"] for each in seen] == [0, 0]

    def test_group_survives_the_loss_of_a_node(self, cluster: Any, tmp_path: Path) -> None:
        """The other two of three nodes continue."""
        train_func = self._sum_until_two_are_left(tmp_path)
        # Each worker takes all of a node's CPUs.
        with self.trainer(tmp_path, (2, 3), cpus_per_worker=2) as trainer, _additional_node(cluster) as lose:
            stream = trainer.run_generator(train_func, callbacks=quiet(), returns="all")
            for result in stream:
                if result["size"] == 3 and result["step"] == 3:
                    break
            (tmp_path / "lost").touch()
            lose()
            seen = stream.get_returns()
        assert [each["total"] for each in seen] == [3, 3]
        assert len({each["node"] for each in seen}) == 2

    def _sum_until_two_are_left(self, folder: Path) -> Callable[[], dict[str, Any]]:
        make_total = self.make_total

        def train_func() -> dict[str, Any]:
            rank, size, total = session.world_rank(), session.world_size(), make_total()
            is_after = (folder / "lost").exists() and size == 2  # the run may have begun with two workers
            for step in range(int(TIMEOUT_S / SLOW_STEP_S)):
                found = total(rank + 1)
                if is_after:
                    return {"total": found, "node": ray.get_runtime_context().get_node_id()}
                session.report(size=size, step=step)
                session.save_checkpoint({"step": step})
                time.sleep(SLOW_STEP_S)
            raise TimeoutError(f"no node was lost in a group of {size}")

        return train_func

    def _run(self, folder: Path, num_workers: int, strategy: str) -> list[dict[str, Any]]:
        make_total = self.make_total

        def train_func() -> dict[str, Any]:
            found = make_total()(session.world_rank() + 1)
            return {"total": found, "node_rank": session.node_rank(), "local_rank": session.local_rank()}

        with self.trainer(folder, num_workers, placement_strategy=strategy) as trainer:
            seen = run_all(trainer, train_func)
        assert [each["total"] for each in seen] == [sum(range(1, num_workers + 1))] * num_workers
        return seen


@contextmanager
def _additional_node(cluster: Any) -> Iterator[Callable[[], None]]:
    """Add a node with two CPUs, without the driver and the TrainerActor; yield a function that kills all its processes."""
    node = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()

    def lose() -> None:
        cluster.remove_node(node, allow_graceful=False)

    try:
        yield lose
    finally:
        if node in cluster.worker_nodes:
            lose()
        deadline = time.monotonic() + TIMEOUT_S
        while node.node_id in {each["NodeID"] for each in ray.nodes() if each["Alive"]} and time.monotonic() < deadline:
            time.sleep(0.1)  # until then Ray counts its resources as in use
