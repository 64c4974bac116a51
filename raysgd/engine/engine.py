"""`Engine`: applies strategies to a model, its optimizer, scheduler and loaders, and makes the steps. Worker side."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from raysgd._util.text import with_article
from raysgd.config.checks import check_count
from raysgd.engine.accumulation import Accumulation
from raysgd.engine.attached import AttachedForward, AttachedHook
from raysgd.engine.composing import Composition, check_parts, place_loaded
from raysgd.engine.config import EngineConfig, current_engine_config, merge_configs
from raysgd.engine.evaluation import gather_for_metrics
from raysgd.engine.memory import KeptActivations, MemoryUse, measure
from raysgd.engine.optimizer import EngineOptimizer, follow_steps
from raysgd.engine.precision import LossScale
from raysgd.engine.rows import FollowedLoader, count_rows
from raysgd.engine.saving import collect, complete, spread
from raysgd.engine.step import StepGradients
from raysgd.errors import CheckpointError, ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.loader import PreparedLoader, prepare_data_loader
from raysgd.torch.meshes import mesh as make_mesh
from raysgd.torch.model import unwrap
from raysgd.torch.restoring import restore

if TYPE_CHECKING:
    from raysgd.engine.planning.plan import Plan

#: Strategies that do not act in the optimizer's step.
_WITHOUT_OPTIMIZER = {
    "precision": ("bf16",),
    "zero_stage": (3,),
    "cpu_offload": (True,),
    "activation_checkpointing": ("full", "selective"),
    "compile": ("model", "blocks"),
    "find_unused_parameters": (True,),
}


#: The engines of this process, of which several may read the batches of one loader, as those of a GAN do.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _readers(dataset: Any) -> list[Engine]:
    return [engine for engine in _engines if engine.reads(dataset)]


class Engine:
    """Applies strategies for speed and large models to a training loop.

        engine = raysgd.Engine(precision="bf16", zero_stage=3)
        model, optimizer, lr_scheduler, train_loader, eval_loader = engine.compose(
            model=model, optimizer=optimizer, lr_scheduler_fn=schedule, train_dataloader=loader
        )
        for batch in train_loader:
            loss = model(**batch).loss
            engine.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    Without strategies the losses are those of the loop without the engine. It works in a ``train_func``, and alone as a world
    of one.

    Strategies of the command line, as in ``raysgd run --engine.precision bf16 script.py``, override those that are given here.

    With ``plan="auto"``, `compose` chooses the strategies that are not given: the fastest that fit into the memory of the
    devices. The loop computes the same, and the Trainer's ``workers_per_replica`` says how many workers hold one copy of the
    model between them.

    Args:
        config: All strategies at once, in place of ``strategies``.
        **strategies: Fields of `raysgd.engine.EngineConfig`. With ``plan="auto"`` they are not varied.

    Attributes:
        config: The strategies; with ``plan="auto"``, those that were chosen when `compose` has returned.
        plan: What ``plan="auto"`` chose, a `raysgd.engine.Plan`; None before `compose`, and without it.

    Raises:
        ConfigError: A strategy does not exist, or needs other workers than the Trainer has.
    """

    def __init__(self, config: EngineConfig | None = None, **strategies: Any) -> None:
        if config is not None and strategies:
            raise ConfigError("Engine(config, ...) has a config and strategies too; give one of the two.")
        override = current_engine_config()
        config = EngineConfig(**strategies) if config is None else config
        self.config = merge_configs(config, override)
        # With plan="auto", a choice by hand stays also if it is the default.
        self._given = frozenset(strategies) | set(config.named()) | set({} if override is None else override.named())
        self.plan: Plan | None = None
        self._check_workers()
        self._accumulation = Accumulation(self.config.accumulation_steps)
        self._scale = LossScale(self.config.precision == "fp16", self.config.loss_scale)
        self._mesh: DeviceMesh | None = None
        self._model: nn.Module | None = None
        self._optimizer: EngineOptimizer | None = None
        self._scheduler: Any = None
        self._made = Composition(self.config, lambda: self.mesh)
        self._step: StepGradients  # once it is composed
        self._rows: int | None = None  # of the newest batch, without repeated ones, if the engine knows it
        self._pipeline_weight = 1.0  # of the newest batch that the pipeline has computed
        self._dataset: Any = None  # of the training loader
        self._kept_activations: int | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all workers, with the axes ``"dp"``, ``"pp"`` and ``"tp"``."""
        if self._mesh is None:
            config = self.config
            self._mesh = make_mesh(tensor_parallel=config.tensor_parallel, pipeline_parallel=config.pipeline_parallel)
        return self._mesh

    @property
    def loss_scale(self) -> float:
        """The factor of fp16 losses now, equal on all ranks; 1 in other precisions."""
        return self._scale.scale

    # -- composing ----------------------------------------------------------------------------------------------------

    def compose(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler_fn: Callable[[Any], Any] | None = None,
        train_dataloader: DataLoader[Any] | None = None,
        eval_dataloader: DataLoader[Any] | None = None,
        tensor_plan: Any = None,
        sample_batch: Any = None,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Prepare everything that a training loop uses. All ranks call it.

        Args:
            model: Is changed in place; its parameters may be replaced by others.
            optimizer: Made of the model's parameters. It is moved to the new ones with its groups and its state.
            lr_scheduler_fn: Called with the optimizer that is returned; returns its scheduler.
            train_dataloader: Each copy of the model reads its shard; see `raysgd.torch.prepare_data_loader`. With
                ``weighted_gradients=True`` the rows that it repeats at the end of an epoch are left out.
            eval_dataloader: Each row is read on one copy of the model, and once; see ``train=False`` there.
            tensor_plan: A plan for ``tensor_parallel``: torch's styles by module path, or a function that is called with the
                model and the mesh's axis ``"tp"``. None: it is made from the model's structure.
            sample_batch: Used by ``plan="auto"``: a batch of the loop, or shapes as `raysgd.engine.plan` takes them. Give the
                largest if batches differ. None: the first rows of ``train_dataloader``'s dataset, which are read for it.
            loss_fn: Used by ``plan="auto"``: computes the loss of a model and a batch. None: the model is called with what
                its ``forward`` takes of the batch.

        Returns:
            model, optimizer, lr_scheduler, train_dataloader, eval_dataloader; None for what was not given.

        Raises:
            ConfigError: Something cannot be used with the strategies, or with ``plan="auto"`` no strategies fit; the text says
                what and why.
            UsageError: It is called a second time.
        """
        if self._model is not None:
            raise UsageError("engine.compose was called before; make an Engine for each model.")
        check_parts(model, optimizer, lr_scheduler_fn)
        if self.config.plan is not None:
            self._choose(
                model=model,
                optimizer=optimizer,
                loader=train_dataloader,
                sample_batch=sample_batch,
                loss_fn=loss_fn,
                tensor_plan=tensor_plan,
            )
        self._made.apply(model, optimizer, tensor_plan)
        self._model = self._made.model
        unwrap(self._model).register_load_state_dict_pre_hook(AttachedHook(place_loaded))  # type: ignore[no-untyped-call]
        unwrap(self._model).register_load_state_dict_post_hook(AttachedHook(self._on_load))  # type: ignore[no-untyped-call]
        if self._made.pipeline is None:
            self._model.register_forward_pre_hook(AttachedHook(lambda module, _: self._step.begin_forward(module)))
        else:
            self._model = self._made.pipeline
            self._made.pipeline.scale = self._scale_of
        self._step = StepGradients(
            self.config, self._made, self._model, optimizer, lambda: self.mesh, self._accumulation, self._scale
        )
        if optimizer is not None:
            self._optimizer = EngineOptimizer(optimizer, self)
            self._model.zero_grad = AttachedForward(  # type: ignore[method-assign]
                self._model.zero_grad, self._optimizer.zero_grad
            )
            if lr_scheduler_fn is not None:
                self._scheduler = self._make_scheduler(lr_scheduler_fn, self._optimizer)
        train = None
        if train_dataloader is not None:
            prepared = prepare_data_loader(train_dataloader)
            train = self._follow(prepared)
        _engines.add(self)
        evaluate = None if eval_dataloader is None else prepare_data_loader(eval_dataloader, train=False)
        return self._model, self._optimizer, self._scheduler, train, evaluate

    def _follow(self, prepared: PreparedLoader) -> FollowedLoader:
        self._dataset = dataset = prepared.loader.dataset

        def on_batch(num_rows: int, is_last: bool) -> None:
            for engine in _readers(dataset):
                engine.on_batch(num_rows, is_last)

        def on_end() -> None:
            for engine in _readers(dataset):
                engine.on_end()

        return FollowedLoader(prepared, on_batch, on_end=on_end, keeps_repeated=not self.config.weighted_gradients)

    def _choose(self, **composed: Any) -> None:
        """Choose the strategies that were not given."""
        from raysgd.engine.planning.automatic import Composed, choose_plan  # imports much that no other engine needs

        self.plan = choose_plan(self.config, self._given, Composed(**composed))
        self.config = self.plan.config
        self._made = Composition(self.config, lambda: self.mesh)

    def _make_scheduler(self, make: Callable[[Any], Any], optimizer: EngineOptimizer) -> Any:
        scheduler = make(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                f"lr_scheduler_fn made {with_article(type(scheduler).__name__)} for another optimizer; make it for the one that "
                "it is called with."
            )
        return follow_steps(scheduler, self)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, num_batches: int) -> None:
        """Set how many batches the next step has, in place of ``accumulation_steps``; for loops that read batches ahead."""
        self._accumulation.steps = check_count("begin_step(num_batches)", num_batches, minimum=1)

    def begin_batch(self, num_rows: int) -> None:
        """Set how many rows of the next batch count, which weigh its gradients; for loops with loaders of their own."""
        self._rows = num_rows
        self._accumulation.on_batch()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of a complete step, which are those of its mean loss; call it before they are clipped."""
        if self._accumulation.is_complete and factor != 1:
            self._step.scale(factor)

    def backward(self, loss: torch.Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """Make a backward pass of a batch, in place of ``loss.backward()``. Gradients of several passes add up, as in torch.

        After the last batch of a step, the gradients of the parameters are those of the step's mean loss over all ranks, in
        every precision. They are the loop's until ``optimizer.step()``: it may read, clip, scale or drop them. Before that,
        parameters have no gradients.

        Args:
            loss: The mean over the batch on this rank; a scalar.
            weight: With ``weighted_gradients=True``, over how many rows or tokens the mean is. None: the rows of the batch
                that the engine's loader has handed out last. A batch that only repeats rows has the weight 0 in any case.
            retain_graph: As in ``torch.Tensor.backward``: whether another loss of the same graph follows.

        Raises:
            UsageError: The weight of the batch is not known, or cannot be used; with ``pipeline_parallel``, the loss is another
                one than the model returned; the strategies need an optimizer, and `compose` got none; a parameter has no
                gradient, or has hooks, and the strategies do not allow that.
        """
        self._check_backward(weight)
        weight = self._weight_of(weight)
        if self._made.pipeline is None:
            self._step.search_scale(loss, weight)
            self._step.begin_pass()
            factor = self._step.factor(weight)
            (loss if factor == 1 else loss * factor).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        elif loss.requires_grad:
            raise UsageError(
                "with pipeline_parallel the backward passes are made when the model is called; give engine.backward the loss "
                "that the model returned, unchanged."
            )
        self._step.end_pass(weight)

    def _weight_of(self, weight: float | None) -> float:
        if not self.config.weighted_gradients:
            return 1.0
        if self._made.pipeline is not None:
            return self._pipeline_weight
        rows = self._rows if weight is None or self._rows == 0 else weight
        assert rows is not None
        return float(rows)

    def _check_backward(self, weight: float | None) -> None:
        if self._optimizer is None:
            given = self.config.given().items()
            if names := [name for name, value in given if value not in _WITHOUT_OPTIMIZER.get(name, ())]:
                raise UsageError(
                    f"{', '.join(names)} act in the optimizer's step, and engine.compose got no optimizer: give "
                    "compose(optimizer=...)."
                )
        if not self.config.weighted_gradients:
            if weight is not None:
                raise UsageError("engine.backward(weight=...) needs Engine(weighted_gradients=True).")
        elif self._made.pipeline is not None:
            if weight is not None:
                raise UsageError(
                    "with pipeline_parallel the backward passes are made when the model is called, before the weight is known: "
                    "leave out engine.backward(weight=...); batches are weighted by their rows."
                )
        elif weight is None and self._rows is None:
            raise UsageError(
                "weighted_gradients=True: the engine has handed out no batch, so it does not know its rows: call "
                "engine.backward(loss, weight=number), or give the loader to compose(train_dataloader=...)."
            )

    def _scale_of(self, batch: Any) -> float:
        """Return what a pipeline multiplies the gradients of a batch by."""
        if self.config.weighted_gradients:
            self._pipeline_weight = float(0 if self._rows == 0 else count_rows(batch))
        self._step.begin_pass()
        return self._step.factor(self._pipeline_weight)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of a complete step by their global norm, over all shards; call it before ``optimizer.step()``.

        Returns:
            The norm before clipping; None if the step is not complete, or is skipped because gradients overflowed.
        """
        return self._step.clip(max_norm) if self._accumulation.is_complete else None

    def gather_for_metrics(self, values: Any) -> Any:
        """Return the entries of all ranks for the newest batch, in the order of the data, on every rank. All ranks call it.

            for x, y in eval_loader:
                predicted, expected = engine.gather_for_metrics((model(x).argmax(1), y))

        Rows that a loader repeats, as loaders for training do at the end of an epoch, are dropped.

        Args:
            values: Tensors or lists with an entry for each row of the batch that a prepared loader has handed out last, or a
                dict, tuple or list of such tensors.

        Raises:
            UsageError: No prepared loader has handed out a batch, or it is not known which rows it repeats.
        """
        return gather_for_metrics(values)

    # -- what the optimizer and the scheduler call ------------------------------------------------------------------------

    def finish_gradients(self) -> bool:
        """Take the gradients of a complete step from the loop, and clip them; returns whether they are finite."""
        self._check_clear()
        return self._step.take()

    def is_finite(self) -> bool:
        return self._step.is_finite

    def is_complete(self) -> bool:
        return self._accumulation.is_complete

    def is_open(self) -> bool:
        return self._accumulation.is_open

    def check_gradients(self) -> None:
        """Check that there are no gradients of which the engine knows nothing, and end the batch of an unfinished step."""
        if self._step.has_others():
            raise UsageError(
                "optimizer.step() was called with gradients that did not come from the engine: call engine.backward(loss) in "
                "place of loss.backward(), and optimizer.zero_grad() after each step."
            )
        self._check_clear()
        self._accumulation.end_batch()

    def _check_clear(self) -> None:
        """Check that it is known where batches begin, if it matters."""
        is_fixed = self._accumulation.is_complete and not self.config.weighted_gradients
        if self._accumulation.is_unclear and not is_fixed:
            raise UsageError(
                "engine.backward was called several times before optimizer.step(), and the engine does not know whether that was "
                "for one batch with several losses, or for several batches: call optimizer.step() after each batch, or add the "
                "losses of a batch up and call engine.backward once, or give the loader to compose(train_dataloader=...)."
            )

    def discard(self) -> None:
        """Forget a complete step, whose gradients are dropped."""
        self._accumulation.discard()
        self._step.weight = 0.0

    def on_step(self, *, skipped: bool) -> None:
        self._scale.update(overflowed=skipped)
        self._accumulation.on_step(skipped=skipped)
        self._step.on_step()

    def drop_gradients(self) -> None:
        assert self._optimizer is not None
        self._optimizer.inner.zero_grad()
        if self._made.pieces is not None:
            self._made.pieces.drop_gradients()

    def may_schedule(self) -> bool:
        return self._accumulation.may_schedule()

    def on_schedule(self) -> None:
        self._accumulation.on_schedule()

    def update_parameters(self) -> None:
        if self._made.pieces is not None:
            with torch.no_grad():
                self._made.pieces.update_parameters()

    def on_batch(self, num_rows: int, is_last: bool) -> None:
        """The training loader hands out a batch, of which so many rows count on this rank."""
        self._accumulation.on_batch(is_last=is_last)
        self._rows = num_rows

    def on_end(self) -> None:
        """The training loader has handed out all batches of an epoch, or was left."""
        self._accumulation.on_end()

    def reads(self, dataset: Any) -> bool:
        """Return whether batches of a dataset are this engine's: it has a loader of it, or has none at all."""
        return self._dataset is None or self._dataset is dataset

    @property
    def num_rows(self) -> int:
        """Rows of the training loader's newest batch that count on this rank."""
        return 1 if self._rows is None else self._rows

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, *, metrics: Mapping[str, Any] | None = None, merged: bool = False, **more: Any) -> None:
        """Save model, optimizer, scheduler and the engine's own state, and ``more`` values; see `raysgd.save_checkpoint`.

        Every rank calls it. Each saves the pieces that it holds, and any number of ranks with any strategies can load them.

        Args:
            metrics: What retention ranks the checkpoint by, as for `raysgd.save_checkpoint`.
            merged: Whether rank 0 collects whole tensors in host memory and saves them in one part.
            **more: Values that `load_checkpoint` returns; equal on all ranks.
        """
        model = self._composed()
        if taken := sorted({"model", "optimizer", "lr_scheduler", "engine"} & set(more)):
            raise UsageError(
                f"engine.save_checkpoint({taken[0]}=...): the engine saves its own {taken[0]}; use another name."
            )
        state: dict[str, Any] = {
            "model": unwrap(model).state_dict(),
            "engine": {"loss_scale": self._scale.state_dict(), "tied": self._made.tied},
        }
        if self._optimizer is not None and self._made.numbers is not None:
            state["optimizer"] = self._made.numbers.state_of(self._optimizer.inner)
            state["engine"]["masters"] = self._masters()
        if self._scheduler is not None:
            state["lr_scheduler"] = self._scheduler.state_dict()
        if api.world_size() > 1 and (self.config.zero_stage > 0 or self.config.workers_per_replica > 1):
            state = {key: complete(spread(dict(value), self.mesh), self.mesh) for key, value in state.items()}
            if not merged:
                api.save_checkpoint({**state, **more}, all_ranks=True, metrics=metrics)
                return
            state = collect(state, is_kept=api.world_rank() == 0)
        api.save_checkpoint({**state, **more} if api.world_rank() == 0 else None, metrics=metrics)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Restore what `save_checkpoint` saved, from the run's newest checkpoint; after `compose`, on all ranks.

        Returns:
            The values that were saved in addition; None if there is no checkpoint.

        Raises:
            CheckpointError: It is a checkpoint of another model or optimizer, or `save_checkpoint` did not make it.
        """
        model = self._composed()
        state = api.load_checkpoint()
        if state is None:
            return None
        if not isinstance(state, dict) or "engine" not in state:
            raise CheckpointError(
                "the checkpoint was not saved by engine.save_checkpoint: load it by raysgd.load_checkpoint()."
            )
        for name, value in (("optimizer", self._optimizer), ("lr_scheduler", self._scheduler)):
            if value is not None and name not in state:
                raise CheckpointError(f"the checkpoint has no {name}, because the loop that saved it had none.")
        own, saved = unwrap(model).state_dict(), {**state["model"], **state["engine"].get("masters", {})}
        restore({name: value for name, value in saved.items() if name in own}, into=model)
        self._scale.load_state_dict(state["engine"]["loss_scale"])
        if self._made.pieces is not None:
            self._made.pieces.take_parameters()
        restore(saved, into=self._masters())
        if self._optimizer is not None and self._made.numbers is not None:
            self._made.numbers.load(self._optimizer.inner, state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["lr_scheduler"])
        taken = ("model", "optimizer", "lr_scheduler", "engine")
        return {name: value for name, value in state.items() if name not in taken}

    def _on_load(self, module: nn.Module, incompatible: Any) -> None:
        """Parameters were loaded into the model."""
        if self._made.pieces is not None:
            self._made.pieces.take_parameters()

    def _masters(self) -> dict[str, torch.Tensor]:
        """Return the master weights by the names of their parameters, if they are in another type."""
        if self._made.pieces is None or self._model is None or self.config.precision != "bf16-true":
            return {}
        pieces = self._made.pieces.piece_of
        return {
            name: pieces[parameter].detach()
            for name, parameter in self._model.named_parameters()
            if parameter in pieces and pieces[parameter] is not parameter
        }

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_workers(self) -> None:
        identity, needed = context.current().identity, self.config.workers_per_replica
        if context.current().logical is not None:
            raise ConfigError(
                "the engine adds gradients in orders of its own, so it cannot train logical workers: use "
                "raysgd.torch.logical_steps with a plain model, or leave out Trainer(logical_workers=...)."
            )
        is_planned = self.config.plan is not None
        if self.config.memory_per_device is not None and not is_planned:
            raise ConfigError('memory_per_device is what plan="auto" may use, and plan is None: give plan="auto" too.')
        # What is not given, a plan can choose.
        is_fitting = identity.workers_per_replica == needed or (
            is_planned
            and identity.workers_per_replica % needed == 0
            and not {"tensor_parallel", "pipeline_parallel"} <= self._given
        )
        if not is_fitting:
            sizes = self.config.tensor_parallel, self.config.pipeline_parallel
            raise ConfigError(
                f"tensor_parallel={sizes[0]} and pipeline_parallel={sizes[1]} need {needed} workers for each copy of the model, "
                f"and the Trainer was made with workers_per_replica={identity.workers_per_replica}: give "
                f"Trainer(..., workers_per_replica={needed}), or on the command line `raysgd run --engine.tensor-parallel "
                f"{sizes[0]} --engine.pipeline-parallel {sizes[1]}`."
            )
        if api.world_size() > 1 and not dist.is_initialized():
            raise UsageError(
                "the engine needs a torch process group for several workers: use Trainer(backend='torch'); a script under "
                "`raysgd run --backend env` calls torch.distributed.init_process_group() first."
            )

    def _composed(self) -> nn.Module:
        if self._model is None:
            raise UsageError("call engine.compose(...) first: there is no model yet.")
        return self._model

    # -- what users see ------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryUse:
        """Measure what this rank's parameters, gradients and optimizer state take now.

        After the first step the optimizer has its state, and between ``backward`` and ``zero_grad`` there are gradients.
        Activations are what `measure_activations` measured last. `raysgd.engine.predict_memory` predicts the same.
        """
        model = self._composed()
        pieces = [] if self._made.pieces is None else list(self._made.pieces.piece_of.values())
        states = [] if self._optimizer is None else list(self._optimizer.state.values())
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        found = measure((*model.parameters(), *model.buffers()), pieces, state, self._kept_activations)
        return replace(found, gradients=found.gradients + self._step.hidden.num_bytes())

    @contextmanager
    def measure_activations(self) -> Iterator[None]:
        """Measure what forward passes in a ``with`` block keep for their backward passes on this rank, for `memory`.

            with engine.measure_activations():
                engine.backward(model(**batch).loss)
            print(engine.memory())

        Other steps cost nothing.
        """
        kept = KeptActivations(self._composed())
        with kept.measuring():
            yield
        self._kept_activations = kept.num_bytes

    def describe(self) -> str:
        """Return a table of what was done to each module; with ``plan="auto"``, after the choice and its reasons."""
        rows = [
            ("module", "done to it"),
            *((name or "(model)", "; ".join(did)) for name, did in self._made.changes.items()),
        ]
        if len(rows) == 1:
            rows.append(("(model)", "nothing"))
        width = max(len(name) for name, _ in rows)
        table = [f"{name:<{width}}  {did}" for name, did in rows]
        return "\n".join(table if self.plan is None else [self.plan.reason, "", *table])
