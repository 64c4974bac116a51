"""What a loop with the engine may do besides the usual order: more passes, dropped gradients, its own loader, loaded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import raysgd
from raysgd.checkpoint.placing import place_like
from raysgd.engine.data_parallel.fully_sharded import fsdp_shard_placement
from raysgd.engine.gradients.clipping import HostFlag, global_norm
from raysgd.engine.model.precision import LossScale
from raysgd.engine.optimizer.parameters import OptimizerNumbers
from raysgd.engine.optimizer.shards import OptimizerShards
from raysgd.errors import ConfigError, UsageError
from support.tiny_models import batch, loss_of, make_model, weights

pytestmark = pytest.mark.usefixtures("group")

STEPS = 6


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def composed(make: Callable[[Any], Any] = adam, **strategies: Any) -> tuple[raysgd.Engine, Any, Any]:
    engine = raysgd.Engine(**strategies)
    model = make_model()
    model, optimizer, *_ = engine.compose(model=model, optimizer=make(model))
    return engine, model, optimizer


def whole_weights(model: nn.Module) -> list[float]:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).tolist()


def train_plainly(step: Callable[[nn.Module, torch.optim.Optimizer, int], None]) -> list[float]:
    model = make_model()
    optimizer = adam(model)
    for number in range(STEPS):
        step(model, optimizer, number)
    return weights(model)


def test_passes_before_a_step_add_up() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        loss_of(model, number + 100).backward()
        optimizer.step()

    engine, model, optimizer = composed(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    plain = make_model()
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(STEPS):
        step(plain, of_plain, number)
        engine.backward(loss_of(model, number))
        engine.backward(loss_of(model, number + 100))
        optimizer.step()
        optimizer.zero_grad()
    assert weights(model) == pytest.approx(weights(plain))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_gradients_that_a_loop_keeps_after_a_step_are_added(is_weighted: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss_of(model, number).backward()
        optimizer.step()

    engine, model, optimizer = composed(weighted_gradients=is_weighted)
    for number in range(STEPS):
        engine.backward(loss_of(model, number), 4 + number if is_weighted else None)
        optimizer.step()
    assert weights(model) == pytest.approx(train_plainly(step), abs=1e-6)


@pytest.mark.parametrize("of_model", [False, True])
def test_gradients_of_a_batch_can_be_dropped(of_model: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    engine, model, optimizer = composed()
    zero_grad = model.zero_grad if of_model else optimizer.zero_grad
    for number in range(STEPS):
        engine.backward(loss_of(model, number) * float("nan"))
        zero_grad()
        engine.backward(loss_of(model, number))
        optimizer.step()
        zero_grad()
    assert weights(model) == pytest.approx(train_plainly(step))


def test_zero_grad_of_the_model_keeps_gradients_of_an_unfinished_step() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        ((loss_of(model, number) + loss_of(model, number + 100)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    engine, model, optimizer = composed(accumulation_steps=2)
    for number in range(STEPS):
        for more in (0, 100):
            engine.backward(loss_of(model, number + more))
            optimizer.step()
            model.zero_grad()
    assert weights(model) == pytest.approx(train_plainly(step), rel=1e-5)
    assert copy.deepcopy(model).zero_grad.__self__ is not model


def test_backward_of_the_loss_itself_is_an_error() -> None:
    _, model, optimizer = composed()
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match=r"call engine\.backward\(loss\) in place of loss\.backward\(\)"):
        optimizer.step()


@pytest.mark.parametrize(
    "strategies",
    [
        {"precision": "fp16"},
        {"zero_stage": 1},
        {"clip_grad_norm": 1.0},
        {"accumulation_steps": 2},
        {"fused_optimizer": True},
    ],
    ids=str,
)
def test_strategies_of_the_step_need_the_optimizer(strategies: dict[str, Any]) -> None:
    engine = raysgd.Engine(**strategies)
    model, *_ = engine.compose(model=make_model())
    loss = loss_of(model, 0)
    with pytest.raises(UsageError, match=rf"{next(iter(strategies))} act in the optimizer's step"):
        engine.backward(loss)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda loss: loss.item(), "got a float; give the mean loss of the batch, a scalar tensor"),
        (lambda loss: None, "got None; give the mean loss"),
        (lambda loss: loss.expand(3), r"got a tensor of shape \(3,\); give the mean loss.*loss\.mean\(\)"),
        (lambda loss: loss.detach(), r"has no gradient: it was detached, or computed under torch\.no_grad"),
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_loss_that_has_no_backward_pass_is_refused(spoil: Callable[[Any], Any], message: str, zero_stage: int) -> None:
    engine, model, _ = composed(zero_stage=zero_stage)
    with pytest.raises(UsageError, match=message):
        engine.backward(spoil(loss_of(model, 0)))
    engine.backward(loss_of(model, 0))
    with torch.no_grad(), pytest.raises(UsageError, match="all parameters are frozen"):
        engine.backward(loss_of(model.requires_grad_(False), 0))


def test_model_alone_trains_with_an_optimizer_of_the_loop() -> None:
    engine = raysgd.Engine(precision="bf16", activation_checkpointing="full")
    model, *_ = engine.compose(model=make_model())
    engine.backward(loss_of(model, 0))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weight_of_a_batch_must_be_known() -> None:
    engine, model, _ = composed(weighted_gradients=True)
    with pytest.raises(UsageError, match=r"does not know its rows: call engine\.backward\(loss, weight=number\)"):
        engine.backward(loss_of(model, 0))
    engine.backward(loss_of(model, 0), weight=4)
    engine, model, _ = composed()
    with pytest.raises(UsageError, match=r"needs Engine\(weighted_gradients=True\)"):
        engine.backward(loss_of(model, 0), weight=4)


def test_weights_that_are_loaded_after_compose_are_trained_on() -> None:
    engine, model, optimizer = composed(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.0), precision="bf16-true"
    )
    model.load_state_dict({name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()})
    engine.backward(loss_of(model, 0))
    optimizer.step()
    assert set(weights(model)) == {7.0}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.rand(3))
        self.register_buffer("frequencies", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x) + self.positions)


def test_bf16_parameters_keep_exact_tables() -> None:
    model = Tables()
    exact = model.frequencies.clone()
    engine = raysgd.Engine(precision="bf16-true")
    model, optimizer, *_ = engine.compose(model=model, optimizer=adam(model))
    engine.backward(loss_of(model, 0))
    optimizer.step()
    assert torch.equal(model.frequencies, exact) and model.positions.dtype == model.layer.weight.dtype == torch.bfloat16


def test_schedule_by_epochs_counts_also_within_an_unfinished_step() -> None:
    model = make_model()
    engine = raysgd.Engine(accumulation_steps=4)
    model, optimizer, scheduler, *_ = engine.compose(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    rates = []
    for _ in range(4):
        for number in range(6):
            engine.backward(loss_of(model, number))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.001, 0.0001])


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def test_random_data_is_drawn_as_without_the_engine() -> None:
    def draws(loader: Any) -> list[float]:
        return [value for batch in loader for value in (float(batch.sum()), float(torch.rand(())))]

    loader = DataLoader(Noisy(), batch_size=1)
    engine = raysgd.Engine()
    *_, composed_loader, _ = engine.compose(model=make_model(), train_dataloader=loader)
    torch.manual_seed(1)
    plain = draws(loader)
    torch.manual_seed(1)
    assert draws(composed_loader) == plain


def test_scale_of_a_run_without_fp16_is_not_restored() -> None:
    scale = LossScale(True, 1024.0)
    scale.load_state_dict(LossScale(False).state_dict())
    assert scale.scale == 1024.0
    other = LossScale(True, 2.0)
    other.load_state_dict(scale.state_dict())
    assert other.scale == 1024.0


def test_restored_optimizer_keeps_its_own_kernels() -> None:
    model = make_model()
    saved = torch.optim.Adam(model.parameters(), lr=0.1)
    own = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    numbers = [OptimizerNumbers(each, names) for each in (own, saved)]
    saved.param_groups[0]["lr"] = 0.5
    shards = OptimizerShards([], None)
    numbers[0].load(own, numbers[1].state_of(saved), numbers[1].describe(saved), shards)
    assert (own.param_groups[0]["lr"], own.param_groups[0]["fused"]) == (0.5, True)


def test_fused_weight_that_fsdp_would_cut_wrongly_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def fused(width: int) -> Any:
        return nn.Parameter(DTensor.from_local(torch.empty(12, width), mesh, [_StridedShard(0, split_factor=3)]))

    place = fsdp_shard_placement(3)
    assert place(fused(6)) == Shard(1)
    with pytest.raises(ConfigError, match=r"fused weight of shape \(12, 5\) over 3 replicas.*3 does not divide 5"):
        place(fused(5))


def test_state_of_a_scalar_lies_where_the_scalar_does_but_not_its_count_of_steps() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    scalar = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()])
    placed = place_like("exp_avg", torch.tensor(0.5), scalar, "here")
    assert isinstance(placed, DTensor) and float(placed.to_local()) == 0.5
    assert not isinstance(place_like("step", torch.tensor(3.0), scalar, "here"), DTensor)


def test_criterion_of_two_models_scales_for_the_newest() -> None:
    criterion = nn.MSELoss()

    def update(mixed_precision: Any) -> list[float]:
        model = make_model()
        before = weights(model)
        settings = {"loss_scale": 64.0} if mixed_precision else {}
        model, optimizer = raysgd.accelerate(
            model,
            criterion,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mixed_precision=mixed_precision,
            **settings,
        )
        criterion(model(batch(0)), torch.zeros(4, 1)).backward()
        optimizer.step()
        return [now - then for now, then in zip(weights(model), before, strict=True)]

    plain = update(False)
    for _ in range(2):
        assert update("fp16") == pytest.approx(plain, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("is_fused", [True, False])
def test_fp16_step_that_overflows_changes_nothing_and_fused_ones_are_queued_before_anybody_waits(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    engine, model, optimizer = composed(
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=is_fused),
        precision="fp16",
        loss_scale=1024.0,
        clip_grad_norm=0.5,
    )
    ask, update = HostFlag.ask, optimizer.inner.step
    monkeypatch.setattr(HostFlag, "ask", lambda flag: order.append("wait") or ask(flag))
    monkeypatch.setattr(optimizer.inner, "step", lambda: order.append("step") or update())

    def step(factor: float) -> list[float]:
        before = weights(model)
        engine.backward(loss_of(model, 0) * factor)
        optimizer.step()
        optimizer.zero_grad()
        return [now - then for now, then in zip(weights(model), before, strict=True)]

    first = step(1.0)
    states = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}
    assert order == (["step", "wait"] if is_fused else ["wait", "step", "wait"])
    assert any(first) and not any(step(1e30))
    assert engine.loss_scale == 512.0
    assert all(torch.equal(value, states[key]) for key, value in optimizer.state[model[0].weight].items())
    assert any(step(1.0)) and engine.loss_scale == 512.0


@pytest.mark.parametrize("num_gradients", [3, 300])
def test_number_of_operations_of_the_norm_does_not_depend_on_the_number_of_gradients(num_gradients: int) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
    gradients = [torch.full((4,), 0.5) for _ in range(num_gradients)]
    with _CountOperations() as counter:
        norm = global_norm(gradients, mesh, is_sharded=False)
    assert norm == pytest.approx(num_gradients**0.5)
    assert counter.count < 12


class _CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _WithLoss(nn.Module):
    """A model that computes its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_outputs_are_fp32_but_in_training_what_comes_with_a_loss(precision: str) -> None:
    engine = raysgd.Engine(precision=precision)
    model = _WithLoss()
    model, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = model(batch(0))
    assert (found["loss"].dtype, found["logits"].dtype) == (torch.float32, torch.bfloat16)
    engine.backward(found["loss"])
    model.eval()
    assert {each.dtype for each in model(batch(0)).values()} == {torch.float32}


class _Classifier(nn.Module):
    """A model that returns its logits with its loss, with a loss of other outputs, or alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 50), kind

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.layer(x)
        if self.kind == "logits":
            return logits
        targets = torch.zeros(len(x), dtype=torch.int64)
        loss = (
            nn.functional.cross_entropy(logits, targets) if self.kind == "loss" else (x * self.layer.weight.sum()).sum()
        )
        return logits, loss


class _CountCopies(TorchDispatchMode):
    """Counts copies to fp32 of tensors with so many elements."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements, self.num_copies = num_elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (out.dtype, out.numel()) == (torch.float32, self.num_elements):
            self.num_copies += 1
        return out


@pytest.mark.parametrize("kind", ["loss", "other loss", "logits"])
def test_logits_are_copied_to_fp32_only_for_a_loss_of_the_loop(kind: str) -> None:
    def copies(call: Callable[[], Any]) -> int:
        with _CountCopies(4 * 50) as counter:
            call()
        return counter.num_copies

    model, x = _Classifier(kind), batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        by_hand = copies(lambda: model(x))
    model, *_ = raysgd.Engine(precision="bf16").compose(model=model)
    assert copies(lambda: model(x)) - by_hand == (kind != "loss")
    logits = model(x) if kind == "logits" else model(x)[0]
    assert logits.dtype == (torch.bfloat16 if kind == "loss" else torch.float32)


@pytest.mark.parametrize(
    ("strategies", "chosen", "is_fused"),
    [
        ({"zero_stage": 3, "cpu_offload": True}, {}, True),
        ({"zero_stage": 3, "cpu_offload": True}, {"foreach": True}, None),
        ({"zero_stage": 3, "cpu_offload": True, "fused_optimizer": False}, {}, None),
        ({"zero_stage": 3}, {}, None),
        ({"fused_optimizer": True}, {"foreach": True}, True),
    ],
)
def test_steps_of_offloaded_states_are_fused_unless_the_user_chose_otherwise(
    strategies: dict[str, Any], chosen: dict[str, Any], is_fused: bool | None
) -> None:
    def update(**options: Any) -> list[float]:
        engine, model, optimizer = composed(
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, **chosen), **options
        )
        for number in range(STEPS):
            engine.backward(loss_of(model, number))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["fused"] == (is_fused if options else None)
        return whole_weights(model)

    assert update(**strategies) == pytest.approx(update(), rel=1e-5)


def test_zero_3_step_makes_no_more_operations_than_fsdp_by_hand() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(4)))

    def count(step: Callable[[], None]) -> int:
        for _ in range(2):  # the optimizer has its state then
            step()
        with _CountOperations() as counter:
            step()
        return counter.count

    model = make()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def by_hand() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch(0))
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    engine, of_engine = raysgd.Engine(zero_stage=3, precision="bf16", fused_optimizer=True), make()
    of_engine, optimizer_of_engine, *_ = engine.compose(model=of_engine, optimizer=adam(of_engine))

    def with_engine() -> None:
        engine.backward(loss_of(of_engine, 0))
        optimizer_of_engine.step()
        optimizer_of_engine.zero_grad()

    assert count(with_engine) <= count(by_hand)


def test_model_that_was_compiled_in_the_users_way_stays_so() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, plain = make_model(), make_model()
    model.compile(backend=backend)
    engine = raysgd.Engine(precision="bf16")
    model, *_ = engine.compose(model=model)
    loss = loss_of(model, 0)
    engine.backward(loss)
    assert graphs
    assert loss.item() == pytest.approx(loss_of(plain, 0).item(), rel=0.02)


_NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "layer norm": lambda: [nn.LayerNorm(3)],
    "RMS norm": lambda: [nn.RMSNorm(3)],
    "batch norm": lambda: [nn.BatchNorm1d(3)],
    "group norm of a convolution": lambda: [
        nn.Unflatten(1, (3, 1)),
        nn.Conv1d(3, 3, 1),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
    ],
    "batch norm of a convolution": lambda: [
        nn.Unflatten(1, (3, 1)),
        nn.Conv1d(3, 3, 1),
        nn.BatchNorm1d(3),
        nn.Flatten(),
    ],
    "encoder": lambda: [nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0)],
    "embedding": lambda: [_Ids(), nn.Embedding(9, 3), nn.LayerNorm(3)],
}


class _Ids(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0].abs() * 3).long().clamp(max=8)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", list(_NORMS))
def test_zero_3_trains_norms_to_the_losses_of_zero_0_in_the_same_precision(kind: str, precision: Any) -> None:
    def losses(zero_stage: Any) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*_NORMS[kind](), nn.Linear(3, 2))
        engine = raysgd.Engine(precision=precision, zero_stage=zero_stage, loss_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer, *_ = engine.compose(model=model, optimizer=optimizer)
        # The first layers of these kinds are norms. In bf16 their inputs would be equal: norms of fp32 inputs compute in fp32.
        offset = 1000 if kind.endswith("norm") else 0
        found = []
        for number in range(STEPS):
            loss = (model(batch(number) + offset) - 1).square().mean()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(0)
    assert losses(3) == pytest.approx(expected, abs=5e-3 * expected[0])
