"""Fixtures for all tests. Those marked autouse see to it that a test leaves nothing behind.

A test that needs Ray asks for `ray_cluster`. Its module may say with which settings: ``RAY_INIT = {"num_gpus": 2}``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from support import leftovers

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(scope="session", autouse=True)
def _a_home_for_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs without a storage path, and caches of libraries, go to a home that is thrown away."""
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    leftovers.mark_this_process()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left(_a_home_for_the_tests: None) -> Iterator[None]:
    before = leftovers.marked_processes()
    yield
    left = [*_stop_ray_if_it_runs(), *leftovers.end_processes(before)]
    assert not left, "the module left behind: " + "; ".join(left)


@pytest.fixture(autouse=True)
def _nothing_is_left_in_this_process() -> Iterator[None]:
    before = leftovers.ProcessState.now()
    yield
    left = before.restore()
    assert not left, "the test left behind: " + "; ".join(left)


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest, _no_process_is_left: None) -> Iterator[dict[str, Any]]:
    """A Ray cluster of one node with 8 logical CPUs, for the module; yields what `ray.init` returned."""
    import ray

    from support.cluster import ClusterState, start_ray

    settings = {"num_cpus": 8, "include_dashboard": False, "log_to_driver": True, "namespace": "tests"}
    yield start_ray(**settings | getattr(request.module, "RAY_INIT", {}))
    left = ClusterState.empty().leftovers()
    ray.shutdown()
    assert not left, "the module left behind on the cluster: " + "; ".join(left)


@pytest.fixture(autouse=True)
def _nothing_is_left_on_the_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    if "ray_cluster" not in request.fixturenames or request.node.get_closest_marker("shared_trainer"):
        yield
        return
    request.getfixturevalue("ray_cluster")
    from support.cluster import ClusterState

    before = ClusterState.now()
    yield
    left = before.leftovers()
    assert not left, "the test left behind on the cluster: " + "; ".join(left)


def _stop_ray_if_it_runs() -> list[str]:
    """Ray that a test's own code started and nobody stopped."""
    import sys

    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    ray.shutdown()
    return ["a running Ray (call ray.shutdown in the test, or use the fixture ray_cluster)"]
