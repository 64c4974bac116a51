"""`PreTrainer` and `Finetuner` in a world of one, and which rows each rank of many counts in an evaluation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import raysgd
from raysgd import Finetuner, PreTrainer, TemplateSettings
from raysgd.errors import CheckpointError, ConfigError, UnknownArgumentError, UsageError
from raysgd.torch.batches import take_rows
from raysgd.torch.evaluation import EvaluationLoader, interleave
from raysgd.torch.rows import check_order, skip_batches
from raysgd.torch.samplers import Order, RankSampler, Shard
from raysgd.train.templates import learning_rate_factor, make_default_optimizer
from support.engine_steps import session_of

pytestmark = pytest.mark.usefixtures("group")

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = X.prod(1, keepdim=True)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 1))


class Template(PreTrainer):
    """Trains on 20 rows, and keeps the losses of all batches."""

    data: Any = (TensorDataset(X[:20], Y[:20]), TensorDataset(X[20:27], Y[20:27]), None)
    made: Any = (None, None)

    def train_valid_test_datasets_provider(self) -> Any:
        return self.data

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        self.losses: list[float] = []
        return make_model(), *self.made

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if model.training:
            self.losses.append(loss.item())
        return loss


class Tuner(Finetuner, Template):
    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        indices, seen = [], []
        for x, y in eval_dataloader:
            indices.append(self.gather({"y": y.flatten(), "names": [str(each) for each in x[:, 0].tolist()]}))
            seen.append(y)
        assert torch.equal(self.gather(torch.cat(seen)), torch.cat([each["y"] for each in indices])[:, None])
        names = [name for each in indices for name in each["names"]]
        return {"rows": len(names), "sum": sum(map(float, names)), "training": model.training}


# -- training --------------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_a_loop_by_hand() -> None:
    options = {"batch_size": 8, "epochs": 3, "learning_rate": 0.01, "weight_decay": 0.1, "clip_grad_norm": 0.5}
    template = Template(engine=raysgd.Engine(), **options)
    metrics = template.train()

    model, losses = make_model(), []
    decayed = [model[0].weight, model[3].weight]
    others = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=8, shuffle=True, generator=generator)
    step = 0
    for epoch in range(3):
        generator.manual_seed(epoch)
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * learning_rate_factor(step, 9, 0.1, "linear")
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
    assert template.losses == pytest.approx(losses, rel=1e-6)
    model.eval()
    expected = nn.functional.mse_loss(model(X[20:27]), Y[20:27]).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert (metrics["step"], metrics["epoch"], metrics["learning_rate"]) == (9, 3, 0.0)


@pytest.mark.parametrize("first_steps", [1, 3, 4, 7])
def test_training_resumes_after_the_step_that_was_saved(first_steps: int, tmp_path: Path) -> None:
    options = {"batch_size": 8, "learning_rate": 0.01, "decay": "constant", "warmup": 0.0}
    whole = Template(engine=raysgd.Engine(), steps=8, **options)
    torch.manual_seed(5)
    metrics = whole.train()
    with raysgd.local(dir=tmp_path):
        first = Template(engine=raysgd.Engine(), steps=first_steps, **options)
        torch.manual_seed(5)
        first.train()
        second = Template(engine=raysgd.Engine(), steps=8, **options)
        resumed = second.train()
        third = Template(engine=raysgd.Engine(), steps=8, **options)
        assert third.train() == resumed and third.losses == [], "there was nothing left to train"
    assert first.losses + second.losses == whole.losses
    assert resumed["eval_loss"] == metrics["eval_loss"]


@pytest.mark.parametrize("kind", ["losses", "metrics that draw"])
def test_evaluations_do_not_change_the_training(kind: str) -> None:
    """Not by the generator that a user's loader draws from, which is dropout's, nor by what a user's method draws."""

    class Drawing(Tuner):
        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            return {"drawn": float(torch.rand(())) + random.random()}

    losses = []
    for interval in (1, 2, None):
        base = Template if kind == "losses" else Drawing
        of_user = DataLoader(TensorDataset(X[20:27], Y[20:27]), batch_size=3, shuffle=True)
        mine = type("Mine", (base,), {"data": (Template.data[0], of_user, None)})
        template = mine(engine=raysgd.Engine(), epochs=2, learning_rate=0.01, eval_interval=interval)
        torch.manual_seed(5)
        template.train()
        losses.append(template.losses)
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 6


def test_last_step_of_an_epoch_has_one_report_with_its_evaluation(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X[:20], Y[:20], strict=True))

    def reports(data: Any, **options: Any) -> list[tuple[int, int, bool]]:
        mine = type("Mine", (Template,), {"data": (data, Template.data[1], None)})
        mine.model_optimizer_lr_scheduler_provider = lambda self: (  # type: ignore[attr-defined]
            setattr(self, "losses", []) or make_model(),
            None,
            lambda it: torch.optim.lr_scheduler.ConstantLR(it),
        )
        found: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("raysgd.session.api.report", lambda metrics: found.append(metrics))
            mine(engine=raysgd.Engine(), **options).train()
        return [(each["step"], each["epoch"], "eval_loss" in each) for each in found]

    each_step = {"batch_size": 8, "epochs": 2, "log_interval": 1}
    of_steps = [(1, 0, False), (2, 0, False), (3, 1, True), (4, 1, False), (5, 1, False), (6, 2, True)]
    assert reports(Template.data[0], **each_step) == of_steps
    # That it was the last one is known when a stream has ended.
    of_stream = [*of_steps[:2], (3, 0, False), *of_steps[2:5], (6, 1, False), of_steps[5]]
    assert reports(Stream(), **each_step) == of_stream
    assert reports(Template.data[0], batch_size=8, epochs=2) == [(3, 1, True), (6, 2, True)]
    assert reports(Stream(), batch_size=8, epochs=2) == [(3, 1, True), (6, 2, True)]


class RowTemplate(Template):
    """Keeps the rows that it trains on."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        if model.training:
            vars(self).setdefault("rows", []).extend(batch[1].flatten().tolist())
        return super().run_forward_step(batch, model)


@pytest.mark.parametrize(("first", "then"), [(4, 2), (2, 4), (4, 1)])
def test_another_batch_size_within_an_epoch_trains_each_row_once(first: int, then: int, tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        one = RowTemplate(engine=raysgd.Engine(), batch_size=first, steps=2)
        one.train()
    with raysgd.local(dir=tmp_path):
        other = RowTemplate(engine=raysgd.Engine(), batch_size=then, epochs=1)
        other.train()
    assert sorted(one.rows + other.rows) == sorted(Y[:20].flatten().tolist())


def test_data_of_another_size_is_refused_within_an_epoch_only(tmp_path: Path) -> None:
    class Larger(Template):
        data = (TensorDataset(X[:24], Y[:24]), None, None)

    with raysgd.local(dir=tmp_path):
        Template(engine=raysgd.Engine(), batch_size=4, steps=2).train()
    match = "within epoch 0 of 20 rows, and the data has 24: which rows are left is not known"
    with raysgd.local(dir=tmp_path), pytest.raises(CheckpointError, match=match):
        Larger(engine=raysgd.Engine(), batch_size=4, epochs=2).train()
    with raysgd.local(dir=tmp_path):
        Template(engine=raysgd.Engine(), batch_size=4, epochs=1).train()
    with raysgd.local(dir=tmp_path):
        larger = Larger(engine=raysgd.Engine(), batch_size=4, epochs=2)
        assert larger.train()["step"] == 5 + 6


def test_another_seed_is_refused_within_an_epoch_of_shuffled_rows() -> None:
    data = TensorDataset(X[:20], Y[:20])
    saved = {"rows": 20, "seed": 7}
    with pytest.raises(CheckpointError, match="within epoch 1 in the order of seed 7, not 0"):
        check_order(saved, DataLoader(data, shuffle=True), 1)
    check_order(saved, DataLoader(data), 1)
    check_order({**saved, "seed": 0}, DataLoader(data, shuffle=True), 1)


def test_stream_of_rows_resumes_too(tmp_path: Path) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, Y, strict=True))

    class OfStream(Template):
        data = (Rows(), None, None)

    def run(steps: int) -> list[float]:
        template = OfStream(engine=raysgd.Engine(), steps=steps, batch_size=4)
        template.train()
        return template.losses

    whole = run(10)
    with raysgd.local(dir=tmp_path):
        assert len(run(3)) == 3
        assert len(run(10)) == 7 and len(whole) == 10
    with pytest.raises(ConfigError, match=r"OfStream: the training data has no length.*give steps="):
        OfStream(engine=raysgd.Engine()).train()


class Rows(IterableDataset[Any]):
    """A stream of seven rows."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X[20:27], Y[20:27], strict=True))


def test_stream_that_takes_its_shard_is_given_as_a_prepared_loader() -> None:
    class OfStream(Template):
        data = (Rows(), None, None)

    with (
        session_of(0, 2),
        pytest.raises(UsageError, match=r"prepare_data_loader\(loader, add_sampler=False\).* templates"),
    ):
        raysgd.torch.prepare_data_loader(OfStream(engine=raysgd.Engine())._provide_loaders()[0])
    expected = OfStream(engine=raysgd.Engine(), steps=2, batch_size=3)
    torch.manual_seed(5)
    expected.train()
    prepared = raysgd.torch.prepare_data_loader(DataLoader(Rows(), 3, generator=torch.Generator()), add_sampler=False)
    OfStream.data = (prepared, None, None)
    template = OfStream(engine=raysgd.Engine(), steps=2)
    torch.manual_seed(5)
    template.train()
    assert template.losses == expected.losses


def test_prepared_loader_has_the_batches_of_this_rank() -> None:
    with session_of(0, 2):
        loader = DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=2)
        template = Template(engine=raysgd.Engine(), epochs=1)
        assert [template._count_steps(one) for one in (loader, raysgd.torch.prepare_data_loader(loader))] == [5, 5]


class Batches:
    """A batch sampler that has nothing but batches, not even a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize(
    "validation",
    [Rows(), DataLoader(TensorDataset(X[20:27], Y[20:27]), batch_sampler=Batches())],
    ids=["stream", "batch sampler"],
)
def test_validation_data_needs_no_length_on_one_worker(validation: Any) -> None:
    class OfStream(Template):
        data = (TensorDataset(X[:20], Y[:20]), validation, None)

    class TunerOfStream(Tuner):
        data = OfStream.data

    template = OfStream(engine=raysgd.Engine(), batch_size=3)
    metrics = template.train()
    with torch.no_grad():
        expected = nn.functional.mse_loss(template.model.eval()(X[20:27]), Y[20:27]).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert TunerOfStream(engine=raysgd.Engine(), batch_size=3, epochs=1).train()["eval_rows"] == 7


def test_validation_data_whose_rows_are_not_known_is_refused_before_training() -> None:
    with session_of(1, 3):
        prepared = raysgd.torch.prepare_data_loader(DataLoader(range(9), batch_size=2), add_sampler=False)
        with pytest.raises(
            ConfigError, match=r"3 replicas of the model .* BatchSampler does not say so: give a dataset"
        ):
            EvaluationLoader(prepared)
        with pytest.raises(UsageError, match="Rows is an IterableDataset, which no sampler can split"):
            EvaluationLoader(raysgd.torch.prepare_data_loader(DataLoader(Rows())))


def test_own_optimizer_scheduler_and_loaders_are_used() -> None:
    class Own(Template):
        data = (DataLoader(TensorDataset(X, Y), batch_size=30), None, TensorDataset(X[:3], Y[:3]))

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            model, *_ = super().model_optimizer_lr_scheduler_provider()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            return model, optimizer, lambda it: torch.optim.lr_scheduler.StepLR(it, step_size=1, gamma=0.5)

    metrics = Own(engine=raysgd.Engine(), epochs=2).train()
    assert (metrics["step"], metrics["learning_rate"]) == (2, 0.25)
    assert "test_loss" in metrics and "eval_loss" not in metrics


def test_accumulated_batches_make_one_step() -> None:
    template = Template(engine=raysgd.Engine(accumulation_steps=2), batch_size=4, epochs=1)
    assert template.train()["step"] == 3  # 2 + 2 + 1 batches
    assert len(template.losses) == 5


def test_metrics_are_computed_from_every_row() -> None:
    metrics = Tuner(engine=raysgd.Engine(), batch_size=3, epochs=1).train()
    assert metrics["eval_rows"] == 7 and metrics["eval_sum"] == pytest.approx(X[20:27, 0].sum().item(), rel=1e-5)
    assert metrics["eval_training"] is False


def test_finetuner_has_defaults_of_its_own() -> None:
    engine = raysgd.Engine()
    assert Tuner(engine=engine).settings == TemplateSettings(epochs=3, learning_rate=5e-5)
    assert Template(engine=engine).settings == TemplateSettings()


def test_biases_and_norms_have_no_weight_decay() -> None:
    model = make_model()
    decayed, others = make_default_optimizer(model, TemplateSettings(weight_decay=0.3)).param_groups
    assert [tuple(each.shape) for each in decayed["params"]] == [(8, 4), (1, 8)] and decayed["weight_decay"] == 0.3
    assert len(others["params"]) == 4 and others["weight_decay"] == 0.0


@given(st.integers(1, 200), st.floats(0, 1), st.sampled_from(["linear", "cosine", "constant"]))
def test_learning_rate_rises_and_then_falls(num_steps: int, warmup: float, decay: Any) -> None:
    factors = [learning_rate_factor(step, num_steps, warmup, decay) for step in range(num_steps + 1)]
    top = factors.index(max(factors))
    assert min(factors) >= 0 and max(factors) == 1.0
    assert factors[: top + 1] == sorted(factors[: top + 1]) and factors[top:] == sorted(factors[top:], reverse=True)
    if round(warmup * num_steps) < num_steps:
        assert factors[-1] == pytest.approx(1.0 if decay == "constant" else 0.0, abs=1e-9)


# -- mistakes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [PreTrainer, Finetuner])
def test_missing_method_is_named_at_construction(base: type[PreTrainer]) -> None:
    methods = {name: getattr(Tuner, name) for name in base._REQUIRED}
    for missing in base._REQUIRED:
        kind = type("Mine", (base,), {name: method for name, method in methods.items() if name != missing})
        with pytest.raises(ConfigError, match=f"Mine has no method {missing}, which {base.__name__} needs"):
            kind(engine=raysgd.Engine())
    type("Mine", (base,), methods)(engine=raysgd.Engine())


PROVIDED = [
    ({"data": None}, r"Mine.train_valid_test_datasets_provider returned None; return \(train, valid, test\)"),
    ({"data": (1, 2)}, "datasets_provider returned 2 values"),
    ({"data": (None, None, None)}, "returned None as the training data, which has no default"),
    (
        {"model_optimizer_lr_scheduler_provider": lambda self: None},
        r"scheduler_provider returned None; return \(model, optimizer, lr_scheduler_fn\)",
    ),
    (
        {"model_optimizer_lr_scheduler_provider": lambda self: (None, None, None)},
        "returned None as the model, which has no default",
    ),
    ({"run_forward_step": lambda self, batch, model: None}, "Mine.run_forward_step returned None; return the loss"),
    (
        {"run_forward_step": lambda self, batch, model: model(batch[0])},
        r"run_forward_step returned a tensor of shape \(8, 1\)",
    ),
    ({"data": (TensorDataset(X[:0], Y[:0]), None, None)}, "a TensorDataset as the training data, and it has no rows"),
    (
        {"data": (TensorDataset(X, Y), DataLoader(TensorDataset(X[:0])), None)},
        "a DataLoader as the validation data, and it has no rows; .* for validation and test None",
    ),
    ({"data": (7, None, None)}, "an int as the training data; return a dataset with __getitem__ and __len__"),
    (
        {"model_optimizer_lr_scheduler_provider": lambda self: (make_model().requires_grad_(False), None, None)},
        r"provider returned a Sequential without parameters to train: all are frozen; unfreeze",
    ),
    ({"run_compute_metrics": lambda self, model, loader: 0.5}, "run_compute_metrics returned a float; return a dict"),
]


@pytest.mark.parametrize(("changes", "message"), PROVIDED, ids=[message[-40:] for _, message in PROVIDED])
def test_value_without_a_default_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        type("Mine", (Tuner,), changes)(engine=raysgd.Engine()).train()


def test_settings_are_checked() -> None:
    engine = raysgd.Engine()
    with pytest.raises(UnknownArgumentError, match="learning_rate"):
        Template(engine=engine, lr=0.1)
    for wrong in ({"steps": 0}, {"warmup": 1.5}, {"decay": "square"}, {"learning_rate": -1.0}, {"batch_size": 2.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Template(engine=engine, **wrong)
    with pytest.raises(ConfigError, match=r"engine is a str; give a raysgd.Engine"):
        Template(engine="fp16")


def test_gather_outside_an_evaluation_and_of_other_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="call it in run_compute_metrics"):
        Tuner(engine=raysgd.Engine()).gather(torch.ones(3))

    class Wrong(Tuner):
        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            for x, _ in itertools.islice(eval_dataloader, 2):
                self.gather(x[1:])

    with pytest.raises(UsageError, match=r"gather got 7 entries|gather got 2 entries, and the newest batch has 3 rows"):
        Wrong(engine=raysgd.Engine(), batch_size=3).train()


@pytest.mark.parametrize(
    ("value", "given"), [(0.5, "a float"), (torch.tensor(0.5), "a tensor without dimensions"), (None, "a NoneType")]
)
def test_gather_of_a_single_value_is_refused(value: Any, given: str) -> None:
    class Wrong(Tuner):
        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            for _ in eval_dataloader:
                self.gather({"loss": value})

    with pytest.raises(UsageError, match=rf"gather got {given}; give tensors or lists with one entry for each row"):
        Wrong(engine=raysgd.Engine(), batch_size=1).train()


# -- which rows each rank counts ---------------------------------------------------------------------------------------


@given(num=st.integers(1, 40), num_ranks=st.integers(1, 6))
def test_rows_of_all_ranks_make_up_the_data_in_its_order(num: int, num_ranks: int) -> None:
    order = Order(range(num), 0)
    of_ranks = [
        list(RankSampler(order, Shard(rank, num_ranks, 0), train=False, stands_in=False)) for rank in range(num_ranks)
    ]
    assert interleave(of_ranks) == list(range(num))


class Pairs(BatchSampler):
    """A batch sampler of the user."""


@pytest.mark.parametrize("kind", ["rows", "batches"])
@settings(max_examples=30)
@given(num=st.integers(1, 30), num_ranks=st.integers(1, 5), size=st.integers(1, 7))
def test_each_row_is_counted_on_one_rank(kind: str, num: int, num_ranks: int, size: int) -> None:
    data = list(range(num))
    counted: list[int] = []
    for rank in range(num_ranks):
        with session_of(rank, num_ranks):
            reads: dict[str, Any] = {"batch_size": size}
            if kind == "batches":
                reads = {"batch_sampler": Pairs(SequentialSampler(data), size, False)}
            loader = EvaluationLoader(raysgd.torch.prepare_data_loader(DataLoader(data, **reads)))
            batches = list(_own(loader))
        assert len(batches) == math.ceil(math.ceil(num / size) / num_ranks if kind == "batches" else len(loader))
        counted += itertools.chain.from_iterable(batches)
    assert sorted(counted) == data


def _own(loader: EvaluationLoader) -> Iterator[list[int]]:
    for batch in loader:
        yield batch[: loader.num_own_rows()].tolist()


@settings(max_examples=25)
@given(num=st.integers(1, 30), num_ranks=st.integers(1, 5), size=st.integers(1, 12), left_out=st.integers(0, 3))
@pytest.mark.parametrize("kind", ["rows", "batches", "uneven", "items"])
def test_weighted_gradients_count_each_row_on_one_rank(
    kind: str, num: int, num_ranks: int, size: int, left_out: int
) -> None:
    """With any split of the data, and also where a resumed loop leaves out the first batches."""
    data = list(range(num))
    counted, read = [], []
    for rank in range(num_ranks):
        with session_of(rank, num_ranks):
            reads: dict[str, Any] = {"batch_size": None if kind == "items" else size}
            if kind == "batches":
                reads = {"batch_sampler": Pairs(SequentialSampler(data), size, False)}
            globally = {"global_batch_size": max(size, num_ranks)} if kind == "uneven" else {}
            prepared = raysgd.torch.prepare_data_loader(DataLoader(data, **reads), **globally)
            for number, batch in enumerate(prepared):
                rows = [batch] if kind == "items" else batch.tolist()
                read += rows
                if number < left_out:  # the others are counted when the loop is resumed
                    counted += rows[: prepared.rows.own]
            prepared.set_epoch(0)
            for batch in skip_batches(prepared, left_out):
                rows = [batch] if kind == "items" else batch.tolist()
                counted += rows[: prepared.rows.own]
    assert sorted(counted) == data
    assert len(read) - num < num_ranks * (size if kind == "batches" else 1), "only the last rows are repeated"


def test_rows_are_taken_from_every_tensor_of_a_batch() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "y": (torch.arange(3), "names"), "scale": torch.tensor(2.0)}
    cut = take_rows(batch, 2)
    assert (len(cut["x"]), len(cut["y"][0]), cut["y"][1], cut["scale"].item()) == (2, 2, "names", 2.0)
    assert take_rows(batch, 3) is batch
