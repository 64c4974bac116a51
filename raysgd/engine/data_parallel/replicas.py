"""The ways to hold a model over the data-parallel ranks, one class for each. Worker side.

| class | each rank holds | gradients are averaged by |
| --- | --- | --- |
| `DdpReplicas` | all | DDP |
| `AveragedReplicas` | all; its tensor-parallel shards or its stage | all-reduce, where DDP cannot |
| `ShardedOptimizer` (ZeRO 1) | its shards of the optimizer's state | reduce-scatter, once a step |
| `ShardedGradients` (ZeRO 2) | also its shards of gradients | reduce-scatter, in each backward pass |
| `FullySharded` (ZeRO 3, fully_sharded.py) | also its shards of parameters | FSDP2 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.config import EngineConfig
from raysgd.engine.gradients.accumulation import Accumulation
from raysgd.engine.gradients.averaging import average_gradients, in_buckets
from raysgd.engine.model.local_tensors import local_of
from raysgd.engine.optimizer.shards import DividedShards, OptimizerShards
from raysgd.errors import UsageError
from raysgd.session import api
from raysgd.torch.model import DistributedModel, broadcast_buffers, broadcast_from_rank_0, prepare_model, unwrap

#: Returns the mesh of all workers.
Mesh = Callable[[], DeviceMesh]
#: Takes down what was done to modules, given by their names.
Note = Callable[[Iterable[str], str], None]


class DataParallel:
    """One way to hold parameters, gradients and optimizer state over the data-parallel ranks.

    `raysgd.engine.composing.compose` calls `start_alike`, `shard_model`, `make_shards` and `wrap`, in this order; and
    `raysgd.engine.step.Step` the others, in each step. All ranks call them.

    Args:
        config: The strategies.
        mesh: Called only if it is needed, because it makes process groups.
        note: For `raysgd.Engine.describe`.

    Attributes:
        shards: What the optimizer updates in place of parameters; empty if it updates all as they are.
        is_sharded: Whether a rank updates its shards of the parameters alone.
        gathers_parameters: Whether a pass computes with gathered parameters, not with those that the model has: it can be made
            once, and hooks of the model's parameters do not find its gradients.
    """

    is_sharded = False
    gathers_parameters = False
    _collects_each_pass = False

    def __init__(self, config: EngineConfig, mesh: Mesh, note: Note) -> None:
        self._config, self._mesh, self._note = config, mesh, note
        self.shards = OptimizerShards([], None)
        # A pipeline makes several backward passes for a batch.
        self._is_early = config.pipeline_parallel == 1

    def start_alike(self, model: nn.Module) -> None:
        """Give all ranks the values of rank 0, before master weights and shards are made of them."""
        if api.world_size() > 1:
            broadcast_from_rank_0(model)

    def shard_model(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Replace the model's parameters by this rank's shards, if it has such."""

    def make_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make what the optimizer updates in place of its parameters."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model that the loop calls."""
        return model

    def parameters_of(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        """Return the model's parameters by name, as the loop sees them between two steps.

        Raises:
            UsageError: The loop has replaced one, which is not possible here.
        """
        return dict(model.named_parameters())

    def start_new(self, name: str, parameter: nn.Parameter) -> None:
        """Give all ranks the values of rank 0 in a parameter that the loop has added. All ranks call it.

        Raises:
            UsageError: It does not have the type that the model computes in.
        """
        config = self._config
        if config.precision == "bf16-true" and parameter.dtype in (torch.float32, torch.float64):
            raise UsageError(
                f'the loop has added the parameter {name}, which is {parameter.dtype}, and with precision="bf16-true" the model '
                "computes in bf16: convert the new layer by layer.to(torch.bfloat16)."
            )
        is_replicated = config.tensor_parallel > 1 and not is_dtensor(parameter)
        for axis in ("dp", "tp") if is_replicated else ("dp",) if api.world_size() > 1 else ():
            dist.broadcast(local_of(parameter.detach()), group=self._mesh().get_group(axis), group_src=0)

    def follow(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Begin a forward pass of a model, whose parameters the loop may have unfrozen, or added, since the last one."""
        self.shards.add(parameters)

    def begin_forward(self, *, will_complete: bool) -> None:
        """Begin a forward pass that a backward pass may follow, which may complete the step."""

    def begin_pass(self, accumulation: Accumulation) -> None:
        """Begin a backward pass."""
        if self._is_early:
            self.shards.is_collecting = self._collects_each_pass or accumulation.will_complete

    def end_pass(self, accumulation: Accumulation) -> None:
        """Make the gradients of a backward pass those of all ranks, if the step is complete.

        Raises:
            UsageError: The ranks have computed gradients of different parameters, which is not possible here.
        """
        if self._collects_each_pass or accumulation.is_complete:
            self.shards.collect_gradients()
        self.shards.is_collecting = False  # a pass of another engine may reach these parameters, as in a GAN

    def share_gradients(self) -> None:
        """Make the gradients of an unfinished step those of all ranks; passes that follow add to them. All ranks call it."""
        if not self._collects_each_pass:
            self.shards.collect_gradients()

    def resume_gradients(self) -> None:
        """Continue a step whose gradients, as `share_gradients` made them, were restored."""

    def share_buffers(self, model: nn.Module) -> None:
        """Give all replicas the buffers of the first one, which are those that are evaluated and saved. All ranks call it."""
        if api.world_size() > (size := self._config.workers_per_replica):
            broadcast_buffers(model, self._mesh().get_group("dp") if size > 1 else None)

    def check_gradients(self) -> None:
        """Check that the gradients of a complete step are those of all ranks.

        Raises:
            UsageError: They are not: parameters were left out.
        """


class DdpReplicas(DataParallel):
    """Each rank holds and updates all, and DDP averages gradients; a world of one has nothing to average."""

    _model: DistributedModel | None = None  # if there are several ranks
    _is_averaged_late = False  # what this backward pass computes, after it

    def start_alike(self, model: nn.Module) -> None:
        if self._config.precision == "bf16-true":  # else DDP does it
            super().start_alike(model)

    def make_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._config.precision == "bf16-true":
            self.shards = OptimizerShards(parameters, None)

    def wrap(self, model: nn.Module) -> nn.Module:
        settings = {"find_unused_parameters": True} if self._config.find_unused_parameters else {}
        wrapped = prepare_model(model, move_to_device=False, ddp_kwargs=settings)
        if isinstance(wrapped, DistributedModel):
            wrapped.broadcast_buffers = False  # see `share_buffers`
            wrapped.leave_unchecked()  # the engine averages gradients of several passes
            self._model = wrapped
            self._averaged = [each for each in model.parameters() if each.requires_grad]
            self._accumulated = _accumulators(self._averaged)
            self._note([""], "DDP")
        return wrapped

    def follow(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        trained = [each for each in parameters if each.requires_grad]
        if self._config.precision == "bf16-true":
            self.shards.add(trained)
        if self._model is None or not trained or not torch.is_grad_enabled():
            return
        if (accumulated := _accumulators(trained)) != self._accumulated:
            self._averaged, self._accumulated = trained, accumulated
            self._model.average_trained()

    def begin_forward(self, *, will_complete: bool) -> None:
        """Make DDP average gradients in the backward pass that completes a step, and in no other."""
        if self._model is not None:
            self._model.require_backward_grad_sync = will_complete

    def begin_pass(self, accumulation: Accumulation) -> None:
        super().begin_pass(accumulation)
        if self._model is not None:
            # DDP averages in the first backward pass after a forward pass that was made for that.
            is_averaged = accumulation.has_computed and self._model.require_backward_grad_sync
            self._is_averaged_late = accumulation.will_complete and not is_averaged

    def end_pass(self, accumulation: Accumulation) -> None:
        if self._is_averaged_late:
            self.share_gradients()
        super().end_pass(accumulation)

    def share_gradients(self) -> None:
        if self._model is not None:
            for bucket in in_buckets(self._averaged):
                average_gradients(bucket, self._mesh().get_group("dp"))
        super().share_gradients()

    def check_gradients(self) -> None:
        if self._model is None or self._model.find_unused_parameters:
            return
        try:
            self._model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise UsageError(
                f"this backward pass did not compute gradients of all parameters{self._name_missing(self._model)}: give "
                "Engine(find_unused_parameters=True) if the loop uses different parameters in different steps or on "
                "different ranks, or freeze those that are never used by requires_grad_(False)."
            ) from error

    def _name_missing(self, model: nn.Module) -> str:
        names = [name for name, each in unwrap(model).named_parameters() if each.requires_grad and each.grad is None]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f" ({', '.join(names[:3])}{more} have none on rank {api.world_rank()})" if names else ""


def _accumulators(parameters: Sequence[nn.Parameter]) -> list[tuple[Any, ...]]:
    """Return what DDP attaches hooks to, and the layouts that it makes its buckets for.

    torch makes a new accumulator if a parameter is converted to another type, even if it is converted back later.
    """
    nodes = _Accumulators.apply(*parameters).grad_fn.next_functions if parameters else ()  # type: ignore[no-untyped-call]
    return [(node, each.stride()) for (node, _), each in zip(nodes, parameters, strict=True)]


class _Accumulators(torch.autograd.Function):
    """An operation of all parameters, whose graph has their accumulators: asking for each one takes five times as long."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


class AveragedReplicas(DataParallel):
    """Each rank updates all that it holds, and the engine averages gradients.

    DDP cannot with tensor parallelism and in pipelines. With ``find_unused_parameters`` it would leave zeros where no rank has
    a gradient, which decay and momenta would apply to.
    """

    def make_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        mesh = self._mesh()
        group = mesh.get_group("dp") if mesh.size(0) > 1 else None
        whole_on = mesh["tp"] if self._config.tensor_parallel > 1 else None
        self.shards = OptimizerShards(parameters, group, is_early=self._is_early, whole_on=whole_on)


class ShardedOptimizer(DataParallel):
    """ZeRO 1: each rank updates its shards of the parameters."""

    is_sharded = True
    _what = "optimizer state"

    def make_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        self.shards = DividedShards(parameters, self._mesh(), is_early=self._is_early)
        self._note([""], f"{self._what} divided over {self._mesh().size(0)} ranks")


class ShardedGradients(ShardedOptimizer):
    """ZeRO 2: each rank has the gradients of its shards alone, from the first backward pass of a step on."""

    _what = "optimizer state and gradients"
    _collects_each_pass = True
