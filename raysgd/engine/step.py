"""`Step`: the state of an optimizer's step, over its batches and backward passes. Worker side.

The gradients of a complete step are those of its mean loss over all ranks, without a loss scale: they are the loop's until the
optimizer uses them. Those of an unfinished one are hidden.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.checks import (
    check_hooks,
    check_loss,
    check_saved,
    check_updated,
    check_weight,
    count_hooks,
)
from raysgd.engine.composing import Composed, place_loaded
from raysgd.engine.config import WITHOUT_OPTIMIZER, EngineConfig
from raysgd.engine.data_parallel.replicas import Mesh
from raysgd.engine.gradients.accumulation import Accumulation
from raysgd.engine.gradients.clipping import Gradients, HiddenGradients, HostFlag, scale
from raysgd.engine.gradients.used_batches import UsedBatches
from raysgd.engine.model.precision import LossScale, overflows
from raysgd.engine.optimizer.calls import OptimizerCalls
from raysgd.errors import CheckpointError, UsageError
from raysgd.session import api, context
from raysgd.torch.attached import AttachedForward, AttachedHook, differentiable
from raysgd.torch.batches import count_rows
from raysgd.torch.devices import device
from raysgd.torch.loader import PreparedLoader
from raysgd.torch.model import unwrap
from raysgd.torch.passes import HandedBatch, follow_passes, show_pass
from raysgd.torch.restoring import restore
from raysgd.torch.rows import FollowedLoader

#: The steps of this process, of which several may read the batches of one loader, as those of a GAN do.
_steps: weakref.WeakSet[Step] = weakref.WeakSet()


class Step:
    """Follows the batches, backward passes and gradients of one step of the optimizer after another.

    The model that the loop calls, its optimizer, its scheduler and its training loader report to this object and ask it.

    Args:
        config: The strategies.
        composed: What they made of the model.
        optimizer: The user's, if there is one.
        mesh: Returns the mesh of all workers.
        loss_scale: Of fp16.
        advice: What a loop has to do so that its gradients are known here.

    Attributes:
        composed: What the strategies made of the model.
        model: What the loop calls.
        accumulation: Counts the batches of the step.
        batches: Those that the loop has read.
        hidden: The gradients of a step that is not complete.
        clips: Whether `take_gradients` clips.
        optimizer_calls: Lets optimizers find their shards.
    """

    def __init__(
        self,
        config: EngineConfig,
        composed: Composed,
        optimizer: Optimizer | None,
        mesh: Mesh,
        loss_scale: LossScale,
        *,
        advice: str = "did not come from the engine: call engine.backward(loss) in place of loss.backward()",
    ) -> None:
        self.composed, self.model = composed, composed.model
        self._config, self._optimizer, self._mesh = config, optimizer, mesh
        self._loss_scale, self._advice = loss_scale, advice
        self.accumulation = Accumulation(config.accumulation_steps)
        self.batches = UsedBatches(self.accumulation)
        self._data_parallel = composed.data_parallel
        self._gradients = Gradients(
            lambda: self._parameters.values(),
            composed.data_parallel.shards.tensor_of,
            mesh,
            is_sharded=composed.data_parallel.is_sharded,
            counted_elsewhere=composed.counted_elsewhere,
        )
        self.hidden, self.clips = HiddenGradients(), config.clip_grad_norm is not None
        # Gradients from before this step, which the loop has not dropped: they are not divided by what its own are.
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._finite: HostFlag | None = None  # whether complete gradients are finite, if that is in question
        self._weight = 0.0  # batches, rows or tokens of the step, on this rank
        self._pipeline_weight = 1.0  # of the newest batch that the pipeline has computed
        self._num_pipelined = 0  # calls of the pipeline with backward passes, which `backward` has not counted
        self._dataset: Any = None  # of the training loader
        self._divided_by: torch.Tensor | float = 1.0  # what the gradients of a complete step were divided by
        self._parameters = self._data_parallel.parameters_of(unwrap(composed.model))
        self.optimizer_calls = OptimizerCalls(
            optimizer,
            composed.data_parallel,
            self.accumulation,
            lambda: self._parameters,
            is_scaled=loss_scale.is_enabled,
        )
        # The loop's hooks are those that come later.
        self._num_hooks = {each: count_hooks(each) for each in self._parameters.values()}

    def attach(self) -> None:
        """Follow the passes of the model and what is loaded into it."""
        model, pipeline = self.composed.model, self.composed.pipeline
        for module in unwrap(model).modules():  # the loop may load states of parts
            module.register_load_state_dict_pre_hook(AttachedHook(place_loaded))  # type: ignore[no-untyped-call]
        follow_passes(unwrap(model))
        if pipeline is None:
            # FSDP gathers parameters in its own hook.
            model.register_forward_pre_hook(AttachedHook(self._begin_forward), with_kwargs=True, prepend=True)
            model.register_forward_hook(AttachedHook(lambda module, args, outputs: self._end_forward(outputs)))
        else:
            self.model = model = pipeline
            pipeline.scale = self._begin_pipeline
        if self._optimizer is not None:
            model.zero_grad = AttachedForward(model.zero_grad, functools.partial(self.zero_grad, of_model=True))  # type: ignore[method-assign]
        _steps.add(self)
        context.current().save_checks.append(weakref.WeakMethod(self.check_saved))

    # -- batches ------------------------------------------------------------------------------------------------------

    def follow(self, prepared: PreparedLoader) -> FollowedLoader:
        """Return the training loader, which reports its batches to all steps that read its dataset."""
        self._dataset = dataset = prepared.loader.dataset

        def on_batch(batch: HandedBatch) -> None:
            for each in [step for step in _steps if step.reads(dataset)]:
                each.batches.hand_out(batch)

        def on_end() -> None:
            for each in [step for step in _steps if step.reads(dataset)]:
                each.batches.end()

        return FollowedLoader(prepared, on_batch, on_end=on_end, keeps_repeated=not self._config.weighted_gradients)

    def reads(self, dataset: Any) -> bool:
        """Return whether the batches of a dataset are this step's: it has a loader of it, or has none at all."""
        return self._dataset is None or self._dataset is dataset

    # -- passes -------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | None, *, retain_graph: bool) -> None:
        """Make a backward pass; see `raysgd.Engine.backward`."""
        check_loss(loss, self._parameters.values(), is_pipelined=self.composed.pipeline is not None)
        if self.composed.pipeline is None:
            self._begin_backward(loss)
        self._check_backward(weight)
        weight = self._weight_of(weight)
        if self.composed.pipeline is None:
            self._search_scale(loss, weight)
            self.begin_pass()
            factor = self._factor(weight)
            with self._unscaled_elsewhere(factor):
                (loss if factor == 1 else loss * factor).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        elif loss.requires_grad:
            raise UsageError(
                "with pipeline_parallel the backward passes are made when the model is called; give engine.backward the loss "
                "that the model returned, unchanged."
            )
        elif self._num_pipelined == 0:
            raise UsageError(
                "with pipeline_parallel the backward passes are made when the model is called in training mode, and it was not "
                "since the last engine.backward: call model.train() before, and the model outside of torch.no_grad()."
            )
        else:
            self._num_pipelined -= 1
        self.end_pass(weight)

    def begin_pass(self) -> None:
        """Take the gradients of the open step back from the loop, before a backward pass adds to them."""
        if self.accumulation.is_open and not self.is_complete:
            self.hidden.restore()
        else:
            self._data_parallel.shards.hold_gradients()
            if self.is_complete:
                self._gradients.scale(self._divided_by)
            else:
                self._kept = self._gradients.take()
        self._data_parallel.begin_pass(self.accumulation)

    def end_pass(self, weight: float) -> None:
        """Count a backward pass; then show its gradients to the loop if the step is complete, and hide them else.

        Args:
            weight: That of the batch. It counts in the first pass of a batch: several losses of one batch add up.
        """
        accumulation = self.accumulation
        if accumulation.is_first_pass and (self._config.weighted_gradients or not accumulation.is_complete):
            self._weight += weight
        accumulation.on_backward()
        self._data_parallel.end_pass(accumulation)
        if not accumulation.is_complete:
            self._hide()
            return
        self._check_hooks()
        self._data_parallel.check_gradients()
        self._finish()
        self._data_parallel.shards.show_gradients()
        if self._optimizer is None:  # else until the optimizer's step, since more backward passes may need them
            self.share_buffers()

    def _begin_forward(self, module: nn.Module, *inputs: Any) -> None:
        self._follow_model()
        if not torch.is_grad_enabled():
            return
        will_complete = self.batches.on_forward(inputs, is_training=module.training)
        if module.training:
            self.accumulation.on_forward()
            self._data_parallel.begin_forward(will_complete=will_complete)

    def _end_forward(self, outputs: Any) -> None:
        self.batches.mark(outputs)
        if self._config.tensor_parallel > 1 or self._data_parallel.gathers_parameters:
            for each in differentiable(outputs):
                each.register_hook(self._check_order)  # type: ignore[no-untyped-call]

    def _check_order(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # also the gradients have a graph
            raise UsageError(
                "gradients of gradients (create_graph=True, as for a gradient penalty) cannot be computed with zero_stage=3 or "
                "tensor_parallel, whose layers communicate in the backward pass: give zero_stage=0, 1 or 2 alone."
            )

    def _begin_backward(self, loss: torch.Tensor | None) -> None:
        """Find the batch of a backward pass.

        Raises:
            UsageError: It is not known, and matters.
        """
        self.batches.on_backward(loss)
        if self.batches.is_ambiguous and (self.accumulation.steps > 1 or self._config.weighted_gradients):
            raise UsageError(
                "the loop has read batches ahead, and called the model with other tensors than the loader's, so that it is not "
                "known of which batch this backward pass is: change tensors in the dataset, in collate_fn or in the model, read "
                "a batch when the one before it is done, or call engine.begin_batch(num_rows) for each batch."
            )

    def _begin_pipeline(self, batch: Any) -> float:
        """Begin the passes of a batch; return what its gradients are multiplied by."""
        self.batches.on_forward(batch, is_training=True)
        show_pass(batch, is_training=True)
        self._begin_backward(None)
        if self._config.weighted_gradients:
            self._pipeline_weight = float(0 if self.batches.num_rows == 0 else count_rows(batch))
        self._follow_model()
        self.begin_pass()
        self._num_pipelined += 1
        return self._factor(self._pipeline_weight)

    def _follow_model(self) -> None:
        """Follow what the loop has done to the model's parameters: unfrozen, exchanged or added some."""
        model = unwrap(self.composed.model)
        self._parameters = self._data_parallel.parameters_of(model)
        for name, each in self._parameters.items():
            if each not in self._num_hooks:
                self._data_parallel.start_new(name, each)
                self._num_hooks[each] = count_hooks(each)
        self._data_parallel.follow(model, self._parameters.values())

    def _weight_of(self, weight: float | None) -> float:
        if not self._config.weighted_gradients or self.composed.pipeline is not None:
            return self._pipeline_weight if self._config.weighted_gradients else 1.0
        rows = self.batches.num_rows
        if weight is not None and rows != 0:
            return float(weight)
        assert rows is not None
        return float(rows)

    @property
    def _expected_weight(self) -> float:
        """What losses are divided by: the batches of a full step, so that its gradients need not be divided."""
        return 1.0 if self._config.weighted_gradients else float(self.accumulation.steps)

    def _factor(self, weight: float) -> float:
        """Return what the loss of a batch is multiplied by."""
        return self._loss_scale.scale * weight / self._expected_weight

    def _search_scale(self, loss: torch.Tensor, weight: float) -> None:
        """Find a first loss scale with which the gradients of a loss are finite, if that is left to the engine."""
        if self._loss_scale.is_searched and not self._data_parallel.gathers_parameters:
            self._loss_scale.search(lambda: self._overflows(loss, weight))

    def _overflows(self, loss: torch.Tensor, weight: float) -> bool | None:
        trained = [each for each in self._parameters.values() if each.requires_grad]
        return overflows(loss * self._factor(weight), trained)

    @contextmanager
    def _unscaled_elsewhere(self, factor: float) -> Iterator[None]:
        """Let a backward pass leave gradients without a factor at the parameters of other engines' models."""
        others = (
            [] if factor == 1 else [each for step in _steps if step is not self for each in step._parameters.values()]
        )
        before = [each.grad for each in others]
        for each in others:
            each.grad = None
        yield
        for each, earlier in zip(others, before, strict=True):
            if each.grad is not None:
                scale([each.grad], 1 / factor)
            if earlier is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad

    # -- complete gradients, which are the loop's ------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the step are complete, and the optimizer has not used them yet."""
        return self.accumulation.is_complete

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of a complete step by their global norm; returns it, or None if there are none or not finite."""
        if not (self.is_complete and self.is_finite):
            return None
        self._take_changes()
        norm = self._gradients.clip(max_norm)
        self._note_changes()
        return norm

    def scale(self, factor: float) -> None:
        """Multiply the gradients of a complete step."""
        if factor != 1 and self.is_complete and self.is_finite:
            self._take_changes()
            self._gradients.scale(factor)
            self._note_changes()

    def _finish(self) -> None:
        """Make the gradients of a complete step those of its mean loss."""
        self._divided_by, self._finite, norm = self._divisor(), None, None
        scale(list(self._kept.values()), self._divided_by)
        for each, kept in self._kept.items():
            each.grad = kept if each.grad is None else each.grad.add_(kept)
        self._kept = {}
        if self._loss_scale.is_enabled:
            norm = self._gradients.norm()
            self._finite = HostFlag(self._is_finite_everywhere(norm))
            self._divided_by = torch.where(self._finite.value, self._divided_by, 1.0)
            norm = norm / self._divided_by
        self._gradients.scale(1 / self._divided_by)
        self._note_changes(norm)

    @property
    def hides_gradients(self) -> bool:
        """Whether there are gradients of an unfinished step, which the loop does not see."""
        return self.accumulation.is_open and not self.is_complete

    @property
    def is_finite(self) -> bool:
        """Whether the gradients of a complete step are finite, on all ranks; in fp16 the host waits for them to be computed."""
        return self._finite is None or self._finite.ask()

    def _divisor(self) -> torch.Tensor | float:
        """Return what the sum of the step's gradients is divided by."""
        divisor = self._weight / self._expected_weight * self._loss_scale.scale
        # Gradients were averaged over the replicas: their sum is that average times their number.
        if not self._config.weighted_gradients or api.world_size() == 1:
            return divisor
        total, mesh = torch.tensor(divisor, dtype=torch.float64, device=device()), self._mesh()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        return total / mesh.size(0)

    def _is_finite_everywhere(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether the norm is finite on all ranks.

        Replicas have the same gradients. Of a parameter that tensor-parallel ranks hold in full, each has computed the gradient
        by itself, and the norm of each rank counts its own.
        """
        is_finite = torch.isfinite(norm)
        if self._config.workers_per_replica > 1:
            is_finite = is_finite.to(torch.uint8)
            dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        return is_finite.to(torch.bool)

    def _take_changes(self) -> None:
        """Let the optimizer use the gradients that the loop has left at the parameters.

        Raises:
            UsageError: The loop has changed those of a pipeline's stage, as by a norm that is not that of all stages.
        """
        self._data_parallel.shards.hold_gradients()
        self._data_parallel.shards.show_gradients()
        if self.composed.pipeline is not None and self._gradients.are_changed():
            raise UsageError(
                "the loop has changed gradients, and with pipeline_parallel each rank has those of one stage alone: clip by "
                "Engine(clip_grad_norm=...) or engine.clip_grad_norm_(max_norm), and scale the loss."
            )

    def _note_changes(self, norm: torch.Tensor | None = None) -> None:
        """Remember which gradients there are, where it matters whether the loop changes them."""
        if norm is not None or self.composed.pipeline is not None:
            self._gradients.note(norm)

    # -- the optimizer and the scheduler ----------------------------------------------------------------------------------

    def end_batch(self) -> None:
        """End a batch of an unfinished step, since the loop has called the optimizer.

        Raises:
            UsageError: There are gradients that the engine does not know, or it is not known where the batch began.
        """
        if any(map(self.hidden.is_strange, (*self._parameters.values(), *self._gradients.updated()))):
            raise UsageError(
                f"optimizer.step() was called with gradients that {self._advice}, and optimizer.zero_grad() after each step."
            )
        self._check_clear()
        self.accumulation.end_batch()
        self.batches.end_batch()

    def take_gradients(self) -> bool:
        """Take the gradients of a complete step from the loop, and clip them.

        Returns:
            Whether the optimizer makes its step. False if they are not finite on all ranks, unless the optimizer finds that out.
        """
        self._check_clear()
        self.check_updated()
        self._take_changes()
        if self._config.clip_grad_norm is not None:
            self._gradients.clip(self._config.clip_grad_norm)
        if self._finite is not None and self._optimizer is not None and self._can_leave_out(self._optimizer):
            # The device finds out by itself, so that the host waits with the step in its queue.
            self._optimizer.found_inf = (~self._finite.value).float()  # type: ignore[attr-defined]
            return True
        return self.is_finite

    def _can_leave_out(self, optimizer: Optimizer) -> bool:
        """Return whether a step of the optimizer changes nothing if its ``found_inf``, which gradient scalers use too, is 1."""
        return (
            type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and all(group["fused"] for group in optimizer.param_groups)
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and not any(map(is_dtensor, self._gradients.updated()))
        )

    def finish(self) -> None:
        """End a complete step: the optimizer has used its gradients, or has skipped them since they are not finite."""
        skipped = not self.is_finite
        self._loss_scale.update(overflowed=skipped)
        self.accumulation.on_step(skipped=skipped)
        self.batches.end_step()
        # If the loop keeps the gradients, those of the next pass are added.
        self._weight, self._num_pipelined = 0.0, 0

    def share_buffers(self) -> None:
        """Give all replicas the buffers of the first one. All ranks call it."""
        self._data_parallel.share_buffers(unwrap(self.composed.model))

    def zero_grad(self, set_to_none: bool = True, *, of_model: bool = False) -> None:
        """Forget the gradients, of the optimizer's parameters or of all; unless the step is not complete yet.

        Args:
            set_to_none: There are none afterwards. Else they are zero: momentum and weight decay then change a parameter that
                gets no other gradient.
            of_model: Those of all.
        """
        if self.is_complete:
            self.accumulation.discard()
            self.batches.end_step()
            self._weight = 0.0
        if self.accumulation.is_open:
            self.hidden.drop_strange(self._parameters.values())  # of the loss of another engine's model
        elif self._optimizer is not None:
            dropped = [each for group in self._optimizer.param_groups for each in group["params"]]
            dropped = list(self._parameters.values()) if of_model else dropped
            zeros = {} if set_to_none else self._gradients.make_zeros(dropped)
            self._optimizer.zero_grad()
            self._data_parallel.shards.drop_gradients(dropped)
            for each, gradient in zeros.items():
                each.grad = gradient

    def should_schedule(self) -> bool:
        """Return whether a call of the scheduler counts now; it may come before the optimizer's step or after it."""
        return self.is_finite if self.is_complete else self.accumulation.may_schedule()

    def on_schedule(self) -> None:
        """The scheduler has made a step."""
        self.accumulation.on_schedule()

    # -- an unfinished step in a checkpoint -------------------------------------------------------------------------------

    def save(self) -> dict[str, Any] | None:
        """Return what there is of an unfinished step, equal on all ranks; None if no batch of it was used. All ranks call it.

        The gradients become those of all ranks, so that any number of ranks can finish the step.

        Raises:
            UsageError: The gradients are complete, and the optimizer has not used them.
        """
        if not self.accumulation.is_open or self._optimizer is None:
            return None
        if self.is_complete:
            raise UsageError(
                "engine.save_checkpoint was called between engine.backward and optimizer.step: a training that resumes there "
                "does not make this step. Save after optimizer.step() and optimizer.zero_grad()."
            )
        self.hidden.restore()
        self._data_parallel.share_gradients()
        if api.world_size() > 1:
            weight = torch.tensor(self._weight, dtype=torch.float64, device=device())
            dist.all_reduce(weight, group=self._mesh().get_group("dp"))
            self._weight = float(weight) / self._mesh().size(0)
        tensors = {name: self._updated(each) for name, each in self._parameters.items()}
        saved = {
            "batches": self.accumulation.num_batches,
            "weight": self._weight,
            "is_weighted": self._config.weighted_gradients,
            "replicas": api.data_parallel_size(),
            "factor": self._factor(1.0),
            "gradients": {name: each.grad for name, each in tensors.items() if each.grad is not None},
            "kept": {name: self._kept[each] for name, each in tensors.items() if each in self._kept},
        }
        self._hide()
        return saved

    def check_saved(self) -> None:
        """Check that a checkpoint without this step's gradients lacks none; see `raysgd.engine.checks.check_saved`."""
        check_saved(is_open=self.accumulation.is_open and self._optimizer is not None)

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Continue the unfinished step that `save` returned, maybe on other ranks; gradients that there are now are dropped.

        Raises:
            CheckpointError: Its batches were weighted otherwise.
        """
        self.accumulation.discard()
        self.batches.end_step()
        self.hidden.drop()
        self._kept, self._weight = {}, 0.0
        self.zero_grad()
        if saved is None:
            return
        is_weighted = self._config.weighted_gradients
        if saved["is_weighted"] != is_weighted:
            raise CheckpointError(
                f"the checkpoint was saved within a step with weighted_gradients={saved['is_weighted']}, and the rest of the "
                f"step cannot be computed with weighted_gradients={is_weighted}: give the value that it had."
            )
        # The mean over the ranks is of the batches of a rank, or of all rows.
        share = saved["replicas"] / api.data_parallel_size() if is_weighted else 1.0
        self._restore_gradients(saved["kept"])
        self._kept = self._gradients.take()
        self._restore_gradients(saved["gradients"])
        self._gradients.scale(share * self._factor(1.0) / saved["factor"])
        self._data_parallel.resume_gradients()
        self._hide()
        self._weight = saved["weight"] * share
        self.accumulation.resume(saved["batches"])

    def _restore_gradients(self, saved: Mapping[str, Any]) -> None:
        gradients = {}
        for name, each in self._parameters.items():
            if name in saved:
                updated = self._updated(each)
                gradients[name] = updated.grad = torch.zeros_like(updated)
        restore(dict(saved), into=gradients)

    def _updated(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return what the optimizer updates of a parameter."""
        return self._data_parallel.shards.tensor_of.get(parameter, parameter)

    def _hide(self) -> None:
        parameters = list(self._parameters.values())
        self.hidden.hide([*parameters, *self._gradients.updated()], parameters)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_backward(self, weight: float | None) -> None:
        if self._optimizer is None and (names := list(self._config.given_but(WITHOUT_OPTIMIZER))):
            raise UsageError(
                f"{', '.join(names)} act in the optimizer's step, and engine.compose got no optimizer: give "
                "compose(optimizer=...)."
            )
        is_pipelined = self.composed.pipeline is not None
        check_weight(self._config, weight, is_pipelined=is_pipelined, is_known=self.batches.num_rows is not None)

    def check_updated(self) -> None:
        """Check that what the optimizer updates is the model's, or has no gradient; see `raysgd.engine.checks`."""
        if self._optimizer is not None:
            check_updated(self._optimizer, self._num_hooks)

    def _check_clear(self) -> None:
        """Check that it is known where batches begin, if it matters."""
        is_fixed = self.is_complete and not self._config.weighted_gradients
        if self.accumulation.is_unclear and not is_fixed:
            raise UsageError(
                "engine.backward was called several times before optimizer.step(), and the engine does not know whether that was "
                "for one batch with several losses, or for several batches: call optimizer.step() after each batch, or add the "
                "losses of a batch up and call engine.backward once, or give the loader to compose(train_dataloader=...)."
            )

    def _check_hooks(self) -> None:
        """Check that no hook of the loop has found another gradient than that of the plain loop."""
        is_late = self._data_parallel.gathers_parameters or self._config.precision == "fp16"
        if not is_late and api.world_size() == 1:
            return
        check_hooks(self._num_hooks, self._parameters.values(), is_late=is_late)
