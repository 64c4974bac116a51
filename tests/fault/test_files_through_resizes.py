"""Workers that read files die, and the group shrinks and grows: each row is read once, in the order of a fault-free run."""

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
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.sources import files
from raysgd.data.sources.resolve import resolve_datasets
from support.poll import until
from support.runs import PATIENCE_S, events_of, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.fault
travels_by_value(__name__)

NUM_ROWS = 1200
GLOBAL_BATCH = 12
SEED = 5
#: Shrinks and growths together. After a growth that was soon followed by a loss the next one waits twice as long.
NUM_RESIZES = 6


def logged(config: dict[str, Any]) -> None:
    """Train epochs until a file exists; write a line per step, to a file per attempt and rank."""
    state = raysgd.load_checkpoint()
    step = first = 0 if state is None else state["step"]
    shard = raysgd.get_dataset().get_split()
    batches = shard.iter_batches(global_batch_size=GLOBAL_BATCH, columns=["x"], shuffle=config["shuffle"])
    name = f"{raysgd.broadcast(time.time_ns())}-{first}-{raysgd.world_rank()}"  # unique per attempt
    with open(Path(config["folder"], name), "a") as log:
        while not raysgd.broadcast(os.path.exists(config["stop"])):
            for batch in batches:
                step += 1
                log.write(" ".join(map(str, [step, *batch["x"].tolist()])) + "\n")
                log.flush()
                raysgd.report(step=step, pid=os.getpid())
                raysgd.save_checkpoint({"step": step})
                time.sleep(0.02)


def batches_of_one_worker(folder: Path, shuffle: Any, num_steps: int) -> list[list[int]]:
    """Return the global batches of this number of steps, as a single worker reads them."""
    context = WorkerDatasets(resolve_datasets(folder, lambda block: block), 0, 1, SEED, fetch=lambda ref: ref)
    batches = context.get().get_split().iter_batches(global_batch_size=GLOBAL_BATCH, columns=["x"], shuffle=shuffle)
    steps: list[list[int]] = []
    while len(steps) < num_steps:
        steps += [batch["x"].tolist() for batch in batches]
    return steps[:num_steps]


def trained(folder: Path) -> list[list[int]]:
    """Return the rows of each step, from the last attempt that made the step."""
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


@pytest.mark.timeout(300)
def test_every_row_is_read_once_through_deaths_and_resizes(
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
    with make_trainer(tmp_path / "runs", (1, 4), failure_config=failure, seed=SEED) as trainer:
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
            # After a replacement other workers are ready too, and the group grows.
            if size > 1 and size != before:
                os.kill(result.workers[attempt % size]["pid"], signal.SIGKILL)
        stream.get_returns()
        resizes = events_of(trainer, "resize")
    assert len(resizes) >= NUM_RESIZES and {data["new"] > data["old"] for data in resizes} == {True, False}
    steps = trained(log)
    expected = batches_of_one_worker(data, "window", len(steps))
    assert all(
        sorted(chain(*expected[at : at + 100])) == list(range(NUM_ROWS)) for at in range(0, len(steps) - 99, 100)
    )
    assert steps == expected


def test_every_row_is_read_once_after_death_of_a_worker_that_reads_ahead(ray_cluster: Any, tmp_path: Path) -> None:
    """Rows that were read ahead are read again: the replacement reads the same part."""
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
    assert len(steps) >= 100 and steps == batches_of_one_worker(data, "window", len(steps))


def test_every_row_of_a_lazy_dataset_is_read_once_through_a_death_and_a_resize(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """Fewer workers make some steps, then all again, in the order of a single worker."""

    def steps_of(name: str, num_workers: int | tuple[int, int], is_to_stop: Callable[[Any], bool]) -> list[list[int]]:
        log, stop = tmp_path / f"log {name}", tmp_path / f"stop {name}"
        log.mkdir()
        data = ray.data.range(NUM_ROWS, override_num_blocks=12).map_batches(lambda batch: {"x": batch["id"]})
        config = {"folder": str(log), "stop": str(stop), "shuffle": "window"}
        failure = raysgd.FailureConfig(max_failures=2)
        with make_trainer(tmp_path / name, num_workers, failure_config=failure, seed=SEED) as trainer:
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
    assert alone[: len(steps)] == steps  # the driver may stop it an epoch later
