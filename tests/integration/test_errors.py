"""Errors of user code, of arguments of a run, and of the use of a Trainer: one clear error each.

All tests of the module go through the same few Trainers, in the same processes: each error leaves its Trainer usable.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import (
    ConfigError,
    MetricError,
    SerializationError,
    SessionError,
    TrainerBusyError,
    TrainerClosedError,
    TrainFuncError,
    UsageError,
    WorkerTraceback,
)
from raysgd.testing import check_history
from support.poll import until
from support.runs import PATIENCE_S, events_of, latest_run, make_trainer, pids, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


@pytest.fixture
def same_processes(trainer: raysgd.Trainer) -> Iterator[None]:
    """Check that the test leaves the Trainer usable, with the same processes."""
    before = pids(trainer)
    yield
    assert pids(trainer) == before


class Diverged(Exception):
    pass


class ServiceDown(Exception):
    """An error that a retry may cure."""


class ServiceSlow(ServiceDown):
    pass


class WithDetails(Exception):
    """An exception with more arguments than its message, as in many libraries; pickle alone cannot restore it."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("the lock is jammed")
        self.lock = threading.Lock()


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def linger() -> None:
    """Keep a rank busy while another fails. (A rank in a long C call would be replaced.)"""
    for _ in range(6000):
        time.sleep(0.01)


# -- exceptions in train_func ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_processes")
class TestExceptionsOfTheUser:
    def test_exception_keeps_its_type_with_rank_node_and_traceback(self, trainer: raysgd.Trainer) -> None:
        def check_loss(loss: float) -> None:
            raise Diverged(f"loss is {loss}")

        def train_func() -> None:
            if raysgd.world_rank() == 1:
                check_loss(1e9)
            linger()

        with pytest.raises(Diverged, match=r"^loss is 1000000000\.0$") as caught:
            trainer.run(train_func, callbacks=quiet())

        cause = caught.value.__cause__
        assert isinstance(cause, WorkerTraceback)
        assert cause.rank == 1
        hostname, ip = os.uname().nodename, trainer_node_ip()
        assert cause.node == f"{hostname} ({ip})"
        assert "check_loss(1e9)" in cause.traceback and "in check_loss" in cause.traceback
        assert f"in the worker of rank 1 on {hostname}" in str(cause)

    def test_secrets_are_not_in_tracebacks_or_files(self, trainer: raysgd.Trainer) -> None:
        def train_func(config: dict[str, Any]) -> None:
            password = config["db_password"]
            raise ConnectionError(f"{password} was refused by {config['url']}")

        with pytest.raises(ConnectionError) as caught:
            trainer.run(train_func, {"db_password": "hunter2!", "url": "db.local"}, callbacks=quiet())

        assert "hunter2!" not in str(caught.value.__cause__)
        assert "*** was refused by db.local" in str(caught.value.__cause__)
        run_dir = Path(latest_run(trainer).run_dir)
        assert "refused by db.local" in (run_dir / "events.jsonl").read_text()
        for file in run_dir.glob("*.json*"):
            assert "hunter2!" not in file.read_text(), file.name

    def test_first_exception_is_raised_and_others_are_listed(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            raysgd.barrier()
            end = time.monotonic() + 0.02 * (1 - raysgd.world_rank())
            while time.monotonic() < end:
                pass
            raise ValueError(time.time())

        for _ in range(10):  # a slow rank may be ended before it raises
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                trainer.run(train_func, callbacks=quiet())
            cause = caught.value.__cause__
            assert isinstance(cause, WorkerTraceback)
            if cause.followed:
                break
        ((rank, line),) = cause.followed
        assert {rank, cause.rank} == {0, 1}
        assert caught.value.args[0] < float(line.removeprefix("ValueError: "))
        assert f"rank {rank}: ValueError: " in str(cause)

    def test_error_does_not_wait_for_other_ranks(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            raysgd.barrier()
            if raysgd.world_rank() == 0:
                raysgd.report(raised_at=time.time())
                raise Diverged("now")
            while True:  # a Python loop can be ended at any point
                sum(range(100))

        stream = trainer.run_generator(train_func, callbacks=quiet())
        with pytest.raises(Diverged):
            stream.get_returns()
        # The target is 0.3 s on an idle machine; the benchmarks measure it.
        assert stream.wait_closed(PATIENCE_S)

    def test_exception_keeps_its_attributes(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            raise WithDetails(7, reason="no more disk")

        with pytest.raises(WithDetails, match=r"no more disk \(7\)") as caught:
            trainer.run(train_func, callbacks=quiet())
        assert caught.value.code == 7
        assert caught.value.reason == "no more disk"
        assert isinstance(caught.value.__cause__, WorkerTraceback)

    def test_exception_that_does_not_pickle_keeps_its_name_and_text(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            raise HoldsALock

        with pytest.raises(TrainFuncError, match="HoldsALock: the lock is jammed") as caught:
            trainer.run(train_func, callbacks=quiet())
        assert caught.value.type_name.endswith("HoldsALock")
        assert "does not pickle" in str(caught.value)
        assert "raise HoldsALock" in str(caught.value.__cause__)

    def test_exception_whose_str_raises_keeps_its_name(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            raise Unspeakable

        with pytest.raises(TrainFuncError, match="Unspeakable"):
            trainer.run(train_func, callbacks=quiet())

    def test_sys_exit_is_an_error(self, trainer: raysgd.Trainer) -> None:
        with pytest.raises(TrainFuncError, match=r"sys\.exit\(3\) on rank 0; return instead") as caught:
            trainer.run(lambda: sys.exit(3) if raysgd.world_rank() == 0 else linger(), callbacks=quiet())
        assert caught.value.type_name == "SystemExit"

    def test_keyboard_interrupt_of_user_code_is_an_error(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            raise KeyboardInterrupt("a signal handler of a library")

        with pytest.raises(TrainFuncError, match="KeyboardInterrupt in train_func on rank"):
            trainer.run(train_func, callbacks=quiet())

    def test_value_that_does_not_pickle(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> dict[str, Any]:
            return {"model": {"lock": threading.Lock()}}

        with pytest.raises(SerializationError, match="train_func's return value") as caught:
            trainer.run(train_func, callbacks=quiet())
        assert caught.value.path == "train_func's return value ['model']['lock']"

    def test_unpicklable_return_value_of_one_rank_is_refused(self, trainer: raysgd.Trainer) -> None:
        with pytest.raises(SerializationError, match="train_func's return value on rank 1 cannot be sent"):
            trainer.run(lambda: threading.Lock() if raysgd.world_rank() == 1 else 0, callbacks=quiet(), returns="all")

    @pytest.mark.parametrize(
        ("train_func", "says"),
        [
            (lambda: coroutine(None), "train_func is async: it returned a coroutine"),
            (lambda: coroutine(None) if raysgd.world_rank() == 1 else linger(), "train_func is async"),
            (lambda: generator(None), "train_func returned a generator"),
        ],
    )
    def test_returned_coroutine_or_generator_is_refused(
        self, trainer: raysgd.Trainer, train_func: Callable[..., Any], says: str
    ) -> None:
        with pytest.raises(ConfigError, match=says):
            trainer.run(train_func, callbacks=quiet())

    def test_results_before_an_error_are_iterated_first(self, trainer: raysgd.Trainer) -> None:
        def train_func() -> None:
            for step in range(3):
                raysgd.report(step=step)
            raysgd.barrier()  # both ranks made all reports: an incomplete round is dropped
            raise Diverged("after three")

        stream = trainer.run_generator(train_func, callbacks=quiet())
        assert [next(stream)["step"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(Diverged, match="after three"):
            next(stream)
        with pytest.raises(Diverged, match="after three"):
            stream.get_returns()
        assert list(stream) == []
        assert stream.is_finished()


# -- with a process group ----------------------------------------------------------------------------------------------


def depends_on_a_service(config: dict[str, Any]) -> tuple[int, int]:
    """Save three steps; rank 1 raises after the second one, as often as the config says. Return where it started."""
    start = raysgd.load_checkpoint() or 0
    for step in range(start, 3):
        raysgd.report(step=step)
        raysgd.save_checkpoint(step + 1)
        if step == 1 and raysgd.world_rank() == 1:
            while raysgd.load_checkpoint() != 2:  # it is written meanwhile
                time.sleep(0.01)
            raise config["error"]
        raysgd.barrier()
    return start, os.getpid()


def raises_once(config: dict[str, Any]) -> tuple[int, int]:
    if raysgd.load_checkpoint() is not None:
        config = {**config, "error": AssertionError("not reached, as the run resumes after that step")}
    return depends_on_a_service(config)


def test_chosen_exception_is_retried_as_a_failure(ray_cluster: Any, tmp_path: Path) -> None:
    retried = raysgd.FailureConfig(max_failures=1, retry_on=ServiceDown)
    with make_trainer(tmp_path, 2, failure_config=retried) as trainer:
        processes = pids(trainer)
        found = trainer.run(raises_once, {"error": ServiceSlow("503")}, callbacks=quiet(), returns="all")
        assert found == [(2, pid) for pid in processes], "the run resumes from its checkpoint, in the same processes"
        (failure,) = events_of(trainer, "failure")
        assert failure["ranks"] == [1] and failure["action"] == "retry 1"
        assert failure["error"].startswith("train_func raised ") and "ServiceSlow: 503 on rank 1, " in failure["error"]
        check_history(str(trainer.run_dir))

        with pytest.raises(ServiceDown, match="500") as caught:
            trainer.run(always_raises, {"error": ServiceDown("500")}, callbacks=quiet())
        assert isinstance(caught.value.__cause__, WorkerTraceback) and caught.value.__cause__.rank == 1
        (note,) = caught.value.__notes__
        assert "failure 2 of the run; FailureConfig(max_failures=1) allows no more" in note
        assert len(events_of(trainer, "failure")) == 2
        check_history(str(trainer.run_dir))

        with pytest.raises(Diverged) as raised:
            trainer.run(always_raises, {"error": Diverged("nan")}, callbacks=quiet())
        assert not hasattr(raised.value, "__notes__") and events_of(trainer, "failure") == []
        assert pids(trainer) == processes


def always_raises(config: dict[str, Any]) -> None:
    raysgd.report(step=0)
    if raysgd.world_rank() == 1:
        raise config["error"]
    raysgd.barrier()


def test_cause_is_raised_and_broken_collectives_are_listed(ray_cluster: Any, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> int:
        import torch
        import torch.distributed as dist

        model = raysgd.torch.prepare_model(torch.nn.Linear(4, 2))
        for _step in range(3):
            model(torch.ones(2, 4)).sum().backward()
        if config["fails"] and raysgd.world_rank() == raysgd.world_size() - 1:
            time.sleep(0.2)  # the other ranks wait in the collective by now
            raise Diverged("the cause")
        dist.all_reduce(torch.ones(1))
        return os.getpid()

    with make_trainer(tmp_path, 3, "torch") as trainer:
        before = trainer.run(train_func, {"fails": False}, callbacks=quiet(), returns="all")
        with pytest.raises(Diverged, match=r"^the cause$") as caught:
            trainer.run(train_func, {"fails": True}, callbacks=quiet())

        last = len(before) - 1
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerTraceback) and cause.rank == last
        assert last not in {rank for rank, _ in cause.followed}
        assert trainer.run(train_func, {"fails": False}, callbacks=quiet(), returns="all") == before


# -- arguments of a run ------------------------------------------------------------------------------------------------


def test_unpicklable_config_is_refused_with_its_key(trainer: raysgd.Trainer) -> None:
    with pytest.raises(SerializationError, match=r"config\['data'\]\['lock'\] cannot be sent") as caught:
        trainer.run(lambda config: None, {"lr": 1, "data": {"lock": threading.Lock()}})
    assert caught.value.path == "config['data']['lock']"


def test_unpicklable_train_func_is_refused_with_its_variable(trainer: raysgd.Trainer) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"train_func \(its variable 'lock'\)"):
        trainer.run(lambda: lock.locked())


def test_train_func_that_captures_its_trainer_is_refused(trainer: raysgd.Trainer) -> None:
    with pytest.raises(SerializationError, match=r"its variable 'trainer'.*pass what it needs in the config"):
        trainer.run(lambda: trainer.run_dir)


def test_trainer_cannot_be_pickled(trainer: raysgd.Trainer) -> None:
    with pytest.raises(SerializationError, match="holds processes and cannot be pickled"):
        pickle.dumps(trainer)


async def coroutine(config: Any) -> None: ...


def generator(config: Any) -> Iterator[int]:
    yield 1


def needs_two(config: Any, data: Any) -> None: ...


def needs_keyword(config: Any, *, data: Any) -> None: ...


@pytest.mark.parametrize(
    ("train_func", "says"),
    [
        (coroutine, "train_func coroutine is async"),
        (generator, "train_func generator is a generator"),
        (needs_two, r"needs config, data, but it gets one argument.*functools\.partial"),
        (needs_keyword, "needs config, data"),
        (functools.partial(coroutine), "is async"),
        (42, "train_func=42 is not a function"),
        (Diverged, "is not a function"),
    ],
)
def test_invalid_train_func_is_refused(trainer: raysgd.Trainer, train_func: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer.run(train_func)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"config": [("lr", 1)]}, r"config=\[\('lr', 1\)\] is a list; give a dict"),
        ({"config": {1: 2}}, "config has the key 1, an int; give strings"),
        ({"returns": "last"}, "returns='last' is not known"),
        ({"reduce": {"loss": "median"}}, r"reduce\['loss'\]='median' is not known"),
        ({"callbacks": raysgd.Callback()}, r"give callbacks=\[...\]"),
    ],
)
def test_invalid_arguments_are_refused(trainer: raysgd.Trainer, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer.run(lambda config: None, **given)


def test_storage_path_that_cannot_be_created_raises(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer(tmp_path / "file" / "runs", 1)
    with trainer, pytest.raises(raysgd.errors.StorageError, match="could not make"):
        trainer.run(os.getpid, callbacks=quiet())


# -- metrics and sessions ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_processes")
class TestMisuseInTheWorker:
    @pytest.mark.parametrize(
        ("metric", "says"),
        [
            ({"loss": {1, 2}}, r"report\(loss=\.\.\.\) got a builtins\.set"),
            ({"weights": bytes(10)}, "raysgd.save_checkpoint"),
            ({"text": "x" * (1 << 21)}, "the limit is 1 MiB"),
            ({"a": {"b": {3: 4}}}, "give a string"),
            ({"timestamp": 1.0, "time_total_s": 2.0}, "sets time_total_s, timestamp itself"),
        ],
    )
    def test_invalid_metric_is_refused(self, trainer: raysgd.Trainer, metric: dict[str, Any], says: str) -> None:
        with pytest.raises(MetricError, match=says) as caught:
            trainer.run(lambda config: raysgd.report(config["metric"]), {"metric": metric}, callbacks=quiet())
        assert caught.value.key.startswith(tuple(metric))

    def test_trainer_inside_train_func_is_refused(self, trainer: raysgd.Trainer) -> None:
        with pytest.raises(UsageError, match="a Trainer inside train_func"):
            trainer.run(lambda: raysgd.Trainer(2) and None, callbacks=quiet())

    @pytest.mark.parametrize("during", ["nothing", "the next run"])
    @pytest.mark.parametrize("call", ["report", "save_checkpoint"])
    def test_calls_of_a_leftover_thread_raise(
        self, trainer: raysgd.Trainer, tmp_path: Path, call: str, during: str
    ) -> None:
        def train_func(config: dict[str, Any]) -> str:
            # Read here: the thread may run between two sessions, in a world of one.
            answer = Path(config["gate"] + str(raysgd.world_rank()))

            def late() -> None:
                until(Path(config["gate"]).exists, 30)
                try:
                    raysgd.report(late=1) if config["call"] == "report" else raysgd.save_checkpoint({"late": 1})
                    text = "no error"
                except BaseException as error:
                    text = f"{type(error).__name__}: {error}"
                answer.write_text(text)

            threading.Thread(target=late).start()
            raysgd.report(early=1)
            return "done"

        gate = tmp_path / "gate"
        assert trainer.run(train_func, {"gate": str(gate), "call": call}, callbacks=quiet()) == "done"
        answers = [tmp_path / "gate0", tmp_path / "gate1"]

        def next_one(config: dict[str, Any]) -> None:
            raysgd.report(early=1)
            Path(config["gate"]).write_text("")
            until(lambda: all(path.exists() and path.read_text() for path in map(Path, config["answers"])), 60)

        if during == "nothing":
            gate.write_text("")
        else:
            trainer.run(next_one, {"gate": str(gate), "answers": [str(path) for path in answers]}, callbacks=quiet())
        assert until(lambda: all(path.exists() and path.read_text() for path in answers), PATIENCE_S)
        for path in answers:
            assert path.read_text().startswith(f"{SessionError.__name__}: train_func has returned")
        run = latest_run(trainer)
        assert len(run.workers) == 2 and not run.checkpoints

    @pytest.mark.parametrize("is_running", [True, False])
    def test_unreadable_device_scalar_raises(self, trainer: raysgd.Trainer, is_running: bool) -> None:
        """The value is read after the call, when train_func continued or returned."""

        def train_func(config: dict[str, Any]) -> None:
            class Lost:
                shape = ()

                def item(self) -> float:
                    raise RuntimeError("buffer has been deleted or donated")

            Lost.__module__ = "jaxlib.lost"
            raysgd.report(step=0)
            raysgd.barrier()
            raysgd.report(loss=Lost() if raysgd.world_rank() == 1 else 0.0)
            while config["is_running"]:
                raysgd.report(step=1)
                time.sleep(0.001)

        stream = trainer.run_generator(train_func, {"is_running": is_running}, callbacks=quiet())
        with pytest.raises(
            MetricError, match=r"report\(loss=...\) could not be read: RuntimeError: buffer has been del"
        ):
            stream.get_returns()
        assert next(stream)["step"] == 0
        assert events_of(trainer, "failure") == []


# -- the Trainer -------------------------------------------------------------------------------------------------------


def test_second_run_while_one_is_live_is_refused(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    stream = trainer.run_generator(wait_for_file, {"file": str(tmp_path / "go")}, callbacks=quiet())
    for second in (trainer.run, trainer.run_generator, trainer.start):
        with pytest.raises(
            TrainerBusyError, match=r"is running; wait for its end with get_returns\(\), or cancel\(\) it"
        ):
            second(None if second == trainer.start else os.getpid)  # type: ignore[operator]
    assert until(lambda: stream.run_dir, PATIENCE_S)
    with pytest.raises(TrainerBusyError, match=rf"^{Path(str(stream.run_dir)).name} is running;"):
        trainer.run(os.getpid)
    (tmp_path / "go").write_text("")
    assert stream.get_returns() == "went"


def wait_for_file(config: dict[str, Any]) -> str:
    deadline = time.monotonic() + 60
    while not os.path.exists(config["file"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return "went"


def test_calls_after_shutdown_raise(ray_cluster: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1)
    trainer.shutdown()
    trainer.shutdown()
    calls: list[Callable[[], Any]] = [
        lambda: trainer.run(os.getpid),
        lambda: trainer.run_generator(os.getpid),
        lambda: trainer.start(),
        lambda: trainer.execute(os.getpid),
        lambda: trainer.__enter__(),
    ]
    for call in calls:
        with pytest.raises(TrainerClosedError, match="was shut down; make a new one"):
            call()


def test_errors_are_in_the_events(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        raise Diverged("for the record")

    with pytest.raises(Diverged):
        trainer.run(train_func, callbacks=quiet())
    (end,) = events_of(trainer, "run_end")[-1:]
    assert end["kind"] == "error"
    assert latest_run(trainer).outcome == "error"
    assert "Diverged: for the record" in end["message"]


def trainer_node_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


# -- ranks that have returned ------------------------------------------------------------------------------------------


def test_broadcast_after_rank_0_returned_raises(trainer: raysgd.Trainer, same_processes: None) -> None:
    def train_func() -> None:
        raysgd.barrier()
        if raysgd.world_rank() > 0:
            raysgd.broadcast()

    with pytest.raises(SessionError, match="rank 0 returned without calling broadcast"):
        trainer.run(train_func, callbacks=quiet())


def test_barrier_does_not_wait_for_returned_ranks(trainer: raysgd.Trainer, same_processes: None) -> None:
    def train_func() -> int:
        for _ in range(3 * raysgd.world_rank()):
            raysgd.barrier()
        return raysgd.world_rank()

    assert trainer.run(train_func, callbacks=quiet(), returns="all") == [0, 1]
