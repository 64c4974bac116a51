"""Pipeline parallelism: a model's blocks are split into stages, and micro-batches flow through them.

A stage is the model itself without the other stages' blocks: the model's own forward pass makes masks, rotary embeddings and
losses, and the names of parameters stay. The schedules and their messages are those of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.engine.pipeline.stages import StageSplit, item_counter, read_model
from raysgd.engine.tensor_parallel.collectives import broadcast_from_first
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: What a stage takes from a batch; each stage has the whole batch, and only hidden states are sent.
_FRONT_KEYS = frozenset({"input_ids", "inputs_embeds", "token_type_ids"})
_STAGE_KEYS = frozenset({"attention_mask", "position_ids"})

#: Shapes of batches whose buffers are kept.
_MAX_RUNS = 8
#: Further arguments of the model: hidden states are all that passes on from a forward pass.
_OPTIONS = {"use_cache": False, "return_dict": True}


def split_model(model: nn.Module, mesh: DeviceMesh) -> PipelineModel:
    """Keep this rank's stage of a model; every rank of the mesh calls it with the whole model.

    The blocks are balanced by their parameters. Embeddings are on the first stage, the head and the loss on the last. If the
    output layer is tied to the embedding, both stages have the weight, and their gradients are added up.

    Args:
        model: A model for GPT-2, LLaMA or BERT of transformers, which is changed in place. All ranks get the parameters of
            the mesh's first.
        mesh: The pipeline axis, ``mesh["pp"]``.

    Returns:
        The stage. Its `module` is the model; tensor parallelism and then data parallelism may be applied to it.

    Raises:
        ConfigError: The model has a class that is not known, too few blocks, or parameters that are shared between blocks.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"A model is split over one axis of a mesh, and this one has {mesh.ndim}: give mesh['pp'].")
    split = read_model(model, mesh.size())
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast_from_first(tensor, mesh.get_group())
    split.keep_stage(model, mesh.get_local_rank())
    model.__class__ = type(
        type(model).__name__,
        (_Stage, type(model)),
        {"__module__": type(model).__module__, "__doc__": type(model).__doc__},
    )
    assert isinstance(model, _Stage)
    model._stage_state = _StageState(
        is_first=mesh.get_local_rank() == 0,
        is_last=mesh.get_local_rank() == mesh.size() - 1,
        base=split.base,
        count_items=item_counter(model),
    )
    return PipelineModel(model, mesh, split)


@dataclass
class _StageState:
    is_first: bool
    is_last: bool
    base: str
    count_items: Callable[[Mapping[str, Tensor]], Tensor | int]
    #: Whether a schedule runs; nobody else can run a stage.
    is_running: bool = False
    #: The items of the whole batch of the current step.
    num_items: Tensor | int = 1
    #: What gradients are multiplied by.
    scale: float | Tensor = 1.0
    #: The type of the hidden states between stages.
    dtype: torch.dtype = torch.float32


class _Stage(nn.Module):
    """Mixed into a model's class: its forward pass takes hidden states, and returns hidden states or the loss.

    Attributes:
        _stage_state: What the stage knows of its place and of the current step.
    """

    _stage_state: _StageState

    def forward(self, *hidden: Tensor, **batch: Tensor) -> Tensor:
        state = self._stage_state
        if not state.is_running:
            raise ConfigError(
                "This model is one stage of a pipeline, and cannot be called: call `step` or `evaluate` of its PipelineModel."
            )
        keys = _STAGE_KEYS | _FRONT_KEYS if state.is_first else _STAGE_KEYS
        inputs: dict[str, Any] = {key: value for key, value in batch.items() if key in keys}
        if not state.is_first:
            (inputs["inputs_embeds"],) = hidden
        if not state.is_last:
            outputs = getattr(self, state.base)(**inputs, **_OPTIONS)
            result: Tensor = outputs.last_hidden_state.to(state.dtype)
            return result
        return self._share_of_loss(inputs, batch)

    def _share_of_loss(self, inputs: dict[str, Any], batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the micro-batch adds to the batch's loss, the mean over all items."""
        state = self._stage_state
        num_items = state.count_items(batch)
        value = super().forward(**inputs, labels=batch["labels"], **_OPTIONS).loss
        # A mean over no items is not a number; such a micro-batch adds nothing.
        share = torch.where(torch.as_tensor(num_items, device=value.device) > 0, value.float(), 0.0)
        return torch.stack([share * num_items / state.num_items])


@dataclass
class _Run:
    """A schedule for batches of one shape, and the torch stage that it drives."""

    schedule: Any
    module: nn.Module


@dataclass
class PipelineModel:
    """One stage of a model, and the means to train on whole batches.

    Attributes:
        module: The stage's module. It may be replaced by a wrapper of it: DDP or FSDP2 over a data-parallel axis.
        mesh: The pipeline axis.
        split: Which blocks each stage has.
    """

    module: nn.Module
    mesh: DeviceMesh
    split: StageSplit
    _model: _Stage = field(init=False)
    _runs: dict[Any, _Run] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        assert isinstance(self.module, _Stage)
        self._model = self.module

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embeddings."""
        return self._model._stage_state.is_first

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head and computes the loss."""
        return self._model._stage_state.is_last

    @property
    def copied_parameters(self) -> tuple[str, ...]:
        """Names of this stage's parameters that are copies of the first stage's: in norms and checkpoints they count once."""
        return tuple(back for _, back in self.split.ties) if self.is_last and not self.is_first else ()

    def step(
        self,
        batch: Mapping[str, Any],
        micro_batches: int | None = None,
        *,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Run the forward and backward passes of a whole batch; gradients are added to those that are there.

        Args:
            batch: The arguments of the model, tensors with a row for each example. Every stage gives the same batch.
            micro_batches: The parts that the batch is cut into. None: four for each stage. If it does not divide the rows,
                the largest number below it that does is used.
            scale: What the gradients are multiplied by: a loss scale, or the part that the batch is of an accumulated step.

        Returns:
            The loss of the batch as the whole model computes it, without `scale`; all stages have it.

        Raises:
            ConfigError: The batch has arguments that a pipeline does not know.
        """
        held = self._hold_tied_gradients()
        loss = self._run(batch, micro_batches, scale, is_training=True)
        self._add_tied_gradients(held)
        return loss

    def evaluate(self, batch: Mapping[str, Any], micro_batches: int | None = None) -> Tensor:
        """Compute the loss of a whole batch without gradients; arguments and result as those of `step`."""
        with torch.no_grad():
            return self._run(batch, micro_batches, 1.0, is_training=False)

    def _run(
        self,
        batch: Mapping[str, Any],
        micro_batches: int | None,
        scale: float | Tensor,
        *,
        is_training: bool,
    ) -> Tensor:
        state = self._model._stage_state
        tensors, num_rows, length = self._check_batch(batch)
        num_parts = _divisor(num_rows, micro_batches or 4 * self.mesh.size())
        state.num_items = state.count_items(tensors)
        state.dtype, state.scale = self._hidden_dtype(), scale
        run = self._prepare(num_rows // num_parts, length, num_parts, state.dtype, is_training)
        target = torch.zeros(num_parts) if self.is_last and is_training else None
        state.is_running = True
        try:
            outputs = run.schedule.step(target=target, **tensors) if is_training else run.schedule.eval(**tensors)
        finally:
            state.is_running = False
        loss = outputs.detach().sum() if self.is_last else torch.zeros((), device=self._device())
        dist.broadcast(loss, group=self.mesh.get_group(), group_src=self.mesh.size() - 1)
        return loss

    def _prepare(self, num_rows: int, length: int, num_parts: int, dtype: torch.dtype, is_training: bool) -> _Run:
        """Return a schedule for micro-batches of one shape; shapes are known, so stages do not ask each other for them."""
        key = (num_rows, length, num_parts, dtype, is_training)
        run = self._runs.get(key)
        if run is not None and run.module is self.module:
            self._runs[key] = self._runs.pop(key)  # the newest is the last
            return run
        while len(self._runs) >= _MAX_RUNS:  # each has buffers for its shapes
            del self._runs[next(iter(self._runs))]
        # It imports torch's compiler, for which a model without stages would wait too.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        hidden = torch.empty(
            num_rows, length, self.split.hidden_size, dtype=dtype, device="meta", requires_grad=is_training
        )
        stage = PipelineStage(
            self.module,
            self.mesh.get_local_rank(),
            self.mesh.size(),
            self._device(),
            input_args=() if self.is_first else (hidden,),
            output_args=(torch.empty(1, device="meta", requires_grad=is_training),) if self.is_last else (hidden,),
            group=self.mesh.get_group(),
        )
        is_enough = is_training and num_parts >= self.mesh.size()
        kind = Schedule1F1B if is_enough else ScheduleGPipe
        state = self._model._stage_state
        loss_fn = (lambda output, _: output.sum() * state.scale) if is_training else None
        run = self._runs[key] = _Run(kind(stage, num_parts, loss_fn=loss_fn, scale_grads=False), self.module)
        return run

    def _check_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], int, int]:
        """Return the tensors of a batch, its rows and its sequence length."""
        tensors = {key: value for key, value in batch.items() if value is not None}
        known = _FRONT_KEYS | _STAGE_KEYS | {"labels"}
        odd = [key for key, value in tensors.items() if not isinstance(value, Tensor) or value.dim() == 0]
        odd += [key for key in tensors if key not in known]
        if odd:
            raise ConfigError(
                f"pipeline_parallel does not know what to do with {', '.join(odd)} of the batch: it takes tensors, namely "
                f"{', '.join(sorted(known))}."
            )
        source = tensors.get("input_ids", tensors.get("inputs_embeds"))
        if source is None or "labels" not in tensors:
            raise ConfigError(f"The batch has {', '.join(tensors)}; pipeline_parallel needs input_ids and labels.")
        num_rows, length = source.shape[:2]
        device = self._device()
        whole = {
            key: (value.expand(num_rows, *value.shape[1:]) if value.shape[0] == 1 else value).to(device)
            for key, value in tensors.items()
        }
        return whole, num_rows, length

    def _hidden_dtype(self) -> torch.dtype:
        return next(one.dtype for one in self._model.parameters() if one.is_floating_point())

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    # The weight of a tied output layer

    def _tied_parameters(self) -> list[nn.Parameter]:
        if self.is_first is self.is_last:  # Neither end, or a pipeline of one stage.
            return []
        names = [front if self.is_first else back for front, back in self.split.ties]
        return [self._model.get_parameter(name) for name in names]

    def _hold_tied_gradients(self) -> list[Tensor | None]:
        """Put the gradients of earlier steps aside, which have both stages' parts already."""
        held = []
        for parameter in self._tied_parameters():
            held.append(parameter.grad)
            parameter.grad = None
        return held

    def _add_tied_gradients(self, held: Sequence[Tensor | None]) -> None:
        """Add up the two stages' gradients of a tied weight, in the same order on both."""
        for parameter, earlier in zip(self._tied_parameters(), held, strict=True):
            if parameter.grad is not None:
                own = parameter.grad.to_local() if is_dtensor(parameter.grad) else parameter.grad
                other = self._exchange(own.contiguous())
                own.copy_(own + other if self.is_first else other + own)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _exchange(self, own: Tensor) -> Tensor:
        peer, group = (self.mesh.size() - 1 if self.is_first else 0), self.mesh.get_group()
        other = torch.empty_like(own)
        operations = [
            dist.P2POp(dist.isend, own, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return other


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above the limit."""
    return next(one for one in range(min(number, limit), 0, -1) if number % one == 0)
