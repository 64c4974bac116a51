"""`Trainer.restore`: a finished, failed or lost run is resumed from its folder alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import CheckpointNotFoundError, ConfigError
from support.runs import latest_run, make_trainer, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)


def steps(config: dict[str, Any]) -> dict[str, Any]:
    """Make six steps, save each, and fail at ``fails_at``."""
    state = raysgd.load_checkpoint() or {"step": 0}
    begun_at = state["step"]
    for step in range(begun_at, 6):
        if step == config.get("fails_at"):
            raysgd.barrier()  # both ranks made the saves before
            raise ValueError("a mistake")
        raysgd.report(step=step)
        raysgd.save_checkpoint({"step": step + 1})
    return {"begun_at": begun_at, "size": raysgd.world_size()}


@pytest.fixture(scope="module")
def failed_run(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that failed after step 3, and whose Trainer is shut down."""
    folder = tmp_path_factory.mktemp("runs")
    with make_trainer(folder, failure_config=raysgd.FailureConfig(max_failures=1), seed=3) as trainer:
        with pytest.raises(ValueError, match="a mistake"):
            trainer.run(steps, {"fails_at": 4}, callbacks=quiet())
        return Path(str(trainer.run_dir))


def test_restored_run_resumes_where_the_failed_run_stopped(failed_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in failed_run.rglob("*") if path.is_file()}
    with raysgd.Trainer.restore(failed_run) as trainer:
        assert trainer.run(steps, {}, callbacks=quiet()) == {"begun_at": 4, "size": 2}
        assert trainer.run_dir is not None and Path(trainer.run_dir).parent == failed_run.parent
        assert trainer.run_dir != str(failed_run)
        run = latest_run(trainer)
        assert list(run.metrics["training_iteration"]) == [5, 6]
        assert run.description["seed"] == 3 and run.description["failure_config"]["max_failures"] == 1
        # This holds for one run: the next one starts from the beginning.
        assert trainer.run(steps, {}, callbacks=quiet())["begun_at"] == 0
    assert {path: path.stat().st_mtime_ns for path in failed_run.rglob("*") if path.is_file()} == before


def test_restore_accepts_other_arguments(failed_run: Path) -> None:
    with raysgd.Trainer.restore(failed_run, num_workers=1) as trainer:
        assert trainer.run(steps, {}, callbacks=quiet()) == {"begun_at": 4, "size": 1}


def test_given_checkpoint_takes_precedence_over_the_newest(failed_run: Path) -> None:
    first = sorted((failed_run / "checkpoints").glob("checkpoint_*"))[0]
    with raysgd.Trainer.restore(failed_run) as trainer:
        assert trainer.run(steps, {}, callbacks=quiet(), resume_from=first)["begun_at"] == 1


def test_restore_skips_a_damaged_newest_checkpoint(
    ray_cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_trainer(tmp_path) as trainer:
        trainer.run(steps, {}, callbacks=quiet())
        run_dir = Path(str(trainer.run_dir))
    (damaged,) = (run_dir / "checkpoints/checkpoint_000006").glob("a*.json")
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with raysgd.Trainer.restore(run_dir) as trainer:
        assert trainer.run(steps, {}, callbacks=quiet())["begun_at"] == 5
        assert "checkpoint 6 is damaged and was skipped" in caplog.text
        assert any("checkpoint 6 is damaged" in each for each in trainer.run_info.warnings)  # type: ignore[union-attr]


def test_restore_brings_back_the_trainer_settings(ray_cluster: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "backend": "none",
        "cpus_per_worker": 2.5,
        "resources_per_worker": {},
        "seed": 7,
        "failure_config": raysgd.FailureConfig(max_failures=-1, num_spares=1, heartbeat_timeout_s=20),
        "checkpoint_config": raysgd.CheckpointConfig(num_to_keep=3, score_attribute="loss", score_order="min"),
        "run_config": raysgd.RunConfig(name="mine", storage_path=str(tmp_path)),
        "runtime_env": {"env_vars": {"A": "1"}},
    }
    with raysgd.Trainer((1, math.inf), **settings) as trainer:
        trainer.run(steps, {}, callbacks=quiet())
        first, run_dir = latest_run(trainer).description, trainer.run_dir
    assert run_dir is not None
    with raysgd.Trainer.restore(run_dir) as trainer:
        trainer.run(steps, {}, callbacks=quiet())
        second = latest_run(trainer).description
        assert trainer.run_dir == f"{tmp_path}/mine/run_002"
    for name in ("scaling", "run_config", "failure_config", "checkpoint_config", "backend_args", "seed", "runtime_env"):
        assert second[name] == first[name]
    assert second["scaling"]["num_workers"] == [1, None]


# -- refused arguments -------------------------------------------------------------------------------------------------


def test_restore_refuses_a_folder_that_is_not_a_run(failed_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"not the folder of a run.* and does not exist"):
        raysgd.Trainer.restore(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match=rf"did you mean {failed_run.parent}/run_\d+\?"):
        raysgd.Trainer.restore(failed_run.parent)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="does not say how the run's Trainer was made"):
        raysgd.Trainer.restore(tmp_path)


def copy_of(run: Path, folder: Path, **changes: Any) -> Path:
    """Create a folder that holds only a changed description of a run."""
    description = json.loads((run / "run.json").read_text()) | changes
    (folder / "run.json").write_text(json.dumps(description))
    return folder


def test_restore_asks_for_what_the_files_do_not_hold(failed_run: Path, tmp_path: Path) -> None:
    folder = copy_of(failed_run, tmp_path, runtime_env={"env_vars": {"API_KEY": "***"}})
    with pytest.raises(ConfigError, match=r"restore\(runtime_env=...\)"):
        raysgd.Trainer.restore(folder)
    raysgd.Trainer.restore(folder, runtime_env=None)
    failure = json.loads((folder / "run.json").read_text())["failure_config"] | {"on_resize": "<function rescale>"}
    copy_of(failed_run, tmp_path, failure_config=failure)
    with pytest.raises(ConfigError, match=r"restore\(failure_config=...\)"):
        raysgd.Trainer.restore(folder)


def test_restore_refuses_unknown_arguments(failed_run: Path) -> None:
    with pytest.raises(TypeError, match="'workers': use num_workers="):
        raysgd.Trainer.restore(failed_run, workers=3)
