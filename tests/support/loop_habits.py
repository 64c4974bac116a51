"""What loops of users do in addition to a plain step: one row for each habit, with the function that does it and the place where.

A habit is code of a user. It runs unchanged in the plain loop of one process and in the loop with the engine, which
`support.loop_runs` has. Habits are drawn several at a time, one of each kind at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

from support.loop_models import Exchanging

if TYPE_CHECKING:
    from support.loop_runs import Run

LIMIT = 0.05  # of gradients, below what they are
LARGEST = 0.3  # of weights, below what some are
Act = Callable[["Run"], None]


@dataclass(frozen=True)
class Schedule:
    """A scheduler of learning rates.

    Attributes:
        make: Makes it, of an optimizer and the number of steps.
        every: ``"step"`` or ``"epoch"``.
        metric: What its ``step`` gets: nothing, the ``"loss"`` of the batch, or that of an ``"evaluation"``.
    """

    make: Callable[[Any, int], Any]
    every: str = "step"
    metric: str | None = None


@dataclass(frozen=True)
class Habit:
    """Something that a loop does; the functions say where. All of them get the `Run`.

    Attributes:
        text: What the guide calls it.
        kind: Of habits of one kind a loop has one.
        refused: Marks of strategies that refuse it by a sentence; see `support.loop_runs.STRATEGIES`.
        without: Marks of strategies, and names and kinds of habits, with which it is not drawn.
        only: Marks of strategies with which it is drawn; empty: with all.
        net: Options of the model.
        strategies: Fields of the engine's config that it needs.
        reads: Reads the batches of a loader, in steps of so many.
        begin: Before the engine is made, and in a resumed training again.
        optimizer: Makes the optimizer.
        before: Before a batch.
        skips: Whether a batch is left out.
        losses: Changes or adds losses of a batch.
        gradients: Between the backward pass and the step.
        after: After a batch, be it the last of its step or not.
        end: After the training.
        schedule: The scheduler.
    """

    text: str
    kind: str
    refused: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    net: tuple[str, ...] = ()
    strategies: tuple[tuple[str, Any], ...] = ()
    reads: Callable[[Iterable[Any], int], Iterator[Any]] | None = None
    begin: Act | None = None
    optimizer: Callable[[Run], Any] | None = None
    before: Act | None = None
    skips: Callable[[Run], bool] | None = None
    losses: Callable[[Run, Any, list[torch.Tensor]], list[torch.Tensor]] | None = None
    gradients: Act | None = None
    after: Act | None = None
    end: Act | None = None
    schedule: Schedule | None = None


# -- batches -------------------------------------------------------------------------------------------------------------


def one_ahead(loader: Iterable[Any], step: int) -> Iterator[Any]:
    batches = iter(loader)
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield batch


def a_step_at_once(loader: Iterable[Any], step: int) -> Iterator[Any]:
    batches = iter(loader)
    while group := list(islice(batches, step)):
        yield from group


# -- gradients -----------------------------------------------------------------------------------------------------------


def gradients(run: Run) -> list[torch.Tensor]:
    return [each.grad for each in run.inner.parameters() if each.grad is not None]


def clip_norm(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)


def clip_value(run: Run) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), LIMIT / 4)


def read_gradients(run: Run) -> None:
    norms = [run.whole(each).norm() for each in gradients(run)]
    if run.ends_step:
        run.log(sum(norms))  # type: ignore[arg-type]


def scale_gradients(run: Run) -> None:
    for each in gradients(run):
        each.mul_(0.5)


def add_noise(run: Run) -> None:
    for number, each in enumerate(gradients(run)):
        each.add_(0.1 * torch.sin(torch.zeros_like(each) + number))


def drop_gradients(run: Run) -> None:
    for number, each in enumerate(run.inner.parameters()):
        if number % 2:
            each.grad = None


def hook_parameters(run: Run) -> None:
    for each in [each for each in run.inner.parameters() if each.requires_grad]:
        each.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]


# -- losses --------------------------------------------------------------------------------------------------------------


def loss_of_hidden(run: Run, batch: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*losses, run.hidden.square().mean()]


def second_pass(run: Run, batch: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    x, y = batch
    return [*losses, run.loss(x * 2, y)]


def two_forwards(run: Run, batch: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    x, y = batch
    (loss,) = losses
    return [loss + run.loss(x * 2, y)]


def penalize_gradients(run: Run, batch: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    x, y = batch
    x = x.detach().clone().requires_grad_()
    loss = run.loss(x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return [loss + (gradient.norm() - 1).square()]


# -- weights and buffers -------------------------------------------------------------------------------------------------


@torch.no_grad()
def clamp_weights(run: Run) -> None:
    for each in run.inner.parameters():
        each.clamp_(-LARGEST, LARGEST)


def clamp_data(run: Run) -> None:
    for each in run.inner.parameters():
        each.data.clamp_(-LARGEST, LARGEST)


def replace_data(run: Run) -> None:
    for each in run.inner.parameters():
        each.data = each.data.clamp(-LARGEST, LARGEST)


@torch.no_grad()
def decay_weights(run: Run) -> None:
    if run.number % 2:
        for each in run.inner.parameters():
            each.mul_(0.9)


@torch.no_grad()
def reset_layer(run: Run) -> None:
    if run.number == run.moment:
        nn.init.constant_(run.inner.blocks[0].up.weight, 0.2)
        run.inner.last.bias.zero_()


def copies_of(run: Run) -> list[torch.Tensor]:
    return [each.detach().clone() for each in run.inner.parameters()]


def keep_weights(run: Run) -> None:
    run.notes["weights"] = copies_of(run)


@torch.no_grad()
def average_weights(run: Run) -> None:
    """Keep an average, and train on from it at one moment."""
    averages = run.notes.setdefault("weights", copies_of(run))
    for average, each in zip(averages, run.inner.parameters(), strict=True):
        average.lerp_(each.detach(), 0.5)
        if run.number == run.moment:
            each.copy_(average)


def load_part(run: Run) -> None:
    part = run.inner.blocks[0]
    if run.number == 0:
        run.notes["part"] = {key: value.clone() for key, value in part.state_dict().items()}
    elif run.number == max(run.moment, 1):
        part.load_state_dict(run.notes["part"])


def load_model(run: Run) -> None:
    if run.number == 0:
        run.notes["model"] = {key: value.clone() for key, value in run.inner.state_dict().items()}
    elif run.number == max(run.moment, 1):
        run.model.load_state_dict(run.notes["model"])


def change_buffer(run: Run) -> None:
    if run.number % 2:
        run.inner.shift.mul_(0.5).add_(0.1)


def replace_buffer(run: Run) -> None:
    if run.number % 2:
        run.inner.shift = run.inner.shift * 0.5 + 0.1


@torch.no_grad()
def exchange_weights(run: Run) -> None:
    """Evaluate by an average of the weights, then put the weights back."""
    average_in(run.notes.setdefault("averages", copies_of(run)), run)
    kept = copies_of(run)
    for each, average in zip(run.inner.parameters(), run.notes["averages"], strict=True):
        each.copy_(average)
    run.evaluate()
    for each, own in zip(run.inner.parameters(), kept, strict=True):
        each.copy_(own)


def exchange_data(run: Run) -> None:
    """Evaluate by an average of the weights, whose tensors are exchanged with the model's."""
    averages = run.notes.setdefault("averages", copies_of(run))
    average_in(averages, run)
    for _ in range(2):
        for number, each in enumerate(run.inner.parameters()):
            each.data, averages[number] = averages[number], each.data
        if _ == 0:
            run.evaluate()


def average_in(averages: list[torch.Tensor], run: Run) -> None:
    for average, each in zip(averages, run.inner.parameters(), strict=True):
        average.lerp_(each.detach(), 0.3)


def make_average(run: Run) -> None:
    run.notes["ema"] = AveragedModel(run.inner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))


def update_average(run: Run) -> None:
    run.notes["ema"].update_parameters(run.model)


def log_average(run: Run) -> None:
    for each in run.notes["ema"].module.parameters():
        run.log(run.whole(each).norm())


def evaluate_average(run: Run) -> None:
    run.optimizer.eval()
    run.evaluate()
    run.optimizer.train()


# -- evaluations and saves -----------------------------------------------------------------------------------------------


def evaluate_on_one_rank(run: Run) -> None:
    if run.world_rank == 0 and run.number % 2:
        run.evaluate()


@torch.no_grad()
def evaluate_part(run: Run) -> None:
    run.inner.eval()
    hidden = torch.tanh(run.inner.first(run.rows_of_evaluation[0].to(run.dtype)))
    run.log(run.inner.blocks[1](hidden).square().mean())
    run.inner.train()


@torch.no_grad()
def read_weights(run: Run) -> None:
    run.log(sum(run.whole(each).float().abs().sum() for each in run.inner.parameters()))  # type: ignore[arg-type]


def save(run: Run) -> None:
    if run.number == run.moment:
        run.save()


def save_at_steps(run: Run) -> None:
    if run.ends_step and run.number >= run.moment and "saved" not in run.notes:
        run.notes["saved"] = True
        run.save()


# -- layers and groups ---------------------------------------------------------------------------------------------------


def freeze(run: Run) -> None:
    if run.number >= run.boundary:
        run.inner.first.requires_grad_(False)


def unfreeze(run: Run) -> None:
    run.inner.blocks[0].requires_grad_(run.number >= run.boundary)


def add_layer(run: Run) -> None:
    if run.number == run.boundary:
        torch.manual_seed(5)
        run.inner.extra = nn.Linear(run.inner.width, run.inner.width, dtype=run.dtype)
        run.optimizer.add_param_group({"params": list(run.inner.extra.parameters())})


def add_layer_with_optimizer(run: Run) -> None:
    if run.number == run.boundary:
        torch.manual_seed(5)
        run.inner.extra = nn.Linear(run.inner.width, run.inner.width, dtype=run.dtype)
        run.notes["second"] = torch.optim.SGD(run.inner.extra.parameters(), lr=0.1)


def step_second(run: Run) -> None:
    if "second" in run.notes and run.ends_step:
        run.notes["second"].step()
        run.notes["second"].zero_grad()


def hold_last(run: Run) -> None:
    run.inner.last.requires_grad_(run.number > run.boundary)


def without_last(run: Run) -> Any:
    names = ("last.",) if run.number <= run.boundary else ()
    return torch.optim.SGD(
        [each for name, each in run.inner.named_parameters() if not name.startswith(names or ("-",))], lr=0.05
    )


def add_group(run: Run) -> None:
    if run.number == run.boundary:
        run.inner.last.requires_grad_(True)
        run.optimizer.add_param_group({"params": list(run.inner.last.parameters()), "lr": 0.02})


def several_groups(run: Run) -> Any:
    named = list(run.inner.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [each for name, each in named if each.ndim > 1], "weight_decay": 0.2},
            {"params": [each for name, each in named if each.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
        ],
        lr=0.05,
        eps=1e-2,
    )


def change_groups(run: Run) -> None:
    if run.number >= run.moment:
        for group in run.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01, 0.3


# -- schedulers ----------------------------------------------------------------------------------------------------------


def sequence(optimizer: Any, num_steps: int) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.2, total_iters=2), schedulers.ExponentialLR(optimizer, 0.8)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


def chain(optimizer: Any, num_steps: int) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.2, total_iters=2), schedulers.ExponentialLR(optimizer, 0.8)]
    return schedulers.ChainedScheduler(parts, optimizer=optimizer)


_plateau = partial(schedulers.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.2)
SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": Schedule(lambda optimizer, _: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))),
    "StepLR of epochs": Schedule(lambda optimizer, _: schedulers.StepLR(optimizer, 1, 0.5), every="epoch"),
    "OneCycleLR": Schedule(lambda optimizer, steps: schedulers.OneCycleLR(optimizer, 0.2, total_steps=steps + 1)),
    "CyclicLR": Schedule(lambda optimizer, _: schedulers.CyclicLR(optimizer, 0.01, 0.1, 2, cycle_momentum=False)),
    "SequentialLR": Schedule(sequence),
    "ChainedScheduler": Schedule(chain),
    "CosineAnnealingWarmRestarts": Schedule(lambda optimizer, _: schedulers.CosineAnnealingWarmRestarts(optimizer, 2)),
    "ReduceLROnPlateau of losses": Schedule(lambda optimizer, _: _plateau(optimizer), metric="loss"),
    "ReduceLROnPlateau of epochs": Schedule(
        lambda optimizer, _: _plateau(optimizer), every="epoch", metric="evaluation"
    ),
}

#: Of torch's own schedulers, those that do not take groups which are added later.
OF_KNOWN_GROUPS = ("LambdaLR", "SequentialLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts")
#: Habits, and kinds of them, that loops with the stages of a pipeline may have: a rank has some layers, and the loss alone.
OF_STAGES = {
    *("reads", "skip", "clip", "gradients", "zero_grad", "closure", "save", "groups", "schedule"),
    *("clamp", "clamp data", "replace data", "decay", "average", "load model", "exchange", "exchange data"),
    *("evaluate", "resume", "resume at a step"),
}
#: By name. The guide has the texts and where they are refused.
HABITS: dict[str, Habit] = {
    "one ahead": Habit("read one batch ahead of the one that is trained on", "reads", reads=one_ahead),
    "a step at once": Habit("read the batches of a step at once", "reads", reads=a_step_at_once),
    "list": Habit("`batches = list(loader)`", "reads", reads=lambda loader, _: iter(list(loader))),
    "skip": Habit(
        "skip a batch, on all ranks", "skip", skips=lambda run: run.number == run.loop.accumulation, without=("reads",)
    ),
    "clip norm": Habit("`torch.nn.utils.clip_grad_norm_`", "clip", gradients=clip_norm, refused=("pipeline",)),
    "clip value": Habit("`torch.nn.utils.clip_grad_value_`", "clip", gradients=clip_value, refused=("pipeline",)),
    "read gradients": Habit(
        "read gradients, as for a log", "read gradients", gradients=read_gradients, without=("overflow",)
    ),
    "scale gradients": Habit(
        "`parameter.grad.mul_(factor)`", "gradients", gradients=scale_gradients, refused=("pipeline",)
    ),
    "noise": Habit(
        "add to `parameter.grad`, made of it: `torch.randn_like(parameter.grad)`",
        "gradients",
        gradients=add_noise,
        refused=("pipeline",),
    ),
    "drop gradients": Habit("`parameter.grad = None`", "gradients", gradients=drop_gradients, refused=("pipeline",)),
    "hook": Habit(
        "`parameter.register_hook`, linear",
        "hook",
        refused=("ZeRO 3", "fp16"),
        before=lambda run: (
            None if run.notes.setdefault("hooked", False) else run.notes.update(hooked=True) or hook_parameters(run)
        ),
    ),
    "unused": Habit(
        "a layer that is never used, with `find_unused_parameters=True`",
        "branch",
        net=("unused",),
        strategies=(("find_unused_parameters", True),),
    ),
    "branch per step": Habit(
        "layers used in some steps, with `find_unused_parameters=True`",
        "branch",
        net=("branch per step",),
        strategies=(("find_unused_parameters", True),),
    ),
    "branch per rank": Habit(
        "layers used on some ranks, as the data says, with `find_unused_parameters=True`",
        "branch",
        net=("branch per rank",),
        strategies=(("find_unused_parameters", True),),
        without=("other ranks",),
    ),
    "two losses": Habit("two backward passes of one graph, `retain_graph=True`", "losses", losses=loss_of_hidden),
    "two passes": Habit("two forward and backward passes for one batch", "losses", losses=second_pass),
    "two forwards": Habit("two forward passes before one backward pass", "losses", losses=two_forwards),
    "gradient penalty": Habit(
        "a penalty of gradients: `torch.autograd.grad(..., create_graph=True)`",
        "losses",
        losses=penalize_gradients,
        refused=("ZeRO 3", "tensor"),
        without=(
            "other ranks",
            "reads",
        ),  # it gives the model other tensors: ambiguous, and refused, if batches are read ahead
    ),
    "zero_grad first": Habit("`zero_grad` before the forward pass", "zero_grad"),
    "zero_grad of the model": Habit("`model.zero_grad()`", "zero_grad"),
    "zeros": Habit("`zero_grad(set_to_none=False)`", "zero_grad"),
    "kept gradients": Habit("keep gradients over a step, without `zero_grad`", "zero_grad"),
    "closure": Habit("`optimizer.step(closure)`", "closure", refused=("all",)),
    "clamp": Habit("`parameter.clamp_(low, high)` between steps", "weights", after=clamp_weights),
    "clamp data": Habit("`parameter.data.clamp_(low, high)`", "weights", after=clamp_data),
    "replace data": Habit("`parameter.data = tensor`", "weights", after=replace_data),
    "decay": Habit("decay weights by `parameter.mul_(factor)`", "weights", after=decay_weights),
    "reset": Habit("reset a layer", "weights", after=reset_layer),
    "average": Habit("`parameter.copy_(average)`", "weights", after=average_weights, without=("resume",)),
    "load part": Habit("`load_state_dict` of a submodule", "weights", before=load_part, without=("resume",)),
    "load model": Habit("`load_state_dict` of the model", "weights", before=load_model, without=("resume",)),
    "exchange": Habit(
        "exchange weights for an evaluation by `copy_`", "averages", after=exchange_weights, without=("resume",)
    ),
    "exchange data": Habit(
        "exchange weights for an evaluation by `.data =`",
        "averages",
        after=exchange_data,
        without=("resume",),
    ),
    "EMA": Habit(
        "`AveragedModel`, updated at each step",
        "averages",
        refused=("ZeRO 3", "bf16-true"),
        begin=make_average,
        after=update_average,
        end=log_average,
        without=("resume", "tensor"),
    ),
    "schedule-free": Habit(
        "an optimizer that exchanges weights in `train()` and `eval()`",
        "averages",
        optimizer=lambda run: Exchanging(run.inner.parameters()),
        after=evaluate_average,
        without=("groups", "OneCycleLR"),
    ),
    "change buffer": Habit("change a buffer in place", "buffers", net=("shift",), after=change_buffer),
    "replace buffer": Habit("assign a new tensor to a buffer", "buffers", net=("shift",), after=replace_buffer),
    "BatchNorm": Habit("`BatchNorm`", "buffers", net=("norm",), without=("other ranks",)),
    "recompute": Habit(
        "`activation_checkpointing`, with dropout",
        "recompute",
        net=("dropout",),
        strategies=(("activation_checkpointing", "full"),),
        without=("other ranks",),
    ),
    "evaluate": Habit("evaluate after any batch", "evaluate", after=lambda run: run.evaluate()),
    "evaluate on one rank": Habit(
        "evaluate on one rank alone, with ZeRO 0 to 2",
        "evaluate",
        after=evaluate_on_one_rank,
        without=("ZeRO 3", "tensor", "pipeline"),
    ),
    "evaluate a part": Habit(
        "call a layer by itself, for an evaluation",
        "evaluate",
        after=evaluate_part,
        refused=("ZeRO 3",),
        without=("pipeline",),
    ),
    "read weights": Habit("read weights, as for a log", "read weights", after=read_weights),
    # With Accelerate's interface there is `raysgd.save_checkpoint` alone, which is refused within a step.
    "save": Habit("save after any batch", "save", after=save, without=("accelerate",)),
    "save at a step": Habit("save after a step", "save", after=save_at_steps),
    "resume": Habit("resume after any batch", "resume", without=("accelerate",)),
    "resume at a step": Habit("resume after a step", "resume"),
    "resume on one rank": Habit(
        "resume after a step, on one rank", "resume", net=("other ranks",), without=("divided",)
    ),
    "resume on two ranks": Habit(
        "resume after a step, on two ranks in place of one", "resume", net=("other ranks",), without=("divided",)
    ),
    "freeze": Habit("freeze layers in the middle of a training", "layers", before=freeze),
    "unfreeze": Habit("unfreeze layers in the middle of a training", "layers", begin=unfreeze, before=unfreeze),
    "add layer": Habit(
        "add a layer, and its group to the optimizer",
        "layers",
        before=add_layer,
        without=("resume", "averages", "weights", *OF_KNOWN_GROUPS),
    ),
    "second optimizer": Habit(
        "add a layer with an optimizer of its own",
        "layers",
        before=add_layer_with_optimizer,
        gradients=step_second,
        refused=("fp16",),
        without=("resume", "averages", "weights", "clip", "gradients"),
    ),
    "add group": Habit(
        "add frozen layers to the optimizer by `add_param_group`",
        "layers",
        begin=hold_last,
        optimizer=without_last,
        before=add_group,
        without=("groups", "averages", "resume", *OF_KNOWN_GROUPS),
    ),
    "several groups": Habit(
        "groups of parameters with settings of their own", "groups", optimizer=several_groups, without=("averages",)
    ),
    "change groups": Habit(
        "change learning rate and decay in `param_groups`, at any moment",
        "schedule",
        before=change_groups,
        without=("schedule-free",),
    ),
    "overflow": Habit(
        "gradients that overflow in a step, on one rank",
        "overflow",
        only=("fp16",),
        net=("overflow",),
        without=("losses",),
    ),
    **{
        name: Habit(
            f"`{name.split()[0]}`, stepped at each {schedule.every}"
            + (f" with the {schedule.metric}" if schedule.metric else ""),
            "schedule",
            schedule=schedule,
        )
        for name, schedule in SCHEDULES.items()
    },
}
