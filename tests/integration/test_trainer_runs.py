"""A Trainer and its runs as a user sees them: return values, streams of results, warm workers.

Most tests share one Trainer and its two processes; those of torch share another.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import io
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysgd
from raysgd.callbacks import ProgressCallback
from raysgd.errors import ConfigError, RunCancelledError, UsageError
from raysgd.result import AUTOMATIC_KEYS
from support.cluster import ClusterState
from support.poll import until
from support.runs import PATIENCE_S, are_gone, latest_run, make_trainer, pids, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


def count_to(config: dict[str, Any]) -> int:
    """Report 0, 1, 2, ... on each rank."""
    for step in range(config["n"]):
        raysgd.report(step=step, rank=raysgd.world_rank())
    return int(config["n"])


def wait_for_file(config: dict[str, Any]) -> str:
    """Report once, then run until a file exists."""
    raysgd.report(waits=True)
    deadline = time.monotonic() + 60
    while not os.path.exists(config["file"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return "went"


# -- return values -----------------------------------------------------------------------------------------------------


def test_run_returns_what_rank_0_returned(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> dict[str, Any]:
        return {"rank": raysgd.world_rank(), "lr": config["lr"], "of": raysgd.world_size(), "in": raysgd.in_worker()}

    found = trainer.run(train_func, {"lr": 0.5}, callbacks=quiet())
    assert found == {"rank": 0, "lr": 0.5, "of": 2, "in": True}


def test_returns_all_is_the_list_by_rank(trainer: raysgd.Trainer) -> None:
    def ranks() -> tuple[int, ...]:
        rank, local = raysgd.world_rank(), raysgd.local_rank()
        return rank, local, raysgd.local_world_size(), raysgd.node_rank()

    assert trainer.run(ranks, callbacks=quiet(), returns="all") == [(0, 0, 2, 0), (1, 1, 2, 0)]


def test_large_return_value_is_complete(trainer: raysgd.Trainer) -> None:
    found = trainer.run(lambda: bytes([raysgd.world_rank()]) * (1 << 20), callbacks=quiet(), returns="all")
    assert [(value[0], len(value)) for value in found] == [(0, 1 << 20), (1, 1 << 20)]


def plus(config: dict[str, Any], more: int = 1) -> Any:
    return config.get("base", 0) + more


class Recipe:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def train(self, config: dict[str, Any]) -> int:
        return self.factor * int(config["base"])

    def __call__(self, config: dict[str, Any]) -> str:
        return "called"


@pytest.mark.parametrize(
    ("train_func", "config", "returned"),
    [
        (lambda: "no argument", None, "no argument"),
        (lambda config: config, None, {}),
        (plus, {"base": 1}, 2),
        (functools.partial(plus, more=5), {"base": 1}, 6),
        (functools.partial(plus, {"base": 10}, 5), None, 15),
        (Recipe(3).train, {"base": 2}, 6),
        (Recipe(3), {}, "called"),
        (lambda *args: args, {"a": 1}, ({"a": 1},)),
    ],
)
def test_callables_accepted_as_train_func(
    trainer: raysgd.Trainer, train_func: Callable[..., Any], config: Any, returned: Any
) -> None:
    assert trainer.run(train_func, config, callbacks=quiet()) == returned


def test_worker_changes_its_own_copy_of_the_config(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> list[int]:
        config["layers"].append(raysgd.world_rank())
        config["new"] = 1
        return list(config["layers"])

    config = {"layers": [10]}
    for _ in range(2):
        assert trainer.run(train_func, config, callbacks=quiet(), returns="all") == [[10, 0], [10, 1]]
    assert config == {"layers": [10]}


def test_wrapped_model_is_returned_unwrapped(torch_trainer: raysgd.Trainer) -> None:
    import torch

    def train_func() -> dict[str, Any]:
        model = raysgd.torch.prepare_model(torch.nn.Linear(3, 1))
        plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 3)).backward()
        return {"model": model, "nested": [plain], "weights": model.weight.detach()}

    found = torch_trainer.run(train_func, callbacks=quiet())
    assert type(found["model"]) is torch.nn.Linear
    assert type(found["nested"][0]) is torch.nn.Linear
    assert torch.equal(found["model"].weight, found["weights"])
    assert list(found["model"].state_dict()) == ["weight", "bias"]


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_have_automatic_keys_and_metrics_of_each_rank(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        for step in range(3):
            time.sleep(0.01)
            raysgd.report(step=step, rank=raysgd.world_rank())

    start = time.time()
    results = list(trainer.run_generator(train_func, callbacks=quiet()))

    assert [result["training_iteration"] for result in results] == [1, 2, 3]
    for step, result in enumerate(results):
        assert set(result) == {"step", "rank"} | AUTOMATIC_KEYS
        assert (result["step"], result["rank"]) == (step, 0)
        assert (result["world_size"], result["attempt"]) == (2, 1)
        assert result.workers == [{"step": step, "rank": 0}, {"step": step, "rank": 1}]
        assert result.ranks == (0, 1)
        assert start < result["timestamp"] < time.time()
        assert result["time_this_iter_s"] >= 0.01
    assert results[2]["time_total_s"] == pytest.approx(sum(result["time_this_iter_s"] for result in results))


def test_reduce_combines_a_metric_over_workers(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        rank = raysgd.world_rank()
        raysgd.report(loss=1.0 + rank, seen=10 * (rank + 1), best=rank, first=rank, last=rank, own=rank)

    reduce = {"loss": "mean", "seen": "sum", "best": "max", "first": "first", "last": "last"}
    (result,) = trainer.run_generator(train_func, reduce=reduce, callbacks=quiet())
    reported = {key: value for key, value in result.items() if key not in AUTOMATIC_KEYS}
    assert reported == {"loss": 1.5, "seen": 30, "best": 1, "first": 0, "last": 1, "own": 0}
    assert result.workers[1]["loss"] == 2.0


def test_rank_that_returns_early_leaves_the_rounds(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        for step in range(2 + 3 * raysgd.world_rank()):
            raysgd.report(step=step, rank=raysgd.world_rank())

    results = list(trainer.run_generator(train_func, callbacks=quiet()))
    assert [(result["step"], result["rank"], result.ranks) for result in results] == [
        (0, 0, (0, 1)),
        (1, 0, (0, 1)),
        (2, 1, (1,)),
        (3, 1, (1,)),
        (4, 1, (1,)),
    ]


def test_five_thousand_reports_arrive_in_order(trainer: raysgd.Trainer) -> None:
    class Counter(raysgd.Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_result(self, result: raysgd.Result) -> None:
            self.steps.append(result["step"])

    counter = Counter()
    assert trainer.run(count_to, {"n": 5000}, callbacks=[*quiet(), counter]) == 5000
    assert counter.steps == list(range(5000))
    metrics = latest_run(trainer).metrics
    assert list(metrics["training_iteration"]) == list(range(1, 5001))


def test_metrics_of_all_kinds_arrive_as_plain_values(torch_trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        import numpy as np
        import torch

        value = torch.tensor(1.5, requires_grad=True)
        raysgd.report(
            {"nested": {"a": [1, 2.5, None, "text", True]}, "nan": math.nan},
            numpy=np.float32(0.5),
            count=np.int64(3),
            torch=value,
        )
        with torch.no_grad():
            value += 1  # the reported value was copied

    (result,) = torch_trainer.run_generator(train_func, callbacks=quiet())
    assert math.isnan(result.pop("nan"))
    reported = {key: value for key, value in result.items() if key not in AUTOMATIC_KEYS}
    assert reported == {"nested": {"a": [1, 2.5, None, "text", True]}, "numpy": 0.5, "count": 3, "torch": 1.5}
    assert type(result["torch"]) is float and type(result["count"]) is int


# -- streams -----------------------------------------------------------------------------------------------------------


def test_stream_is_iterated_during_the_run(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    stream = trainer.run_generator(wait_for_file, {"file": str(tmp_path / "go")}, callbacks=quiet())
    assert next(stream)["waits"] is True
    assert not stream.is_finished()
    assert "running" in repr(stream)
    (tmp_path / "go").write_text("")
    assert list(stream) == []
    assert stream.is_finished()
    assert stream.get_returns() == stream.get_returns() == "went"
    assert str(trainer.run_dir) in repr(stream)


def test_is_finished_only_after_the_last_result_was_taken(trainer: raysgd.Trainer) -> None:
    stream = trainer.run_generator(count_to, {"n": 2}, callbacks=quiet())
    assert stream.get_returns() == 2
    assert not stream.is_finished()
    assert [result["step"] for result in stream] == [0, 1]
    assert stream.is_finished()


async def test_async_iteration_leaves_the_loop_free(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    async def create_file() -> None:
        await asyncio.sleep(0.05)
        (tmp_path / "go").write_text("")

    stream = trainer.run_generator(wait_for_file, {"file": str(tmp_path / "go")}, callbacks=quiet())
    task = asyncio.create_task(create_file())  # runs only if waiting for results does not block the loop
    assert [result["waits"] async for result in stream] == [True]
    await task
    assert stream.is_finished()


async def test_run_inside_a_running_loop_as_in_a_notebook(trainer: raysgd.Trainer) -> None:
    assert trainer.run(count_to, {"n": 3}, callbacks=quiet()) == 3
    assert [result["step"] for result in trainer.run_generator(count_to, {"n": 3}, callbacks=quiet())] == [0, 1, 2]


def test_cancel_ends_the_run_and_keeps_its_workers(trainer: raysgd.Trainer) -> None:
    def train_func() -> None:
        step = 0
        while True:
            raysgd.report(step=step)
            time.sleep(0.001)
            step += 1

    before = pids(trainer)
    stream = trainer.run_generator(train_func, callbacks=quiet())
    next(stream)
    stream.cancel()
    for _ in stream:
        pass
    assert stream.is_finished()
    with pytest.raises(RunCancelledError, match="the run was cancelled"):
        stream.get_returns()
    assert latest_run(trainer).outcome == "cancelled"
    assert pids(trainer) == before


def test_cancelled_run_can_save(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        raysgd.report(started=True)
        try:
            while True:
                raysgd.barrier()
        finally:
            Path(config["folder"], f"left{raysgd.world_rank()}").write_text("")

    stream = trainer.run_generator(train_func, {"folder": str(tmp_path)}, callbacks=quiet())
    next(stream)
    stream.cancel()
    assert stream.wait_closed(PATIENCE_S)
    assert sorted(os.listdir(tmp_path)) == ["left0", "left1"]


def test_leaving_the_stream_does_not_stop_training(trainer: raysgd.Trainer) -> None:
    stream = trainer.run_generator(count_to, {"n": 20_000}, callbacks=quiet())
    next(stream)
    del stream
    gc.collect()
    assert until(lambda: (Path(str(trainer.run_dir)) / "events.jsonl").exists(), PATIENCE_S)
    assert until(lambda: latest_run(trainer).outcome == "done", PATIENCE_S)
    assert len(latest_run(trainer).metrics) == 20_000


def report_80_mb(config: dict[str, Any]) -> None:
    """Make 2,000 reports on each of two ranks: more than an iteration and the controller keep in memory."""
    for step in range(2000):
        raysgd.report(step=step, pad="x" * 20_000)


def test_slow_reader_loses_no_result(trainer: raysgd.Trainer) -> None:
    stream = trainer.run_generator(report_80_mb, {}, callbacks=quiet())
    steps = [next(stream)["step"] for _ in range(100)]
    assert stream.wait_closed(PATIENCE_S)
    assert steps + [result["step"] for result in stream] == list(range(2000))


def test_late_reader_reads_from_the_files_of_the_run(trainer: raysgd.Trainer) -> None:
    stream = trainer.run_generator(report_80_mb, {}, callbacks=quiet())
    assert stream.wait_closed(PATIENCE_S)
    assert [result["step"] for result in stream] == list(range(2000))


def test_return_value_is_available_after_the_next_run(trainer: raysgd.Trainer) -> None:
    first = trainer.run_generator(lambda: [1] * 100_000, callbacks=quiet())
    assert list(first) == []
    second = trainer.run_generator(count_to, {"n": 1}, callbacks=quiet())
    assert second.get_returns() == 1
    assert first.get_returns() == [1] * 100_000


def test_results_lost_after_the_next_run_raise(trainer: raysgd.Trainer) -> None:
    first = trainer.run_generator(report_80_mb, {}, callbacks=quiet())
    assert first.wait_closed(PATIENCE_S)
    trainer.run(count_to, {"n": 1}, callbacks=quiet())
    with pytest.raises(UsageError, match="can no longer be read, because the Trainer has executed another run since"):
        list(first)


# -- warm workers ------------------------------------------------------------------------------------------------------


def test_second_run_uses_the_same_processes(trainer: raysgd.Trainer) -> None:
    first = pids(trainer)
    assert len(set(first)) == 2 and os.getpid() not in first
    assert pids(trainer) == first


def test_each_run_begins_with_a_clean_process(trainer: raysgd.Trainer) -> None:
    def change_process_state() -> None:
        os.environ["LEFT_BY_A_RUN"] = "1"
        os.environ.pop("PATH", None)
        os.chdir("/")
        sys.path.insert(0, "/left/by/a/run")

    def look() -> dict[str, Any]:
        return {"env": os.environ.get("LEFT_BY_A_RUN"), "path": os.environ.get("PATH"), "cwd": os.getcwd(),
                "sys.path": "/left/by/a/run" in sys.path}  # fmt: skip

    before = trainer.run(look, callbacks=quiet())
    trainer.run(change_process_state, callbacks=quiet())
    assert trainer.run(look, callbacks=quiet()) == before
    assert before["env"] is None and before["sys.path"] is False and before["cwd"] != "/"


def test_script_arguments_are_those_of_the_driver(trainer: raysgd.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_func() -> float:
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        arguments = parser.parse_args()  # it would exit if it met Ray's own arguments
        sys.argv.append("--changed-by-a-run")
        return float(arguments.lr)

    for lr in (0.1, 0.2):
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr", str(lr)])
        assert trainer.run(train_func, callbacks=quiet(), returns="all") == [lr, lr]


def test_runs_without_a_seed_draw_different_numbers(trainer: raysgd.Trainer) -> None:
    def draw() -> tuple[float, float]:
        import numpy as np

        return random.random(), float(np.random.random())

    draws = [
        numbers for _ in range(2) for rank in trainer.run(draw, callbacks=quiet(), returns="all") for numbers in rank
    ]
    assert len(set(draws)) == 8


def test_each_run_begins_with_torchs_defaults(torch_trainer: raysgd.Trainer) -> None:
    def change_process_state() -> None:
        import torch  # imported here because torch.backends cannot be pickled

        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        torch.set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = False

    def look() -> tuple[Any, ...]:
        import torch

        tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        modes = torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(), *tf32
        return str(torch.get_default_dtype()), torch.get_num_threads(), *modes, os.getpid()

    before = torch_trainer.run(look, callbacks=quiet())
    torch_trainer.run(change_process_state, callbacks=quiet())
    assert torch_trainer.run(look, callbacks=quiet()) == before
    assert before[0] == "torch.float32" and before[2] is True


def test_torchs_newer_names_of_the_same_flags_are_reset(torch_trainer: raysgd.Trainer) -> None:
    import torch

    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has them not")

    def change_process_state() -> None:
        import torch

        torch.backends.fp32_precision = "tf32"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"

    def look() -> list[Any]:
        import torch

        backends = torch.backends
        new = [owner.fp32_precision for owner in (backends, backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn)]
        return [*new, backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()]

    before = torch_trainer.run(look, callbacks=quiet())
    torch_trainer.run(change_process_state, callbacks=quiet())
    assert torch_trainer.run(look, callbacks=quiet()) == before


def test_memory_of_a_run_is_freed_before_the_next(trainer: raysgd.Trainer) -> None:
    def hold() -> float:
        import numpy as np

        cycle: dict[str, Any] = {"large": np.ones(300 << 17)}  # 300 MiB
        cycle["itself"] = cycle
        return rss_mib()

    before = trainer.run(rss_mib, callbacks=quiet())
    held = trainer.run(hold, callbacks=quiet())
    after = trainer.run(rss_mib, callbacks=quiet())
    assert held > before + 290
    assert after < before + 50


def rss_mib() -> float:
    """Return the resident memory of the process."""
    return float(psutil.Process().memory_info().rss / 2**20)


def test_edited_modules_replace_the_workers_that_loaded_them(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> tuple[str, int]:
        sys.path.insert(0, config["folder"])
        import a_module_of_the_users

        return a_module_of_the_users.VALUE, os.getpid()

    config = {"folder": str(tmp_path)}
    module = tmp_path / "a_module_of_the_users.py"
    module.write_text("VALUE = 'old'\n")
    shown = io.StringIO()
    display = [ProgressCallback(mode="lines", file=shown)]

    old, old_pid = trainer.run(train_func, config, callbacks=display)
    again, again_pid = trainer.run(train_func, config, callbacks=display)
    assert (old, again) == ("old", "old")
    assert old_pid == again_pid
    assert "replaced" not in shown.getvalue()

    module.write_text("VALUE = 'edited since'\n")
    new, new_pid = trainer.run(train_func, config, callbacks=display)
    assert new == "edited since"
    assert new_pid != old_pid
    assert "replaced 2 warm workers: a_module_of_the_users changed since the workers loaded it" in shown.getvalue()


@pytest.mark.timeout(180)
def test_compiled_model_keeps_the_workers_warm(torch_trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """torch.compile writes modules and imports a thousand more: neither replaces the workers nor slows their next starts."""

    def train_func(config: dict[str, Any]) -> tuple[int, int]:
        import torch

        if config["compiles"] and raysgd.world_rank() == 0:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = config[
                "cache"
            ]  # an old source in a cache would not count as changed
            assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)).tolist() == [1.0] * 8
            assert any("compile_tasks." in name for name in sys.modules), "no module was made"
        return os.getpid(), len(gc.get_objects())

    before = torch_trainer.run(train_func, {"compiles": False}, callbacks=quiet(), returns="all")
    torch_trainer.run(train_func, {"compiles": True, "cache": str(tmp_path)}, callbacks=quiet())
    after = torch_trainer.run(train_func, {"compiles": False}, callbacks=quiet(), returns="all")
    assert [pid for pid, _ in after] == [pid for pid, _ in before]
    assert after[0][1] < before[0][1] + 50_000, "collections visit what the run imported"


# -- lifetime ----------------------------------------------------------------------------------------------------------


def test_dropped_trainer_ends_its_run(ray_cluster: Any, tmp_path: Path) -> None:
    before = ClusterState.now()
    with make_trainer(tmp_path) as trainer:
        processes = pids(trainer)
        stream = trainer.run_generator(wait_for_file, {"file": str(tmp_path / "never")}, callbacks=quiet())
        next(stream)
    assert before.leftovers() == []
    assert are_gone(processes)
    with pytest.raises(RunCancelledError):
        stream.get_returns()


def test_two_trainers_run_at_the_same_time(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 1, seed=1) as other:
        streams = [
            one.run_generator(wait_for_file, {"file": str(tmp_path / "go")}, callbacks=quiet())
            for one in (trainer, other)
        ]
        assert [next(stream)["world_size"] for stream in streams] == [2, 1]
        (tmp_path / "go").write_text("")
        assert [stream.get_returns() for stream in streams] == ["went", "went"]
        assert not set(pids(trainer)) & set(pids(other))
        assert trainer.run_dir != other.run_dir
    assert trainer.run(count_to, {"n": 1}, callbacks=quiet()) == 1


def test_refused_function_creates_no_folder(ray_cluster: Any, tmp_path: Path) -> None:
    def refused(config: Any, more: Any) -> None: ...

    with make_trainer(tmp_path, 1) as trainer:
        with pytest.raises(ConfigError, match="needs config, more"):
            trainer.run(refused, callbacks=quiet())
        trainer.run(count_to, {"n": 1}, callbacks=quiet())
        assert Path(str(trainer.run_dir)).parent.name.startswith("count_to_")
    assert not list(tmp_path.glob("*refused*"))


def test_runs_get_folders_of_their_own(trainer: raysgd.Trainer) -> None:
    folders = []
    for _ in range(2):
        trainer.run(count_to, {"n": 1}, callbacks=quiet())
        folders.append(Path(str(trainer.run_dir)))
    first, second = folders
    assert first.parent == second.parent
    assert int(second.name.removeprefix("run_")) == int(first.name.removeprefix("run_")) + 1
