"""Fixtures for all tests. The autouse fixtures check that a test leaves nothing behind.

A test that needs Ray asks for `ray_cluster`. Its module may say with which settings: ``RAY_INIT = {"num_gpus": 2}``.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support import leftovers, records
from support.pace import slowness
from support.promises import is_below, named_tests

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
# Ray's processes take uvloop where it is installed, as flax's dependencies do here; most users have Python's own event loop.
os.environ.setdefault("RAY_USE_UVLOOP", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    records.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Let tests send SIGINT: a shell that starts pytest in the background has its children ignore that signal."""
    records.record_if_asked(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` runs, and put modules next to each other that can share a Ray cluster."""
    smoke = list(named_tests())
    for item in items:
        if any(is_below(item.nodeid, name) for name in smoke):
            item.add_marker(pytest.mark.smoke)
    if not all("tests/unit" in item.nodeid or "tests/architecture" in item.nodeid for item in items):
        _lengthen_timeouts(items)
    clusters: dict[Any, str] = {}
    for item in items:
        clusters[item.path] = min(clusters.get(item.path, "2"), _cluster_of(item))
    items.sort(key=lambda item: clusters[item.path])


def _lengthen_timeouts(items: list[pytest.Item]) -> None:
    """Multiply the timeouts of tests by how slow the machine is."""
    if (factor := slowness()) == 1.0:
        return
    for item in items:
        item.add_marker(pytest.mark.timeout(factor * _timeout_s(item)), append=False)


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    of_all = item.config.getoption("timeout", None) or item.config.getini("timeout")
    return float(marker.args[0] if marker else of_all)


def pytest_collection_finish() -> None:
    """Leave imported modules out of garbage collection: with several frameworks it takes seconds, and tests ask for it often."""
    gc.collect()
    gc.freeze()


def _cluster_of(item: Any) -> str:
    """Return a sort key: the default cluster first, then other settings, then tests without the shared cluster."""
    if "ray_cluster" not in getattr(item, "fixturenames", ()):
        return "2"
    settings = getattr(item.module, "RAY_INIT", None)
    return "0" if settings is None else f"1 {settings}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Print the stacks of a test's other processes shortly before its timeout."""
    if "ray_cluster" not in getattr(item, "fixturenames", ()):
        return (yield)
    from support.watchdog import watching

    with watching(_timeout_s(item), item.config._tmp_path_factory.getbasetemp()):  # type: ignore[attr-defined]
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _temporary_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set a temporary home folder: for runs without a storage path, and caches of libraries."""
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    leftovers.mark_this_process()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest, _temporary_home: None) -> Iterator[None]:
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
    """Yield what `ray.init` returned for a Ray cluster of one node with 8 logical CPUs.

    The next module gets the same cluster, unless a test failed or left something behind.
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


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, _no_process_is_left: None) -> Iterator[Any]:
    """Yield a `ray.cluster_utils.Cluster` of several nodes on this machine.

    The module's ``NODES`` has the numbers of their CPUs, the head node first; without it there are two nodes with two each.
    """
    from support.cluster import cluster_of

    with cluster_of(*getattr(request.module, "NODES", (2, 2))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trainer(
    request: pytest.FixtureRequest, ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A Trainer that the tests of a module share, so that its workers start once.

    The module's ``TRAINER`` has the arguments for `support.runs.make_trainer`, which is for tests that need one of their own.
    """
    from support.runs import make_trainer

    with make_trainer(tmp_path_factory.mktemp("runs"), **getattr(request.module, "TRAINER", {})) as trainer:
        yield trainer


@pytest.fixture
def fit(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a search without its display; see `support.searches.fit_in`."""
    from support.searches import fit_in

    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    return fit_in(tmp_path)


@pytest.fixture
def no_leftovers_of_trials(ray_cluster: Any) -> Iterator[None]:
    """Check that the test leaves no resource, placement group or process behind."""
    from support.searches import check_nothing_is_held

    yield
    check_nothing_is_held()


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
    """End the actors that Ray Data keeps for the life of the cluster."""
    import ray
    from ray.util import list_named_actors

    from raysgd.testing.cluster import RAY_DATA_NAMESPACES

    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] in RAY_DATA_NAMESPACES:
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def _stop_shared_cluster() -> None:
    if (shared := sys.modules.get("support.shared_cluster")) is not None:
        shared.CLUSTER.stop()


def _is_shared(process: Any) -> bool:
    shared = sys.modules.get("support.shared_cluster")
    return shared is not None and bool(shared.CLUSTER.owns(process))


def _stop_ray_if_it_runs() -> list[str]:
    """Stop a Ray that the code of a test started, and name it."""
    ray = sys.modules.get("ray")
    shared = sys.modules.get("support.shared_cluster")
    if ray is None or not ray.is_initialized() or (shared is not None and shared.CLUSTER.is_running):
        return []
    ray.shutdown()
    return ["a running Ray (call ray.shutdown in the test, or use the fixture ray_cluster)"]
