"""What the engine does to a model: a frozen dataclass, made from arguments, a file or the command line.

Plain data: the driver and the command check it without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from raysgd.config.argument_names import refuse_unknown_fields
from raysgd.config.checks import check_amount, check_bool, check_choice, check_count
from raysgd.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16", "bf16-true"]
ActivationCheckpointing = Literal["full", "selective"]
#: Of so many blocks, activation checkpointing computes the first one again.
RECOMPUTED_EVERY: dict[ActivationCheckpointing, int] = {"full": 1, "selective": 2}
Compile = Literal["model", "blocks"]
PipelineSchedule = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"
]
#: Schedules that compute the gradients of weights later than those of hidden states.
ZERO_BUBBLE_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
#: Fields that say how strategies are chosen; they are not strategies.
PLAN_FIELDS = ("plan", "memory_per_device")
#: Strategies that do not act in the optimizer's step.
WITHOUT_OPTIMIZER = {
    "precision": ("bf16",),
    "zero_stage": (3,),
    "cpu_offload": ...,
    "activation_checkpointing": ...,
    "compile": ...,
    "find_unused_parameters": ...,
}
#: Why the two do not go together.
OWN_PLAN_OF_SEQUENCES = (
    "sequence_parallel=True divides the sequence in the layers of the engine's own plan, and tensor_plan is yours, which stays "
    "as it is: leave sequence_parallel out, and give SequenceParallel() to norms and the layouts Shard(1) to their neighbours."
)
#: A device with less memory than this was surely not given in bytes.
_SMALLEST_DEVICE_BYTES = 1e6


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The strategies that the engine applies. Each field is an argument of `raysgd.Engine` and a flag ``--engine.<name>``.

    Attributes:
        precision: ``"fp32"``; ``"bf16"`` or ``"fp16"``: autocast, fp16 with a dynamic loss scale; ``"bf16-true"``: parameters
            in bf16, with fp32 master weights in the optimizer.
        loss_scale: First scale of fp16 losses. It is halved when gradients overflow, and doubled after 2000 steps without that.
        zero_stage: What each data-parallel rank holds only a part of. 0: nothing (DDP); 1: the optimizer's state; 2: also
            gradients; 3: also parameters (FSDP2).
        cpu_offload: Whether parameters, gradients and optimizer state wait in host memory. Needs ``zero_stage=3``.
        tensor_parallel: Ranks that each layer is sharded over.
        sequence_parallel: Whether the activations between layers are sharded too, along the sequence.
        pipeline_parallel: Ranks that hold the stages of the layers: one each, or two with some schedules.
        micro_batches: Parts that a pipeline cuts each batch into. None: four for each rank of the pipeline.
        pipeline_schedule: In which order the passes of micro-batches run: the name of a class of
            ``torch.distributed.pipelining`` without ``Schedule``. ``"1F1B"`` and ``"GPipe"`` give each rank one stage, the
            others two. None: 1F1B, and GPipe for batches with fewer micro-batches than ranks.
        accumulation_steps: Batches of the loader per optimizer step. Gradients are communicated once per step, and with
            ``zero_stage`` 2 and 3 in each backward pass.
        activation_checkpointing: ``"full"``: each block is computed again in the backward pass. ``"selective"``: every second
            block. None: activations are kept.
        clip_grad_norm: Limit of the gradients' global norm, over all shards; None: gradients are not clipped.
        compile: ``"model"`` or ``"blocks"``: what ``torch.compile`` compiles; None: nothing.
        fused_optimizer: Whether torch's optimizer makes its steps with one kernel. None: on a GPU and with ``cpu_offload``, if
            it can, unless it was made with ``fused=`` or ``foreach=``. False: as it was made. Adam and AdamW can with all
            strategies, SGD where ranks hold whole parameters.
        find_unused_parameters: Whether ranks or steps may leave out parameters, as a mixture of experts does. A parameter that
            some ranks have used gets the mean over all ranks; one that none has used stays as it is.
        weighted_gradients: Whether gradients are those of the mean over all rows (or tokens) of a step, when ranks or
            micro-batches have different numbers of them. Rows that the engine's loader would repeat are left out.
        plan: ``"auto"``: ``Engine.compose`` chooses the strategies that are not given. None: they are off.
        memory_per_device: Bytes of a device for ``plan="auto"``, such as ``80e9``. None: what the device has; on CPUs the
            node's memory, divided by its workers.
    """

    precision: Precision = "fp32"
    loss_scale: float = 65536.0
    zero_stage: int = 0
    cpu_offload: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    micro_batches: int | None = None
    pipeline_schedule: PipelineSchedule | None = None
    accumulation_steps: int = 1
    activation_checkpointing: ActivationCheckpointing | None = None
    clip_grad_norm: float | None = None
    compile: Compile | None = None
    fused_optimizer: bool | None = None
    find_unused_parameters: bool = False
    weighted_gradients: bool = False
    plan: Literal["auto"] | None = None
    memory_per_device: float | None = None

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, get_args(Precision))
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage={self.zero_stage!r} is not known; give 0, 1, 2 or 3.")
        for name in ("tensor_parallel", "pipeline_parallel", "accumulation_steps"):
            check_count(name, getattr(self, name), minimum=1)
        if self.micro_batches is not None:
            check_count("micro_batches", self.micro_batches, minimum=1)
        for name, kind in (
            ("activation_checkpointing", ActivationCheckpointing),
            ("compile", Compile),
            ("pipeline_schedule", PipelineSchedule),
        ):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), get_args(kind))
        check_amount("loss_scale", self.loss_scale, positive=True)
        if self.clip_grad_norm is not None:
            check_amount("clip_grad_norm", self.clip_grad_norm, positive=True)
        for name in (
            "cpu_offload",
            "sequence_parallel",
            "find_unused_parameters",
            "weighted_gradients",
        ):
            check_bool(name, getattr(self, name))
        if self.fused_optimizer is not None:
            check_bool("fused_optimizer", self.fused_optimizer)
        self._check_plan()
        self._check_combination()

    def _check_plan(self) -> None:
        if self.plan not in (None, "auto"):
            raise ConfigError(
                f'plan={_shorten(self.plan)} is not known; give "auto". The strategies of a plan that was made by '
                "raysgd.engine.plan are its config: Engine(plan.config)."
            )
        if self.memory_per_device is not None:
            check_memory(self.memory_per_device)

    def _check_combination(self) -> None:
        if self.cpu_offload and self.zero_stage != 3:
            raise ConfigError(f"cpu_offload=True needs zero_stage=3, and zero_stage is {self.zero_stage}.")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("sequence_parallel=True needs tensor_parallel=2 or more: its ranks share the sequence.")
        if self.micro_batches is not None and self.pipeline_parallel == 1:
            raise ConfigError(
                "micro_batches cuts the batches of a pipeline, and pipeline_parallel is 1; accumulation_steps= collects the "
                "gradients of several batches."
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        name = self.pipeline_schedule
        if name is not None and self.pipeline_parallel == 1:
            raise ConfigError(f"pipeline_schedule={name!r} needs pipeline_parallel=2 or more.")
        if name in ZERO_BUBBLE_SCHEDULES and (self.zero_stage == 3 or self.compile is not None):
            other = "zero_stage=3" if self.zero_stage == 3 else f"compile={self.compile!r}"
            raise ConfigError(
                f"pipeline_schedule={name!r} computes the gradients of weights on their own, which torch cannot do with {other}: "
                'give "Interleaved1F1B", or another zero_stage or compile.'
            )
        if self.sequence_parallel and name not in (None, "1F1B", "GPipe"):
            raise ConfigError(
                f"pipeline_schedule={name!r} gives each rank two stages, and sequence_parallel=True divides the sequence in the "
                'blocks of one: give "1F1B" or "GPipe".'
            )

    @property
    def workers_per_replica(self) -> int:
        """Ranks that hold one replica of the model between them."""
        return self.tensor_parallel * self.pipeline_parallel

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}

    def given_but(self, allowed: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `given` does, without values that are allowed: a field's are a tuple, or ``...`` for any."""
        return {
            name: value
            for name, value in self.given().items()
            if (values := allowed.get(name, ())) is not ... and value not in values
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Make a config of names and values, as a file has them; ``-`` in a name counts as ``_``.

        Raises:
            ConfigError: A name is not known, or a value is not allowed.
        """
        given = {name.replace("-", "_"): value for name, value in values.items()}
        config = cls(**given)
        object.__setattr__(config, "_named", frozenset(given))
        return config

    def named(self) -> dict[str, Any]:
        """Return the fields that `of` was called with, also those equal to their defaults; otherwise what `given` returns."""
        names: frozenset[str] | None = vars(self).get("_named")
        return self.given() if names is None else {name: getattr(self, name) for name in names}


def check_memory(memory_per_device: Any) -> float:
    """Check the bytes of a device. Numbers that are too small to be bytes are refused: they are GB or MB."""
    amount = check_amount("memory_per_device", memory_per_device, positive=True)
    if amount < _SMALLEST_DEVICE_BYTES:
        exponent, unit = ("e9", "GB") if amount < 1000 else ("e6", "MB")
        raise ConfigError(
            f"memory_per_device={memory_per_device!r} is less than a megabyte, since it is in bytes: "
            f"give {amount:g}{exponent} for {amount:g} {unit}."
        )
    return amount


def _shorten(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def merge_configs(config: EngineConfig, override: EngineConfig | None) -> EngineConfig:
    """Return the config with the fields that another one names.

    Raises:
        ConfigError: Fields of the two do not go together.
    """
    return config if override is None else replace(config, **override.named())


_current: EngineConfig | None = None
_is_read = False


def current_engine_config() -> EngineConfig | None:
    """Return the config that this process's script was started with, as by ``raysgd run --engine.precision bf16``, or None."""
    global _is_read
    _is_read = True
    return _current


@contextmanager
def using_engine_config(config: EngineConfig | None) -> Iterator[Callable[[], bool]]:
    """Make ``config`` what `current_engine_config` returns, in all threads; yield a function: whether it has been called."""
    global _current, _is_read
    before, _current, _is_read = (_current, _is_read), config, False
    try:
        yield lambda: _is_read
    finally:
        _current, _is_read = before
