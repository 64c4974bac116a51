"""The model that a training loop calls when its blocks are stages of a pipeline. Worker side.

The schedules and their messages are those of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raysgd.engine.model.local_tensors import local_of, place_gradient
from raysgd.engine.pipeline.chunks import BATCH_KEYS, Chunk, check_split, remove_others
from raysgd.engine.pipeline.stages import V_SCHEDULES, StageSplit, read_model
from raysgd.engine.tensor_parallel.collectives import broadcast_from_first
from raysgd.errors import ConfigError
from raysgd.torch.attached import AttachedForward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Shapes of batches whose buffers are kept.
_MAX_RUNS = 8


class PipelineOutput(dict[str, Any]):
    """The output of a pipelined model: the loss, as an attribute and as an item."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss


class PipelinedModel(nn.Module):
    """The stages of a model that this rank has. A call makes the passes of all stages: forward, and backward while training.

    Every rank of the mesh makes one of the whole model, which is changed in place: other ranks' parts are removed. Names of
    parameters and ``state_dict()`` are those of the model. If several ranks have a parameter, as a tied embedding, their
    gradients are added up.

    Args:
        model: A model of transformers. All ranks get the parameters of the mesh's first.
        mesh: The pipeline axis, ``mesh["pp"]``.
        schedule: The name of a schedule of torch, see `raysgd.EngineConfig`; None: 1F1B.
        micro_batches: Parts of a batch; None: four for each rank. If it does not divide the rows, the largest number below it
            that does is used.

    Attributes:
        module: The model with the rank's stages.
        mesh: The pipeline axis.
        split: Which blocks each stage has.
        scale: Returns, for a batch, what its gradients are multiplied by: a loss scale, or its part of an accumulated step.

    Raises:
        ConfigError: The model cannot be split; the message says why.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, schedule: str | None = None, micro_batches: int | None = None
    ) -> None:
        super().__init__()
        if mesh.ndim != 1:
            raise ConfigError(
                f"A model is split over one axis of a mesh, and this one has {mesh.ndim}: give mesh['pp']."
            )
        self.mesh, self._rank = mesh, mesh.get_local_rank()
        self.split = read_model(model, mesh.size(), schedule)
        self.scale: Callable[[Any], float | Tensor] = lambda batch: 1.0
        self._schedule, self._micro_batches = schedule, micro_batches
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast_from_first(tensor, mesh.get_group())
        check_split(model, self.split)
        self._chunks = [Chunk(model, self.split, stage) for stage in _stages_of(self.split, self._rank)]
        remove_others(model, self.split, self._rank)
        model.forward = AttachedForward(model.forward, self._run_chunk)
        self._running: Chunk | None = None
        self._loss_scale: float | Tensor | None = None
        self._runs: dict[Any, Any] = {}  # schedules of torch, by the shapes of batches
        self.module = model

    @property
    def copied_parameters(self) -> tuple[str, ...]:
        """Names of parameters that a rank before this one has too: in norms and checkpoints they count once."""
        return tuple(tie[self._rank] for tie in self.split.ties if self._rank in tie and self._rank > min(tie))

    def forward(self, **batch: Any) -> PipelineOutput:
        if self.training and torch.is_grad_enabled():
            return PipelineOutput(self.step(batch))
        return PipelineOutput(self.evaluate(batch))

    def step(self, batch: Mapping[str, Any]) -> Tensor:
        """Run the forward and backward passes of a whole batch; gradients are added to those that are there.

        Args:
            batch: The arguments of the model, tensors with a row for each example. Every rank gives the same batch.

        Returns:
            The loss of the batch as the whole model computes it, without `scale`; all ranks have it.

        Raises:
            ConfigError: The batch has arguments that a pipeline does not know.
        """
        scale = self.scale(batch)
        tied = self._own_tied()
        held = [parameter.grad for _, parameter in tied]  # of earlier steps: has all ranks' parts already
        for _, parameter in tied:
            parameter.grad = None
        loss = self._run(batch, scale)
        for (tie, parameter), earlier in zip(tied, held, strict=True):
            self._add_gradients(tie, parameter)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the loss of a whole batch without gradients; arguments and result are those of `step`."""
        return self._run(batch, None)

    def _run(self, batch: Mapping[str, Any], scale: float | Tensor | None) -> Tensor:
        """Run a schedule; without gradients if there is no scale of them."""
        tensors, num_rows, lengths = self._check_batch(batch)
        dtype = next(one.dtype for one in self._chunks[0].model.parameters() if one.is_floating_point())
        for chunk in self._chunks:
            chunk.num_items, chunk.dtype = chunk.count_items(tensors), dtype
        self._loss_scale = scale
        schedule, num_parts = self._prepare(num_rows, lengths, dtype, is_training=scale is not None)
        has_last = any(chunk.is_last for chunk in self._chunks)
        if scale is None:
            outputs = schedule.eval(**tensors)
        else:
            outputs = schedule.step(target=torch.zeros(num_parts) if has_last else None, **tensors)
        loss = outputs.detach().sum() if has_last else torch.zeros((), device=self._device())
        dist.broadcast(loss, group=self.mesh.get_group(), group_src=self.split.rank_of[-1])
        return loss

    def _run_chunk(self, *hidden: Tensor, **batch: Tensor) -> Any:
        if self._running is None:
            raise ConfigError(
                "This model is one stage of a pipeline, and cannot be called: call the model that engine.compose returned."
            )
        return self._running(*hidden, **batch)

    def _enter(self, chunk: Chunk, forward: Callable[..., Any], *hidden: Tensor, **batch: Tensor) -> Any:
        self._running = chunk
        try:
            return forward(*hidden, **batch)
        finally:
            self._running = None

    def _prepare(
        self, num_rows: int, lengths: tuple[int, int], dtype: torch.dtype, *, is_training: bool
    ) -> tuple[Any, int]:
        """Return a schedule for batches of one shape, and its number of micro-batches."""
        key = (num_rows, lengths, dtype, is_training)
        run = self._runs.pop(key, None)
        if run is None:
            while len(self._runs) >= _MAX_RUNS:  # each has buffers for its shapes
                del self._runs[next(iter(self._runs))]
            run = self._make_schedule(num_rows, lengths, dtype, is_training)
        self._runs[key] = run  # the newest is the last
        return run, run._n_microbatches

    def _make_schedule(self, num_rows: int, lengths: tuple[int, int], dtype: torch.dtype, is_training: bool) -> Any:
        # It imports torch's compiler, for which a model without stages would wait too.
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        limit = self._micro_batches or 4 * self.mesh.size()
        problem: Exception | None = None
        for num_parts in (one for one in range(min(num_rows, limit), 0, -1) if num_rows % one == 0):
            kind: Any = get_schedule_class(self._schedule_name(num_parts, is_training))
            rows = num_rows // num_parts
            stages: Any = [self._make_stage(chunk, rows, lengths, dtype, is_training) for chunk in self._chunks]
            is_single = issubclass(kind, PipelineScheduleSingle)
            loss_fn = (lambda output, _: output.sum() * self._loss_scale) if is_training else None
            try:
                schedule = kind(stages[0] if is_single else stages, num_parts, loss_fn=loss_fn, scale_grads=False)
            except ValueError as error:  # the number of micro-batches does not suit the schedule
                problem = error
                continue
            if not is_single and not is_training:
                _keep_forward_passes(schedule)
            return schedule
        raise ConfigError(
            f"pipeline_schedule={self._schedule!r} cannot run a batch of {num_rows} rows in up to {limit} micro-batches: "
            f"{problem} Give larger batches, micro_batches= or another schedule."
        )

    def _schedule_name(self, num_parts: int, is_training: bool) -> str:
        name = self._schedule or "1F1B"
        if len(self._chunks) == 1:
            return name if is_training and num_parts >= self.mesh.size() else "GPipe"
        if is_training:
            return name
        return "ZBVZeroBubble" if name in V_SCHEDULES else "LoopedBFS"

    def _make_stage(
        self, chunk: Chunk, num_rows: int, lengths: tuple[int, int], dtype: torch.dtype, is_training: bool
    ) -> Any:
        """Make torch's stage. The shapes of what is sent are known, so that stages do not ask each other for them."""
        from torch.distributed.pipelining import PipelineStage

        def sent(stage: int) -> tuple[Tensor, ...]:
            shapes = [(num_rows, length, self.split.hidden_size) for length in lengths[: self.split.num_sent(stage)]]
            return tuple(torch.empty(one, dtype=dtype, device="meta", requires_grad=is_training) for one in shapes)

        loss = torch.empty(1, device="meta", requires_grad=is_training)
        stage: Any = PipelineStage(
            self.module,
            chunk.stage,
            len(self.split.ranges),
            self._device(),
            input_args=() if chunk.is_first else sent(chunk.stage - 1),
            output_args=(loss,) if chunk.is_last else sent(chunk.stage),
            group=self.mesh.get_group(),
        )
        stage.forward_maybe_with_nosync = partial(self._enter, chunk, stage.forward_maybe_with_nosync)
        return stage

    def _check_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], int, tuple[int, int]]:
        """Return the tensors of a batch, its rows, and the lengths of its sequences: of the only stack, or of both."""
        tensors = {key: value for key, value in batch.items() if value is not None}
        known = BATCH_KEYS[len(self.split.stacks)]
        odd = [
            key for key, value in tensors.items() if key not in known or not isinstance(value, Tensor) or not value.ndim
        ]
        if odd:
            raise ConfigError(
                f"pipeline_parallel does not know what to do with {', '.join(odd)} of the batch: it takes tensors, namely "
                f"{', '.join(sorted(known))}."
            )
        source = tensors.get("input_ids", tensors.get("inputs_embeds"))
        if source is None or "labels" not in tensors:
            raise ConfigError(f"The batch has {', '.join(tensors)}; pipeline_parallel needs input_ids and labels.")
        num_rows = source.shape[0]
        device = self._device()
        whole = {
            key: (value.expand(num_rows, *value.shape[1:]) if value.shape[0] == 1 else value).to(device)
            for key, value in tensors.items()
        }
        decoded = whole.get("decoder_input_ids", whole["labels"])
        return whole, num_rows, (source.shape[1], decoded.shape[-1])

    def _device(self) -> torch.device:
        return next(self._chunks[0].model.parameters()).device

    def _own_tied(self) -> list[tuple[Mapping[int, str], nn.Parameter]]:
        """Return the parameters that other ranks have too."""
        model: Any = self._chunks[0].model
        ties = [tie for tie in self.split.ties if self._rank in tie]
        # FSDP may have left whole parameters in the place of those with gradients.
        if ties and hasattr(model, "reshard"):
            model.reshard()
        return [(tie, model.get_parameter(tie[self._rank])) for tie in ties]

    def _add_gradients(self, tie: Mapping[int, str], parameter: nn.Parameter) -> None:
        """Add up the gradients of the ranks that have a parameter, in the same order on all of them."""
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        place_gradient(parameter)
        own = local_of(parameter.grad)
        parts = {rank: torch.empty_like(own) for rank in tie} | {self._rank: own.contiguous()}
        operations, group = [], self.mesh.get_group()
        for rank in parts.keys() - {self._rank}:
            operations.append(dist.P2POp(dist.isend, parts[self._rank], group=group, group_peer=rank))
            operations.append(dist.P2POp(dist.irecv, parts[rank], group=group, group_peer=rank))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        first, *others = (parts[rank] for rank in tie)
        for other in others:
            first = first + other
        own.copy_(first)

    def __raysgd_unwrap__(self) -> nn.Module:
        """Return the rank's stages, which are saved in a checkpoint."""
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


def _stages_of(split: StageSplit, rank: int) -> list[int]:
    return [stage for stage, own in enumerate(split.rank_of) if own == rank]


def _keep_forward_passes(schedule: Any) -> None:
    """Make a schedule of several stages leave out its backward passes; some of torch's do not know evaluation."""
    from torch.distributed.pipelining.schedules import FORWARD, RECV_F, RESHARD, SEND_F, UNSHARD

    orders = schedule.pipeline_order_with_comms
    for rank, actions in orders.items():
        alone = [one for action in actions for one in action.sub_actions or (action,)]
        orders[rank] = [one for one in alone if one.computation_type in (FORWARD, SEND_F, RECV_F, UNSHARD, RESHARD)]
