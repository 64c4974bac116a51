"""Runs on any number of workers train to the same bits, with all that torch draws, keeps and scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from ray import tune

import raysgd
from support import logical_models
from support.logical_models import make_data, train, train_jax
from support.runs import make_trainer, quiet, travels_by_value
from support.searches import fit_in

pytestmark = pytest.mark.timeout(300)
travels_by_value(__name__)
cloudpickle.register_pickle_by_value(logical_models)

NUM_LOGICAL = 4
CASES: dict[str, dict[str, Any]] = {
    "conv": {"kind": "conv", "num_steps": 200},
    "gpt": {"kind": "gpt", "num_steps": 200},
    "mixed precision": {"kind": "conv", "num_steps": 20, "amp": True},
    "accumulation": {"kind": "gpt", "num_steps": 21, "accumulate": 3},
    "one row a step": {"kind": "gpt", "num_steps": 20, "batch_size": 1},
}


@pytest.fixture(scope="module")
def alone(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker makes of each case."""
    return run_cases(tmp_path_factory.mktemp("alone"), 1)


def run_cases(folder: Path, num_workers: int, names: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """Run cases with so many workers, and return what they returned on rank 0; all ranks return the same."""
    found = {}
    with make_trainer(
        folder, num_workers, "torch", seed=3, deterministic=True, logical_workers=NUM_LOGICAL, cpus_per_worker=0.1
    ) as trainer:
        for name in names:
            config = CASES[name]
            rows = 100 if config.get("batch_size") is None else 40
            returned = trainer.run(
                train, config, dataset=make_data(config["kind"], rows), callbacks=quiet(), returns="all"
            )
            assert len({each["digest"] for each in returned}) == 1, f"{name}: the ranks differ"
            found[name] = returned[0]
    return found


@pytest.mark.parametrize(("num_workers", "names"), [(2, ("conv", "gpt")), (3, ("conv", "gpt")), (4, tuple(CASES))])
def test_the_same_bits_on_any_number_of_workers(
    alone: dict[str, Any], num_workers: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    assert run_cases(tmp_path, num_workers, names) == {name: alone[name] for name in names}
    assert len({found["digest"] for found in alone.values()}) == len(CASES)
    assert alone["conv"]["loss"] < 2.2 and alone["gpt"]["loss"] < 3.8, "it does not learn"


@pytest.mark.smoke
def test_first_difference_is_named_by_step_and_parameter(ray_cluster: Any, tmp_path: Path) -> None:
    config = {"kind": "conv", "num_steps": 8, "checksums": True}
    folders = []
    for num_workers, num_rows in ((1, [100]), (2, [100, 99])):
        with make_trainer(
            tmp_path / str(num_workers), num_workers, "torch", deterministic=True, logical_workers=NUM_LOGICAL
        ) as trainer:
            for rows in num_rows:
                trainer.run(train, config, dataset=make_data("conv", rows), callbacks=quiet())
                folders.append(trainer.run_dir)
    assert not raysgd.compare_runs(folders[0], folders[1])
    difference = raysgd.compare_runs(folders[1], folders[2])
    assert difference.iteration == 1 and "checksum/0.weight" in difference.metrics


def test_trials_of_a_search_differ_by_their_learning_rate_alone(ray_cluster: Any, tmp_path: Path) -> None:
    trainer = raysgd.Trainer(1, deterministic=True, logical_workers=4, cpus_per_worker=0.5)
    trials = [(0.01, 1), (0.01, 2), (0.001, 1)]
    space = {"trial": tune.grid_search([{"lr": lr, "num_workers": num} for lr, num in trials])}
    given = trainer.to_trainable(
        lambda config: train({"kind": "conv", "num_steps": 5, "lr": config["trial"]["lr"]}),
        make_data("conv", 100),
        trainer_args_from=lambda config: {"num_workers": config["trial"]["num_workers"]},
    )
    results = list(fit_in(tmp_path)(given, space, reuse_actors=True))
    assert [result.error for result in results] == [None] * 3
    losses = [result.metrics["loss"] for result in results]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.jax
def test_the_same_bits_with_jax(ray_cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed: pip install raysgd[functions]")
    found = []
    for num_workers in (1, 3):
        with make_trainer(
            tmp_path / str(num_workers), num_workers, "jax", seed=3, deterministic=True, logical_workers=NUM_LOGICAL
        ) as trainer:
            returned = trainer.run(
                train_jax, {"num_steps": 60}, dataset=make_data("conv", 100), callbacks=quiet(), returns="all"
            )
            found += [(each["digest"], each["loss"]) for each in returned]
    assert len(set(found)) == 1
    assert found[0][1] < 2.2, "it does not learn"
