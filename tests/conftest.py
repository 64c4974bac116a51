"""Fixtures for all tests. Those marked autouse see to it that a test leaves nothing behind.

A test that needs Ray asks for `ray_cluster`. Its module may say with which settings: ``RAY_INIT = {"num_gpus": 2}``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test with other processes tells where they stand before its time is over."""
    marker = item.get_closest_marker("timeout")
    of_all = item.config.getoption("timeout", None) or item.config.getini("timeout")
    timeout_s = float(marker.args[0] if marker else of_all)
    if "ray_cluster" not in getattr(item, "fixturenames", ()):
        return (yield)
    from support.watchdog import watching

    with watching(timeout_s, item.config._tmp_path_factory.getbasetemp()):  # type: ignore[attr-defined]
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _a_home_for_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs without a storage path, and caches of libraries, go to a home that is thrown away."""
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    leftovers.mark_this_process()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest, _a_home_for_the_tests: None) -> Iterator[None]:
    items = [item for item in request.session.items if item.path == request.path]
    if not any("ray_cluster" in getattr(item, "fixturenames", ()) for item in items):
        _stop_shared_cluster()
    before = leftovers.marked_processes()
    yield
    left = [*_stop_ray_if_it_runs(), *leftovers.end_processes(before, is_to_stay=_is_shared)]
    assert not left, "the module left behind: " + "; ".join(left)


def pytest_sessionfinish() -> None:
    _stop_shared_cluster()


@pytest.fixture(autouse=True)
def _nothing_is_left_in_this_process() -> Iterator[None]:
    before = leftovers.ProcessState.now()
    yield
    left = before.restore()
    assert not left, "the test left behind: " + "; ".join(left)


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest, _no_process_is_left: None) -> Iterator[dict[str, Any]]:
    """A Ray cluster of one node with 8 logical CPUs; yields what `ray.init` returned.

    A module that leaves it as it was, and in which nothing failed, leaves it to the next.
    """
    from support.cluster import ClusterState
    from support.shared_cluster import CLUSTER

    failed_before = request.session.testsfailed
    yield CLUSTER.get(**getattr(request.module, "RAY_INIT", {}))
    _end_actors_of_ray_data()
    left = ClusterState.empty().leftovers()
    if left or request.session.testsfailed > failed_before:
        CLUSTER.stop()
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


def _end_actors_of_ray_data() -> None:
    """Ray Data keeps some for the life of the cluster, which is longer than the module's."""
    import ray
    from ray.util import list_named_actors

    from raysgd.testing.cluster import OF_RAY_DATA

    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] in OF_RAY_DATA:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def _stop_shared_cluster() -> None:
    if (shared := sys.modules.get("support.shared_cluster")) is not None:
        shared.CLUSTER.stop()


def _is_shared(process: Any) -> bool:
    shared = sys.modules.get("support.shared_cluster")
    return shared is not None and bool(shared.CLUSTER.owns(process))


def _stop_ray_if_it_runs() -> list[str]:
    """Ray that a test's own code started and nobody stopped."""
    ray = sys.modules.get("ray")
    shared = sys.modules.get("support.shared_cluster")
    if ray is None or not ray.is_initialized() or (shared is not None and shared.CLUSTER.is_up):
        return []
    ray.shutdown()
    return ["a running Ray (call ray.shutdown in the test, or use the fixture ray_cluster)"]
