"""Callbacks in real runs: what they get in each process, how they end a run, and how their errors are handled."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.callbacks import (
    CsvCallback,
    EarlyStoppingCallback,
    JsonLinesCallback,
    ProgressCallback,
    TensorBoardCallback,
)
from support.poll import until
from support.runs import PATIENCE_S, events_of, latest_run, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


class Witness(raysgd.Callback):
    """Records each call of a hook in any process; raises ``error`` from hook ``fails_in``."""

    def __init__(self, folder: Path, fails_in: str = "", error: BaseException | None = None) -> None:
        self.folder = str(folder)
        self.fails_in = fails_in
        self.error = error
        self.info: raysgd.RunInfo | None = None

    def on_run_start(self, info: raysgd.RunInfo) -> None:
        self.info = info
        self.saw("on_run_start", [info.name, info.run_dir, info.config, info.num_workers, info.backend])

    def on_result(self, result: raysgd.Result) -> None:
        self.saw("on_result", dict(result))

    def on_checkpoint(self, checkpoint: raysgd.Checkpoint) -> None:
        self.saw("on_checkpoint", [checkpoint.path, checkpoint.iteration])

    def on_event(self, event: raysgd.Event) -> None:
        self.saw("on_event", event.kind)

    def on_run_end(self, error: BaseException | None) -> None:
        cause = None if error is None or error.__cause__ is None else type(error.__cause__).__name__
        self.saw("on_run_end", None if error is None else [type(error).__name__, str(error), cause])

    def saw(self, hook: str, data: Any) -> None:
        with open(f"{self.folder}/rank-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps([hook, data, os.getpid()]) + "\n")
        if hook == self.fails_in and self.error is not None:
            raise self.error


class InController(Witness):
    runs_in = "controller"


class InWorker(Witness):
    runs_in = "worker"


class CriticalInDriver(Witness):
    critical = True


class CriticalInController(InController):
    critical = True


class CriticalInWorker(InWorker):
    critical = True


PLACES = {"driver": Witness, "controller": InController, "worker": InWorker}
CRITICAL = {"driver": CriticalInDriver, "controller": CriticalInController, "worker": CriticalInWorker}


def seen(folder: Path, place: str) -> list[tuple[str, Any, int]]:
    """Return the calls that a witness recorded, in a worker those on rank 0; read when the run is closed."""
    file = folder / f"rank-{0 if place == 'worker' else None}.jsonl"
    assert until(file.exists, PATIENCE_S)
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def hooks(folder: Path, place: str) -> list[str]:
    return [hook for hook, _, _ in seen(folder, place) if hook != "on_event"]


def three_steps(config: dict[str, Any]) -> str:
    for step in range(3):
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step)
    return "done"


def endless() -> str:
    """Check should_stop in each step, and return a value when it is set."""
    step = 0
    while not raysgd.should_stop():
        raysgd.report(step=step)
        time.sleep(0.002)
        step += 1
    return "stopped early"


class Boom(Exception):
    pass


# -- what callbacks get ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_callback_sees_the_whole_run(trainer: raysgd.Trainer, tmp_path: Path, place: str) -> None:
    config = {"lr": 0.1, "api_key": "secret"}
    witness = PLACES[place](tmp_path)
    assert trainer.run(three_steps, config, callbacks=[*quiet(), witness]) == "done"
    run_dir = str(trainer.run_dir)
    calls = seen(tmp_path, place)

    name, *info = calls[0][1]
    assert calls[0][0] == "on_run_start"
    assert info == [run_dir, {"lr": 0.1, "api_key": "***"}, 2, "none"]
    assert name == Path(run_dir).name
    results = [data for hook, data, _ in calls if hook == "on_result"]
    assert [(result["step"], result["training_iteration"]) for result in results] == [(0, 1), (1, 2), (2, 3)]
    saved = [data for hook, data, _ in calls if hook == "on_checkpoint"]
    assert len(saved) == (0 if place == "worker" else 3)
    assert all(path.startswith(run_dir) for path, _ in saved)
    assert calls[-1][:2] == ("on_run_end", None)
    assert hooks(tmp_path, place).count("on_run_end") == hooks(tmp_path, place).count("on_run_start") == 1
    events = [data for hook, data, _ in calls if hook == "on_event"]
    assert events.count("worker_up") == (0 if place == "worker" else 2)
    processes = {pid for _, _, pid in calls}
    assert (processes == {os.getpid()}) == (place == "driver") and len(processes) == 1


def test_driver_callback_is_the_given_object_in_every_run(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    witness = Witness(tmp_path)
    for _ in range(2):
        trainer.run(three_steps, callbacks=[*quiet(), witness])
        assert witness.info is not None and witness.info.run_dir == trainer.run_dir
    assert hooks(tmp_path, "driver").count("on_run_start") == 2


def test_callbacks_of_an_iterator_are_called(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    given: Any = iter([*quiet(), Witness(tmp_path)])
    trainer.run(three_steps, callbacks=given)
    assert hooks(tmp_path, "driver")[-1] == "on_run_end"


def test_each_worker_has_its_own_copy_of_a_callback(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    trainer.run(three_steps, callbacks=[*quiet(), InWorker(tmp_path)])
    assert sorted(os.listdir(tmp_path)) == ["rank-0.jsonl", "rank-1.jsonl"]


# -- stopping a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_run_start", "on_result"])
@pytest.mark.parametrize("place", PLACES)
def test_stop_ends_the_run_as_a_success(trainer: raysgd.Trainer, tmp_path: Path, place: str, hook: str) -> None:
    witness = PLACES[place](tmp_path, hook, raysgd.Stop("enough"))
    returned = trainer.run(endless, callbacks=[*quiet(), witness])
    assert returned in ("stopped early", None)  # None if the run was stopped before train_func began
    assert latest_run(trainer).outcome == "stopped"
    assert [(end["kind"], end["message"]) for end in events_of(trainer, "run_end")] == [("stopped", "enough")]
    assert seen(tmp_path, place)[-1][:2] == ("on_run_end", None)
    if hook == "on_result":
        assert returned == "stopped early"
        assert [event["why"] for event in events_of(trainer, "stop")] == ["enough"]


def test_stop_ends_a_loop_that_never_checks_should_stop(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func() -> None:
        while True:
            raysgd.report(step=1)
            time.sleep(0.002)

    assert trainer.run(train_func, callbacks=[*quiet(), Witness(tmp_path, "on_result", raysgd.Stop("enough"))]) is None
    assert latest_run(trainer).outcome == "stopped"


def test_early_stopping_ends_the_run(trainer: raysgd.Trainer) -> None:
    def train_func() -> int:
        for step in range(1000):
            if raysgd.should_stop():
                return step
            raysgd.report(loss=max(1.0, 5.0 - step))
            time.sleep(0.005)
        return 1000

    stops = EarlyStoppingCallback("loss", patience=5)
    assert 9 <= trainer.run(train_func, callbacks=[*quiet(), stops]) < 1000
    (event,) = events_of(trainer, "stop")
    assert "loss has not improved for 5 results" in event["why"]


# -- errors of callbacks -----------------------------------------------------------------------------------------------


def test_error_of_a_callback_is_reported_and_training_continues(
    trainer: raysgd.Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train_func() -> str:
        for step in range(6):
            raysgd.report(step=step)
        return "done"

    witness = Witness(tmp_path, "on_result", Boom("a bug in it"))
    assert trainer.run(train_func, callbacks=[*quiet(), witness]) == "done"
    logged = caplog.text
    assert "callback Witness failed in on_result" in logged and "a bug in it" in logged
    assert "3 times in a row; it gets no further calls in this run" in logged
    assert [text.partition(":")[0] for text in latest_run(trainer).warnings] == [
        "callback Witness failed in on_result"
    ] * 3
    assert trainer.run_info is not None and trainer.run_info.warnings == latest_run(trainer).warnings
    assert hooks(tmp_path, "driver") == ["on_run_start", "on_result", "on_result", "on_result", "on_run_end"]


@pytest.mark.parametrize("place", ["controller", "worker"])
def test_error_of_a_remote_callback_is_a_warning_of_the_run(
    trainer: raysgd.Trainer, tmp_path: Path, place: str
) -> None:
    witness = PLACES[place](tmp_path, "on_result", Boom("a bug in it"))
    assert trainer.run(three_steps, callbacks=[*quiet(), witness]) == "done"
    messages = [event["message"] for event in events_of(trainer, "warning")]
    assert any(f"callback {type(witness).__name__} failed in on_result" in message for message in messages)


@pytest.mark.parametrize("is_shown", [False, True], ids=["display off", "lines"])
def test_warnings_at_the_end_of_a_run_reach_log_result_files_and_last_line(
    trainer: raysgd.Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_shown: bool
) -> None:
    shown = io.StringIO()
    display = ProgressCallback(mode="lines" if is_shown else "off", file=shown)
    witnesses = [kind(tmp_path, "on_run_end", Boom("at the end")) for kind in PLACES.values()]
    assert trainer.run(three_steps, callbacks=[display, *witnesses]) == "done"
    assert trainer.run_info is not None
    warnings = list(trainer.run_info.warnings)
    names = [text.partition(" failed in on_run_end: Boom: at the end.")[0] for text in warnings]
    assert names == [*["callback InWorker"] * 2, "callback InController", "callback Witness"]
    assert sorted(latest_run(trainer).warnings) == sorted(warnings)
    logged = [record.getMessage() for record in caplog.records]
    assert [text for text in logged if "failed in on_run_end" in text] == warnings
    if is_shown:
        last = shown.getvalue().splitlines()[-1]
        assert "3 results; goodput " in last
        assert last.endswith("; 4 warnings, the last: callback Witness failed in on_run_end: Boom: at the end.")


class NeedsNothing(Witness):
    packages = {"no_such_package": "raysgd[nothing]"}  # noqa: RUF012


class NeedsNothingInController(NeedsNothing):
    runs_in = "controller"


@pytest.mark.parametrize("kind", [NeedsNothing, NeedsNothingInController])
def test_callback_whose_package_is_missing_is_refused_by_run(
    trainer: raysgd.Trainer, tmp_path: Path, kind: type[NeedsNothing]
) -> None:
    with pytest.raises(ImportError, match=rf"{kind.__name__} needs no_such_package, which is not.*'raysgd\[nothing\]'"):
        trainer.run(three_steps, callbacks=[*quiet(), kind(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def ends_of_all(folder: Path) -> list[Any]:
    """Return the last call of each witness that has recorded one, whatever its rank."""
    lines = [json.loads(line) for file in folder.glob("rank-*.jsonl") for line in file.read_text().splitlines()]
    return [data for name, data, _ in lines if name == "on_run_end"]


@pytest.mark.parametrize("hook", ["on_run_start", "on_result", "on_run_end"])
@pytest.mark.parametrize("place", CRITICAL)
def test_error_of_a_critical_callback_ends_the_run(
    trainer: raysgd.Trainer, tmp_path: Path, place: str, hook: str
) -> None:
    witness = CRITICAL[place](tmp_path, hook, Boom("the disk is full"))
    with pytest.raises(Boom, match="the disk is full"):
        trainer.run(three_steps, callbacks=[*quiet(), witness])
    trainer.get_last_checkpoint()  # waits until the run is closed
    assert until(lambda: len(ends_of_all(tmp_path)) == (2 if place == "worker" else 1), PATIENCE_S)
    if hook != "on_run_end":  # the first rank's error ends the others' attempt
        assert ["Boom", "the disk is full"] in [end[:2] for end in ends_of_all(tmp_path)]
    assert trainer.run(three_steps, callbacks=quiet()) == "done"


def test_early_stopping_at_nan_raises(trainer: raysgd.Trainer) -> None:
    with pytest.raises(FloatingPointError, match="loss is nan at iteration 1"):
        trainer.run(lambda: raysgd.report(loss=math.nan), callbacks=[*quiet(), EarlyStoppingCallback("loss")])


@pytest.mark.parametrize("place", PLACES)
def test_on_end_receives_the_error_of_a_failed_run(trainer: raysgd.Trainer, tmp_path: Path, place: str) -> None:
    def train_func() -> None:
        raysgd.report(step=0)
        raysgd.barrier()
        if raysgd.world_rank() == 0:
            raise Boom("in training")
        raysgd.barrier()

    with pytest.raises(Boom, match="in training"):
        trainer.run(train_func, callbacks=[*quiet(), PLACES[place](tmp_path)])
    trainer.get_last_checkpoint()
    hook, data, _ = seen(tmp_path, place)[-1]
    assert (hook, data[:2]) == ("on_run_end", ["Boom", "in training"])
    assert data[2] == (None if place == "worker" else "WorkerTraceback")


def test_on_end_in_the_driver_receives_the_raised_error(trainer: raysgd.Trainer) -> None:
    class Keeps(raysgd.Callback):
        error: BaseException | None = None

        def on_run_end(self, error: BaseException | None) -> None:
            self.error = error

    def train_func() -> None:
        raise Boom("once")

    keeps = Keeps()
    with pytest.raises(Boom) as caught:
        trainer.run(train_func, callbacks=[*quiet(), keeps])
    trainer.get_last_checkpoint()
    assert keeps.error is caught.value


def test_controller_callback_that_does_not_unpickle_is_reported(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    class OpensNowhere(InController):
        def __reduce__(self) -> Any:
            return os.stat, (str(tmp_path / "nothing here"),)

    assert trainer.run(three_steps, callbacks=[*quiet(), OpensNowhere(tmp_path)]) == "done"
    messages = [event["message"] for event in events_of(trainer, "warning")]
    assert any("FileNotFoundError" in message for message in messages)


# -- loggers and progress ----------------------------------------------------------------------------------------------


def test_logger_files_are_in_the_run_folder(trainer: raysgd.Trainer) -> None:
    loggers = [JsonLinesCallback(), CsvCallback(), TensorBoardCallback()]
    trainer.run(three_steps, {"lr": 0.1}, callbacks=[*quiet(), *loggers])
    run_dir = Path(str(trainer.run_dir))

    (lines,) = [file for file in run_dir.rglob("*.jsonl") if not file.name.startswith(("metrics-", "events"))]
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [0, 1, 2]
    (table,) = run_dir.rglob("*.csv")
    with open(table, newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert tensorboard_scalars(run_dir, "step") == [(1, 0.0), (2, 1.0), (3, 2.0)]


def losses(config: dict[str, Any]) -> None:
    state = raysgd.load_checkpoint() or {"step": 0}
    for step in range(state["step"], len(config["losses"])):
        raysgd.report(loss=config["losses"][step])
        raysgd.save_checkpoint({"step": step + 1})
        if step + 1 == config.get("leave_after"):
            return
    while not raysgd.should_stop():
        time.sleep(0.01)


def test_early_stopping_counts_the_results_before_the_checkpoint(trainer: raysgd.Trainer) -> None:
    config = {"losses": [1.0 + step / 10 for step in range(12)]}
    stopping: list[Any] = [EarlyStoppingCallback("loss", patience=5), *quiet()]
    trainer.run(losses, {**config, "leave_after": 3}, callbacks=stopping)
    trainer.run(losses, {**config, "leave_after": 5}, callbacks=stopping, resume_from=trainer.get_last_checkpoint())
    trainer.run(losses, config, callbacks=stopping, resume_from=trainer.get_last_checkpoint())
    (stop,) = events_of(trainer, "stop")
    assert stop["why"] == "loss has not improved for 5 results; its best was 1.0 at iteration 1, now 6."


def tensorboard_scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = run_dir.rglob("*tfevents*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if tag.rpartition("/")[2] == name]
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_progress_without_a_terminal_prints_each_line_once(
    trainer: raysgd.Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer.run(three_steps)
    out = capfd.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith(f"[{Path(str(trainer.run_dir)).name}]")]
    assert "\x1b" not in "".join(lines)
    assert len(lines) == len(set(lines))
    assert "started with 2 workers, none; files in" in lines[0]
    assert "finished after" in lines[-1] and "3 results" in lines[-1]
    assert sum("step=" in line for line in lines) in (1, 2, 3)  # at most one per second, and always the last
    assert "step=2" in lines[-2]


def test_progress_shows_how_a_run_failed(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        raise Boom("no luck")

    shown = io.StringIO()
    with pytest.raises(Boom):
        trainer.run(train_func, callbacks=[ProgressCallback(mode="lines", file=shown)])
    trainer.get_last_checkpoint()
    assert "no luck" in shown.getvalue().splitlines()[-1]
