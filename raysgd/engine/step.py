"""The gradients of an optimizer's step: collected over its backward passes, and then the loop's until the step. Worker side.

Those of a complete step are those of its mean loss over all ranks, without a loss scale. Those of an unfinished one are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from raysgd.engine.accumulation import Accumulation
from raysgd.engine.composing import Composition
from raysgd.engine.config import EngineConfig
from raysgd.engine.gradients import HiddenGradients, HostFlag, global_norm, scale, versions
from raysgd.engine.pieces import OptimizerPieces
from raysgd.engine.precision import LossScale
from raysgd.errors import UsageError
from raysgd.session import api
from raysgd.torch.devices import device
from raysgd.torch.model import DistributedModel, unwrap


class StepGradients:
    """Collects the gradients of a step over its backward passes, and shares them with the loop until the optimizer uses them.

    Args:
        config: The strategies.
        made: What was made of the model by them.
        model: The model that the loop calls.
        optimizer: The user's, if there is one.
        mesh: Returns the mesh of all workers.
        accumulation: Says which passes complete a step.
        loss_scale: Of fp16.

    Attributes:
        hidden: The gradients of a step that is not complete.
        weight: Batches, rows or tokens of the step, on this rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        made: Composition,
        model: nn.Module,
        optimizer: Optimizer | None,
        mesh: Callable[[], DeviceMesh],
        accumulation: Accumulation,
        loss_scale: LossScale,
    ) -> None:
        self._config, self._made, self._model, self._optimizer = config, made, model, optimizer
        self._mesh, self._accumulation, self._loss_scale = mesh, accumulation, loss_scale
        self.hidden = HiddenGradients()
        # Whether the gradients of a complete step are finite, if that is in question.
        self._finite: HostFlag | None = None
        self.weight = 0.0
        self._divided_by: torch.Tensor | float = 1.0  # what the gradients of a complete step were divided by
        self._known_norm: torch.Tensor | None = None  # of gradients that the loop has not changed since, by `_versions`
        self._versions: list[tuple[int, int]] = []
        self._parameters = list(model.parameters())
        self.count_hooks()
        self._averaged = [each.requires_grad for each in self._parameters]  # by DDP
        self._is_averaged_late = False  # what this backward pass computes, after it
        is_fixed = api.world_size() > 1 and config.zero_stage < 3 and not isinstance(model, DistributedModel)
        self._frozen = [each for each in self._parameters if is_fixed and not each.requires_grad]

    def count_hooks(self) -> None:
        """Take the hooks that the parameters have now for the engine's; the loop's are those that come later."""
        self._num_hooks = [_count_hooks(each) for each in self._parameters]

    def search_scale(self, loss: torch.Tensor, weight: float) -> None:
        """Find a first loss scale with which the gradients of a loss are finite, if that is left to the engine."""
        if self._loss_scale.is_searched and self._config.zero_stage < 3:  # FSDP's hooks expect one pass
            self._loss_scale.search(lambda: self._overflows(loss, weight))

    def _overflows(self, loss: torch.Tensor, weight: float) -> bool | None:
        """Return whether gradients of a loss overflow on any rank, without keeping them; None if that cannot be computed."""
        trained = [each for each in self._parameters if each.requires_grad]
        try:
            found: Any = torch.autograd.grad(loss * self.factor(weight), trained, retain_graph=True, allow_unused=True)
        except RuntimeError:  # torch.compile and some checkpointing allow one pass; or there is no memory for two
            state = torch.tensor(0)
        else:
            norms = torch.stack([each.float().norm() for each in found if each is not None])
            state = torch.isfinite(norms).all().to(torch.int64) + 1
        state = state.to(device())
        if api.world_size() > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MIN)
        return None if not state else bool(state == 1)

    def begin_pass(self) -> None:
        """Take the gradients of the open step back from the loop, before a backward pass adds to them."""
        pieces = self._made.pieces
        if self._accumulation.is_open and not self._accumulation.is_complete:
            self.hidden.restore()
        else:  # there are gradients if the loop has not dropped them, to which more are added
            if pieces is not None:
                pieces.hold_gradients()
            self._finish(undo=True)
        if self._made.use is not None:
            self._made.use.begin_pass(is_first=self._accumulation.is_first_pass)
        will_complete = self._accumulation.will_complete
        if pieces is not None and self._made.pipeline is None:  # a pipeline makes several backward passes
            pieces.is_collecting = self._config.zero_stage == 2 or will_complete
        if isinstance(self._model, DistributedModel):
            # DDP averages in the first backward pass after a forward pass that was made for that.
            is_averaged = self._accumulation.has_computed and self._model.require_backward_grad_sync
            self._is_averaged_late = will_complete and not is_averaged

    def end_pass(self, weight: float) -> None:
        """Count a backward pass; then show its gradients to the loop if the step is complete, and hide them else.

        Args:
            weight: That of the batch. It counts in the first pass of a batch: several losses of one batch add up.
        """
        accumulation, pieces = self._accumulation, self._made.pieces
        if accumulation.is_first_pass and (self._config.weighted_gradients or not accumulation.is_complete):
            self.weight += weight
        accumulation.on_backward()
        if self._made.use is not None:
            self._made.use.end_pass()
            if accumulation.is_complete:
                self._made.use.end_step()
        if self._is_averaged_late:
            self._average()
        if pieces is not None and (self._config.zero_stage == 2 or accumulation.is_complete):
            pieces.collect_gradients()
        if not accumulation.is_complete:
            self.hidden.hide(self._trained(), self._parameters)
            return
        self._check_trained()
        self._finish()
        if pieces is not None:
            pieces.show_gradients()

    def _average(self) -> None:
        """Average gradients in place of DDP."""
        trained = [each for each in self._parameters if each.requires_grad]
        OptimizerPieces(trained, self._mesh(), is_divided=False, is_early=False).average_gradients()

    @property
    def _expected_weight(self) -> float:
        """What losses are divided by: the batches of a full step, so that its gradients need not be divided."""
        return 1.0 if self._config.weighted_gradients else float(self._accumulation.steps)

    def factor(self, weight: float) -> float:
        """Return what the loss of a batch is multiplied by."""
        return self._loss_scale.scale * weight / self._expected_weight

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of a complete step by their global norm; returns it, or None if they are not finite."""
        if not self.is_finite:
            return None
        self._take_changes()
        norm = self._norm()
        self._clip(max_norm, norm)
        self._known_norm = None
        self._note_changes()
        return norm

    def scale(self, factor: float) -> None:
        """Multiply the gradients of a complete step."""
        if self.is_finite:
            self._take_changes()
            scale(self._gradients(), factor)
            self._known_norm = None
            self._note_changes()

    def _clip(self, max_norm: float, norm: torch.Tensor) -> None:
        if max_norm != float("inf"):  # an infinite norm would make all gradients NaN
            scale(self._gradients(), torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def _take_changes(self) -> None:
        """Let the optimizer use the gradients that the loop has left at the parameters.

        Raises:
            UsageError: The loop has changed those of a pipeline's stage, as by a norm that is not that of all stages.
        """
        if self._made.pieces is not None:
            self._made.pieces.hold_gradients()
            self._made.pieces.show_gradients()
        if self._made.pipeline is not None and versions(self._gradients()) != self._versions:
            raise UsageError(
                "the loop has changed gradients, and with pipeline_parallel each rank has those of one stage alone: clip by "
                "Engine(clip_grad_norm=...) or engine.clip_grad_norm_(max_norm), and scale the loss."
            )

    def _note_changes(self) -> None:
        """Remember which gradients there are, where it matters whether the loop changes them."""
        if self._known_norm is not None or self._made.pipeline is not None:
            self._versions = versions(self._gradients())

    def begin_forward(self, module: nn.Module) -> None:
        """Make DDP average gradients in the backward pass that completes a step, and in no other."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._accumulation.on_forward()
        model = self._model
        if isinstance(model, DistributedModel):
            model.require_backward_grad_sync = self._accumulation.will_complete
            trained = [each.requires_grad for each in self._parameters]
            if trained != self._averaged and any(trained):
                self._averaged = trained
                model.average_trained()

    def _norm(self) -> torch.Tensor:
        """Return the norm of all gradients over all ranks."""
        counted = [each.grad for each in self._updated() if each.grad is not None and id(each) not in self._made.copied]
        return global_norm(counted, self._mesh(), is_sharded=self._config.zero_stage > 0)

    def _trained(self) -> list[torch.Tensor]:
        """Return all tensors that may have gradients: the parameters of the model, and what the optimizer updates."""
        return [*self._parameters, *self._updated()]

    def _check_trained(self) -> None:
        """Check after a backward pass that gradients are those of all ranks.

        Raises:
            UsageError: DDP waits for gradients that this pass did not compute, parameters were unfrozen, or they have hooks that
                find other gradients than those of the plain loop.
        """
        self._check_hooks()
        if isinstance(self._model, DistributedModel) and not self._model.find_unused_parameters:
            try:
                self._model.reducer._check_reducer_finalized()
            except RuntimeError as error:
                raise UsageError(
                    f"this backward pass did not compute gradients of all parameters{self._name_missing()}: give "
                    "Engine(find_unused_parameters=True) if the loop uses different parameters in different steps or on "
                    "different ranks, or freeze those that are never used by requires_grad_(False)."
                ) from error
        if any(parameter.grad is not None for parameter in self._frozen):
            raise UsageError(
                "a parameter was frozen at engine.compose and has a gradient now, which is not averaged over the workers: "
                "compose the model with all parameters that will be trained, and freeze them after that."
            )

    def _check_hooks(self) -> None:
        config = self._config
        if config.zero_stage < 3 and config.precision != "fp16" and api.world_size() == 1:
            return
        for each, known in zip(self._parameters, self._num_hooks, strict=True):
            of_gradients, after_them = _count_hooks(each)
            if after_them > known[1] or (
                of_gradients > known[0] and (config.zero_stage == 3 or config.precision == "fp16")
            ):
                raise UsageError(
                    "a parameter has a hook, which would not find its gradient: with several workers, zero_stage=3 or fp16 it is "
                    "complete after the backward pass. Change parameter.grad before optimizer.step() in place of the hook."
                )

    def _name_missing(self) -> str:
        names = [
            name for name, each in unwrap(self._model).named_parameters() if each.requires_grad and each.grad is None
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f" ({', '.join(names[:3])}{more} have none on rank {api.world_rank()})" if names else ""

    def _updated(self) -> list[torch.Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [each for group in groups for each in group["params"]]

    def _gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self._updated() if each.grad is not None]

    def _divisor(self) -> torch.Tensor | float:
        """Return what the sum of the step's gradients is divided by."""
        divisor = self.weight / self._expected_weight * self._loss_scale.scale
        # Gradients were averaged over the copies of the model: their sum is that average times their number.
        if not self._config.weighted_gradients or api.world_size() == 1:
            return divisor
        total, copies = torch.tensor(divisor, dtype=torch.float64, device=device()), self._mesh()["dp"]
        dist.all_reduce(total, group=copies.get_group())
        return total / copies.size()

    def _finish(self, *, undo: bool = False) -> None:
        """Make the gradients of a complete step those of its mean loss; or undo that, before more are added."""
        if undo:
            factor, self._divided_by = self._divided_by, 1.0
        else:
            self._divided_by = self._divisor()
            factor = 1 / self._divided_by
            self._finite = self._known_norm = None
            if self._loss_scale.is_enabled:
                norm = self._norm()
                self._finite = HostFlag(self._is_finite_everywhere(norm))
                self._divided_by = torch.where(self._finite.value, self._divided_by, 1.0)
                factor = 1 / self._divided_by
                self._known_norm = norm * factor
        if not (isinstance(factor, float) and factor == 1):
            scale(self._gradients(), factor)
        self._note_changes()

    @property
    def is_finite(self) -> bool:
        """Whether the gradients of a complete step are finite, on all ranks; in fp16 the host waits for them to be computed."""
        return self._finite is None or self._finite.ask()

    def take(self) -> bool:
        """Take the gradients of a complete step from the loop, and clip them; returns whether the optimizer makes its step."""
        self._take_changes()
        if self._config.clip_grad_norm is not None:
            is_known = self._known_norm is not None and self._versions == versions(self._gradients())
            norm = self._known_norm if is_known else None
            self._clip(self._config.clip_grad_norm, self._norm() if norm is None else norm)
        if self._finite is not None and self._optimizer is not None and _can_leave_out(self._optimizer):
            # The device finds out by itself, so that the host waits with the step in its queue.
            self._optimizer.found_inf = (~self._finite.value).float()  # type: ignore[attr-defined]
            return True
        return self.is_finite

    def on_step(self) -> None:
        """The optimizer has made its step, or left it out. If gradients are kept, those of the next pass are added."""
        vars(self._optimizer or self).pop("found_inf", None)
        self.weight, self._divided_by = 0.0, self._loss_scale.scale

    def has_others(self) -> bool:
        """Return whether there are gradients that no pass of the engine has computed; of a step that is not complete."""
        return any(self.hidden.is_strange(each) for each in self._trained())

    def _is_finite_everywhere(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether the norm is finite on all ranks.

        Copies of the model have the same gradients. Of a parameter that tensor-parallel ranks hold in full, each has computed
        the gradient by itself, and the norm of each rank counts its own.
        """
        is_finite = torch.isfinite(norm)
        if self._config.workers_per_replica > 1:
            is_finite = is_finite.to(torch.uint8)
            dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        return is_finite.to(torch.bool)


def _can_leave_out(optimizer: Optimizer) -> bool:
    """Return whether a step of the optimizer changes nothing if its ``found_inf``, which gradient scalers use too, is 1."""
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"])
    )


def _count_hooks(parameter: nn.Parameter) -> tuple[int, int]:
    """Return how many hooks a parameter has, for its gradient and after that."""
    return len(parameter._backward_hooks or ()), len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
