"""Mistakes in distributed training with torch that would go unnoticed: models of their own, and different collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.errors import CollectiveMismatchError, UsageError
from support.runs import PATIENCE_S, events_of, make_trainer, pids, quiet, travels_by_value

pytestmark = pytest.mark.shared_trainer
travels_by_value(__name__)

TIMEOUT_S = 4.0
TORCH_TRAINER = {
    "num_workers": 2,
    "failure_config": raysgd.FailureConfig(mismatch_timeout_s=TIMEOUT_S, heartbeat_timeout_s=4, abort_grace_s=20),
}


# -- models of their own ---------------------------------------------------------------------------------------------------


def train(prepare: Callable[[Any], Any], *, steps: int = 3, exchange: Callable[[Any, Any], None] | None = None) -> None:
    """Make some steps with a report each."""
    import torch

    model = prepare(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        if exchange is not None:
            exchange(model, loss)
        optimizer.step()
        raysgd.report(step=step)


def without_prepare_model() -> None:
    train(lambda model: model)


def with_its_result_unused() -> None:
    def prepare(model: Any) -> Any:
        raysgd.torch.prepare_model(model)
        return model

    train(prepare)


def with_an_average_of_the_loss() -> None:
    import torch.distributed as dist

    train(lambda model: model, steps=12, exchange=lambda model, loss: dist.all_reduce(loss.detach()))


def with_lightning_on_one_device() -> None:
    import pytorch_lightning as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quietly = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=3, **quietly)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(6, 8), batch_size=2))


@pytest.mark.parametrize(
    "train_func",
    [
        without_prepare_model,
        with_its_result_unused,
        with_an_average_of_the_loss,
        pytest.param(with_lightning_on_one_device, marks=pytest.mark.timeout(300)),  # its import takes a while
    ],
)
def test_models_of_their_own_are_one_warning(torch_trainer: raysgd.Trainer, train_func: Callable[[], None]) -> None:
    torch_trainer.run(train_func, callbacks=quiet())
    (warning,) = [each for each in events_of(torch_trainer, "warning") if "a model of its own" in each["message"]]
    assert warning["message"].startswith("each of the 2 ranks trains a model of its own")
    assert "raysgd.torch.prepare_model(model)" in warning["message"] and "Lightning" in warning["message"]


# -- gradients that are not those of all ranks --------------------------------------------------------------------------


def by_parts(model: Any, x: Any) -> None:
    model[2](model[1](model[0](x))).square().mean().backward()


def clipped(model: Any, x: Any) -> None:
    import torch

    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_autograd_grad(model: Any, x: Any, *, is_averaged: bool = False) -> None:
    import torch
    import torch.distributed as dist

    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if is_averaged:
            dist.all_reduce(gradient)
        parameter.grad = gradient


def with_a_penalty_of_one_rank(model: Any, x: Any) -> None:
    import torch

    parameters = list(model.parameters())
    model(x).square().mean().backward()
    for parameter, gradient in zip(parameters, torch.autograd.grad(model.module(x).sum(), parameters), strict=True):
        parameter.grad = parameter.grad + gradient


def after_two_calls(model: Any, x: Any) -> None:
    for loss in [model(x * factor).square().mean() for factor in (1, 2)]:
        loss.backward()


def without_synchronization(model: Any, x: Any) -> None:
    with model.no_sync():
        model(x).square().mean().backward()


def with_synchronization_at_last(model: Any, x: Any) -> None:
    without_synchronization(model, x)
    model(x).square().mean().backward()


def train_by(config: dict[str, Any]) -> Any:
    """Make some steps on data of this rank alone, and return the weights."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
    model: Any = raysgd.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(raysgd.world_rank())
    for each in [config["passes"][0]] * 4 + [config["passes"][-1]]:
        each(model, torch.randn(4, 2, generator=generator))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize(
    "passes",
    [
        [by_parts],
        [clipped, by_parts],
        [by_autograd_grad],
        [with_a_penalty_of_one_rank],
        [after_two_calls],
        [without_synchronization],
    ],
)
def test_step_with_gradients_of_one_rank_is_refused(torch_trainer: raysgd.Trainer, passes: Any) -> None:
    with pytest.raises(
        UsageError, match=r"gradients that differ between ranks, of '0\.weight' and [23] more parameters"
    ):
        torch_trainer.run(train_by, {"passes": passes}, callbacks=quiet())


@pytest.mark.parametrize(
    "passes", [[clipped], [partial(by_autograd_grad, is_averaged=True)], [with_synchronization_at_last]]
)
def test_ranks_agree_after_steps_with_gradients_of_all(torch_trainer: raysgd.Trainer, passes: Any) -> None:
    one, other = torch_trainer.run(train_by, {"passes": passes}, callbacks=quiet(), returns="all")
    assert one.equal(other)


# -- the warning --------------------------------------------------------------------------------------------------------


class StopAtWarning(raysgd.Callback):
    """Stops the run at its first warning."""

    runs_in = "driver"

    def on_event(self, event: raysgd.Event) -> None:
        if event.kind == "warning":
            raise raysgd.Stop(event.data["message"])


def test_warning_comes_with_the_tenth_report(torch_trainer: raysgd.Trainer) -> None:
    def train_until_stopped() -> None:
        train(lambda model: model, steps=10)
        while not raysgd.should_stop():
            time.sleep(0.01)

    torch_trainer.run(train_until_stopped, callbacks=[StopAtWarning(), *quiet()])
    assert "a model of its own" in events_of(torch_trainer, "stop")[0]["why"]


def with_prepare_model() -> None:
    train(raysgd.torch.prepare_model, steps=12)


def with_gradients_averaged_one_by_one() -> None:
    import torch.distributed as dist

    def average(model: Any, loss: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    train(lambda model: model, steps=12, exchange=average)


def with_sharded_weights() -> None:
    from torch.distributed.fsdp import fully_shard

    train(fully_shard, steps=12)


def send_to_the_next_stage() -> None:
    """Send a tensor from rank 0 to rank 1."""
    import torch
    import torch.distributed as dist

    activations = torch.ones(8)
    if raysgd.world_rank() == 0:
        dist.send(activations, 1)
    else:
        dist.recv(activations, 0)


def with_stages_of_a_pipeline() -> None:
    train(lambda model: model, steps=12, exchange=lambda model, loss: send_to_the_next_stage())


def with_training_on_rank_0_only() -> None:
    if raysgd.world_rank() == 0:
        train(lambda model: model, steps=12)


def with_inference_only() -> None:
    import torch

    for step in range(12):
        raysgd.report(total=torch.nn.Linear(8, 4)(torch.ones(2, 8)).sum().item(), step=step)


@pytest.mark.parametrize(
    "train_func",
    [
        with_prepare_model,
        with_gradients_averaged_one_by_one,
        with_sharded_weights,
        with_stages_of_a_pipeline,
        with_training_on_rank_0_only,
        with_inference_only,
    ],
)
def test_shared_training_and_inference_are_not_warned_about(
    torch_trainer: raysgd.Trainer, train_func: Callable[[], None]
) -> None:
    torch_trainer.run(train_func, callbacks=quiet())
    # A rank that gets no CPU for two seconds is warned about too: others wait for it in a collective.
    assert [each for each in events_of(torch_trainer, "warning") if "of its own" in each["message"]] == []


def test_warning_can_be_switched_off(ray_cluster: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, 2, "torch", backend_args={"warn_unsynchronized": False}) as trainer:
        trainer.run(without_prepare_model, callbacks=quiet())
        assert events_of(trainer, "warning") == []


# -- different collectives ---------------------------------------------------------------------------------------------------


def with_uneven_steps() -> None:
    train(raysgd.torch.prepare_model, steps=5 + raysgd.world_rank())


def with_uneven_steps_after_sends() -> None:
    for _ in range(4):
        send_to_the_next_stage()
    with_uneven_steps()


def with_a_batch_that_one_rank_leaves_out() -> None:
    """The engine's mesh has groups that hold one rank each, so that no rank is in all groups."""
    import torch

    engine, model = raysgd.Engine(zero_stage=2), torch.nn.Linear(8, 4)
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        loss = model(torch.ones(2, 8)).sum()
        if step == raysgd.world_rank() == 0:
            continue
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def with_barriers_of_two_kinds() -> None:
    import torch.distributed as dist

    if raysgd.world_rank() == 0:
        raysgd.barrier()
    else:
        dist.barrier()


def with_sizes_that_differ() -> None:
    """Let rank 0 complete and return, while rank 1 waits for the second half: so gloo's ring does."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones((1 + raysgd.world_rank()) << 20))


def with_a_receive_too_many() -> None:
    import torch
    import torch.distributed as dist

    send_to_the_next_stage()
    if raysgd.world_rank() == 1:
        dist.irecv(torch.ones(8), 0).wait()


UNEVEN = (
    r"rank 1 waits in collective \d+ of default_pg \(gloo:\w+\) for \d+ s; "
    r"rank 0 has returned from train_func\. Make the same number of steps on every rank"
)


@pytest.mark.parametrize(
    ("train_func", "says", "ranks"),
    [
        (with_uneven_steps, UNEVEN, (1,)),
        (with_uneven_steps_after_sends, UNEVEN, (1,)),
        (with_a_batch_that_one_rank_leaves_out, UNEVEN, (1,)),
        (
            with_barriers_of_two_kinds,
            r"rank 0 waits in call 1 of raysgd.barrier\(\), rank 1 waits in collective 1 of default_pg \(gloo:barrier\)",
            (0, 1),
        ),
        (
            with_sizes_that_differ,
            r"rank 1 waits in collective 1 of default_pg \(gloo:all_reduce of 2097152 float32\) for \d+ s; rank 0 has made "
            r"collective 1 of default_pg \(gloo:all_reduce of 1048576 float32\); rank 0 has returned from train_func",
            (1,),
        ),
        (
            with_a_receive_too_many,
            r"rank 1 waits in receive 2 of default_pg from rank 0 to rank 1 for \d+ s; rank 0 has returned from train_func",
            (1,),
        ),
    ],
)
def test_collectives_that_other_ranks_never_join_end_the_run(
    torch_trainer: raysgd.Trainer, train_func: Callable[[], None], says: str, ranks: tuple[int, ...]
) -> None:
    before = pids(torch_trainer)
    started_at = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match=says) as raised:
        torch_trainer.run(train_func, callbacks=quiet())
    assert time.monotonic() - started_at < PATIENCE_S
    assert raised.value.ranks == ranks
    assert "The run fails after 4 s of waiting" in events_of(torch_trainer, "warning")[-1]["message"]
    (mismatch,) = events_of(torch_trainer, "mismatch")
    assert set(mismatch["stacks"]) == {"0", "1"} and mismatch["ranks"] == list(ranks)
    assert events_of(torch_trainer, "failure") == [] and events_of(torch_trainer, "hang") == []
    assert pids(torch_trainer) == before, "workers were replaced"


def evaluate(seconds: float) -> None:
    time.sleep(seconds)


def test_rank_that_evaluates_alone_is_named_in_a_warning_and_not_failed(torch_trainer: raysgd.Trainer) -> None:
    def evaluate_on_rank_0() -> float:
        import torch
        import torch.distributed as dist

        if raysgd.world_rank() == 0:
            evaluate(3 * TIMEOUT_S)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert torch_trainer.run(evaluate_on_rank_0, callbacks=quiet(), returns="all") == [2.0, 2.0]
    (warning,) = [each for each in events_of(torch_trainer, "warning") if "in evaluate" in each["message"]]
    assert "rank 1 waits in collective 1 of default_pg (gloo:all_reduce)" in warning["message"]
    assert "rank 0 is missing, it is at test_torch_mistakes.py:" in warning["message"]
    assert warning["message"].endswith("in evaluate")
    assert events_of(torch_trainer, "mismatch") == []
