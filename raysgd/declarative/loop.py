"""`TrainingLoop`: the loop of a declarative training. Worker side; it is the train_func of a run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch

from raysgd._util.logs import get_logger
from raysgd.declarative.args import TrainerArgs
from raysgd.declarative.components import (
    Batches,
    find_loss,
    load_function,
    make_dataset,
    make_hooks,
    make_loader,
    make_model,
    make_optimizer,
    seed_rows,
)
from raysgd.declarative.hooks import Hooks, TrainHook
from raysgd.declarative.reductions import Reductions
from raysgd.declarative.resuming import TrainStatus, as_numbers, check_interval, find_epoch_steps, progress_of
from raysgd.declarative.values import Importer, naming
from raysgd.engine.config import EngineConfig
from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError, ConfigError
from raysgd.session import api, rank_state
from raysgd.session.live.state import LiveState
from raysgd.torch.batches import are_same_batches, count_rows, digest, take_rows
from raysgd.torch.devices import device, to_device
from raysgd.torch.loader import PreparedLoader
from raysgd.torch.rows import check_order, describe_order
from raysgd.train.loop import LoopSettings, Stepper
from raysgd.train.loop import train as run_loop

_logger = get_logger()
#: The parts of a checkpoint that hooks may change before they are restored.
_RESTORED = ("model", "optimizer", "lr_scheduler")
#: What the loop itself saves for each rank: the generators when the epoch began, and the position of the loader.
_OF_THE_LOOP = ("raysgd_epoch_generators", "raysgd_loader")


class TrainingLoop(Stepper):
    """The loop that trains, and what hooks get as ``trainer``.

    Attributes:
        train_args: The `TrainerArgs`.
        engine: The `raysgd.Engine` that applies the strategies.
        model: What the engine made of the model.
        optimizer: What the engine made of the optimizer.
        lr_scheduler: The scheduler, or None.
        dataset, dataloader: Datasets and loaders, by ``"train"``, ``"val"`` and ``"test"``; None where there is no dataset.
        total_train_steps_per_epoch: Optimizer steps of an epoch; None if the loader has no length.
        max_train_steps: Optimizer steps of the training, by ``max_epochs`` and ``max_train_steps``; None if that is not known.
        loggers: Own loggers, on rank 0.
        train_status: How far it has come; also as ``position``.
        rank, local_rank, node_rank: World rank, rank among the workers of the node, and rank of the node.
        world_size, local_world_size: Workers, and those of the node.
        sync_group: The process group of the replicas of the model; None in a world of one.
        state: A dict for hooks.
    """

    position: TrainStatus

    def __init__(
        self, args: TrainerArgs, engine_config: EngineConfig, importer: Importer, *, metric: str | None = None
    ) -> None:
        self._metric = metric  # of a search: results without it are not reported
        self.train_args = args
        self.rank, self.local_rank, self.node_rank = api.world_rank(), api.local_rank(), api.node_rank()
        self.world_size, self.local_world_size = api.world_size(), api.local_world_size()
        self.state: dict[str, Any] = {}
        self.position = TrainStatus()
        self._importer = importer
        self.sync_group: Any = None
        self.model: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.loggers: list[Any] = []
        self.dataset: dict[str, Any] = {}
        self.dataloader: dict[str, Any] = {}
        self.total_train_steps_per_epoch: int | None = None
        self.max_train_steps: int | None = None
        self.engine = Engine(engine_config)
        self._metrics: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}  # by hooks, since the newest report
        self._val_loss: float | None = None  # of the newest validation
        self._epoch_generators: Any = None
        self._resumed: tuple[Any, Any] = (None, None)  # of the loader, and of the generators when the epoch began
        self._first_batches: list[bytes] | None = []  # hashes of them
        self._live: LiveState | None = None
        self._of_ranks: list[dict[str, Any]] = []  # what the live state has of each rank within this epoch

    @property
    def train_status(self) -> TrainStatus:
        return self.position

    # -- entries ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train from the newest checkpoint, or from the start; returns the newest metrics."""
        self._set_up("train", "val")
        try:
            return self._train()
        finally:
            self._hooks.call("on_finalize", self)

    def _train(self) -> dict[str, Any]:
        self._load()
        self._call_at_start("after_setup", self, is_again=self.position.steps > 0)
        settings, at = self._loop_settings(), self.position
        if settings.is_over(at) and not at.is_pending and (at.saved == at.steps or not settings.saves_last):
            return self._results()
        self._live = self.engine.own_live_state(self._live_problem)
        self._call_at_start("on_train_start", self, is_again=self.position.steps > 0)
        self.model.train()
        run_loop(self, settings, api.should_stop)
        self._hooks.call("on_train_end", self)
        for logger in self.loggers:
            _call_if_there(logger, "finalize")
        return self._results()

    def _results(self) -> dict[str, Any]:
        status = self.position
        return {
            **as_numbers(self._metrics),
            "finished_train_steps": status.finished_train_steps,
            "best_loss": status.best_loss,
        }

    def evaluate(self, stage: str) -> dict[str, Any]:
        """Compute the loss of the validation or test data, with the weights of the checkpoint that the run starts from."""
        self._set_up(stage)
        if self._batches.get(stage) is None:
            raise ConfigError(f"there is no dataset for {stage!r}: dataset.{stage}_args is empty.")
        try:
            self._load(continues=False)
            self._hooks.call("after_setup", self)
            loss = self._loss_of(stage)
        finally:
            self._hooks.call("on_finalize", self)
        name = f"{stage}_loss"
        api.report({name: loss})
        return {name: loss}

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _set_up(self, *stages: str) -> None:
        args, importer = self.train_args, self._importer
        if args.init_module is not None:
            importer.check_allowed(args.init_module, f"init_module {args.init_module}")
            importlib.import_module(args.init_module)
        if args.init_env_fn is not None:
            load_function(importer, args.init_env_fn, "init_env_fn")(self)
        if api.world_size() > api.data_parallel_size() and args.seed is not None:
            seed_rows(args.seed + api.data_parallel_rank())
        model = make_model(args, importer)
        optimizer = make_optimizer(args, importer, model)
        make_scheduler = None
        if args.lr_scheduler is not None:
            of = args.lr_scheduler

            def make_scheduler(optimizer: Any) -> Any:
                with naming("lr_scheduler"):
                    return importer.build(str(of.type), of.args, optimizer)

        self.dataset = {stage: make_dataset(args, importer, stage) for stage in stages}
        self.dataloader = {
            stage: None if dataset is None else make_loader(args, importer, stage, dataset)
            for stage, dataset in self.dataset.items()
        }
        self._replicas = api.data_parallel_size()
        self._accumulation = self._count_accumulation()
        self._count_steps()
        self.model, self.optimizer, self.lr_scheduler, *_ = self.engine.compose(
            model=model, optimizer=optimizer, lr_scheduler_fn=make_scheduler
        )
        if self.world_size > 1:
            self.sync_group = self.engine.mesh["dp"].get_group()
        input_type = args.precision_of("input")
        self._batches = {
            stage: None if loader is None else Batches(loader, input_type) for stage, loader in self.dataloader.items()
        }
        self._reductions = Reductions(args.optimizer, str(args.model.type), importer, self.sync_group, self)
        parts = {"model": model, "optimizer": optimizer, "lr_scheduler": self.lr_scheduler}
        owners = {name: each for name, each in parts.items() if isinstance(each, TrainHook)}
        self._hooks = Hooks(owners | make_hooks(args, importer))
        if self.rank == 0:
            self._make_loggers()

    def _count_accumulation(self) -> int:
        """Return the micro-batches of a replica per step; an elastic group keeps the rows of a step."""
        args = self.train_args
        accumulation, left = divmod(args.rows_per_step, args.micro_batch_size * self._replicas)
        if left or not accumulation:
            raise ConfigError(
                f"{args.rows_per_step} rows of an optimizer step are not a multiple of {self._replicas} replicas of the model x "
                f"{args.micro_batch_size} rows of a micro-batch: give a global_batch_size that is."
            )
        return accumulation

    def _count_steps(self) -> None:
        args = self.train_args
        try:
            self.total_train_steps_per_epoch = -(-len(self.dataloader["train"]) // self._accumulation)
        except (KeyError, TypeError):  # an evaluation, or a loader without a length
            by_epochs = None
        else:
            by_epochs = None if args.max_epochs is None else args.max_epochs * self.total_train_steps_per_epoch
        self.max_train_steps = args.max_train_steps if args.max_epochs is None else by_epochs
        if by_epochs is not None and args.max_train_steps is not None:
            self.max_train_steps = min(by_epochs, args.max_train_steps)

    def _make_loggers(self) -> None:
        from raysgd.declarative.loggers import make_own_loggers

        self.loggers = make_own_loggers(self.train_args, self._importer)

    # -- training -----------------------------------------------------------------------------------------------------

    def _loop_settings(self) -> LoopSettings:
        args, saving = self.train_args, self.train_args.checkpoint
        validates = self._batches.get("val") is not None
        is_followed = self._follows_loss and args.lr_scheduler is not None and args.lr_scheduler.interval == "epoch"
        return LoopSettings(
            epochs=args.max_epochs,
            steps=args.max_train_steps,
            validate_every=args.val_every_n_train_steps if validates else None,
            validate_every_epochs=(1 if is_followed else args.val_every_n_epochs) if validates else None,
            validates_before_saving=validates and not saving.no_save,
            save_every=saving.every_n_train_steps,
            save_every_epochs=saving.epochs_between,
            saves_last=saving.save_last,
        )

    def train_epoch(self) -> Iterator[None]:
        status = self.position
        epoch, batches = status.epoch, self._training_data()
        state, generators = self._resumed
        self._resumed = (None, None)
        self._call_at_start("on_epoch_start", self, epoch, is_again=status.epoch_steps > 0)
        self._epoch_generators = generators if status.epoch_steps else rank_state.capture_generators()
        if self._live is not None:
            is_needed = not batches.has_plain_order
            self._of_ranks = api.gather({"raysgd_epoch_generators": self._epoch_generators}) if is_needed else []
        iterator = batches.start_epoch(epoch, status.epoch_steps * self._accumulation, state, generators)
        for group in self._groups(iterator):
            self._train_step(group)
            yield

    def _call_at_start(self, name: str, *args: Any, is_again: bool) -> None:
        """Call a hook that the resumed training has called before: what it draws is in the generators already."""
        now = rank_state.capture_generators()
        self._hooks.call(name, *args)
        if is_again:
            rank_state.restore_generators(now)

    def is_epoch_over(self) -> bool:
        try:
            left = len(self._training_data().loader) - self.position.epoch_steps * self._accumulation
            return -self._accumulation < left <= 0
        except TypeError:  # a loader without a length
            return False

    def _training_data(self) -> Batches:
        batches = self._batches["train"]
        assert batches is not None
        return batches

    def _groups(self, iterator: Iterator[Any]) -> Iterator[list[tuple[Any, int]]]:
        """Yield the micro-batches of each step with their rows that count; the last step of an epoch may have fewer."""
        while True:
            group = self._take(iterator, "train", keeps_repeated=not (self._is_weighted or self._counts_tokens))
            self._check_group(group)
            if not group:
                return
            yield group

    def _take(self, iterator: Iterator[Any], stage: str, *, keeps_repeated: bool) -> list[tuple[Any, int]]:
        batches = islice(iterator, self._accumulation)
        return [self._counted(batch, stage, keeps_repeated=keeps_repeated) for batch in batches]

    def _counted(self, batch: Any, stage: str, *, keeps_repeated: bool) -> tuple[Any, int]:
        """Return the batch that a loader handed out now, and the rows of the data that count in it.

        A rank whose rows are all repeated keeps them, as sharded models need all ranks; they count as none.
        """
        loader = self.dataloader[stage]
        if not isinstance(loader, PreparedLoader):
            return to_device(batch, device()), count_rows(batch)
        rows = loader.rows
        if keeps_repeated:
            return batch, rows.samples
        return take_rows(batch, rows.own, rows.num) if rows.own else batch, rows.own_samples

    def _check_group(self, group: list[tuple[Any, int]]) -> None:
        """Check that all ranks have as many micro-batches, and not the same ones, where the loader does not guarantee it.

        The first two batches are compared. If they are equal, all rows may be, and equal ones on the ranks mean nothing.

        Raises:
            ConfigError: The numbers differ, or all replicas of the model read the same rows.
        """
        if self.world_size == 1 or self._training_data().is_even:
            return
        if self._first_batches is not None:
            self._first_batches += [digest(batch) for batch, _ in group[: 2 - len(self._first_batches)]]
        gathered = api.gather((len(group), self._first_batches))
        of_ranks, firsts = [number for number, _ in gathered], [first for _, first in gathered]
        if self._first_batches is not None and len(self._first_batches) == 2:
            self._first_batches = None
            if self._replicas > 1 and are_same_batches(firsts):
                data = self.train_args.dataset.type
                raise ConfigError(
                    f"all {self._replicas} replicas of the model read the same batches: dataloader.type "
                    f"{self.train_args.dataloader.type} does not use the sampler that it gets, or {data} is an IterableDataset "
                    "that yields all rows on all ranks. Give the sampler to the loader, or yield the rows of "
                    "raysgd.data_parallel_rank() of raysgd.data_parallel_size()."
                )
        if len(set(of_ranks)) > 1:
            raise ConfigError(
                f"ranks 0 to {self.world_size - 1} have {of_ranks} micro-batches for step {self.position.epoch_steps} of "
                f"epoch {self.position.epoch}, and all need as many: let each replica of the model read equally many rows, "
                "as torch.utils.data.DistributedSampler does."
            )

    @property
    def _is_weighted(self) -> bool:
        return self.engine.config.weighted_gradients

    @property
    def _counts_tokens(self) -> bool:
        return self.train_args.optimizer.counts_tokens

    def _train_step(self, group: list[tuple[Any, int]]) -> None:
        hooks, engine = self._hooks, self.engine
        began, idx = time.perf_counter(), self.position.epoch_steps
        batches = [batch for batch, _ in group]
        hooks.call("on_step_start", self, self.position.epoch, idx)
        hooks.call("before_zero_grad", self)
        self.optimizer.zero_grad()
        hooks.call("after_zero_grad", self)
        hooks.call("on_train_step_start", self, batches, idx)
        outputs, losses = self._forward_and_backward(group)
        hooks.call("on_train_step_end", self, outputs, batches, idx)
        aggregated, loss, num_rows = self._reductions.aggregate(
            outputs, losses, [rows for _, rows in group], self.train_args.optimizer.loss_reduction
        )
        hooks.call("after_aggregate_train_step_outputs", self, aggregated, loss, idx)
        engine.scale_gradients(self._reductions.gradient_factor(aggregated))
        hooks.call("before_gnorm_clip", self)
        limit = self.train_args.optimizer.clip_gnorm or float("inf")
        norm = engine.clip_grad_norm_(limit)
        norm = torch.tensor(float("inf")) if norm is None else norm
        hooks.call("after_gnorm_clip", self, norm)
        hooks.call("before_optimizer_step", self)
        applied = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.optimizer.step()
        hooks.call("after_optimizer_step", self)
        self._metrics = {
            "step": self.position.steps + 1,
            "epoch": self.position.epoch,
            "train_loss": loss,
            "lr": applied[0],
            **{f"lr_{place}": lr for place, lr in enumerate(applied[1:], start=1)},
            "gnorm": norm,
            "rows": int(num_rows),
            "train_wall": time.perf_counter() - began,
        }
        self._aggregated = aggregated

    def after_step(self) -> None:
        hooks, at = self._hooks, self.position
        if not hooks.has("before_log_train_metrics", "on_step_end"):
            self._log(self._metrics, "train")
            return
        shown = {**as_numbers(self._metrics), "loss": self._metrics["train_loss"]}
        hooks.call("before_log_train_metrics", self, shown, self._aggregated)
        self._metrics = {name: value for name, value in shown.items() if name != "loss"}
        self._log(self._metrics, "train")
        hooks.call("on_step_end", self, at.epoch, at.epoch_steps - 1, shown, self._aggregated)

    def _forward_and_backward(self, group: list[tuple[Any, int]]) -> tuple[list[Any], list[torch.Tensor]]:
        outputs, losses = [], []
        self.engine.begin_step(len(group))
        for place, (batch, rows) in enumerate(group):
            if place == len(group) - 1:
                self._hooks.call("before_sync_grad", self)
            self.engine.begin_batch(rows)
            output = self._forward(batch)
            loss = find_loss(output, str(self.train_args.model.type))
            if self._counts_tokens and not rows:  # all are repeated
                loss = loss * 0
            self.engine.backward(loss)
            outputs.append(output)
            losses.append(loss.detach())
        self._hooks.call("after_sync_grad", self)
        return outputs, losses

    @property
    def _is_pipeline(self) -> bool:
        return self.engine.config.pipeline_parallel > 1

    def _forward(self, batch: Any) -> Any:
        if self._is_pipeline:  # stages take the batch by names
            if not isinstance(batch, dict):
                raise ConfigError(
                    "with pipeline parallelism a batch has to be a dict of tensors by the names of forward's arguments."
                )
            return self.model(**batch)
        return self.model(batch)

    def _step_scheduler(self, interval: str) -> None:
        """Make a step of the scheduler, if it counts these. It may follow the validation's loss, or without one this step's."""
        settings = self.train_args.lr_scheduler
        if settings is None or settings.interval != interval:
            return
        if not self._follows_loss:
            self.lr_scheduler.step()
        elif self._batches.get("val") is None:
            self.lr_scheduler.step(self._metrics["train_loss"])
        elif self._val_loss is not None:  # never losses of both kinds, which cannot be compared
            self.lr_scheduler.step(self._val_loss)

    @property
    def _follows_loss(self) -> bool:
        return isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def end_step(self) -> None:
        self._step_scheduler("step")

    def end_epoch(self) -> None:
        self._step_scheduler("epoch")
        self._epoch_generators = None

    def after_epoch(self, epoch: int) -> None:
        self._hooks.call("on_epoch_end", self, epoch)

    def report(self) -> None:
        if self._metric is None or self._metric in self._metrics:
            api.report({**self._metrics, **self._logged})
        self._logged = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, *, tag: str | None = None) -> None:
        """Log metrics of a hook: by own loggers at once, and with the next report, as ``tag/name``, by all others.

        Args:
            metrics: Numbers by their names.
            step: The step that own loggers get; None: ``train_status.finished_train_steps``.
            tag: Such as ``"train"``; None: the names in the report are those of `metrics`.
        """
        self._logged |= {name if tag is None else f"{tag}/{name}": value for name, value in metrics.items()}
        self._log(metrics, tag, step)

    # -- validation ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        began = time.perf_counter()
        self._val_loss = self._loss_of("val")
        found = {"val_loss": self._val_loss, "val_wall": time.perf_counter() - began}
        self._hooks.call("before_log_val_metrics", self, found)
        self._metrics = {**self._metrics, **found}
        self._log(found, "val")

    def _loss_of(self, stage: str) -> float:
        """Return the mean loss over all rows of the data, without those that are repeated."""
        hooks, batches = self._hooks, self._batches[stage]
        assert batches is not None
        hooks.call("on_val_start", self)
        total = [0.0, 0.0]
        self.model.eval()
        try:
            with torch.no_grad():
                iterator = batches.start_epoch(0, 0)
                groups = iter(lambda: self._take(iterator, stage, keeps_repeated=False), [])
                for idx, group in enumerate(islice(groups, self.train_args.max_val_steps)):
                    total = self._validation_step(group, idx, total)
        finally:
            self.model.train()
        sums = self._reductions.add(total)
        loss = sums[0] / max(1.0, sums[1])
        hooks.call("on_val_end", self, loss)
        return loss

    def _validation_step(self, group: list[tuple[Any, int]], idx: int, total: list[float]) -> list[float]:
        hooks, batches, rows = self._hooks, [batch for batch, _ in group], [number for _, number in group]
        hooks.call("on_val_step_start", self, batches, idx)
        outputs = [self._forward(batch) for batch in batches]
        losses = [find_loss(output, str(self.train_args.model.type)) for output in outputs]
        hooks.call("on_val_step_end", self, outputs, batches, idx)
        is_of_tokens = self.train_args.optimizer.loss_reduction == "per-token-mean"
        counted = self._reductions.count(outputs, losses, rows)
        if hooks.has("after_aggregate_val_step_outputs") or (is_of_tokens and not self._counts_tokens):
            reduction = "per-token-mean" if is_of_tokens else "row-mean"
            aggregated, loss, _ = self._reductions.aggregate(outputs, losses, rows, reduction)
            if is_of_tokens and not self._counts_tokens:  # of all replicas: their sums are equal
                counted = [loss * (tokens := self._reductions.tokens_in(aggregated)), float(tokens)]
            hooks.call("after_aggregate_val_step_outputs", self, aggregated, loss, idx)
        return [total[0] + counted[0], total[1] + counted[1]]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        status, settings = self.position, self.train_args.checkpoint
        if settings.no_save:
            return
        loss = self._metrics.get("val_loss", self._metrics.get("train_loss", float("inf")))
        status.best_loss = min(status.best_loss, loss)
        own = self._ask_what_to_save()
        batches = self._training_data()
        if status.epoch_steps:
            if not batches.has_plain_order:
                own["raysgd_epoch_generators"] = self._epoch_generators
            if batches.is_stateful:
                own["raysgd_loader"] = batches.state_dict()
        of_ranks = api.gather((own, as_numbers(self._metrics)))
        newest = of_ranks[0][1]  # times differ by rank, and any number of ranks can load only what is equal on all
        of_loop = status, newest, self._val_loss, [own for own, _ in of_ranks]
        more = progress_of(self.train_args, describe_order(batches.loader), *of_loop)
        metrics = {
            **newest,
            "loss": loss,
            "best_loss": status.best_loss,
            "epochs": status.epoch,
            "step": status.steps,
        }
        self.engine.save_checkpoint(metrics=metrics, merged=settings.save_type == "merged", **more)

    @property
    def _live_problem(self) -> str | None:
        """Why training cannot continue without a save, or None."""
        if self._hooks.has("on_save_checkpoint"):
            return "a hook adds values to each checkpoint, by on_save_checkpoint"
        return "the loader's own position is known in checkpoints only" if self._training_data().is_stateful else None

    def record(self, *, is_same_step: bool) -> None:
        if self._live is not None:
            of_ranks = self._of_ranks if self.position.epoch_steps else []
            given = copy(self.position), self._metrics, self._val_loss, of_ranks or [{}] * self.world_size
            values = partial(progress_of, self.train_args, describe_order(self._training_data().loader), *given)
            self._live.complete(values, is_same_step=is_same_step)

    def _ask_what_to_save(self) -> dict[str, Any]:
        """Return what hooks add to the state that is saved.

        Raises:
            ConfigError: A hook has replaced or removed a part of the state.
        """
        if not self._hooks.has("on_save_checkpoint"):
            return {}
        state = {**self.engine.state_dict(), "train_status": asdict(self.position), "rank": self.rank}
        own = dict(state)
        self._hooks.call("on_save_checkpoint", self, own)
        if changed := [name for name, value in state.items() if own.get(name) is not value]:
            raise ConfigError(
                f"on_save_checkpoint has replaced or removed {changed[0]!r} of the checkpoint, which is saved as it is: add "
                "values under names of yours."
            )
        return {name: value for name, value in own.items() if name not in state}

    def _load(self, *, continues: bool = True) -> None:
        loaded: dict[str, Any] = {}

        def before_restore(saved: Any) -> None:
            if not isinstance(saved, dict) or "train_status" not in saved:
                raise CheckpointError("the checkpoint was not saved by a declarative training: it has no train_status.")
            of_ranks = saved["of_ranks"]
            own = dict(of_ranks[self.rank] if len(of_ranks) == self.world_size else of_ranks[0])
            loaded.update({name: saved[name] for name in (*_RESTORED, "train_status") if name in saved}, **own)
            for name in _OF_THE_LOOP:
                loaded.pop(name, None)
            self._hooks.call("on_load_checkpoint", self, loaded)
            saved.update({name: loaded[name] for name in _RESTORED if name in loaded})

        saved = self.engine.load_checkpoint(before_restore)
        if saved is None:
            return
        status = TrainStatus(**saved["train_status"])
        if continues:
            check_interval(self.train_args, saved["lr_scheduler_interval"])
            if status.epoch_steps:
                check_order(saved["order"], self._training_data().loader, status.epoch)
            status.epoch_steps = find_epoch_steps(self.train_args, status, saved["batches"])
        self.position = status
        self._metrics = dict(saved["newest_metrics"])
        self._val_loss = saved.get("val_loss", self._metrics.get("val_loss"))  # a scheduler may follow it
        of_ranks = saved["of_ranks"]
        is_same_size = len(of_ranks) == self.world_size
        own = of_ranks[self.rank] if is_same_size else of_ranks[0]
        generators, state = (own.get(name) for name in _OF_THE_LOOP)
        # A loader's own position counts batches of that size; where it is another, the batches before are read again.
        is_same_batch = saved["batches"]["rows_per_batch"] == self.train_args.micro_batch_size
        self._resumed = (state if is_same_batch else None, generators) if is_same_size else (None, None)
        self._epoch_generators = generators
        self._hooks.call("after_load_checkpoint", self, loaded)

    def _log(self, metrics: Mapping[str, Any], tag: str | None, step: int | None = None) -> None:
        for logger in self.loggers:
            numbers = {name: value for name, value in as_numbers(metrics).items() if name not in ("step", "epoch")}
            logger.log_metrics(numbers, self.position.steps if step is None else step, tag=tag)


def _call_if_there(owner: Any, name: str) -> None:
    if callable(method := getattr(owner, name, None)):
        method()
