"""What loops do with gradients, batches, optimizers and states under the engine, in a world of one; and what is refused."""

from __future__ import annotations

import copy
import gc
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd.backends.torch import model_reducers
from raysgd.engine.gradients.accumulation import Accumulation
from raysgd.errors import ConfigError, SerializationError, UsageError
from raysgd.workers.pickling import dumps_returned
from support import groups, loop_verdicts, project
from support.engine_steps import session_of

pytestmark = pytest.mark.usefixtures("group")

STAGES = [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"precision": "bf16-true"}]
REFUSED = "which would not find its gradient"


class Net(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 1)
        if is_tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def composed(model: nn.Module | None = None, **strategies: Any) -> tuple[raysgd.Engine, Any, Any]:
    model = Net() if model is None else model
    engine = raysgd.Engine(**strategies)
    model, optimizer, *_ = engine.compose(model=model, optimizer=adam(model))
    return engine, model, optimizer


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    return model(torch.randn(4, 3, generator=torch.Generator().manual_seed(number))).square().mean()


def step(engine: raysgd.Engine, model: Any, optimizer: Any, number: int = 0) -> None:
    engine.backward(loss_of(model, number))
    optimizer.step()
    optimizer.zero_grad()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for name, value in state.items()
    }


# -- gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategies", [*STAGES, {"precision": "fp16", "loss_scale": 256.0}], ids=str)
def test_gradients_of_a_complete_step_are_those_of_the_plain_loop(strategies: dict[str, Any]) -> None:
    plain = Net()
    (loss_of(plain, 0) / 2 + loss_of(plain, 1) / 2).backward()
    engine, model, _ = composed(accumulation_steps=2, **strategies)
    engine.backward(loss_of(model, 0))
    assert sum(each.grad is not None and bool(each.grad.any()) for each in model.parameters()) == 0
    engine.begin_batch(4)
    engine.backward(loss_of(model, 1))
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else found.grad
        assert gradient.dtype == torch.float32
        assert torch.allclose(gradient, expected.grad, rtol=0.05, atol=2e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategies", STAGES, ids=str)
def test_parameters_without_a_gradient_keep_values_and_optimizer_state(strategies: dict[str, Any]) -> None:
    engine, model, optimizer = composed(**strategies)
    for number in range(2):
        step(engine, model, optimizer, number)
    before = whole(model.state_dict())
    model.first.requires_grad_(False)
    engine.backward(loss_of(model, 3))
    model.last.weight.grad = None
    optimizer.step()
    after = whole(model.state_dict())
    kept = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert kept == {"first.weight", "first.bias", "last.weight"}


def test_gradient_of_another_layout_is_refused() -> None:
    with groups.one_of_several(2), session_of(0, 2):
        engine, model, optimizer = composed(zero_stage=2)
        engine.backward(loss_of(model))
        model.last.weight.grad = torch.zeros(1, 4)
        with pytest.raises(UsageError, match=r"not divided as the optimizer's state is.*parameter\.grad\.mul_"):
            optimizer.step()


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_optimizer_updates_the_parameters_themselves_where_one_rank_has_nothing_to_divide(zero_stage: int) -> None:
    def updated(optimizer: Any) -> set[int]:
        """Return what the optimizer finds while it runs."""
        found: list[Any] = []
        optimizer.inner.look = MethodType(lambda self: found.extend(self.param_groups[0]["params"]), optimizer.inner)
        optimizer.look()
        return set(map(id, found))

    _, model, optimizer = composed(zero_stage=zero_stage)
    assert updated(optimizer) == {id(each) for each in model.parameters()}
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    with groups.one_of_several(2), session_of(0, 2):
        _, model, optimizer = composed(zero_stage=zero_stage)
        assert not updated(optimizer) & {id(each) for each in model.parameters()}


def test_gradient_that_appears_within_an_unfinished_step_is_refused() -> None:
    engine, model, optimizer = composed(accumulation_steps=2)
    engine.backward(loss_of(model))
    loss_of(model).backward()
    with pytest.raises(UsageError, match=r"call engine\.backward\(loss\) in place of loss\.backward"):
        optimizer.step()


@pytest.mark.parametrize("strategies", [{"zero_stage": 3}, {"precision": "fp16"}], ids=str)
def test_hook_that_would_find_another_gradient_is_refused(strategies: dict[str, Any]) -> None:
    engine, model, _ = composed(**strategies)
    model.last.bias.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(UsageError, match=REFUSED):
        engine.backward(loss_of(model))
    early = Net()
    early.last.bias.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=rf"last\.bias has a hook, {REFUSED}"):
        composed(early, **strategies)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_first_fp16_scale_is_searched_so_that_no_step_is_lost(tensor_parallel: int) -> None:
    with groups.one_of_several(2), session_of(0, tensor_parallel, tensor_parallel):
        model, engine = Net(), raysgd.Engine(precision="fp16", tensor_parallel=tensor_parallel)
        plan = {"first": ColwiseParallel(output_layouts=Replicate())} if tensor_parallel > 1 else None
        model, optimizer, *_ = engine.compose(model=model, optimizer=adam(model), tensor_plan=plan)
        before = whole(model.last.state_dict())
        engine.backward(loss_of(model) * 1e4)
        optimizer.step()
        assert 1 < engine.loss_scale < 2**16
        assert not torch.equal(whole(model.last.state_dict())["weight"], before["weight"])


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_loop_of_accelerate_clips_sums_of_passes_in_fp16(zero_stage: int) -> None:
    def train(model: Any, optimizer: Any, criterion: nn.Module) -> torch.Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        for number in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                criterion(model(x + number), torch.zeros(4, 1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        return whole(model.state_dict())["first.weight"]

    criterion, plain, model = nn.MSELoss(), Net(), Net()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.5), criterion)
    model, optimizer = raysgd.accelerate(
        model,
        criterion,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        mixed_precision="fp16",
        zero_stage=zero_stage,
        loss_scale=256.0,
    )
    assert torch.allclose(train(model, optimizer, criterion), expected, atol=2e-3)


# -- batches -------------------------------------------------------------------------------------------------------------


def plan(accumulation: Accumulation, events: str) -> list[int]:
    """Return after which events a step is complete: b a batch of a loader, l the last one, f forward, g backward, s step."""
    complete = []
    for place, event in enumerate(events):
        if event in "bl":
            accumulation.on_batch(is_last=event == "l")
        elif event == "f":
            accumulation.on_forward()
        elif event == "g":
            accumulation.on_backward()
        elif accumulation.is_complete:
            accumulation.on_step(skipped=False)
            complete.append(place)
        else:
            accumulation.end_batch()
    return complete


@pytest.mark.parametrize(
    ("events", "complete"),
    [
        ("fgsfgsfgsfgs", [5, 11]),
        ("fggsfggs", [7]),  # two losses of a batch
        ("bfgfgsbfgfgs", [11]),
        ("bfgbfgsbfgbfgs", [6, 13]),  # the loop calls the optimizer at each second batch
        ("bfgsbbfgs", [8]),  # a batch is skipped, and counts
        ("bfgsbfgslfgs", [7, 11]),  # the last group is incomplete
        ("bfgsfgsfgs", [6]),  # the loop stays at one batch
    ],
)
def test_step_is_complete_after_batches_whatever_passes_they_have(events: str, complete: list[int]) -> None:
    assert plan(Accumulation(2), events) == complete


def test_several_passes_that_may_be_batches_are_refused() -> None:
    engine, model, optimizer = composed(accumulation_steps=4)
    engine.backward(loss_of(model, 0))
    engine.backward(loss_of(model, 1))
    with pytest.raises(UsageError, match=r"one batch with several losses, or for several batches.*train_dataloader"):
        optimizer.step()


def test_engines_that_read_one_loader_step_together_at_its_end() -> None:
    loader = DataLoader(TensorDataset(torch.randn(5, 3)), batch_size=1)
    steps = []
    engines = [raysgd.Engine(accumulation_steps=2) for _ in range(2)]
    models = [Net(), Net()]
    parts = [
        engine.compose(model=model, optimizer=adam(model), train_dataloader=given)
        for engine, model, given in zip(engines, models, (loader, None), strict=True)
    ]
    for number, (x,) in enumerate(parts[0][3]):
        for engine, (model, optimizer, *_) in zip(engines, parts, strict=True):
            engine.backward(model(x).mean())
            before = model.last.bias.clone()
            optimizer.step()
            optimizer.zero_grad()
            if not torch.equal(before, model.last.bias):
                steps.append((number, engines.index(engine)))
    assert steps == [(number, engine) for number in (1, 3, 4) for engine in (0, 1)]


# -- optimizers, layers and states ---------------------------------------------------------------------------------------


class Halving(torch.optim.Optimizer):
    """An optimizer that changes a norm of the gradient in place, which torch does not carry out on parts of a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            each.grad.norm().pow_(2)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_optimizers_of_whole_parameters_are_refused_by_name(zero_stage: int) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"Adafactor needs whole parameters.*zero_stage=0"):
        raysgd.Engine(zero_stage=zero_stage).compose(model=model, optimizer=torch.optim.Adafactor(model.parameters()))
    with groups.one_of_several(2), session_of(0, 2):
        model, engine = Net(), raysgd.Engine(zero_stage=zero_stage)
        model, optimizer, *_ = engine.compose(model=model, optimizer=Halving(model.parameters()))
        engine.backward(loss_of(model))
        with pytest.raises(ConfigError, match=r"Halving needs whole parameters.*zero_stage=0"):
            optimizer.step()


@pytest.mark.parametrize("strategies", [*STAGES[1:], {"precision": "fp16"}, {"clip_grad_norm": 1.0}], ids=str)
def test_sparse_gradients_are_refused_by_name(strategies: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    name, value = next(iter(strategies.items()))
    with pytest.raises(ConfigError, match=rf"Embedding 0 has sparse gradients, which {name}={value!r} cannot carry"):
        raysgd.Engine(**strategies).compose(model=model, optimizer=torch.optim.SparseAdam(model.parameters()))


@pytest.mark.parametrize(
    ("name", "strategies", "is_fused"),
    [
        ("SGD", {"zero_stage": 3, "cpu_offload": True}, None),
        ("Adam", {"zero_stage": 3, "cpu_offload": True}, True),
        ("SGD", {"fused_optimizer": True}, True),
    ],
)
def test_step_is_fused_where_torch_has_a_kernel_for_the_shards(
    name: str, strategies: dict[str, Any], is_fused: bool | None
) -> None:
    model, engine = Net(), raysgd.Engine(**strategies)
    optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.05)
    model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
    before = whole(model.state_dict())
    step(engine, model, optimizer)
    assert optimizer.param_groups[0]["fused"] == is_fused
    assert not any(torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items())


@pytest.mark.parametrize(("chosen", "is_fused"), [({}, True), ({"foreach": False}, None), ({"fused": False}, None)])
def test_step_is_not_fused_where_the_user_chose_for_a_group(chosen: dict[str, Any], is_fused: bool | None) -> None:
    model, engine = Net(), raysgd.Engine(zero_stage=3, cpu_offload=True)
    first, *others = model.parameters()
    optimizer: Any = torch.optim.Adam([{"params": [first]}, {"params": others, **chosen}])
    _, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["fused"] is is_fused


@pytest.mark.parametrize(("strategies", "chosen"), [({"fused_optimizer": True}, {}), ({}, {"fused": True})])
def test_fused_step_that_torch_has_for_whole_parameters_alone_is_refused(
    strategies: dict[str, Any], chosen: dict[str, Any]
) -> None:
    model, engine = Net(), raysgd.Engine(zero_stage=3, **strategies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **chosen)
    with pytest.raises(ConfigError, match=r"SGD has no fused step for the shards.*AdamW or Adam"):
        engine.compose(model=model, optimizer=optimizer)


def test_step_of_the_given_optimizer_is_refused_also_between_steps_of_the_returned_one() -> None:
    engine, model, optimizer = composed()
    for number in range(2):
        step(engine, model, optimizer, number)
        before = whole(model.state_dict())
        with pytest.raises(
            UsageError, match=r"the AdamW that the engine was given.*Call step\(\) on the optimizer that was"
        ):
            optimizer.inner.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_step_that_fails_leaves_nothing_at_the_optimizer() -> None:
    engine, model, optimizer = composed(precision="fp16", fused_optimizer=True)
    before = set(vars(optimizer.inner))
    engine.backward(loss_of(model))
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    assert set(vars(optimizer.inner)) == before
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    assert not torch.equal(model.last.weight, Net().last.weight)


def test_sparse_gradients_train_without_a_fused_step() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    before, engine = model[0].weight.clone(), raysgd.Engine(fused_optimizer=False)
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.SparseAdam(model.parameters()))
    engine.backward(model(torch.tensor([3])).sum())
    optimizer.step()
    assert (model[0].weight != before).any(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("strategies", STAGES[:4], ids=str)
def test_weight_of_several_blocks_trains_as_in_the_plain_loop(strategies: dict[str, Any]) -> None:
    plain = Net(is_tied=True)
    optimizer: Any = adam(plain)
    engine, model, composed_optimizer = composed(Net(is_tied=True), **strategies)
    for number in range(3):
        loss_of(plain, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        step(engine, model, composed_optimizer, number)
    for name, value in whole(model.state_dict()).items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-6)


def test_copies_and_averages_of_a_sharded_model_are_refused() -> None:
    early = AveragedModel(Net())
    _, model, _ = composed(zero_stage=3)
    for action in (lambda: copy.deepcopy(model), lambda: AveragedModel(model), lambda: early.update_parameters(model)):
        with pytest.raises(ConfigError, match=r"zero_stage=3 divides.*give zero_stage=2"):
            action()
    other = Net()
    early.update_parameters(other)
    assert torch.equal(early.module.last.weight, other.last.weight)


class Averaging(nn.Module):
    """A model that keeps an average of its own weights, and updates it in its forward pass."""

    def __init__(self, update: Any) -> None:
        super().__init__()
        self.student, self.teacher, self.update = Net(), Net().requires_grad_(False), update
        self.teacher.load_state_dict({name: 0 * each for name, each in self.student.state_dict().items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.update(own, other)
        return self.student(x)  # type: ignore[no-any-return]


def _assign(own: torch.Tensor, other: torch.Tensor) -> None:
    own.data = own.data * 0.9 + other.data * 0.1


@pytest.mark.parametrize(
    "update",
    [lambda own, other: own.lerp_(other, 0.1), lambda own, other: own.data.lerp_(other.data, 0.1), _assign],
    ids=["in place", "in place of data", "data"],
)
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_parameter_that_changes_in_a_forward_pass_is_kept_or_refused(zero_stage: int, update: Any) -> None:
    engine, model, optimizer = composed(Averaging(update), zero_stage=zero_stage)
    if zero_stage == 3:
        with pytest.raises(UsageError, match=r"teacher\.\S+ was changed in a forward pass.*give zero_stage=2"):
            step(engine, model, optimizer)
    else:
        step(engine, model, optimizer)
        assert torch.allclose(model.teacher.last.weight, 0.1 * Net().last.weight)


def test_sharded_model_that_train_func_returns_is_refused_with_what_to_do() -> None:
    _, model, _ = composed(zero_stage=3)
    with pytest.raises(
        SerializationError,
        match=r"^train_func's return value \['model'\] cannot be sent .* FSDPNet are divided.*engine\.save_checkpoint\(\): load",
    ):
        dumps_returned({"model": model}, "train_func", model_reducers())


@pytest.mark.parametrize("saved_by", STAGES[:4], ids=str)
@pytest.mark.parametrize("strategies", STAGES[:4], ids=str)
def test_composed_objects_load_states_of_any_strategy(
    tmp_path: Any, strategies: dict[str, Any], saved_by: dict[str, Any]
) -> None:
    with session_of(0, 1, folder=str(tmp_path)):
        first = composed(**saved_by)
        step(*first)
        raysgd.save_checkpoint({"model": first[1], "optimizer": first[2]}, all_ranks=True)
        step(*first, number=1)
        again = composed(Net(), **strategies)
        step(*again, number=5)
        state = raysgd.load_checkpoint()
        assert state is not None
        again[1].load_state_dict(state["model"])
        again[2].load_state_dict(state["optimizer"])
        step(*again, number=1)
    expected = whole(first[1].state_dict())
    for name, value in whole(again[1].state_dict()).items():
        assert torch.allclose(value, expected[name], atol=1e-6)


def count_tensors() -> int:
    """Count live tensors of more than one number."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) and each.numel() > 1 for each in gc.get_objects())


@pytest.mark.parametrize("strategies", STAGES, ids=str)
def test_training_leaves_no_tensors_behind(strategies: dict[str, Any]) -> None:
    def train() -> None:
        parts = composed(**strategies)
        step(*parts)

    train()  # torch's caches
    before = count_tensors()
    train()
    assert count_tensors() <= before


def test_table_of_the_guide_is_that_of_the_tests() -> None:
    assert loop_verdicts.table() in (project.ROOT / "doc/guides/large-models.md").read_text()
