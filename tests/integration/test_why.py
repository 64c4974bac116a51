"""`raysgd why` on real runs with a cause put into them: the first verdict names it, and the ledger adds up."""

from __future__ import annotations

import gc
import io
import json
import os
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysgd
from raysgd.cli.main import main
from support.runs import make_trainer, travels_by_value

pytestmark = [pytest.mark.shared_trainer, pytest.mark.timeout(240)]
travels_by_value(__name__)

#: What a step computes; sleep, so that other programs on the machine do not slow one rank down.
STEP_S = 0.03
NUM_STEPS = 60
SLOW_RANK = 1
#: How much longer the cause makes a step, in parts of `STEP_S`.
STRENGTHS = (0.4, 0.8, 2.0)

TRAINER: dict[str, Any] = {"num_workers": 2, "backend": "torch"}


def why(trainer: raysgd.Trainer) -> dict[str, Any]:
    """Return what ``raysgd why --json`` prints of the newest run."""
    assert trainer.run_dir is not None
    with redirect_stdout(io.StringIO()) as out:
        assert main(["why", "--json", str(trainer.run_dir)]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def causes_of(trainer: raysgd.Trainer) -> list[dict[str, Any]]:
    """Return the causes in the newest run that a test puts there: short runs are mostly start, and other tests use processors."""
    return [each for each in why(trainer)["causes"] if each["cause"] not in ("start", "processors")]


class Numbers:
    """A map-style dataset, whose items take their time on some ranks."""

    def __init__(self, item_s: float, only_rank: int | None = None) -> None:
        self.item_s, self.only_rank = item_s, only_rank

    def __len__(self) -> int:
        return 2 * NUM_STEPS

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.only_rank in (None, raysgd.world_rank()):
            time.sleep(self.item_s)
        return torch.full((4,), float(index))


class Slow(raysgd.Callback):
    """A callback in the workers that takes its time, as a logger that waits for a server."""

    runs_in = "worker"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_result(self, result: raysgd.Result) -> None:
        time.sleep(self._seconds)


def train(config: dict[str, Any]) -> None:
    """Train a small model with DDP; ``config`` says what makes the steps longer."""
    import torch
    from torch.utils.data import DataLoader

    time.sleep(config.get("setup_s", 0.0))
    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    dataset: Any = Numbers(config.get("item_s", 0.0), config.get("item_rank"))
    loader = raysgd.torch.prepare_data_loader(DataLoader(dataset, batch_size=1))
    first = 0 if (loaded := raysgd.load_checkpoint()) is None else int(loaded["step"]) + 1
    kept = [[number] for number in range(config.get("objects", 0))]
    state = {"weights": np.zeros(config.get("megabytes", 0) * 2**17)}
    for step, batch in enumerate(loader):
        if step < first:
            continue
        time.sleep(STEP_S)
        if raysgd.world_rank() == SLOW_RANK:
            time.sleep(config.get("extra_s", 0.0))
            if step == config.get("dies_at") and not (died := Path(config["died"])).exists():
                died.touch()
                os._exit(1)
        model(batch).sum().backward()
        if config.get("evaluates") and raysgd.world_rank() == 0:
            with torch.no_grad():
                model.eval()(batch)
            time.sleep(STEP_S)
            model.train()
        if kept:
            gc.collect()
        if config.get("megabytes"):
            raysgd.save_checkpoint(state)
        if (every := config.get("save_every")) and step % every == every - 1:
            raysgd.save_checkpoint({"step": step})
        raysgd.report({"step": step})


class Rows:
    """A map-style dataset of rows that are longer, or more, on one rank, or of many lengths on all."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.lengths = config["lengths"]

    def __len__(self) -> int:
        return 4 * len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return int(self.lengths[(index // 2 * 7 + 3 * raysgd.world_rank()) % len(self.lengths)])


def train_on_rows(config: dict[str, Any]) -> None:
    """Train with DDP on batches of rows, each of whose values takes its time."""
    import torch
    from torch.utils.data import DataLoader

    model = raysgd.torch.prepare_model(torch.nn.Linear(4, 1))
    rows = config["more_rows"] if raysgd.world_rank() == SLOW_RANK else 1

    def collate(lengths: list[int]) -> Any:
        return torch.ones(rows, max(lengths))

    dataset: Any = Rows(config)
    for batch in raysgd.torch.prepare_data_loader(DataLoader(dataset, batch_size=1, collate_fn=collate)):
        time.sleep(config.get("fixed_s", 0.0) + config["value_s"] * batch.numel())
        model(torch.ones(1, 4)).sum().backward()
        raysgd.report(rows=len(batch))


CAUSES: dict[str, dict[str, float]] = {
    "healthy": {},
    "slow storage": {"item_s": STEP_S},
    "slow items on one rank": {"item_s": STEP_S, "item_rank": SLOW_RANK},
    "slow rank": {"extra_s": STEP_S},
}
NAMES = {"slow storage": "data", "slow items on one rank": "data", "slow rank": "straggler"}


def test_a_healthy_run_has_no_cause_and_its_ledger_adds_up(trainer: raysgd.Trainer) -> None:
    began = time.time()
    trainer.run(train, {})
    took_s = time.time() - began
    found = why(trainer)
    assert causes_of(trainer) == []
    total_s = sum(found["seconds"].values())
    assert 0.5 * took_s < total_s / 2 <= took_s
    for uses in found["ranks"].values():
        assert sum(uses.values()) == pytest.approx(total_s / 2, rel=0.01)
    assert trainer.run_info is not None
    assert trainer.run_info.goodput == pytest.approx(found["goodput"], abs=0.01)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("cause", NAMES)
def test_first_finding_is_the_cause(trainer: raysgd.Trainer, cause: str, strength: float) -> None:
    config = {key: value if key == "item_rank" else value * strength for key, value in CAUSES[cause].items()}
    trainer.run(train, config)
    found = causes_of(trainer)
    assert found[0]["cause"] == NAMES[cause]
    assert ("steps wait" if cause == "slow storage" else f"rank {SLOW_RANK} on ") in found[0]["text"]


def test_checkpoints_that_are_too_many(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {"megabytes": 64})
    assert "checkpoints" in [each["cause"] for each in why(trainer)["causes"]]


def test_garbage_collections(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {"objects": 600_000})
    found = causes_of(trainer)
    assert found[0]["cause"] == "garbage collection"


def test_a_callback_that_waits(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {}, callbacks=[Slow(STEP_S)])
    found = causes_of(trainer)
    assert found[0]["cause"] == "callbacks"


@pytest.mark.parametrize(
    ("config", "cause", "words"),
    [
        ({"lengths": [10] * 60, "more_rows": 2, "value_s": 3e-3}, "uneven batches", "gets 2.00x as many rows"),
        ({"lengths": [2, 18, 6, 14], "more_rows": 1, "value_s": 3e-3}, "uneven batches", "from step to step"),
        ({"lengths": [2, 30], "more_rows": 1, "value_s": 1e-4, "fixed_s": STEP_S}, "small batches", "does not depend"),
    ],
    ids=["more rows on one rank", "lengths that differ", "mostly fixed"],
)
def test_batches_are_the_cause(trainer: raysgd.Trainer, config: dict[str, Any], cause: str, words: str) -> None:
    config = {**config, "lengths": config["lengths"] * (120 // len(config["lengths"]))}
    for _ in range(3):  # times that others made vary too much show nothing
        trainer.run(train_on_rows, config)
        if found := [each for each in causes_of(trainer) if each["cause"] == cause]:
            break
    assert found and words in found[0]["text"]


def exchange(config: dict[str, Any]) -> None:
    """Exchange the gradients of a model, in steps that have little else to do."""
    import torch

    width = config["width"]
    model = raysgd.torch.prepare_model(torch.nn.Linear(width, width, bias=False))
    inputs = torch.ones(1, width)
    for _ in range(config["steps"]):
        model(inputs).sum().backward()
        raysgd.report(step=0)


@pytest.mark.parametrize(
    ("width", "steps", "cause"), [(2, 5000, "small batches"), (2000, 100, "collectives")], ids=["messages", "bytes"]
)
def test_what_is_exchanged_is_the_cause(trainer: raysgd.Trainer, width: int, steps: int, cause: str) -> None:
    trainer.run(exchange, {"width": width, "steps": steps})
    assert cause in [each["cause"] for each in why(trainer)["causes"]]


def exchange_myself(config: dict[str, Any]) -> None:
    """Average by collectives of torch, without a model of raysgd; one rank is late."""
    import torch
    import torch.distributed as dist

    for step in range(NUM_STEPS):
        time.sleep(STEP_S * (2 if raysgd.world_rank() == SLOW_RANK else 1))
        dist.all_reduce(torch.ones(4))
        raysgd.report(step=step)


def test_waiting_in_own_collectives_is_seen(trainer: raysgd.Trainer) -> None:
    trainer.run(exchange_myself, {})
    found = why(trainer)
    assert [each["cause"] for each in causes_of(trainer)] == ["straggler"]
    assert found["unseen"] == []
    assert found["ranks"]["0"]["skew"] > 10 * found["ranks"][str(SLOW_RANK)].get("skew", 0.0)


def test_a_death_without_newer_checkpoint_is_a_cause_with_a_better_interval(ray_cluster: Any, tmp_path: Path) -> None:
    failures = raysgd.FailureConfig(max_failures=1)
    with make_trainer(tmp_path, **TRAINER, failure_config=failures) as trainer:
        trainer.run(train, {"save_every": 20, "dies_at": 38, "died": str(tmp_path / "died")})
        (found,) = [each for each in why(trainer)["causes"] if each["cause"] == "restarts"]
    assert "1 failure cost" in found["text"]


def test_a_rank_that_evaluates_alone(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {"evaluates": True})
    assert [(each["cause"], each["rank"]) for each in causes_of(trainer)] == [("evaluation", 0)]


def test_a_long_setup_is_the_start(trainer: raysgd.Trainer) -> None:
    trainer.run(train, {"setup_s": 10.0})  # 5 s are what imports take
    assert why(trainer)["causes"][0]["cause"] == "start"


def compile_again(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda values: (values @ values.T).sum())
    for number in range(1, NUM_STEPS):
        step(jnp.ones((number if config["again"] else 3, 4))).block_until_ready()
        time.sleep(STEP_S)
        raysgd.report({"step": number})


@pytest.mark.parametrize("again", [True, False])
def test_compilations(tmp_path: Path, ray_cluster: Any, again: bool) -> None:
    with make_trainer(tmp_path, num_workers=1, backend="jax") as trainer:
        trainer.run(compile_again, {"again": again})
        found = [each["cause"] for each in causes_of(trainer)]
    assert found == (["compiling"] if again else [])
