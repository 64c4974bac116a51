"""A Trainer that nothing refers to any more releases its workers; who waits for resources says who holds them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.errors import ConfigError, StartTimeoutError
from support.cluster import ClusterState
from support.poll import until
from support.runs import PATIENCE_S, are_gone, events_of, make_trainer, pids, quiet, travels_by_value
from support.searches import Fit

travels_by_value(__name__)

RAY_INIT = {"num_cpus": 2}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector: a Trainer must be freed at once when its last reference is dropped."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fails(config: dict[str, Any]) -> None:
    raise ValueError("of train_func")


def reports_until(config: dict[str, Any]) -> bytes:
    """Report until the file exists; return more than travels in a message."""
    step = 0
    while not os.path.exists(config["file"]):
        step += 1
        raysgd.report(step=step)
        until(lambda: os.path.exists(config["file"]), 0.05)
    return bytes(500_000)


def test_trainer_whose_name_is_rebound_releases_its_workers(
    ray_cluster: Any, tmp_path: Path, no_collector: None
) -> None:
    """As when cells of a notebook are executed again, also with an exception that the notebook keeps."""
    kept = []
    trainer = make_trainer(tmp_path, 2)
    for _ in range(2):
        before = pids(trainer)
        with pytest.raises(ValueError, match="of train_func") as caught:
            trainer.run(fails, callbacks=quiet())
        kept.append(caught.value)
        with pytest.raises(ConfigError) as refused:
            trainer.run(fails, 7)  # type: ignore[arg-type]
        kept.append(refused.value)
        del caught, refused
        trainer = make_trainer(tmp_path, 2)
        assert pids(trainer) and are_gone(before)
    assert len(kept) == 4
    trainer.shutdown()


def test_trainer_that_belongs_to_cyclic_garbage_releases_its_workers_for_the_next(
    ray_cluster: Any, tmp_path: Path, no_collector: None
) -> None:
    owner: dict[str, Any] = {"trainer": make_trainer(tmp_path, 2)}
    owner["itself"] = owner
    before = pids(owner["trainer"])
    del owner
    with make_trainer(tmp_path, 2) as trainer:
        assert pids(trainer) and are_gone(before)


def test_live_stream_keeps_the_workers_until_its_end(ray_cluster: Any, tmp_path: Path, no_collector: None) -> None:
    file = tmp_path / "end"
    stream = make_trainer(tmp_path, 2).run_generator(reports_until, {"file": str(file)}, callbacks=quiet())
    assert [next(stream)["step"] for _ in range(3)] == [1, 2, 3]
    file.touch()
    list(stream)
    assert ClusterState.empty().leftovers() == [], "the run is over"
    assert stream.get_returns() == bytes(500_000)


def test_run_is_cancelled_when_its_trainer_and_its_stream_are_dropped(
    ray_cluster: Any, tmp_path: Path, no_collector: None, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_trainer(tmp_path, 2).run_generator(reports_until, {"file": str(tmp_path / "end")}, callbacks=quiet())
    next(stream)
    run_dir = str(stream.run_dir)
    with caplog.at_level(logging.WARNING, "raysgd"):
        del stream
        assert ClusterState.empty().leftovers() == []
    assert raysgd.load_run(run_dir).outcome == "cancelled"
    assert any("its Trainer and its results were dropped" in record.getMessage() for record in caplog.records)


def test_detached_run_continues_when_its_trainer_and_its_stream_are_dropped(
    ray_cluster: Any, tmp_path: Path, no_collector: None
) -> None:
    run_config = raysgd.RunConfig(name="kept", storage_path=tmp_path, detached=True)
    trainer = raysgd.Trainer(1, "none", run_config=run_config)
    trainer.run_generator(reports_until, {"file": str(tmp_path / "end")}, callbacks=quiet())
    del trainer
    again = raysgd.Trainer.attach("kept")
    try:
        patience = raysgd.FailureConfig(start_timeout_s=4)
        held = "1 is held by the detached Trainer 'kept' of run kept/run_001"
        with (
            make_trainer(tmp_path, 2, failure_config=patience) as waiting,
            pytest.raises(StartTimeoutError, match=held),
        ):
            waiting.run(os.getpid, callbacks=quiet())
        (tmp_path / "end").touch()
        assert again.stream().get_returns() == bytes(500_000)
    finally:
        again.shutdown()


def test_waiting_run_says_what_it_waits_for_and_who_holds_it(ray_cluster: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(make_trainer(tmp_path, 1))
        pids(holder)
        run = "/".join(str(holder.run_dir).split("/")[-2:])
        others = ray.util.placement_group([{"CPU": 1}], name="mine")
        ray.get(others.ready(), timeout=PATIENCE_S)
        try:
            waiting = stack.enter_context(make_trainer(tmp_path, 2))  # not before: it starts its workers at once
            stream = waiting.run_generator(os.getpid, callbacks=[Warnings(tmp_path / "warned")])
            assert until((tmp_path / "warned").exists, PATIENCE_S)
        finally:
            ray.util.remove_placement_group(others)
        holder.shutdown()
        assert stream.get_returns() > 0
        (message,) = [event["message"] for event in events_of(waiting, "warning")]
    assert message.startswith("waiting for 2 CPUs; 1 is held by ")
    assert f"your Trainer of run {run} (its shutdown() releases them)" in message
    assert "the placement group 'mine'" in message


class Warnings(raysgd.Callback):
    """Makes a file when there is a warning."""

    runs_in = "driver"

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_event(self, event: raysgd.Event) -> None:
        if event.kind == "warning":
            self._file.touch()


def test_class_api_says_what_it_waits_for(ray_cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with make_trainer(tmp_path, 2) as holder:
        pids(holder)
        patience = raysgd.FailureConfig(start_timeout_s=5)
        held = "waiting for 2 CPUs; 2 are held by your Trainer of run"
        with (
            make_trainer(tmp_path, 2, failure_config=patience) as waiting,
            pytest.raises(StartTimeoutError, match=held),
        ):
            waiting.start()
        printed = until(lambda: find_printed(capfd, "[raysgd] waiting for 2 CPUs; 2 are held"), PATIENCE_S)
    assert printed


def test_search_says_what_its_trials_wait_for(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture, no_leftovers_of_trials: None
) -> None:
    trainable = raysgd.Trainer(2, "none").to_trainable(lambda config: raysgd.report(done=1))
    with make_trainer(tmp_path, 1) as holder, caplog.at_level(logging.WARNING, "raysgd"):
        pids(holder)
        search = threading.Thread(target=fit, args=(trainable,))
        search.start()
        assert until(lambda: find_logged(caplog), PATIENCE_S)
        holder.shutdown()
        search.join()
    assert "your Trainer of run" in find_logged(caplog)


def find_logged(caplog: pytest.LogCaptureFixture) -> str:
    texts = [record.getMessage() for record in caplog.records]
    return next((text for text in texts if "the search cannot start a trial yet, it is waiting for 2 CPUs" in text), "")


def find_printed(capfd: pytest.CaptureFixture[str], text: str) -> bool:
    captured = capfd.readouterr()
    return text in captured.out + captured.err


def test_workers_without_resources_start_where_all_cpus_are_taken(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2) as holder, make_trainer(tmp_path, 2, cpus_per_worker=0) as trainer:
        pids(holder)
        assert ray.available_resources().get("CPU", 0) == 0
        assert len(pids(trainer)) == 2
