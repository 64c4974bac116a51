"""`Engine(plan="auto")` in a world of one: what it chooses, what it leaves as it is, and what it refuses."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import raysgd
from raysgd.engine.config import EngineConfig, using_engine_config
from raysgd.engine.planning import plan
from raysgd.errors import ConfigError

WIDTH, DEPTH, NUM_ROWS = 32, 6, 1024
#: Plenty; what needs full checkpointing; and less than the smallest need.
PLENTY, LITTLE, TOO_LITTLE = 1e9, 5e6, 1.5e6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.fc2(nn.functional.gelu(self.fc1(self.norm(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).flatten()  # type: ignore[no-any-return]


class Rows(Dataset[Any]):
    """Rows that are changed at random each time they are read."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        return torch.full((WIDTH,), index / NUM_ROWS) + noise, torch.tensor(float(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(WIDTH)


def make_loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    rows = TensorDataset(torch.zeros(NUM_ROWS, WIDTH), torch.zeros(NUM_ROWS))
    return DataLoader(rows if dataset is None else dataset, **{"batch_size": NUM_ROWS, **options})


def compose(memory: float | None = LITTLE, *, model: Any = None, loader: Any = None, **given: Any) -> raysgd.Engine:
    model = Model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = raysgd.Engine(plan="auto", memory_per_device=memory, **given)
    engine.compose(model=model, optimizer=optimizer, train_dataloader=make_loader() if loader is None else loader)
    return engine


def test_plenty_of_memory_needs_no_strategy() -> None:
    engine = compose(PLENTY)
    assert engine.config == EngineConfig()
    assert engine.plan is not None and engine.plan.config is engine.config
    assert "one device" in engine.plan.reason and engine.plan.memory_per_device == PLENTY


def test_little_memory_needs_checkpointing_and_the_reason_is_described(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "raysgd"):
        engine = compose(LITTLE)
    assert engine.config.activation_checkpointing == "full"
    assert engine.plan is not None and engine.plan.chosen.memory.total < LITTLE
    reason, table = engine.describe().split("\n\n")
    assert re.match(r"Chosen: full checkpointing\. 1 of 3 strategies fit into 0\.0047 GB", reason)
    assert re.search(r"Not one device: needs 0\.0\d+ GB, activations", reason)
    assert re.search(r"^blocks\.5 +full activation checkpointing$", table, re.MULTILINE)
    (line,) = [record.getMessage() for record in caplog.records if "plan=" in record.getMessage()]
    assert line.startswith('plan="auto": chosen: full checkpointing.') and "Not one device" in line
    assert "(not calibrated: times assume the speeds of a current data-center GPU)" in line
    assert "\n" not in line


@settings(max_examples=12)
@given(st.floats(1e6, 2e7))
def test_what_is_chosen_fits_or_there_is_an_error(memory: float) -> None:
    try:
        engine = compose(memory)
    except ConfigError as error:
        smallest = re.search(r"smallest need is (\S+) GB", str(error))
        assert smallest is not None and float(smallest[1]) * 1e9 > memory * 0.9
        return
    assert engine.plan is not None and engine.plan.chosen.memory.total <= 0.95 * memory
    others = [one for one in engine.plan.candidates if one.step_s < engine.plan.chosen.step_s / 1.03]
    assert not any(one.is_fitting for one in others)


@pytest.mark.parametrize(
    "fixed",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": None, "clip_grad_norm": 1.0},
        {"activation_checkpointing": "selective", "zero_stage": 0, "precision": "bf16", "compile": None},
        {"accumulation_steps": 3, "activation_checkpointing": None},
    ],
)
def test_choices_that_are_given_stay(fixed: dict[str, Any]) -> None:
    engine = compose(PLENTY, **fixed)
    assert {name: getattr(engine.config, name) for name in fixed} == fixed
    assert engine.plan is not None
    for one in engine.plan.candidates:
        assert {name: getattr(one.config, name) for name in fixed} == fixed


def test_number_of_accumulated_batches_is_never_chosen() -> None:
    engine = compose(LITTLE)
    assert engine.plan is not None
    assert {one.config.accumulation_steps for one in engine.plan.candidates} == {1}
    assert {one.num_rows for one in engine.plan.candidates} == {NUM_ROWS}


def test_strategies_of_the_command_line_stay() -> None:
    with using_engine_config(EngineConfig(plan="auto", memory_per_device=PLENTY, activation_checkpointing="selective")):
        engine = raysgd.Engine()
        model = Model()
        engine.compose(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), sample_batch=torch.zeros(NUM_ROWS, WIDTH)
        )
    assert engine.config == EngineConfig(activation_checkpointing="selective")


def train(engine: raysgd.Engine) -> list[float]:
    """Return the losses of an epoch, and random numbers after it."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    model, loader = Model(), make_loader(Rows(), batch_size=256, shuffle=True)
    model, optimizer, _, loader, _ = engine.compose(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), train_dataloader=loader
    )
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, torch.rand(1).item(), random.random(), float(np.random.rand())]


def test_loop_computes_the_same_with_the_same_order_of_rows_and_random_numbers() -> None:
    expected = train(raysgd.Engine())
    planned = raysgd.Engine(plan="auto", memory_per_device=3e6)
    assert train(planned) == pytest.approx(expected, rel=1e-6)
    assert planned.config.activation_checkpointing is not None
    assert len(set(expected)) == len(expected)


def test_model_and_optimizer_are_left_as_they_were() -> None:
    model = Model().eval()
    model.register_buffer("seen", torch.ones(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    parameters = list(model.parameters())
    raysgd.Engine(plan="auto", memory_per_device=PLENTY).compose(
        model=model, optimizer=optimizer, train_dataloader=make_loader()
    )
    assert not model.training and not called and not optimizer.state
    assert list(model.parameters()) == parameters
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters)


def test_state_of_the_optimizer_that_is_given_is_counted() -> None:
    sizes = []
    for kind, options in ((torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
        model, engine = Model(), raysgd.Engine(plan="auto", memory_per_device=PLENTY)
        engine.compose(
            model=model, optimizer=kind(model.parameters(), lr=0.1, **options), train_dataloader=make_loader()
        )
        assert engine.plan is not None
        sizes.append(engine.plan.chosen.memory.optimizer / engine.plan.chosen.memory.parameters)
    assert sizes == pytest.approx([0, 1, 2], rel=0.01)


def test_prediction_is_that_of_a_plan_by_hand() -> None:
    engine = compose(PLENTY)
    by_hand = plan(Model, torch.zeros(NUM_ROWS, WIDTH), 1, PLENTY, device="cpu", accumulation_steps=1)
    assert engine.plan is not None
    assert engine.plan.chosen.memory == by_hand.chosen.memory


def test_memory_of_the_node_is_the_default() -> None:
    import psutil

    engine = compose(None)
    assert engine.plan is not None
    assert 1e8 < engine.plan.memory_per_device <= psutil.virtual_memory().total


def test_labels_of_the_loop_are_not_given_to_the_model() -> None:
    model = Model()
    batch = {"x": torch.zeros(NUM_ROWS, WIDTH), "labels": torch.zeros(NUM_ROWS)}
    engine = raysgd.Engine(plan="auto", memory_per_device=LITTLE)
    engine.compose(model=model, optimizer=torch.optim.AdamW(model.parameters()), sample_batch=batch)
    assert engine.config.activation_checkpointing == "full"


def test_own_loss_is_counted() -> None:
    sizes = []
    for copies in (1, 3000):

        def loss_fn(model: nn.Module, batch: Any, copies: int = copies) -> torch.Tensor:
            return model(batch).expand(copies, NUM_ROWS).exp().sum()  # type: ignore[no-any-return]

        model, engine = Model(), raysgd.Engine(plan="auto", memory_per_device=PLENTY)
        engine.compose(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            sample_batch=torch.zeros(NUM_ROWS, WIDTH),
            loss_fn=loss_fn,
        )
        assert engine.plan is not None
        sizes.append(engine.plan.chosen.memory.activations)
    assert sizes[1] - sizes[0] >= 2000 * NUM_ROWS * 4


def test_model_that_fits_nowhere_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(TOO_LITTLE)
    text = str(caught.value)
    assert re.search(r"fits nowhere: [\d,]+ parameters on 1 x 0\.0015 GB, of which 0\.0014 GB may be used", text)
    assert "1024 rows in a micro-batch" in text
    found = re.search(r"batches of (\d+) rows with accumulation_steps=(\d+) ", text)
    assert found is not None and int(found[1]) * int(found[2]) == NUM_ROWS
    compose(TOO_LITTLE, loader=make_loader(batch_size=int(found[1])), accumulation_steps=int(found[2]))


def test_choice_that_keeps_a_model_from_fitting_is_named() -> None:
    with pytest.raises(ConfigError, match="leaving out activation_checkpointing=None"):
        compose(LITTLE, activation_checkpointing=None)


class Locked(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lock = __import__("threading").Lock()


class Reading(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Lazy(Rows):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the file is opened in the loader's processes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loader": make_loader(Stream())}, r"Stream is an IterableDataset.*give engine\.compose\(sample_batch="),
        ({"loader": make_loader(Lazy())}, r"rows of Lazy cannot be read \(OSError: the file.*sample_batch="),
        (
            {"loader": DataLoader(Rows(), batch_sampler=RandomSampler(Rows()))},  # type: ignore[arg-type]
            "RandomSampler does not say how many rows a batch has",
        ),
        ({"model": Locked()}, r"Locked cannot be copied \(TypeError: .*Engine\(plan\.config\)"),
        ({"model": Reading()}, "must not depend on the values of tensors"),
        ({"memory": 40}, "memory_per_device=40 is less than a megabyte.*give 40e9"),
        ({"tensor_parallel": 2}, "workers_per_replica=1: give"),
    ],
)
def test_mistakes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(**arguments)


def test_what_is_needed_is_named() -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"needs the optimizer.*compose\(optimizer="):
        raysgd.Engine(plan="auto").compose(model=model, train_dataloader=make_loader())
    with pytest.raises(ConfigError, match=r"no train_dataloader.*compose\(sample_batch="):
        raysgd.Engine(plan="auto").compose(model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match="plan is None: give plan"):
        raysgd.Engine(memory_per_device=1e9)
    with pytest.raises(ConfigError, match=r"plan='fast' is not known; give .*Engine\(plan\.config\)"):
        raysgd.Engine(plan="fast")
    made = plan(Model, torch.zeros(8, WIDTH), 1, PLENTY, device="cpu")
    with pytest.raises(ConfigError, match=r"plan=Plan is not known; give .*Engine\(plan\.config\)"):
        raysgd.Engine(plan=made)
    with pytest.raises(ConfigError, match=r"accelerate cannot use plan='auto': use raysgd\.Engine"):
        raysgd.accelerate(model, plan="auto")
