"""JAX on two workers with two devices each: meshes, global arrays, and worker deaths."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.errors import ConfigError
from support.runs import actor_pids, are_gone, events_of, make_trainer, quiet, travels_by_value
from support.totals import with_jax

travels_by_value(__name__)
travels_by_value("support.totals")
pytestmark = pytest.mark.timeout(180)
NUM_ROWS = 64
TRAINER = {
    "backend": raysgd.JaxConfig(devices_per_worker=2),
    "failure_config": raysgd.FailureConfig(max_failures=1, abort_grace_s=20),
}
shared = pytest.mark.shared_trainer


@pytest.fixture
def rows() -> dict[str, Any]:
    return {"x": np.arange(NUM_ROWS, dtype=np.float32)}


@shared
def test_mesh_has_all_devices_with_its_last_axis_within_a_worker(trainer: raysgd.Trainer) -> None:
    def train_func() -> dict[str, Any]:
        mesh = raysgd.jax.mesh(("data", -1), ("model", 2))
        return {
            "shape": dict(mesh.shape),
            "rows": [{device.process_index for device in row} for row in mesh.devices],
            "default": dict(raysgd.jax.mesh().shape),
        }

    seen = trainer.run(train_func, callbacks=quiet(), returns="all")
    for each in seen:
        assert each["shape"] == {"data": 2, "model": 2}
        assert each["rows"] == [{0}, {1}]
        assert each["default"] == {"data": 4}


@shared
def test_global_batches_stay_one_array_after_a_death(
    trainer: raysgd.Trainer, tmp_path: Path, rows: dict[str, Any]
) -> None:
    mark = tmp_path / "killed"

    def train_func() -> dict[str, Any]:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        by_rows = NamedSharding(raysgd.jax.mesh(), PartitionSpec("data"))
        total = jax.jit(lambda x: x.sum())
        state = raysgd.load_checkpoint() or {"seen": 0.0, "steps": 0}
        seen, steps = state["seen"], state["steps"]
        for batch in raysgd.get_dataset().get_split().to_jax(batch_size=4, device=by_rows, drop_last=True):
            assert batch["x"].shape == (8,)
            seen, steps = seen + float(total(batch["x"])), steps + 1
            raysgd.report(seen=seen, pid=os.getpid())
            raysgd.save_checkpoint({"seen": seen, "steps": steps})
            if (steps, raysgd.world_rank()) == (4, 0) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"seen": seen, "steps": steps, "pid": os.getpid()}

    before = trainer.run(os.getpid, callbacks=quiet(), returns="all")
    ended = trainer.run(train_func, dataset=rows, callbacks=quiet(), returns="all")
    assert [each["seen"] for each in ended] == [float(np.arange(NUM_ROWS).sum())] * 2
    assert [each["steps"] for each in ended] == [NUM_ROWS // 8] * 2
    assert (
        ended[1]["pid"] == before[1] and ended[0]["pid"] != before[0]
    )  # rank 0 died, and the other rank kept its process


@shared
def test_killed_coordinator_is_replaced_for_the_next_run(trainer: raysgd.Trainer) -> None:
    def train_func() -> int:
        import jax

        return int(jax.process_count())

    assert trainer.run(train_func, callbacks=quiet()) == 2
    (coordinator,) = actor_pids("CoordinatorActor")
    trainer.execute(os.getpid)  # the workers left their group; JAX would end them otherwise
    os.kill(coordinator, signal.SIGKILL)
    assert are_gone([coordinator])
    assert trainer.run(train_func, callbacks=quiet()) == 2


@shared
def test_shards_of_unequal_length_are_refused(trainer: raysgd.Trainer, rows: dict[str, Any]) -> None:
    def train_func() -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        by_rows = NamedSharding(raysgd.jax.mesh(), PartitionSpec("data"))
        raysgd.get_dataset().get_split().to_jax(batch_size=4, device=by_rows)

    with pytest.raises(ConfigError, match="drop_last=True"):
        trainer.run(train_func, dataset=rows, callbacks=quiet())


class ArrayOfJax:
    """Becomes a JAX array when it is unpickled. An array in this process would start threads, and tests fork."""

    def __reduce__(self) -> Any:
        import jax

        return jax.numpy.ones, (3,)


@shared
def test_arrays_created_before_the_group_are_refused(trainer: raysgd.Trainer) -> None:
    def train_func(config: dict[str, Any]) -> tuple[int, int]:
        import jax

        return os.getpid(), jax.device_count()

    before = trainer.run(train_func, callbacks=quiet(), returns="all")
    with pytest.raises(ConfigError, match=r"before train_func was entered: in its config, .* give NumPy arrays"):
        trainer.run(train_func, {"weights": ArrayOfJax()}, callbacks=quiet())
    assert len(events_of(trainer, "failure")) == 0
    after = trainer.run(train_func, {"weights": np.ones(3)}, callbacks=quiet(), returns="all")
    assert after == before
    assert [count for _, count in after] == [4, 4]


def has_devices() -> bool:
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def test_kept_group_has_arrays_of_earlier_runs_until_another_group_forms(ray_cluster: Any, tmp_path: Path) -> None:
    def store() -> tuple[int, int]:
        import jax

        np._array_of_run = jax.numpy.arange(3.0)  # type: ignore[attr-defined]
        return os.getpid(), jax.device_count()

    def read() -> tuple[int, float]:
        assert with_jax()(1.0) == 2.0  # a collective
        return os.getpid(), float(np._array_of_run.sum())  # type: ignore[attr-defined]

    others = set(actor_pids("CoordinatorActor"))
    with make_trainer(tmp_path, 2, raysgd.JaxConfig(keep_group=True)) as trainer:
        before = trainer.run(store, callbacks=quiet(), returns="all")
        assert trainer.run(read, callbacks=quiet(), returns="all") == [(pid, 3.0) for pid, _ in before]
        assert trainer.execute(has_devices) == [False, False]  # the workers have left the group
        assert trainer.run(has_devices, callbacks=quiet(), returns="all") == [True, True]
        os.kill(before[0][0], signal.SIGKILL)
        assert are_gone([before[0][0]])
        (first, count), (second, _) = trainer.run(store, callbacks=quiet(), returns="all")
        assert count == 2 and first != before[0][0] and second == before[1][0]
        (coordinator,) = set(actor_pids("CoordinatorActor")) - others
        os.kill(coordinator, signal.SIGKILL)
        assert are_gone([coordinator])
        assert [count for _, count in trainer.run(store, callbacks=quiet(), returns="all")] == [2, 2]


@shared
def test_client_of_the_devices_is_freed_after_a_run_that_imported_much(trainer: raysgd.Trainer) -> None:
    """Imports of a run are frozen. The client must not be among them: on a GPU it holds most of the memory."""

    def use_devices() -> None:
        import jax

        for number in range(200):
            sys.modules[f"pretended_{number}"] = ModuleType("pretended")
        assert with_jax()(1.0) == 2.0
        np._client_of_run = weakref.ref(jax.devices()[0].client)  # type: ignore[attr-defined]

    def is_freed() -> bool:
        return np._client_of_run() is None  # type: ignore[attr-defined]

    trainer.run(use_devices, callbacks=quiet())
    assert trainer.run(is_freed, callbacks=quiet(), returns="all") == [True, True]


class BrokenToken:
    """A token of a failed step."""

    def block_until_ready(self) -> None:
        raise RuntimeError("the step has failed")


@shared
def test_jit_step_with_effects_ends_after_a_death(trainer: raysgd.Trainer, tmp_path: Path) -> None:
    """Pending prints of the ended step must not keep its devices.

    Pretended: by JAX's source, steps on GPUs would leave such tokens; those on CPUs fail where they are called.
    """
    mark = tmp_path / "killed"

    def train_func() -> tuple[int, float]:
        import jax
        from jax._src import dispatch

        total = with_jax()
        dispatch.runtime_tokens.set_output_runtime_token(jax.local_devices()[0], BrokenToken())  # type: ignore[arg-type]
        for index in range(10):
            found = total(1.0)
            if (index, raysgd.world_rank()) == (5, 1) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        dispatch.runtime_tokens.clear()
        return os.getpid(), found

    survivor, _ = trainer.run(os.getpid, callbacks=quiet(), returns="all")
    ended = trainer.run(train_func, callbacks=quiet(), returns="all")
    failures = events_of(trainer, "failure")
    assert [total for _, total in ended] == [2.0, 2.0]
    assert ended[0][0] == survivor
    assert len(failures) == 1, failures
