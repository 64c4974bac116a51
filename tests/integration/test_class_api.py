"""start, execute and execute_single, in torch groups of two workers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.backends.base import Backend
from raysgd.backends.none import NoneBackend, NoneConfig
from raysgd.errors import ConfigError, SerializationError, TrainerBusyError, WorkerTraceback
from support.runs import make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


TRAINER = {"backend": "torch"}


@pytest.fixture
def started(trainer: raysgd.Trainer) -> Iterator[raysgd.Trainer]:
    """The Trainer with an instance of `Learner` on each worker."""
    trainer.start(Learner, 10, step=2)
    yield trainer
    trainer.start()


class TakesDevice(NoneBackend):
    """A backend whose device belongs to a thread, as with CUDA."""

    def set_device(self) -> None:
        threading.current_thread().has_device = True  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class TakesDeviceConfig(NoneConfig):
    def make_backend(self) -> Backend:
        return TakesDevice()


class Learner:
    """Counts its calls, and sums over all ranks."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.count = start + raysgd.world_rank()
        self.step = step
        self.size = int(total(1))

    def train(self, rounds: int = 1) -> float:
        self.count += self.step * rounds
        return total(self.count)

    def fail_on(self, rank: int) -> float:
        if raysgd.world_rank() == rank:
            raise LookupError(f"no data on rank {rank}")
        return total(1)


class FailsOnRank1:
    """Fails while the other rank is in a collective."""

    def __init__(self) -> None:
        if raysgd.world_rank() == 1:
            raise LookupError("no such data")
        total(1)


def total(value: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor)
    return float(tensor)


def test_methods_run_on_every_worker_and_results_come_by_rank(started: raysgd.Trainer) -> None:
    assert started.execute(lambda learner: (raysgd.world_rank(), learner.count, learner.size)) == [
        (0, 10, 2),
        (1, 11, 2),
    ]
    assert started.execute(lambda learner: learner.train()) == [25.0, 25.0]
    assert started.execute(Learner.train) == [29.0, 29.0]
    assert started.execute(lambda learner: learner.count) == [14, 15]


def test_execute_single_is_on_rank_0_alone(started: raysgd.Trainer) -> None:
    assert started.execute_single(lambda learner: learner.count) == 10
    started.execute_single(lambda learner: setattr(learner, "count", 0))
    assert started.execute(lambda learner: learner.count) == [0, 11]


def test_constructor_arguments_are_copied(trainer: raysgd.Trainer) -> None:
    class Keeps:
        def __init__(self, items: list[int]) -> None:
            items.append(raysgd.world_rank())
            self.items = items

    given: list[int] = []
    trainer.start(Keeps, given)
    assert trainer.execute(lambda keeps: keeps.items) == [[0], [1]]
    assert given == []
    trainer.start()


def test_models_come_back_unwrapped(trainer: raysgd.Trainer) -> None:
    import torch

    class Holds:
        def __init__(self) -> None:
            self.model = raysgd.torch.prepare_model(torch.nn.Linear(2, 1))

    trainer.start(Holds)
    model = trainer.execute_single(lambda holds: holds.model)
    assert type(model) is torch.nn.Linear
    trainer.start()


def test_functions_are_executed_without_a_class(trainer: raysgd.Trainer) -> None:
    trainer.start()
    processes = trainer.execute(os.getpid)
    assert len(set(processes)) == 2
    assert trainer.execute_single(os.getpid) == processes[0]
    assert trainer.run(os.getpid, callbacks=quiet(), returns="all") == processes


def test_what_a_function_changes_in_its_process_lasts_until_the_next_run(trainer: raysgd.Trainer) -> None:
    def get() -> str | None:
        return os.environ.get("SET_BY_A_FUNCTION")

    class Reads:
        def __init__(self) -> None:
            self.value = get()

    trainer.start()
    trainer.execute_single(lambda: os.environ.update(SET_BY_A_FUNCTION="1"))
    assert trainer.execute(get) == ["1", None]
    trainer.start(Reads)
    assert trainer.execute(lambda reads: reads.value) == ["1", None]
    trainer.start()
    assert trainer.run(get, callbacks=quiet(), returns="all") == [None, None]
    trainer.run(lambda: os.environ.update(SET_BY_A_FUNCTION="by a run"), callbacks=quiet())
    assert trainer.execute(get) == [None, None]


def test_functions_and_instances_have_the_drivers_arguments(
    trainer: raysgd.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parses:
        def __init__(self) -> None:
            self.arguments = list(sys.argv)

    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    trainer.start(Parses)
    assert trainer.execute(lambda parses: parses.arguments) == [["train.py", "--epochs", "3"]] * 2
    trainer.start()
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "4"])
    assert trainer.execute_single(lambda: sys.argv) == ["train.py", "--epochs", "4"]


def test_error_in_a_function_is_raised_and_instances_stay(started: raysgd.Trainer) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        started.execute(lambda learner: learner.count // 0)
    assert type(caught.value) is ZeroDivisionError
    assert "in <lambda>" in str(caught.value.__cause__), "where in the worker it was raised"
    assert started.execute(lambda learner: learner.train()) == [25.0, 25.0]


def test_value_that_does_not_pickle(started: raysgd.Trainer) -> None:
    with pytest.raises(SerializationError, match="the function's return value cannot be sent"):
        started.execute(lambda learner: threading.Lock())
    lock = threading.Lock()
    with pytest.raises(SerializationError, match="the function"):
        started.execute(lambda learner: lock)
    assert started.execute_single(lambda learner: learner.count) == 10


@pytest.mark.timeout(90)
def test_instances_can_be_restarted_after_an_error_during_a_collective(started: raysgd.Trainer) -> None:
    with pytest.raises(LookupError, match="no data on rank 1"):
        started.execute(lambda learner: learner.fail_on(1))
    started.start(Learner, 20)
    assert started.execute(lambda learner: learner.train()) == [43.0, 43.0]


@pytest.mark.timeout(90)
def test_trainer_is_usable_after_an_error_in_the_constructor(trainer: raysgd.Trainer) -> None:
    with pytest.raises(LookupError, match="no such data"):
        trainer.start(FailsOnRank1)
    trainer.start(Learner, 0)
    assert trainer.execute(lambda learner: learner.train()) == [3.0, 3.0]
    trainer.start()
    assert trainer.run(raysgd.world_size, callbacks=quiet()) == 2


def test_run_while_instances_are_live_is_refused(started: raysgd.Trainer) -> None:
    with pytest.raises(TrainerBusyError, match=r"instances of Learner are live on the workers; start"):
        started.run(os.getpid)
    assert started.execute_single(lambda learner: learner.count) == 10
    started.start()
    assert started.run(raysgd.world_size, callbacks=quiet()) == 2


def test_second_class_replaces_the_first(started: raysgd.Trainer) -> None:
    class Other:
        pass

    started.start(Other)
    assert started.execute(lambda other: type(other).__name__) == ["Other", "Other"]


def test_instances_and_runs_alternate(trainer: raysgd.Trainer) -> None:
    def train_func() -> float:
        raysgd.report(step=1)
        return total(2)

    assert trainer.run(train_func, callbacks=quiet()) == 4.0
    trainer.start(Learner, 1)
    assert trainer.execute(Learner.train) == [5.0, 5.0]
    trainer.start()
    assert trainer.run(train_func, callbacks=quiet()) == 4.0


def test_start_refuses_other_objects(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"start\(.*did not get a class"):
        trainer.start(Learner(0) if False else "Learner")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not callable"):
        trainer.execute("train")  # type: ignore[arg-type]


async def coroutine(learner: Any = None) -> None: ...


def generator(learner: Any = None) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda a, b: 1, r"execute\(\) calls .*<lambda>\(a, b\) with one argument, the worker's instance: .*'b'"),
        (lambda: 1, "with one argument"),
        (coroutine, "coroutine, which is async; give a plain function"),
        (generator, "generator, which is a generator"),
        (lambda learner: coroutine(), "the function is async: it returned a coroutine"),
        (lambda learner: generator(), "the function returned a generator"),
    ],
)
def test_execute_refuses_other_objects(started: raysgd.Trainer, function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        started.execute(function)
    with pytest.raises(ConfigError, match=says.replace("execute", "execute_single")):
        started.execute_single(function)


def test_function_without_its_instance_is_refused(trainer: raysgd.Trainer) -> None:
    trainer.start()
    with pytest.raises(ConfigError, match=r"with no argument, since start\(\) was given no class"):
        trainer.execute(lambda learner: learner)


@pytest.mark.parametrize("has_class", [True, False])
def test_error_names_rank_and_line(trainer: raysgd.Trainer, has_class: bool) -> None:
    def fail(*instance: Any) -> None:
        if not has_class or raysgd.world_rank() == 1:
            raise LookupError("no data")

    trainer.start(*([Learner, 10] if has_class else []))  # type: ignore[arg-type]
    with pytest.raises(LookupError, match=r"^'?no data'?$") as caught:
        trainer.execute(fail)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerTraceback)
    assert cause.rank in ((1,) if has_class else (0, 1))
    assert cause.node.startswith(f"{os.uname().nodename} (")
    assert "in fail" in cause.traceback and "instances.py" not in cause.traceback
    trainer.start()


def test_error_in_the_constructor_names_rank_and_line(trainer: raysgd.Trainer) -> None:
    with pytest.raises(LookupError) as caught:
        trainer.start(FailsOnRank1)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerTraceback) and cause.rank == 1
    assert "in __init__" in cause.traceback
    trainer.start()


def test_function_has_the_device_of_its_worker(ray_cluster: Any, tmp_path: Path) -> None:
    """The device is set in every thread of the worker that executes functions."""

    def has_taken() -> bool:
        return getattr(threading.current_thread(), "has_device", False)

    with make_trainer(tmp_path, 1, TakesDeviceConfig()) as trainer:
        assert trainer.execute(has_taken) == [True]
