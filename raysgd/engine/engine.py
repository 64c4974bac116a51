"""`Engine`: applies strategies to a model, its optimizer, scheduler and loaders, and makes the steps. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from raysgd.config.argument_names import COMPOSE_HINTS, refuse_unknown
from raysgd.config.checks import check_count
from raysgd.engine.checks import check_parts, check_workers
from raysgd.engine.composing import compose
from raysgd.engine.config import EngineConfig, current_engine_config, merge_configs
from raysgd.engine.model.memory_use import KeptActivations, MemoryUse, measure
from raysgd.engine.model.precision import LossScale
from raysgd.engine.optimizer.engine_optimizer import EngineOptimizer
from raysgd.engine.optimizer.schedule import Schedule
from raysgd.engine.saving import SAVED_NAMES, EngineState, collect, spread
from raysgd.engine.step import Step
from raysgd.errors import ConfigError, UsageError
from raysgd.session import api, context
from raysgd.torch.evaluation import gather_for_metrics
from raysgd.torch.loader import prepare_data_loader
from raysgd.torch.meshes import mesh as make_mesh

if TYPE_CHECKING:
    from raysgd.engine.planning.strategy_plan import Plan
    from raysgd.session.live.state import LiveState


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
    devices. The loop computes the same, and the Trainer's ``workers_per_replica`` says how many workers hold one replica of the
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
        check_workers(self.config, self._given)
        self._loss_scale = LossScale(self.config.precision == "fp16", self.config.loss_scale)
        self._mesh: DeviceMesh | None = None
        self._step: Step | None = None  # once it is composed
        self._optimizer: EngineOptimizer | None = None
        self._schedule: Schedule | None = None
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
        return self._loss_scale.scale

    # -- composing ----------------------------------------------------------------------------------------------------

    @refuse_unknown("engine.compose", COMPOSE_HINTS)
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
            train_dataloader: Each replica of the model reads its shard; see `raysgd.torch.prepare_data_loader`. With
                ``weighted_gradients=True`` the rows that it repeats at the end of an epoch are left out.
            eval_dataloader: Each row is read on one replica of the model, and once; see ``train=False`` there.
            tensor_plan: A plan for ``tensor_parallel``: torch's styles by module path, or a function that is called with the
                model and the mesh's axis ``"tp"`` and changes the model in place. None: transformers' own plan, or one that is
                made from the model's structure.
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
        if self._step is not None:
            raise UsageError("engine.compose was called before; make an Engine for each model.")
        check_parts(model, optimizer, lr_scheduler_fn)
        if self.config.plan is not None:
            self._choose(
                model=model,
                optimizer=optimizer,
                train_dataloader=train_dataloader,
                sample_batch=sample_batch,
                loss_fn=loss_fn,
                tensor_plan=tensor_plan,
            )
        composed = compose(self.config, lambda: self.mesh, model, optimizer, tensor_plan)
        self._step = step = Step(self.config, composed, optimizer, lambda: self.mesh, self._loss_scale)
        step.attach()
        if optimizer is not None:
            self._optimizer = EngineOptimizer(optimizer, step)
            if lr_scheduler_fn is not None:
                assert composed.numbers is not None
                self._schedule = Schedule(lr_scheduler_fn, self._optimizer, composed.numbers.given, step)
        train = None if train_dataloader is None else step.follow(prepare_data_loader(train_dataloader))
        evaluate = None if eval_dataloader is None else prepare_data_loader(eval_dataloader, train=False)
        scheduler = None if self._schedule is None else self._schedule.scheduler
        return step.model, self._optimizer, scheduler, train, evaluate

    def _choose(self, **composed: Any) -> None:
        """Choose the strategies that were not given."""
        from raysgd.engine.planning import automatic  # imports much that no other engine needs

        self.plan = automatic.choose_plan(self.config, self._given, **composed)
        self.config, self._mesh = self.plan.config, None

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, num_batches: int) -> None:
        """Set how many batches the next step has, in place of ``accumulation_steps``."""
        self._running().accumulation.steps = check_count("begin_step(num_batches)", num_batches, minimum=1)

    def begin_batch(self, num_rows: int) -> None:
        """Set how many rows of the next batch count, which weigh its gradients; for loops with loaders of their own."""
        self._running().batches.begin(num_rows)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of a complete step, which are those of its mean loss; call it before they are clipped."""
        self._running().scale(factor)

    def backward(self, loss: torch.Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """Make a backward pass of a batch, in place of ``loss.backward()``. Gradients of several passes add up, as in torch.

        After the last batch of a step, the gradients of the parameters are those of the step's mean loss over all ranks, in
        every precision. They are the loop's until ``optimizer.step()``: it may read, clip, scale or drop them. Before that,
        parameters have no gradients.

        Args:
            loss: The mean over the batch on this rank; a scalar.
            weight: With ``weighted_gradients=True``, over how many rows or tokens the mean is. None: the rows of the batch
                of the loader that the model was called with. A batch that only repeats rows has the weight 0 in any case.
            retain_graph: As in ``torch.Tensor.backward``: whether another loss of the same graph follows.

        Raises:
            UsageError: The loss is not a scalar tensor with a gradient; the weight of the batch is not known, or cannot be used;
                with ``pipeline_parallel``, the loss is another one than the model returned; the strategies need an optimizer, and
                `compose` got none; a parameter has no gradient, or has hooks, and the strategies do not allow that.
        """
        self._running().backward(loss, weight, retain_graph=retain_graph)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of a complete step by their global norm, over all shards; call it before ``optimizer.step()``.

        Returns:
            The norm before clipping; None if the step is not complete, or is skipped because gradients overflowed.
        """
        return self._running().clip(max_norm)

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

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, *, metrics: Mapping[str, Any] | None = None, merged: bool = False, **more: Any) -> None:
        """Save model, optimizer, scheduler and the engine's own state, and ``more`` values; see `raysgd.save_checkpoint`.

        Every rank calls it. Each saves the shards that it holds, and any number of ranks with any strategies can load them.
        Between two batches of a step, the gradients so far are saved too.

        Args:
            metrics: What retention ranks the checkpoint by, as for `raysgd.save_checkpoint`.
            merged: Whether rank 0 collects whole tensors in host memory and saves them in one part.
            **more: Values that `load_checkpoint` returns; equal on all ranks.

        Raises:
            UsageError: It is called between ``engine.backward`` and ``optimizer.step`` of a complete step.
        """
        if taken := sorted({*SAVED_NAMES} & set(more)):
            raise UsageError(
                f"engine.save_checkpoint({taken[0]}=...): the engine saves its own {taken[0]}; use another name."
            )
        self._running().share_buffers()  # each rank saves its part of them
        state = self._saved()
        if self._is_divided:
            if not merged:
                _save({**state, **more}, metrics, all_ranks=True)
                return
            state = collect(state, is_kept=api.world_rank() == 0)
        _save({**state, **more} if api.world_rank() == 0 else None, metrics, all_ranks=False)

    @property
    def _is_divided(self) -> bool:
        """Whether each rank has a part of the state."""
        is_sharded = self._running().composed.data_parallel.is_sharded
        return api.world_size() > 1 and (is_sharded or self.config.workers_per_replica > 1)

    def _saved(self) -> dict[str, Any]:
        """Return what this rank saves: the whole state, or its part."""
        state = self._state().save()
        if (unfinished := self._running().save()) is not None:
            state["engine"]["step"] = unfinished
        return spread(state, self.mesh) if self._is_divided else state

    def state_dict(self) -> dict[str, Any]:
        """Return ``model``, ``optimizer`` and ``lr_scheduler`` as `save_checkpoint` saves them, with this rank's tensors."""
        return self._state().save()

    def load_checkpoint(
        self, before_restore: Callable[[dict[str, Any]], object] | None = None
    ) -> dict[str, Any] | None:
        """Restore what `save_checkpoint` saved, from the run's newest checkpoint; after `compose`, on all ranks.

        What this program gives to the optimizer and the scheduler differently than the program that saved it counts: a rate,
        another argument, another schedule, which continues after as many steps. A line of the log names it. Everything else is
        restored as it was saved, with what a scheduler or the loop has changed.

        Args:
            before_restore: Called with all that was saved, which it may change, before it is restored.

        Returns:
            The values that were saved in addition; None if there is no checkpoint.

        Raises:
            CheckpointError: It is a checkpoint of another model or optimizer, or `save_checkpoint` did not make it.
        """
        own, state = self._state(), api.load_checkpoint()
        if state is None:
            return None
        if before_restore is not None and isinstance(state, dict):  # else it is refused
            before_restore(state)
        own.load(state)
        self._running().load(state["engine"].get("step"))
        return {name: value for name, value in state.items() if name not in SAVED_NAMES}

    def live_parts(self) -> dict[str, Any]:
        """Return what ``raysgd.live_state(engine=engine)`` holds, if each rank has the whole state."""
        return self._state().live_parts()

    def live_copy(self) -> Callable[[], dict[str, Any]] | None:
        """Return what makes this rank's part of a copy of the state; None if each rank has the whole state."""
        return self._saved if self._is_divided else None

    def own_live_state(self, problem: str | None) -> LiveState | None:
        """Return the live state of a loop of raysgd; see `raysgd.session.base.Session.own_live_state`."""
        return context.acting().own_live_state({"engine": self}, problem=problem)

    def _running(self) -> Step:
        if self._step is None:
            raise UsageError("call engine.compose(...) first: there is no model yet.")
        return self._step

    def _state(self) -> EngineState:
        return EngineState(self._running().composed, self._optimizer, self._schedule, self._loss_scale)

    # -- what users see ------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryUse:
        """Measure what this rank's parameters, gradients and optimizer state take now.

        After the first step the optimizer has its state, and between ``backward`` and ``zero_grad`` there are gradients.
        Activations are what `measure_activations` measured last. `raysgd.engine.predict_memory` predicts the same.
        """
        step = self._running()
        model, updated = step.model, step.composed.data_parallel.shards.tensor_of.values()
        states = [] if self._optimizer is None else list(self._optimizer.state.values())
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        found = measure((*model.parameters(), *model.buffers()), updated, state, self._kept_activations)
        return replace(found, gradients=found.gradients + step.hidden.num_bytes())

    @contextmanager
    def measure_activations(self) -> Iterator[None]:
        """Measure what forward passes in a ``with`` block keep for their backward passes on this rank, for `memory`.

            with engine.measure_activations():
                engine.backward(model(**batch).loss)
            print(engine.memory())

        Other steps cost nothing.
        """
        kept = KeptActivations(self._running().model)
        with kept.measuring():
            yield
        self._kept_activations = kept.num_bytes

    def describe(self) -> str:
        """Return a table of what was done to each module; with ``plan="auto"``, after the choice and its reasons."""
        changes = {} if self._step is None else self._step.composed.changes
        rows = [("module", "done to it"), *((name or "(model)", "; ".join(did)) for name, did in changes.items())]
        if len(rows) == 1:
            rows.append(("(model)", "nothing"))
        width = max(len(name) for name, _ in rows)
        table = [f"{name:<{width}}  {did}" for name, did in rows]
        return "\n".join(table if self.plan is None else [self.plan.reason, "", *table])


def _save(state: Any, metrics: Mapping[str, Any] | None, *, all_ranks: bool) -> None:
    """Save a state that has the gradients of an unfinished step, without which `raysgd.save_checkpoint` is refused."""
    context.acting().save_checkpoint(state, files=False, metrics=metrics, all_ranks=all_ranks, allow_pickle=False)
