"""`PreTrainer`, `Finetuner`: training loops whose parts are methods to override. Worker side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from raysgd._util.text import with_article
from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_choice, check_count
from raysgd.engine.engine import Engine
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api
from raysgd.torch.batches import take_rows
from raysgd.torch.evaluation import EvaluationLoader
from raysgd.torch.loader import PreparedLoader, prepare_data_loader
from raysgd.torch.rows import FollowedLoader, check_order, describe_order, skip_batches
from raysgd.train.loop import LoopPosition, LoopSettings, Stepper
from raysgd.train.loop import train as run_loop

Decay = Literal["linear", "cosine", "constant"]


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class TemplateSettings:
    """Settings of `PreTrainer` and `Finetuner`; each field is an argument of theirs.

    Attributes:
        batch_size: Rows of a batch on each replica of the model; the engine's ``accumulation_steps`` multiplies it. For datasets;
            a DataLoader has its own.
        epochs: Passes over the training data.
        steps: Optimizer steps; ends the training before ``epochs`` are over, or continues beyond them.
        learning_rate: Highest learning rate of the default optimizer.
        weight_decay: Of the default optimizer, on all parameters but biases and those of norms.
        warmup: Part of all steps in which the default scheduler raises the learning rate from 0, linearly.
        decay: How the default scheduler lowers it to 0 afterwards.
        clip_grad_norm: Limit of the gradients' norm, unless the engine's config has one. None: gradients are not clipped.
        log_interval: Steps between two reports of the loss.
        eval_interval: Steps between two evaluations. None: after each epoch.
        save_interval: Steps between two checkpoints. None: after each epoch. One is saved at the end in any case.
    """

    batch_size: int = 8
    epochs: int = 1
    steps: int | None = None
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    warmup: float = 0.1
    decay: Decay = "linear"
    clip_grad_norm: float | None = 1.0
    log_interval: int = 10
    eval_interval: int | None = None
    save_interval: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "log_interval"):
            check_count(name, getattr(self, name), minimum=1)
        for name in ("steps", "eval_interval", "save_interval"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), minimum=1)
        check_amount("learning_rate", self.learning_rate, positive=True)
        check_amount("weight_decay", self.weight_decay)
        if check_amount("warmup", self.warmup) > 1:
            raise ConfigError(f"warmup={self.warmup} is a part of all steps; give a number from 0 to 1.")
        check_choice("decay", self.decay, get_args(Decay))
        if self.clip_grad_norm is not None:
            check_amount("clip_grad_norm", self.clip_grad_norm, positive=True)


def make_default_optimizer(model: nn.Module, settings: TemplateSettings) -> Optimizer:
    """Make AdamW without weight decay on biases and on the parameters of norms, which have one dimension."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.learning_rate)


def learning_rate_factor(step: int, num_steps: int, warmup: float, decay: Decay) -> float:
    """Return what the default scheduler multiplies the learning rate of a step by.

    Args:
        step: From 0.
        num_steps: Of the whole training.
        warmup: Part of it.
        decay: Shape of what follows.
    """
    num_warmup = round(warmup * num_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    return {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}[decay]


class PreTrainer:
    """A training loop whose parts are methods to override; `train` runs it, in a ``train_func`` or alone.

        class MyPreTrainer(raysgd.PreTrainer):
            def train_valid_test_datasets_provider(self):
                return train_dataset, valid_dataset, None

            def model_optimizer_lr_scheduler_provider(self):
                return Model(), None, None

            def run_forward_step(self, batch, model):
                return model(**batch).loss


        MyPreTrainer(engine=raysgd.Engine(zero_stage=2), steps=1000).train()

    It reports ``step``, ``epoch``, ``loss`` and ``learning_rate``, after an evaluation ``eval_loss``, and saves checkpoints. A
    resumed run continues after the step that was saved. With as many workers its losses are those of an uninterrupted run. With
    another number of workers or another ``batch_size`` it trains on up to one batch of each again.

    Args:
        engine: Its strategies are applied.
        **settings: Fields of `TemplateSettings`.

    Attributes:
        engine: The engine.
        settings: The settings.
        model: What the engine made of the model; once `train` was called.

    Raises:
        ConfigError: A setting does not exist or is not allowed, or a method is missing.
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {}
    _REQUIRED: ClassVar[tuple[str, ...]] = (
        "train_valid_test_datasets_provider",
        "model_optimizer_lr_scheduler_provider",
        "run_forward_step",
    )

    def __init__(self, engine: Engine, **settings: Any) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is {with_article(type(engine).__name__)}; give a raysgd.Engine(...).")
        kind = type(self)
        base = next(each for each in kind.__mro__ if each.__module__ == __name__)
        if missing := [name for name in self._REQUIRED if getattr(kind, name) is getattr(base, name)]:
            raise ConfigError(
                f"{kind.__name__} has no method {missing[0]}, which {base.__name__} needs: define it in a subclass."
            )
        self.engine = engine
        self.settings = TemplateSettings(**{**self._DEFAULTS, **settings})
        self.model: Any = None
        self._evaluation: EvaluationLoader | None = None

    # -- what a subclass overrides ------------------------------------------------------------------------------------

    def train_valid_test_datasets_provider(self) -> Any:
        """Return the datasets for training, validation and test, and if needed a ``collate_fn`` as a fourth value.

        The last two datasets may be None. A DataLoader may stand in the place of a dataset, or what
        `raysgd.torch.prepare_data_loader` made of it.
        """
        raise NotImplementedError

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        """Return the model, its optimizer, and a function that makes a scheduler for an optimizer.

        The last two may be None: AdamW, and a linear warm-up with a decay; see `TemplateSettings`.
        """
        raise NotImplementedError

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        """Return the loss of a batch, a mean over its rows; in training and in evaluation."""
        raise NotImplementedError

    # -- what it may call ---------------------------------------------------------------------------------------------

    def gather(self, values: Any) -> Any:
        """Return the values of every row of an evaluation once, in the order of the data, on every rank.

        All ranks call it, within a loop over the evaluation's loader or after it.

        Args:
            values: Of the newest batch, or of all batches of the loop so far: tensors or lists with an entry for each row, or a
                dict or tuple of these.

        Raises:
            UsageError: There is no evaluation, or there are not as many entries as rows.
        """
        if self._evaluation is None:
            raise UsageError("gather() gathers the rows of an evaluation: call it in run_compute_metrics.")
        return self._evaluation.gather(values)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train from the newest checkpoint, or from the start, and return the metrics of the last report.

        Raises:
            ConfigError: A method has returned something that cannot be used; the text names it.
        """
        loaders = self._provide_loaders()
        model, optimizer, make_scheduler = self._provide_model()
        if make_scheduler is None:
            make_scheduler = self._default_scheduler(self._count_steps(loaders[0]))
        self.model, optimizer, scheduler, train, _ = self.engine.compose(
            model=model,
            optimizer=optimizer,
            lr_scheduler_fn=make_scheduler,
            train_dataloader=loaders[0],
        )
        # A user's step may not take a batch without rows: these loaders repeat rows, which are not counted.
        evaluation, test = (
            None if each is None else EvaluationLoader(prepare_data_loader(each)) for each in loaders[1:]
        )
        steps = _Steps(self, optimizer, scheduler, train, evaluation)
        self.model.train()
        run_loop(steps, steps.loop_settings(), api.should_stop)
        metrics = steps.metrics
        if test is not None:
            metrics |= {f"test_{name.removeprefix('eval_')}": value for name, value in self._evaluate(test).items()}
            api.report(metrics)
        return metrics

    def _evaluate(self, loader: EvaluationLoader) -> dict[str, Any]:
        self._evaluation = loader
        self.model.eval()
        try:
            with torch.no_grad():
                return self._compute_metrics(loader)
        finally:
            self._evaluation = None
            self.model.train()

    def _compute_metrics(self, loader: EvaluationLoader) -> dict[str, Any]:
        return {"eval_loss": self._compute_loss(loader)}

    def _compute_loss(self, loader: EvaluationLoader) -> float:
        """Return the mean loss over all rows: those that pad the last batches do not count."""
        total, num_rows = 0.0, 0
        for batch in loader:
            rows = loader.rows
            # A rank without own rows computes the batch too, as sharded models need all ranks.
            loss = self._loss_of(take_rows(batch, rows.own, rows.num) if rows.own else batch)
            total += float(loss) * rows.own_samples
            num_rows += rows.own_samples
        sums: list[tuple[float, int]] = api.gather((total, num_rows))
        return sum(each for each, _ in sums) / max(1, sum(rows for _, rows in sums))

    def _loss_of(self, batch: Any) -> Any:
        loss = self.run_forward_step(batch, self.model)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ConfigError(
                f"{type(self).__name__}.run_forward_step returned {what}; return the loss, a scalar tensor."
            )
        return loss

    def _provide_loaders(self) -> list[Any]:
        name = f"{type(self).__name__}.train_valid_test_datasets_provider"
        provided = self.train_valid_test_datasets_provider()
        if not isinstance(provided, (tuple, list)) or len(provided) not in (3, 4):
            what = "None" if provided is None else f"{with_article(type(provided).__name__)}"
            if isinstance(provided, (tuple, list)):
                what = f"{len(provided)} values"
            raise ConfigError(
                f"{name} returned {what}; return (train, valid, test) or (train, valid, test, collate_fn)."
            )
        if provided[0] is None:
            raise ConfigError(f"{name} returned None as the training data, which has no default.")
        collate = provided[3] if len(provided) == 4 else None
        for kind, data in zip(("training", "validation", "test"), provided[:3], strict=True):
            _check_rows(f"{name} returned {with_article(type(data).__name__)} as the {kind} data", data)
        return [
            None if data is None else self._make_loader(data, collate, shuffles=place == 0)
            for place, data in enumerate(provided[:3])
        ]

    def _make_loader(self, data: Any, collate: Any, *, shuffles: bool) -> DataLoader[Any] | PreparedLoader:
        if isinstance(data, (DataLoader, PreparedLoader)):
            return data
        shuffles = shuffles and not isinstance(data, IterableDataset)
        # Of its own: a loader without one draws from the generator that dropout uses.
        generator = torch.Generator()
        return DataLoader(
            data, batch_size=self.settings.batch_size, shuffle=shuffles, collate_fn=collate, generator=generator
        )

    def _provide_model(self) -> tuple[nn.Module, Any, Any]:
        name = f"{type(self).__name__}.model_optimizer_lr_scheduler_provider"
        provided = self.model_optimizer_lr_scheduler_provider()
        if not isinstance(provided, (tuple, list)) or len(provided) != 3:
            what = "None" if provided is None else with_article(type(provided).__name__)
            raise ConfigError(f"{name} returned {what}; return (model, optimizer, lr_scheduler_fn).")
        model, optimizer, make_scheduler = provided
        if not isinstance(model, nn.Module):
            what = "None" if model is None else with_article(type(model).__name__)
            raise ConfigError(f"{name} returned {what} as the model, which has no default; return a torch module.")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"{name} returned {with_article(type(model).__name__)} without parameters to train: all are frozen; unfreeze "
                "those that shall be trained by parameter.requires_grad_(True)."
            )
        return model, make_default_optimizer(model, self.settings) if optimizer is None else optimizer, make_scheduler

    def _count_steps(self, loader: DataLoader[Any] | PreparedLoader) -> int:
        settings = self.settings
        if settings.steps is not None:
            return settings.steps
        try:
            num_batches = len(loader)
        except TypeError:
            raise ConfigError(
                f"{type(self).__name__}: the training data has no length, so the default scheduler needs the number of steps: "
                "give steps=..., or return a function that makes a scheduler."
            ) from None
        if not isinstance(loader, PreparedLoader):  # it has all rows
            num_batches = math.ceil(num_batches / api.data_parallel_size())
        return settings.epochs * math.ceil(num_batches / self.engine.config.accumulation_steps)

    def _default_scheduler(self, num_steps: int) -> Callable[[Any], Any]:
        settings = self.settings

        def factor(step: int) -> float:
            return learning_rate_factor(step, num_steps, settings.warmup, settings.decay)

        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _check_rows(what: str, data: Any) -> None:
    """Check that data is a dataset or a loader, and has rows if it has a length."""
    dataset: Any = data.dataset if isinstance(data, (DataLoader, PreparedLoader)) else data
    if data is None or isinstance(dataset, IterableDataset):
        return
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{what}; return a dataset with __getitem__ and __len__, an IterableDataset or a DataLoader.")
    if not len(dataset):
        raise ConfigError(f"{what}, and it has no rows; return one with rows, or for validation and test None.")


class Finetuner(PreTrainer):
    """A `PreTrainer` that computes metrics after each epoch, in a method of the subclass, and reports them.

    Its defaults are those for a model that was trained before: 3 epochs, and a learning rate of 5e-5.

    Args:
        engine: Its strategies are applied.
        **settings: Fields of `TemplateSettings`.
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {"epochs": 3, "learning_rate": 5e-5}
    _REQUIRED: ClassVar[tuple[str, ...]] = (*PreTrainer._REQUIRED, "run_compute_metrics")

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        """Return metrics of the model by name, or report nothing with None; `gather` gives the rows of all ranks.

        Args:
            model: In evaluation mode, without gradients.
            eval_dataloader: The validation data on this rank; at the end of the training also the test data.
        """
        raise NotImplementedError

    def _compute_metrics(self, loader: EvaluationLoader) -> dict[str, Any]:
        metrics = self.run_compute_metrics(self.model, loader)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{type(self).__name__}.run_compute_metrics returned {with_article(type(metrics).__name__)}; return a dict of "
                "metrics by name."
            )
        return {f"eval_{name.removeprefix('eval_')}": value for name, value in (metrics or {}).items()}


class _Steps(Stepper):
    """The steps of a template, and what it reports and saves."""

    def __init__(
        self,
        template: PreTrainer,
        optimizer: Any,
        scheduler: Any,
        loader: FollowedLoader,
        evaluation: EvaluationLoader | None,
    ) -> None:
        self._template, self._engine, self._settings = template, template.engine, template.settings
        self._optimizer, self._scheduler = optimizer, scheduler
        self._loader, self._evaluation = loader, evaluation
        self.position = LoopPosition()
        self._num_batches = 0  # of this epoch, on each replica
        self._losses: list[torch.Tensor] = []  # since the last report
        self._rows: list[int] = []
        self.metrics: dict[str, Any] = {}
        self._found: dict[str, Any] = {}  # by an evaluation, since the last report
        self._load()
        self._live = self._engine.own_live_state(None)

    def loop_settings(self) -> LoopSettings:
        settings, evaluates = self._settings, self._evaluation is not None
        return LoopSettings(
            epochs=settings.epochs if settings.steps is None else None,
            steps=settings.steps,
            report_every=settings.log_interval,
            validate_every=settings.eval_interval if evaluates else None,
            validate_every_epochs=1 if evaluates and settings.eval_interval is None else None,
            validates_last=evaluates,
            save_every=settings.save_interval,
            save_every_epochs=1 if settings.save_interval is None else None,
        )

    def train_epoch(self) -> Iterator[None]:
        epoch = self.position.epoch
        self._loader.set_epoch(epoch)
        generator = self._loader.loader.generator
        if generator is not None and not api.in_worker():  # in a worker the loader's order depends on the epoch
            generator.manual_seed(epoch)
        for batch in skip_batches(self._loader, self._num_batches):
            self._num_batches += 1
            if self._train_on(batch):
                yield

    def _train_on(self, batch: Any) -> bool:
        """Train on a batch; returns whether it was the last of its optimizer step."""
        loss = self._template._loss_of(batch)
        self._engine.backward(loss)
        self._losses.append(loss.detach())
        self._rows.append(self._loader.num_rows)
        is_step: bool = self._optimizer.is_complete
        if is_step and self._engine.config.clip_grad_norm is None and self._settings.clip_grad_norm is not None:
            self._engine.clip_grad_norm_(self._settings.clip_grad_norm)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return is_step

    def is_epoch_over(self) -> bool:
        try:
            return self._num_batches == len(self._loader)
        except TypeError:  # a loader without a length
            return False

    def end_epoch(self) -> None:
        self._num_batches = 0

    def validate(self) -> None:
        assert self._evaluation is not None
        # Those of rank 0: they are saved too, and ranks must not save different values.
        self._found = api.gather(self._template._evaluate(self._evaluation))[0]

    def report(self) -> None:
        epochs = self.position.epoch + self.is_epoch_over()
        metrics: dict[str, Any] = {"step": self.position.steps, "epoch": epochs}
        if self._losses:  # on all ranks, or on none
            rows = torch.tensor(self._rows, dtype=torch.float64)
            own = float((torch.stack(self._losses).double().cpu() * rows).sum()), float(rows.sum())
            totals = api.gather(own)
            metrics["loss"] = sum(total for total, _ in totals) / sum(num for _, num in totals)
            self._losses, self._rows = [], []
        elif "loss" in self.metrics:
            metrics["loss"] = self.metrics["loss"]
        metrics["learning_rate"] = self._optimizer.param_groups[0]["lr"]
        self.metrics, self._found = metrics | self._found, {}
        api.report(self.metrics)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _rows_of_batch(self) -> int | None:
        """Rows of a full batch of all ranks; None: they differ, or the dataset makes whole batches."""
        batches: Any = self._loader.loader.batch_sampler
        own: int | None = getattr(batches, "batch_size", None)
        return getattr(batches, "size", None) or (own and own * api.data_parallel_size())

    def save(self) -> None:
        self._engine.save_checkpoint(**self._progress(self.position, self._num_batches, self.metrics))

    def record(self, *, is_same_step: bool) -> None:
        if self._live is not None:
            given = copy(self.position), self._num_batches, self.metrics, self._losses.copy(), self._rows.copy()
            self._live.complete(partial(self._progress, *given), is_same_step=is_same_step)

    def _progress(
        self,
        position: LoopPosition,
        num_batches: int,
        metrics: dict[str, Any],
        losses: Sequence[torch.Tensor] = (),
        rows: Sequence[int] = (),
    ) -> dict[str, Any]:
        progress = {
            "position": asdict(position),
            "batches": num_batches,
            "copies": api.data_parallel_size(),
            "rows_of_batch": self._rows_of_batch,
            "order": describe_order(self._loader),
            "metrics": metrics,
            "losses": [float(loss) for loss in losses],
            "rows": list(rows),
        }
        return {"progress": progress}

    def _load(self) -> None:
        state = self._engine.load_checkpoint()
        if state is None:
            return
        at = state["progress"]
        self.position, self.metrics = LoopPosition(**at["position"]), at["metrics"]
        self._losses, self._rows = [torch.tensor(loss) for loss in at.get("losses", ())], list(at.get("rows", ()))
        if at["batches"]:
            check_order(at["order"], self._loader, self.position.epoch)
            # The order of the data does not depend on the number of workers: rows that were trained on are skipped.
            then, now = at["rows_of_batch"], self._rows_of_batch
            if then is None or now is None:
                then, now = at["copies"], api.data_parallel_size()
            self._num_batches = at["batches"] * then // now
