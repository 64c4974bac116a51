"""Loops that change weights, layers or the optimizer outside of its step. Runs in processes of one group.

An edit is a function that a loop calls at one place of each step: on the engine's objects, and on the plain loop's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

import raysgd
from raysgd.errors import RaySGDError
from raysgd.torch.model import unwrap
from support.engine_steps import session_of

RANKS, ROWS, NUM_STEPS = 2, 3, 8

#: The engine's strategies by name, and whether `raysgd.accelerate` applies them.
STRATEGIES: dict[str, tuple[dict[str, Any], bool]] = {
    "DDP": ({}, False),
    "unused": ({"find_unused_parameters": True}, False),
    "ZeRO 1": ({"zero_stage": 1}, False),
    "ZeRO 2": ({"zero_stage": 2}, False),
    "ZeRO 3": ({"zero_stage": 3}, False),
    "bf16": ({"precision": "bf16", "zero_stage": 2}, False),
    "fp16": ({"precision": "fp16", "loss_scale": 64.0, "zero_stage": 1}, False),
    "bf16-true": ({"precision": "bf16-true"}, False),
    "bf16-true, ZeRO 1": ({"precision": "bf16-true", "zero_stage": 1}, False),
    "bf16-true, ZeRO 3": ({"precision": "bf16-true", "zero_stage": 3}, False),
    "TP": ({"tensor_parallel": 2}, False),
    "TP, bf16-true": ({"tensor_parallel": 2, "precision": "bf16-true"}, False),
    "accelerate, ZeRO 2": ({"zero_stage": 2}, True),
    "accelerate, ZeRO 3": ({"zero_stage": 3}, True),
}
#: The largest difference of a weight, of 1 or so, that rounding explains.
TOLERANCES = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 1e-2, "bf16-true": 2e-2}


class Net(nn.Module):
    """Linear layers, a convolution whose weight is not contiguous, a frozen layer and a scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.middle = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nn.functional.pad(self.conv(x.view(-1, 2, 2, 2)).flatten(1), (0, 6))
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.middle(x)) + torch.tanh(self.frozen(x))
        return self.gain * self.last(x)


class Interpolating(torch.optim.SGD):
    """Trains between the newest weights and their average, and evaluates at the average, as schedule-free optimizers do."""

    RATIO = 0.5
    is_training = True

    @torch.no_grad()
    def eval(self) -> None:
        if self.is_training:
            self._move(1 - 1 / self.RATIO)
        self.is_training = False

    @torch.no_grad()
    def train(self) -> None:
        if not self.is_training:
            self._move(1 - self.RATIO)
        self.is_training = True

    def _move(self, weight: float) -> None:
        for each in self.param_groups[0]["params"]:
            if "newest" in self.state[each]:
                each.lerp_(self.state[each]["newest"].to(each.dtype), weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.is_training
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                newest = self.state[each].setdefault("newest", each.detach().clone())
                newest.sub_(each.grad, alpha=self.param_groups[0]["lr"])
                each.lerp_(newest, 0.3)


class Sharpness(torch.optim.SGD):
    """Computes gradients where the loss is highest near the weights (SAM, Foret et al., arXiv 2010.01412)."""

    @torch.no_grad()
    def first_step(self) -> None:
        trained = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in trained]).norm()
        for each in trained:
            self.state[each]["before"] = each.data.clone()
            each.add_(each.grad * (0.2 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                each.data = self.state[each]["before"]
        self.step()
        self.zero_grad()


@dataclass
class Loop:
    """What an edit may change.

    Attributes:
        model: The user's, without a wrapper.
        call: Computes the model's outputs.
        optimizer: As the loop has it.
        step: How many steps were made.
        kept: Of the edit, from step to step.
    """

    model: Any
    call: Callable[..., Any]
    optimizer: Any
    step: int = 0
    kept: dict[str, Any] = field(default_factory=dict)


def _values(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """Return values that do not depend on the model's own, as a user makes them who resets layers."""
    return [
        (0.3 * torch.randn(each.shape, generator=torch.Generator().manual_seed(seed + at))).to(each.dtype)
        for at, each in enumerate(model.parameters())
    ]


def _copy_into(parameter: torch.Tensor, values: torch.Tensor) -> None:
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    parameter.copy_(values)


@torch.no_grad()
def _clamp(loop: Loop) -> None:
    for each in loop.model.parameters():
        each.clamp_(-0.25, 0.25)


def _clamp_data(loop: Loop) -> None:
    for each in loop.model.parameters():
        each.data.clamp_(-0.25, 0.25)


def _assign_data(loop: Loop) -> None:
    for each in loop.model.parameters():
        each.data = each.data.clamp(-0.25, 0.25)


@torch.no_grad()
def _decay_by_groups(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        for each in group["params"]:
            each.mul_(0.8)


@torch.no_grad()
def _reset(loop: Loop) -> None:
    if loop.step == 3:
        for each, values in zip(loop.model.parameters(), _values(loop.model, 5), strict=True):
            _copy_into(each, values)


def _load_submodule(loop: Loop) -> None:
    if loop.step == 3:
        state = nn.Linear(8, loop.model.first.out_features).state_dict()
        for at, name in enumerate(state):
            state[name] = torch.full_like(state[name], 0.3 * (at + 1))
        loop.model.first.load_state_dict(state)


def _restore_best(loop: Loop) -> None:
    if loop.step == 2:
        loop.kept["best"] = {name: value.clone() for name, value in loop.model.state_dict().items()}
    if loop.step == 5:
        loop.model.load_state_dict(loop.kept["best"])


def _vector(loop: Loop) -> None:
    parameters = [loop.model.first.weight, loop.model.middle.bias]
    vector_to_parameters(parameters_to_vector(parameters) * 0.8, parameters)


def _swap(loop: Loop) -> None:
    if loop.step == 3:
        weight = loop.model.middle.weight
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.2))


@torch.no_grad()
def _set(loop: Loop) -> None:
    if loop.step == 3:
        weight = loop.model.middle.weight
        weight.set_(weight.detach() * 0.2)


def _transpose_memory(loop: Loop) -> None:
    loop.model.middle.weight.data = loop.model.middle.weight.data.t()


@torch.no_grad()
def _average(loop: Loop) -> list[torch.Tensor]:
    means = loop.kept.setdefault("means", [each.detach().clone() for each in loop.model.parameters()])
    for mean, each in zip(means, loop.model.parameters(), strict=True):
        mean.lerp_(each.detach(), 0.3)
    return means  # type: ignore[no-any-return]


@torch.no_grad()
def _average_for_evaluation(loop: Loop) -> None:
    means = _average(loop)
    own = [each.detach().clone() for each in loop.model.parameters()]
    for each, mean in zip(loop.model.parameters(), means, strict=True):
        each.copy_(mean)
    loop.kept.setdefault("evaluations", []).append(float(loop.call(torch.ones(2, 8)).mean()))
    for each, before in zip(loop.model.parameters(), own, strict=True):
        each.data = before


@torch.no_grad()
def _average_copied_back(loop: Loop) -> None:
    means = _average(loop)
    if loop.step % 3 == 2:
        loop.call(torch.ones(2, 8))  # an evaluation, after which the parameters are those of before
        for each, mean in zip(loop.model.parameters(), means, strict=True):
            each.copy_(mean)


def _lookahead(loop: Loop) -> None:
    parameters = [each for group in loop.optimizer.param_groups for each in group["params"]]
    slow = loop.kept.setdefault("slow", [each.data.clone() for each in parameters])
    if loop.step % 3 == 2:
        for each, mean in zip(parameters, slow, strict=True):
            mean.lerp_(each.data, 0.5)
            each.data.copy_(mean)


def _reset_momenta(loop: Loop) -> None:
    if loop.step == 3:
        for state in loop.optimizer.state.values():
            state["momentum_buffer"].zero_()
    if loop.step == 4:
        for each in loop.model.parameters():
            if each in loop.optimizer.state:
                loop.optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each, dtype=torch.float32)
    if loop.step == 5:
        loop.optimizer.state.clear()


def _unfreeze(loop: Loop) -> None:
    if loop.step == 2:
        loop.model.frozen.requires_grad_(True)
    if loop.step == 5:
        loop.model.frozen.requires_grad_(False)


def _add_group(loop: Loop) -> None:
    if loop.step == 2:
        loop.model.frozen.requires_grad_(True)
        loop.optimizer.add_param_group({"params": loop.model.frozen.parameters(), "lr": 0.1})


def _edit_groups(loop: Loop) -> None:
    group = loop.optimizer.param_groups[0]
    if loop.step == 2:
        group["params"] = [each for each in group["params"] if each is not loop.model.first.weight]
    if loop.step == 4:
        group["params"].append(loop.model.first.weight)


def _exchange(loop: Loop) -> None:
    if loop.step == 2:
        torch.manual_seed(0 if not dist.is_initialized() or loop.kept.get("is_plain") else dist.get_rank())
        loop.model.last = nn.Linear(loop.model.last.in_features, 1, dtype=loop.model.last.weight.dtype)
        loop.optimizer.add_param_group({"params": loop.model.last.parameters()})


def _tie(loop: Loop) -> None:
    if loop.step == 2:
        loop.model.frozen.weight = loop.model.middle.weight


class _Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def _parametrize(loop: Loop) -> None:
    if loop.step == 2:
        parametrize.register_parametrization(loop.model.middle, "weight", _Halved(), unsafe=True)


def _round(loop: Loop) -> None:
    loop.model.bfloat16()
    loop.call(torch.ones(2, 8, dtype=torch.bfloat16))
    loop.model.float()


def _evaluate_in_fp32(loop: Loop) -> None:
    dtype = loop.model.first.weight.dtype
    loop.model.float()
    with torch.no_grad():
        loop.kept.setdefault("evaluations", []).append(float(loop.call(torch.ones(2, 8)).mean()))
    loop.model.to(dtype)


def _hook_after(loop: Loop) -> None:
    if loop.step == 1:
        loop.optimizer.register_step_post_hook(lambda *_: _clamp(loop))


def _hook_before(loop: Loop) -> None:
    def halve(*_: Any) -> None:
        for each in loop.model.parameters():
            if each.grad is not None:
                each.grad.mul_(0.5)

    if loop.step == 1:
        loop.optimizer.register_step_pre_hook(halve)


def _evaluate_average(loop: Loop) -> None:
    loop.optimizer.eval()
    with torch.no_grad():
        loop.kept.setdefault("evaluations", []).append(float(loop.call(torch.ones(2, 8)).mean()))
    loop.optimizer.train()


def _step_directly(loop: Loop) -> None:
    if loop.step == 1:
        loop.kept["given"].step()


def _nothing(loop: Loop) -> None:
    pass


#: What a loop does after each step of the optimizer.
EDITS: dict[str, Callable[[Loop], None]] = {
    "clamp": _clamp,
    "clamp .data": _clamp_data,
    "assign .data": _assign_data,
    "decay by groups": _decay_by_groups,
    "reset": _reset,
    "load submodule": _load_submodule,
    "restore best": _restore_best,
    "vector": _vector,
    "swap_tensors": _swap,
    "set_": _set,
    "transpose memory": _transpose_memory,
    "average for evaluation": _average_for_evaluation,
    "average copied back": _average_copied_back,
    "lookahead": _lookahead,
    "reset momenta": _reset_momenta,
    "unfreeze": _unfreeze,
    "add group": _add_group,
    "edit groups": _edit_groups,
    "exchange": _exchange,
    "tie": _tie,
    "parametrize": _parametrize,
    "round": _round,
    "evaluate in fp32": _evaluate_in_fp32,
    "hook after": _hook_after,
    "hook before": _hook_before,
    "schedule-free": _evaluate_average,
    "SAM": _nothing,
    "step of the given optimizer": _step_directly,
}


def make(edit: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(8)
    kinds: dict[str, Any] = {"schedule-free": Interpolating, "SAM": Sharpness}
    trained = [each for each in model.parameters() if each.requires_grad or edit == "unfreeze"]
    if edit in kinds:
        return model, kinds[edit](trained, lr=0.1)
    return model, torch.optim.SGD(trained, lr=0.05, momentum=0.8, weight_decay=numbers.choice([0.0, 0.1]))


def batch(seed: int, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * number + rank)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, torch.randn(ROWS, 1, generator=generator)


def whole_batch(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*(batch(seed, number, rank) for rank in range(RANKS)), strict=True)
    return torch.cat(xs), torch.cat(ys)


def _shard_layers(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    styles = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("first", "middle", "frozen")}
    return parallelize_module(model, mesh, styles)


def _outcome(loop: Loop) -> tuple[torch.Tensor, list[float]]:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in loop.model.parameters()]
    return torch.cat([each.detach().float().flatten() for each in whole]), loop.kept.get("evaluations", [])


def train_plainly(edit: str, seed: int, accumulation: int) -> tuple[torch.Tensor, list[float]]:
    """Return the weights and what evaluations found, of the loop in one process, which computes the batches of all ranks."""
    model, optimizer = make(edit, seed)
    loop = Loop(model, model, optimizer, kept={"is_plain": True, "given": optimizer})

    def passes() -> None:
        for part in range(accumulation):
            for rank in range(RANKS):
                x, y = batch(seed, loop.step * accumulation + part, rank)
                ((model(x) - y).square().mean() / RANKS / accumulation).backward()

    while loop.step < NUM_STEPS:
        passes()
        if isinstance(optimizer, Sharpness):
            optimizer.first_step()
            passes()
            optimizer.second_step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        loop.step += 1
        EDITS[edit](loop)
    return _outcome(loop)


def train(
    strategy: str, edit: str, seed: int, accumulation: int, **more: Any
) -> tuple[torch.Tensor, list[float]] | str:
    """Return what `train_plainly` does, of the loop with the engine, or the error with which it was refused.

    Args:
        strategy: One of `STRATEGIES`.
        edit: One of `EDITS`.
        seed: Of the model and the batches.
        accumulation: The batches of a step.
        **more: Further strategies.
    """
    strategies, is_accelerated = {**STRATEGIES[strategy][0], **more}, STRATEGIES[strategy][1]
    rank, ranks_per_replica = dist.get_rank(), strategies.get("tensor_parallel", 1)
    with session_of(rank, RANKS, ranks_per_replica):
        model, optimizer = make(edit, seed)
        backward: Callable[..., None] = torch.Tensor.backward
        try:
            if is_accelerated:
                wrapped, composed = raysgd.accelerate(model, optimizer=optimizer, **strategies)
            else:
                engine = raysgd.Engine(accumulation_steps=accumulation, **strategies)
                wrapped, composed, *_ = engine.compose(model=model, optimizer=optimizer, tensor_plan=_shard_layers)
                backward = engine.backward
            loop = Loop(unwrap(wrapped), wrapped, composed, kept={"given": optimizer})
            while loop.step < NUM_STEPS:
                for part in range(accumulation):
                    number = loop.step * accumulation + part
                    x, y = batch(seed, number, rank) if ranks_per_replica == 1 else whole_batch(seed, number)
                    loss = (wrapped(x) - y).square().mean()
                    backward(loss / accumulation if is_accelerated else loss)
                    if isinstance(optimizer, Sharpness):
                        composed.first_step()
                        backward((wrapped(x) - y).square().mean())
                        composed.second_step()
                    else:
                        if not is_accelerated or part + 1 == accumulation:
                            composed.step()
                            composed.zero_grad()
                loop.step += 1
                EDITS[edit](loop)
        except RaySGDError as error:
            return f"{type(error).__name__}: {error}"
        return _outcome(loop)


def compare(cases: list[tuple[str, str, int, int]]) -> list[str | float]:
    """Train each case with the engine and plainly; return how it was refused, or the largest difference."""
    found: list[str | float] = []
    for strategy, edit, seed, accumulation in cases:
        try:
            outcome = train(strategy, edit, seed, accumulation)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        if isinstance(outcome, str):
            found.append(outcome)
            continue
        weights, evaluations = outcome
        expected, of_plain = train_plainly(edit, seed, accumulation)
        differences = [abs(one - other) for one, other in zip(evaluations, of_plain, strict=True)]
        found.append(max(float((weights - expected).abs().max()), *differences, 0.0))
    return found
