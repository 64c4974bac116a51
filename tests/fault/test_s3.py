"""Runs whose storage and data are on S3: a real server over HTTP, which refuses requests or answers late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import raysgd
from raysgd.errors import CheckpointNotFoundError, StorageError
from support.runs import events_of, latest_run, quiet, travels_by_value
from support.s3 import S3Server, s3_server

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
travels_by_value(__name__)

NUM_ROWS = 96
KEEP_TWO = raysgd.CheckpointConfig(num_to_keep=2)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory, _no_process_is_left: None) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def rows(s3: S3Server) -> str:
    """Put four Parquet files on S3; return the URI of their folder."""
    for part, values in enumerate(np.split(np.arange(NUM_ROWS), 4)):
        files, path = pyarrow.fs.FileSystem.from_uri(s3.uri(f"rows/part-{part}.parquet"))
        pq.write_table(pa.table({"x": values}), path, filesystem=files)
    return s3.uri("rows")


def trainer_on(s3: S3Server, folder: str, **settings: Any) -> raysgd.Trainer:
    return raysgd.Trainer(2, "none", run_config=raysgd.RunConfig(storage_path=s3.uri(folder), name="t"), **settings)


def one_epoch(config: dict[str, Any]) -> list[int]:
    """Train on every row and save each step; rank 1 dies once, when a checkpoint of at least step 3 is on storage."""
    state = raysgd.load_checkpoint() or {"step": 0, "seen": [], "weights": np.zeros(1_000_000)}
    is_first = state["step"] == 0
    for batch in raysgd.get_dataset().get_split().to_torch(batch_size=4):
        state = {
            "step": state["step"] + 1,
            "seen": state["seen"] + batch["x"].tolist(),
            "weights": state["weights"] + 1,
        }
        raysgd.save_checkpoint(state, all_ranks=True)
        raysgd.report(step=state["step"])
        if is_first and state["step"] == 6 and config["dies"]:
            while (newest := raysgd.load_checkpoint()) is None or newest["step"] < 3:
                time.sleep(0.05)
            if raysgd.world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raysgd.barrier()
    return state["seen"]


def test_run_on_s3_trains_on_each_row_once_through_a_worker_death(ray_cluster: Any, s3: S3Server, rows: str) -> None:
    """The server also refuses some requests, as S3 does when it is overloaded, and answers others late."""
    with trainer_on(s3, "death", checkpoint_config=KEEP_TWO) as trainer:
        for method, path in [
            ("PUT", "death/t/run_001/checkpoints/checkpoint_000001/"),
            ("PUT", "manifest.json"),
            ("PUT", "metrics-"),
            ("PUT", "events-"),
            ("GET", "rows/part-"),
            ("GET", "manifest.json"),
        ]:
            s3.cause(method, path, times=2, status=503)
        s3.cause("GET", "safetensors", times=1, delay_s=3)
        s3.cause("GET", "rows/part-", times=2, delay_s=3)
        seen = trainer.run(one_epoch, {"dies": True}, dataset=rows, callbacks=quiet(), returns="all")
        assert sorted(row for of_rank in seen for row in of_rank) == list(range(NUM_ROWS))
        (failure,) = events_of(trainer, "failure")
        assert failure["ranks"] == [1]
        loaded = latest_run(trainer)
        assert list(loaded.metrics["step"]) == list(range(1, 13))
        assert [checkpoint.load(rank=1)["step"] for checkpoint in loaded.checkpoints] == [11, 12]
        refused = " ".join(line for line in s3.requests() if line.endswith(" 503"))
        assert all(
            name in refused for name in ("checkpoint_000001/", "manifest.json", "metrics-", "events-", "rows/part-")
        )

        last = loaded.checkpoints[-1]
        pattern = s3.uri("rows/part-*.parquet")
        resumed = trainer.run(one_epoch, {"dies": False}, dataset=pattern, resume_from=last, callbacks=quiet())
        assert resumed == seen[0], "the last checkpoint is at the end of the epoch, and has no rows left"


def saves_three(config: dict[str, Any]) -> float:
    """Return the seconds that the first save took."""
    took = []
    for step in range(3):
        start = time.monotonic()
        raysgd.save_checkpoint({"step": step, "weights": np.full(1000, step)})
        took.append(time.monotonic() - start)
        raysgd.report(step=step)
    return took[0]


def test_s3_that_answers_late_holds_up_no_training_and_is_not_a_hang(ray_cluster: Any, s3: S3Server) -> None:
    failure = raysgd.FailureConfig(progress_timeout_s=2, max_failures=0)
    with trainer_on(s3, "late", failure_config=failure) as trainer:
        s3.cause("PUT", "late/t/run_001/checkpoints/", times=3, delay_s=4)
        first_took = trainer.run(saves_three, callbacks=quiet())
        assert first_took < 4, "training waited for the server"
        assert [checkpoint.load()["step"] for checkpoint in latest_run(trainer).checkpoints] == [0, 1, 2]


def test_s3_that_refuses_access_is_named_before_and_during_a_run(ray_cluster: Any, s3: S3Server) -> None:
    with trainer_on(s3, "refused") as trainer:
        s3.cause("PUT", "refused/t/run_001/checkpoints/", times=1000, status=403)
        with pytest.raises(StorageError, match="ACCESS_DENIED") as raised:
            trainer.run(saves_three, callbacks=quiet())
        assert "secret" not in str(raised.value)
    missing = s3.uri("runs").replace("@bucket/", "@no-such-bucket/")
    trainer = raysgd.Trainer(1, "none", run_config=raysgd.RunConfig(storage_path=missing))
    with trainer, pytest.raises(StorageError, match="no-such-bucket"):
        trainer.run(saves_three, callbacks=quiet())
    with pytest.raises(CheckpointNotFoundError):
        raysgd.Checkpoint(s3.uri("nothing/checkpoint_000001")).load()
