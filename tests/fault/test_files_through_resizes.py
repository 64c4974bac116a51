"""Files are trained on while workers die and the group shrinks and grows: each row once, in the order of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import raysgd
from raysgd.data import DataContext, files, resolve_datasets
from support.poll import until
from support.runs import PATIENCE_S, events_of, make_trainer, quiet, travels_by_value

pytestmark = [pytest.mark.slow, pytest.mark.fault]
travels_by_value(__name__)

NUM_ROWS = 1200
GLOBAL_BATCH = 12
SEED = 5
#: Shrinks and growths together. After a growth that was soon followed by a loss the next one waits twice as long.
NUM_RESIZES = 10


def logged(config: dict[str, Any]) -> None:
    """Epochs until there is a file; a line for each step, in a file for each attempt and rank."""
    state = raysgd.load_checkpoint()
    step = first = 0 if state is None else state["step"]
    shard = raysgd.get_dataset().get_split()
    batches = shard.to_torch(global_batch_size=GLOBAL_BATCH, columns=["x"], shuffle=config["shuffle"])
    name = f"{raysgd.broadcast(time.time_ns())}-{first}-{raysgd.world_rank()}"  # of this attempt
    with open(Path(config["folder"], name), "a") as log:
        while not raysgd.broadcast(os.path.exists(config["stop"])):
            for batch in batches:
                step += 1
                log.write(" ".join(map(str, [step, *batch["x"].tolist()])) + "\n")
                log.flush()
                raysgd.report(step=step, pid=os.getpid())
                raysgd.save_checkpoint({"step": step})
                time.sleep(0.02)


def undisturbed(folder: Path, shuffle: Any, num_steps: int) -> list[list[int]]:
    """The global batches of as many steps, as one worker alone reads them."""
    context = DataContext(resolve_datasets(folder, lambda block: block), 0, 1, SEED, fetch=lambda ref: ref)
    batches = context.get().get_split().iter_batches(global_batch_size=GLOBAL_BATCH, columns=["x"], shuffle=shuffle)
    steps: list[list[int]] = []
    while len(steps) < num_steps:
        steps += [batch["x"].tolist() for batch in batches]
    return steps[:num_steps]


def trained(folder: Path) -> list[list[int]]:
    """The rows of each step, of the attempt that last made it: those before were forgotten with its checkpoint."""
    attempts: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for path in folder.iterdir():
        begun, first, rank = map(int, path.name.split("-"))
        attempts[begun, first][rank] = path.read_text()
    steps: dict[int, list[int]] = {}
    for (_, first), texts in sorted(attempts.items()):
        made: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for rank, text in texts.items():
            for line in text.splitlines():
                step, *rows = map(int, line.split())
                made[step][rank] = rows
        steps = {step: rows for step, rows in steps.items() if step <= first}
        steps |= {step: list(chain(*(of_rank[rank] for rank in sorted(of_rank)))) for step, of_rank in made.items()}
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [steps[step] for step in sorted(steps)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_workers_die_and_the_group_is_resized_again_and_again(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1)  # each row group is a block
    data, log, stop = tmp_path / "data", tmp_path / "log", tmp_path / "stop"
    data.mkdir()
    log.mkdir()
    for number in range(6):
        rows = np.arange(200 * number, 200 * (number + 1))
        pq.write_table(pa.table({"x": rows, "y": rows * 0.5}), data / f"{number}.parquet", row_group_size=50)
    failure = raysgd.FailureConfig(max_failures=2 * NUM_RESIZES)
    config = {"folder": str(log), "stop": str(stop), "shuffle": "window"}
    with make_trainer(tmp_path / "runs", (1, 4), failure=failure, seed=SEED) as trainer:
        stream = trainer.run_generator(logged, config, dataset=data, callbacks=quiet())
        attempt = size = num_resizes = 0
        for result in stream:
            if result["attempt"] == attempt:
                continue
            before, size, attempt = size, result["world_size"], result["attempt"]
            num_resizes += before not in (0, size)
            if num_resizes >= NUM_RESIZES:
                stop.touch()
                break
            # Where one has taken the place of the dead there are others up: it will grow.
            if size > 1 and size != before:
                os.kill(result.workers[attempt % size]["pid"], signal.SIGKILL)
        stream.get_returns()
        resizes = events_of(trainer, "resize")
    assert len(resizes) >= NUM_RESIZES and {data["new"] > data["old"] for data in resizes} == {True, False}
    steps = trained(log)
    expected = undisturbed(data, "window", len(steps))
    assert all(
        sorted(chain(*expected[at : at + 100])) == list(range(NUM_ROWS)) for at in range(0, len(steps) - 99, 100)
    )
    assert steps == expected


def test_a_worker_that_reads_ahead_dies(ray_cluster: Any, tmp_path: Path) -> None:
    """What it had read and not handed out comes again; the worker in its place reads the same part."""
    data, log, stop = tmp_path / "data", tmp_path / "log", tmp_path / "stop"
    data.mkdir()
    log.mkdir()
    for number in range(6):
        pq.write_table(pa.table({"x": np.arange(200 * number, 200 * (number + 1))}), data / f"{number}.parquet")
    config = {"folder": str(log), "stop": str(stop), "shuffle": "window"}
    with make_trainer(tmp_path / "runs", 2, seed=SEED) as trainer:
        stream = trainer.run_generator(logged, config, dataset=data, callbacks=quiet())
        pid = next(stream).workers[1]["pid"]
        run_dir = Path(str(stream.run_dir))
        assert until(lambda: list(run_dir.glob("checkpoints/*/manifest.json")), PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        assert next(result for result in stream if result["attempt"] == 2)
        stop.touch()
        stream.get_returns()
    steps = trained(log)
    assert len(steps) >= 100 and steps == undisturbed(data, "window", len(steps))


def test_a_lazy_dataset_is_executed_while_a_worker_dies_and_another_one_comes(ray_cluster: Any, tmp_path: Path) -> None:
    """Some steps by fewer workers, then by all again; in the order in which one worker alone takes them."""

    def steps_of(name: str, num_workers: int | tuple[int, int], is_to_stop: Callable[[Any], bool]) -> list[list[int]]:
        log, stop = tmp_path / f"log {name}", tmp_path / f"stop {name}"
        log.mkdir()
        data = ray.data.range(NUM_ROWS, override_num_blocks=12).map_batches(lambda batch: {"x": batch["id"]})
        config = {"folder": str(log), "stop": str(stop), "shuffle": "window"}
        failure = raysgd.FailureConfig(max_failures=2)
        with make_trainer(tmp_path / name, num_workers, failure=failure, seed=SEED) as trainer:
            stream = trainer.run_generator(logged, config, dataset=data, callbacks=quiet())
            for result in stream:
                if is_to_stop(result):
                    stop.touch()
            stream.get_returns()
        return trained(log)

    sizes: list[int] = []

    def resized(result: Any) -> bool:
        if not sizes or sizes[-1] != result["world_size"]:
            sizes.append(result["world_size"])
        if len(sizes) == 1 and result["step"] == 20:
            os.kill(result.workers[1]["pid"], signal.SIGKILL)
        return sizes[-1] > min(sizes)

    steps = steps_of("resized", (1, 3), resized)
    assert sizes[0] == 3 > min(sizes) < sizes[-1]
    assert len(steps) % 100 == 0, "epochs were not read to their ends"
    for at in range(0, len(steps), 100):
        assert sorted(chain(*steps[at : at + 100])) == list(range(NUM_ROWS))
    alone = steps_of("alone", 1, lambda result: result["step"] > len(steps) - 100)
    assert alone == steps
