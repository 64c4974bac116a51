"""The conformance suite for callbacks, over every callback that is shipped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorboardX  # noqa: F401 - sets an environment variable, which must not seem to be a test's doing

from raysgd.callbacks import (
    Callback,
    CsvCallback,
    EarlyStoppingCallback,
    JsonLinesCallback,
    MLflowCallback,
    PrintCallback,
    ProgressCallback,
    TensorBoardCallback,
    TorchProfilerCallback,
    WandbCallback,
)
from raysgd.testing.callback_suite import CallbackSuite
from support import wandb_files


class TestNothing(CallbackSuite):
    def make_callback(self) -> Callback:
        return Callback()


class TestPrint(CallbackSuite):
    def make_callback(self) -> Callback:
        return PrintCallback(workers=True)


class TestJsonLines(CallbackSuite):
    def make_callback(self) -> Callback:
        return JsonLinesCallback(workers=True)


class TestCsv(CallbackSuite):
    def make_callback(self) -> Callback:
        return CsvCallback()


class TestTensorBoard(CallbackSuite):
    num_results = 2000

    def make_callback(self) -> Callback:
        return TensorBoardCallback()


class TestEarlyStopping(CallbackSuite):
    def make_callback(self) -> Callback:
        return EarlyStoppingCallback("loss", nan_is_failure=False)


class TestProgressOff(CallbackSuite):
    def make_callback(self) -> Callback:
        return ProgressCallback(mode="off")


class TestProgressAuto(CallbackSuite):
    def make_callback(self) -> Callback:
        return ProgressCallback()


class TestProgressLines(CallbackSuite):
    def make_callback(self) -> Callback:
        return ProgressCallback(mode="lines")


class TestProgressLive(CallbackSuite):
    def make_callback(self) -> Callback:
        return ProgressCallback(mode="live", refresh_hz=20)


class TestProgressLiveIntoAFile(CallbackSuite):
    def make_callback(self) -> Callback:
        return ProgressCallback(mode="live", refresh_hz=20, file=io.StringIO())


class TestTorchProfiler(CallbackSuite):
    num_results = 500

    def make_callback(self) -> Callback:
        return TorchProfilerCallback(wait=0, warmup=1, active=1)


class TestMLflow(CallbackSuite):
    num_results = 250
    store = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _mlflow(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
            pytest.importorskip("mlflow")
            cls.store = (
                f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"  # creating the database takes seconds
            )
            yield

    def make_callback(self) -> Callback:
        return MLflowCallback(tracking_uri=self.store)


class TestWandb(CallbackSuite):
    num_results = 100

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _wandb(cls) -> Iterator[None]:
        wandb = pytest.importorskip("wandb")
        yield
        wandb.teardown()  # its service outlives its runs

    def make_callback(self) -> Callback:
        return WandbCallback(mode="offline")

    def files_of(self, run_dir: Path) -> dict[str, str]:
        wandb_files.read(run_dir)  # waits until the service has written the end of the file
        return {name: digest for name, digest in super().files_of(run_dir).items() if not name.endswith(".log")}
