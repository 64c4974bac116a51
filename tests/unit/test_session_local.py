"""The session outside of a Trainer, with scalars on a device: the loop does not wait for them."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import SessionError
from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.event_queue import EventQueue
from raysgd.session.worker import Codec, WorkerSession
from support.poll import until
from support.sessions import FakeLink, FakeWriter, Worker


def scalar_of(read: Any) -> Any:
    """A scalar on a device, which is read by ``read``."""
    return type("Scalar", (), {"__module__": "jaxlib._jax", "shape": (), "item": lambda self: read()})()


def ranks_and_sizes() -> tuple[int, ...]:
    return (
        raysgd.world_rank(),
        raysgd.world_size(),
        raysgd.local_rank(),
        raysgd.local_world_size(),
        raysgd.node_rank(),
        raysgd.data_parallel_rank(),
        raysgd.data_parallel_size(),
    )


def test_single_process_is_a_world_of_one(tmp_path: Path) -> None:
    assert ranks_and_sizes() == (0, 1, 0, 1, 0, 0, 1)
    assert raysgd.in_worker() is False
    with raysgd.local(dir=tmp_path):
        weights = {"weight": 1.0}
        raysgd.barrier()
        assert raysgd.should_stop() is False
        assert raysgd.broadcast(weights) is weights
        assert raysgd.gather(weights) == [weights]
        assert raysgd.list_checkpoints() == []
        raysgd.save_checkpoint(weights)
        assert [each.load() for each in raysgd.list_checkpoints()] == [weights]


def test_worker_has_its_ranks_among_all_on_its_node_and_among_replicas() -> None:
    session = WorkerSession(
        Identity(5, 8, 1, 4, 1, workers_per_replica=2),
        event_queue=EventQueue(0),
        writer=FakeWriter(),  # type: ignore[arg-type]
        link=FakeLink(),
        codec=Codec(pickle.dumps, pickle.loads),
        start=None,
        time_before_s=0.0,
        seed=None,
        deterministic=False,
    )
    context.install(session)
    try:
        assert ranks_and_sizes() == (5, 8, 1, 4, 1, 2, 4)
        assert raysgd.in_worker() is True
    finally:
        context.uninstall()


def test_thread_that_outlives_its_attempt_reports_nothing_to_the_next_one() -> None:
    is_over, errors = threading.Event(), list[BaseException]()

    def report_late() -> None:
        assert is_over.wait(20)
        try:
            raysgd.report(loss=1.0)
        except SessionError as error:
            errors.append(error)

    before = set(threading.enumerate())
    thread = threading.Thread(target=report_late)
    thread.start()
    context.block_threads_started_since(before)
    worker = Worker()
    context.install(worker.session)
    try:
        raysgd.report(loss=0.5)  # this thread was there before
        is_over.set()
        thread.join(20)
    finally:
        context.uninstall()
    assert len(errors) == 1 and worker.session.num_reports == 1


def test_metrics_of_a_report_may_be_a_mapping_and_arguments(caplog: pytest.LogCaptureFixture) -> None:
    with raysgd.local():
        raysgd.report({"loss": 0.5, "step": 1}, step=2)
    assert caplog.messages == ["1: loss=0.5  step=2"]


def test_report_does_not_wait_for_the_device(caplog: pytest.LogCaptureFixture) -> None:
    is_computed = threading.Event()

    def read() -> float:
        assert is_computed.wait(20)
        return 0.5

    with raysgd.local():
        raysgd.report(step=0, loss=1.0)
        raysgd.report(step=1, nested={"losses": [scalar_of(read)]})
        raysgd.report(step=2)
        assert caplog.messages == ["1: step=0  loss=1"]
        is_computed.set()
        assert until(lambda: len(caplog.messages) == 3, 20)
        raysgd.report(step=3)
        assert until(lambda: len(caplog.messages) == 4, 20)
    assert caplog.messages[1:] == ["2: step=1  nested={'losses': [0.5]}", "3: step=2", "4: step=3"]


def test_scalar_that_cannot_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> float:
        raise RuntimeError("device-side assert triggered")

    with raysgd.local():
        raysgd.report(loss=scalar_of(fail))
        assert until(lambda: caplog.messages, 20)
    assert caplog.messages == ["1: this report could not be read: RuntimeError: device-side assert triggered"]


def test_metrics_of_a_checkpoint_may_be_on_a_device(tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint({"x": 1}, metrics={"loss": scalar_of(lambda: 0.5)})
    (folder,) = tmp_path.iterdir()
    assert raysgd.Checkpoint.from_path(folder).metrics == {"loss": 0.5}
