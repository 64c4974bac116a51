"""`Trainer.restore`: the Trainer of an earlier run is made from the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysgd
from raysgd.backends.torch import TorchConfig
from raysgd.errors import ConfigError, UnknownArgumentError, UsageError
from raysgd.session import context
from raysgd.session.local import LocalSession
from raysgd.trainer.spec import describe_run, make_spec, restore_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run without checkpoints."""
    spec = make_spec(
        num_workers=(2, math.inf),
        backend=TorchConfig(timeout_s=5),
        seed=3,
        failure_config=raysgd.FailureConfig(num_spares=1),
        checkpoint_config=raysgd.CheckpointConfig(num_to_keep=2),
        run_config=raysgd.RunConfig(name="runs", storage_path=tmp_path),
    )
    folder = tmp_path / "runs" / "run_001"
    folder.mkdir(parents=True)
    description = {"backend": spec.backend.name, **describe_run(spec, len)}
    (folder / "run.json").write_text(json.dumps(description))
    return folder


def test_restored_settings_are_those_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    restored = restore_run(run_dir, {})
    spec = make_spec(**restored.arguments)
    assert spec.scaling.num_workers == (2, math.inf)
    assert spec.backend == TorchConfig(timeout_s=5)
    assert spec.failure_config == raysgd.FailureConfig(num_spares=1)
    assert spec.checkpoint_config == raysgd.CheckpointConfig(num_to_keep=2)
    assert spec.run_config == raysgd.RunConfig(name="runs", storage_path=str(tmp_path))
    assert spec.seed == 3 and restored.found.checkpoint is None
    assert restored.runs_uri == str(tmp_path / "runs")


def test_restore_replaces_settings_and_refuses_unknown_ones(run_dir: Path) -> None:
    assert "Trainer: 4 x torch worker" in repr(raysgd.Trainer.restore(run_dir, num_workers=4))
    with pytest.raises(UnknownArgumentError, match="did you mean 'num_workers'"):
        raysgd.Trainer.restore(run_dir, num_worker=4)
    with pytest.raises(ConfigError, match="num_workers=0"):
        raysgd.Trainer.restore(run_dir, num_workers=0)


@pytest.fixture
def worker_session() -> Iterator[None]:
    """Make this process a worker's."""

    class WorkerSession(LocalSession):
        in_worker = True

    context.install(WorkerSession())
    yield
    context.uninstall()


@pytest.mark.usefixtures("worker_session")
def test_restore_is_refused_inside_a_train_func(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="a Trainer inside train_func"):
        raysgd.Trainer.restore(run_dir)


def test_restored_trainer_of_a_subclass_has_the_attributes_of_the_subclass(run_dir: Path) -> None:
    class Named(raysgd.Trainer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.label = "mine"

    assert Named.restore(run_dir).label == "mine"
