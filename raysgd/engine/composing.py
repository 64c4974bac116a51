"""`compose`: applies the strategies to a model and its optimizer. Worker side.

The order: pipeline stages, tensor-parallel layers, activation checkpointing, precision, FSDP, the optimizer's parameters or
shards of them, compilation, DDP. Each step finds parameters by the names that they have in the user's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.checkpoint.placing import place_state
from raysgd.engine.checks import check_averages
from raysgd.engine.config import OWN_PLAN_OF_SEQUENCES, RECOMPUTED_EVERY, EngineConfig
from raysgd.engine.data_parallel.replicas import (
    AveragedReplicas,
    DataParallel,
    DdpReplicas,
    Mesh,
    Note,
    ShardedGradients,
    ShardedOptimizer,
)
from raysgd.engine.model.blocks import find_blocks, find_stage_blocks
from raysgd.engine.model.local_tensors import make_data_settable
from raysgd.engine.model.precision import DTYPES, autocast_forward, cast_inputs
from raysgd.engine.model.recomputation import recompute
from raysgd.engine.optimizer.parameters import OptimizerNumbers, refuse_optimizer, replace_parameters
from raysgd.errors import ConfigError
from raysgd.torch.devices import device
from raysgd.torch.model import is_wrapped, prepare_optimizer

if TYPE_CHECKING:
    from raysgd.engine.pipeline.pipelined_model import PipelinedModel

#: Strategies that carry sparse gradients.
_CARRY_SPARSE = {
    "precision": ("bf16",),
    "accumulation_steps": ...,
    "activation_checkpointing": ...,
    "compile": ...,
    "fused_optimizer": (False,),
}
#: Optimizers with a fused step, and those of which torch computes it on DTensors.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Composed:
    """A model to train and its optimizer's parts, made by applying the strategies.

    Attributes:
        model: The model to train.
        data_parallel: How the data-parallel ranks hold it.
        pipeline: The stages of the model that this rank has, if there are several.
        names: The names of the user's model's state, in all stages.
        numbers: Of the optimizer's parameters, before any was replaced; None without an optimizer.
        counted_elsewhere: Ids of the tensors that the optimizer updates and whose gradients another stage counts.
        tied: Names of parameters that are another one too, and the first name of that one.
        changes: What was done to each module, by its name.
    """

    model: nn.Module
    data_parallel: DataParallel
    pipeline: PipelinedModel | None
    names: frozenset[str]
    numbers: OptimizerNumbers | None
    counted_elsewhere: frozenset[int]
    tied: Mapping[str, str]
    changes: Mapping[str, list[str]]


def compose(
    config: EngineConfig, mesh: Mesh, model: nn.Module, optimizer: Optimizer | None, tensor_plan: Any = None
) -> Composed:
    """Apply all strategies; the model and the optimizer are changed in place. All ranks call it.

    Args:
        config: The strategies.
        mesh: Returns the mesh of all workers; called only if a strategy needs it, because it makes process groups.
        model: The user's model.
        optimizer: Made of its parameters.
        tensor_plan: As for `raysgd.Engine.compose`.

    Raises:
        ConfigError: A strategy cannot be applied to the model, or the optimizer has other parameters.
    """
    changes: dict[str, list[str]] = {}

    def note(names: Iterable[str], what: str) -> None:
        for name in names:
            changes.setdefault(name, []).append(what)

    data_parallel = _choose_data_parallel(config, mesh, optimizer)(config, mesh, note)
    _check_strategies(config, data_parallel, model, optimizer)
    if tensor_plan is not None and config.tensor_parallel > 1:
        _check_own_plan(config, model, tensor_plan)
    before = dict(model.named_parameters(remove_duplicate=False))
    names = frozenset(model.state_dict())
    numbers = None
    if optimizer is not None:
        replace_parameters(optimizer, {parameter: parameter for parameter in before.values()})  # refuses others
        numbers = OptimizerNumbers(optimizer, {parameter: name for name, parameter in reversed(before.items())})
    model = model.to(device())
    data_parallel.start_alike(model)
    blocks, pipeline = _divide_layers(config, mesh, model, tensor_plan, note)
    if (kind := config.activation_checkpointing) is not None:
        chosen = dict(list((blocks or {"": model}).items())[:: RECOMPUTED_EVERY[kind]])
        _recompute(model, chosen.values())
        note(chosen, f"{kind} activation checkpointing")
    if config.precision != "fp32":
        note([""], _set_precision(config, model, data_parallel))
    data_parallel.shard_model(model, blocks)
    moved: Mapping[torch.Tensor, torch.Tensor] = {}
    if optimizer is not None and numbers is not None:
        moved = _move_optimizer(config, optimizer, numbers, model, before, data_parallel)
    if config.compile is not None:
        targets = {"": model} if config.compile == "model" or not blocks else blocks
        for module in targets.values():
            module.compile()
        note(targets, "compiled")
    copied = [] if pipeline is None else [model.get_parameter(name) for name in pipeline.copied_parameters]
    return Composed(
        model=data_parallel.wrap(model),
        data_parallel=data_parallel,
        pipeline=pipeline,
        names=names,
        numbers=numbers,
        counted_elsewhere=frozenset(id(moved.get(parameter, parameter)) for parameter in copied),
        tied=_find_ties(before),
        changes=changes,
    )


def _choose_data_parallel(config: EngineConfig, mesh: Mesh, optimizer: Optimizer | None) -> type[DataParallel]:
    if config.zero_stage == 3:
        from raysgd.engine.data_parallel.fully_sharded import FullySharded  # imports FSDP, which nothing else needs

        return FullySharded
    if config.zero_stage > 0 and mesh().size(0) > 1:  # one data-parallel rank has nothing to divide
        return ShardedOptimizer if config.zero_stage == 1 else ShardedGradients
    if config.workers_per_replica > 1 or (config.find_unused_parameters and optimizer is not None):
        return AveragedReplicas
    return DdpReplicas


def _check_strategies(
    config: EngineConfig, data_parallel: DataParallel, model: nn.Module, optimizer: Optimizer | None
) -> None:
    """Check that the model's and the optimizer's kinds can be used with the strategies, on any number of ranks."""
    layers = [f"{type(layer).__name__} {name}".strip() for name, layer in model.named_modules() if _is_sparse(layer)]
    if type(optimizer).__name__ == "SparseAdam":
        layers.append("SparseAdam")
    if layers and (refused := config.given_but(_CARRY_SPARSE)):
        names = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        raise ConfigError(
            f"{layers[0]} has sparse gradients, which {names} cannot carry: leave them out, or make the "
            "layer with sparse=False and the optimizer a dense one, such as AdamW."
        )
    updates_whole = config.zero_stage == 0 and config.tensor_parallel == 1
    if optimizer is not None and type(optimizer).__name__ == "Adafactor" and not updates_whole:
        raise refuse_optimizer(optimizer)
    is_late = data_parallel.gathers_parameters or config.precision == "fp16"
    if hooked := [name for name, each in model.named_parameters() if each._backward_hooks and is_late]:
        raise ConfigError(
            f"the parameter {hooked[0]} has a hook, which would not find its gradient with zero_stage=3 or fp16: change "
            "parameter.grad between engine.backward and optimizer.step() in place of the hook."
        )


def _check_own_plan(config: EngineConfig, model: nn.Module, plan: Any) -> None:
    from raysgd.engine.tensor_parallel import check_own_plan  # imports DTensors

    if config.sequence_parallel:
        raise ConfigError(OWN_PLAN_OF_SEQUENCES)
    check_own_plan(model, plan)


def _find_ties(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Return the names of parameters that are another one too, and the first name of that one."""
    first_names = {parameter: name for name, parameter in reversed(parameters.items())}
    return {name: first for name, parameter in parameters.items() if (first := first_names[parameter]) != name}


def _divide_layers(
    config: EngineConfig, mesh: Mesh, model: nn.Module, tensor_plan: Any, note: Note
) -> tuple[dict[str, nn.Module], PipelinedModel | None]:
    """Keep this rank's stage of the model and its shards of layers; return its blocks, and the stage if there are several."""
    blocks, pipeline = find_blocks(model), None
    if config.pipeline_parallel > 1:
        pipeline = _split(config, mesh, model)
        blocks = find_stage_blocks(model, blocks)
        for name in blocks:
            (stage,) = pipeline.split.stages_of(name)
            note([name], f"stage {stage} of {len(pipeline.split.ranges)}")
    if config.tensor_parallel > 1:
        _shard_layers(config, mesh, model, tensor_plan)
        note([""], f"layers sharded over {config.tensor_parallel} ranks")
    return blocks, pipeline


def _split(config: EngineConfig, mesh: Mesh, model: nn.Module) -> PipelinedModel:
    stages = mesh()["pp"]
    if device().type != "cpu" and dist.get_backend(stages.get_group()) == "gloo":
        raise ConfigError(
            f"pipeline_parallel={config.pipeline_parallel} sends tensors of GPUs from stage to stage, and gloo, which "
            "workers that share a GPU use, sends tensors of the CPU only. Give each worker a GPU of its own "
            "(gpus_per_worker=1, with nccl), or use zero_stage or tensor_parallel instead."
        )
    from raysgd.engine.pipeline.pipelined_model import PipelinedModel  # imports DTensors, as tensor parallelism does

    pipeline = PipelinedModel(model, stages, config.pipeline_schedule, config.micro_batches)
    if config.tensor_parallel > 1 and len(pipeline.split.stacks) > 1:
        raise ConfigError(
            f"a {type(model).__name__} cannot have tensor_parallel and pipeline_parallel together: the stages of an encoder "
            "and a decoder share a position bias, which tensor parallelism divides by its own rules. Use one of the two."
        )
    return pipeline


def _shard_layers(config: EngineConfig, mesh: Mesh, model: nn.Module, plan: Any) -> None:
    from raysgd.engine.tensor_parallel import apply_tensor_plan, make_tensor_plan

    if plan is None:
        plan = make_tensor_plan(model, config.tensor_parallel, config.sequence_parallel)
    apply_tensor_plan(model, mesh()["tp"], plan)
    make_data_settable()


def _recompute(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):  # of transformers: the second computation would fill the cache again
            config.use_cache = False
    recompute(blocks)


def _set_precision(config: EngineConfig, model: nn.Module, data_parallel: DataParallel) -> str:
    """Make the model compute in a reduced precision; return what was done."""
    dtype = DTYPES[config.precision]
    if config.precision != "bf16-true":
        autocast_forward(model, dtype)
        return f"autocast to {config.precision}"
    check_averages()
    is_gathered = data_parallel.gathers_parameters
    _convert(model, dtype, with_parameters=not is_gathered)
    cast_inputs(model, dtype, gathers_parameters=is_gathered, keeps_outputs=config.pipeline_parallel > 1)
    return "parameters in bf16, master weights in fp32"


def _move_optimizer(
    config: EngineConfig,
    optimizer: Optimizer,
    numbers: OptimizerNumbers,
    model: nn.Module,
    before: Mapping[str, nn.Parameter],
    data_parallel: DataParallel,
) -> Mapping[torch.Tensor, torch.Tensor]:
    """Make the optimizer update the parameters that this rank has now, or what is in their place; return what that is."""
    after = model.named_parameters(remove_duplicate=False)
    replaced: dict[Any, torch.Tensor] = {before[name]: parameter for name, parameter in after}
    replace_parameters(optimizer, replaced, dropped=set(before.values()))
    numbers.replace(replaced)
    data_parallel.make_shards([each for each in model.parameters() if each.requires_grad])
    with data_parallel.shards.in_place(optimizer, with_gradients=False):
        if _should_fuse(optimizer, config, has_sparse=any(map(_is_sparse, model.modules()))):
            _fuse(optimizer)
        _check_fused(optimizer)
        prepare_optimizer(optimizer)
    return data_parallel.shards.tensor_of


def _is_sparse(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad


def place_loaded(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepare a state dict, which may be of a checkpoint of any ranks, for a composed model; before it is loaded."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and is_wrapped(module):
            reshard()
    place_state(model, state, prefix)


def _convert(model: nn.Module, dtype: torch.dtype, *, with_parameters: bool) -> None:
    """Convert parameters, and buffers that are part of the state; tables that are not, as rotary frequencies, stay exact.

    FSDP keeps its shards of parameters in fp32, and gathers them in ``dtype``.
    """
    buffers = [
        (module, name, buffer, name not in module._non_persistent_buffers_set)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    if with_parameters:
        model.to(dtype)
    for module, name, buffer, is_saved in buffers:
        setattr(module, name, buffer.to(dtype) if is_saved and buffer.is_floating_point() else buffer)


def _should_fuse(optimizer: Optimizer, config: EngineConfig, *, has_sparse: bool) -> bool:
    """Return whether the optimizer's steps are to be one kernel: where this is not said, if it can and the user chose nothing.

    On a CPU this is left to the user but for offloaded states, whose step is the longest part of training.
    """
    if config.fused_optimizer is not None:
        return config.fused_optimizer
    groups = optimizer.param_groups
    parameters = [each for group in groups for each in group["params"]]
    # One kernel takes parameters of one mesh, or plain ones.
    meshes = {each.device_mesh if is_dtensor(each) else None for each in parameters}
    can_fuse = type(optimizer) in (_FUSED if meshes == {None} else _FUSED_ON_SHARDS) and not any(
        group["fused"] is not None or group["foreach"] is not None or group["differentiable"] for group in groups
    )
    return (
        can_fuse
        and not has_sparse
        and len(meshes) == 1
        and all(each.is_floating_point() and (config.cpu_offload or each.device.type == "cuda") for each in parameters)
    )


def _fuse(optimizer: Optimizer) -> None:
    """Make the optimizer's steps be one kernel.

    Raises:
        ConfigError: It cannot.
    """
    if "fused" not in optimizer.defaults:
        raise ConfigError(
            f"fused_optimizer=True: {type(optimizer).__name__} has no fused step; give torch.optim.AdamW, Adam, SGD or Adagrad."
        )
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update(fused=True, foreach=False)


def _check_fused(optimizer: Optimizer) -> None:
    """Check that torch has the optimizer's fused step for the parameters, if it is to make one.

    Raises:
        ConfigError: It has none.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    has_shards = any(is_dtensor(each) for group in optimizer.param_groups for each in group["params"])
    if is_fused and has_shards and not isinstance(optimizer, _FUSED_ON_SHARDS):
        raise ConfigError(
            f"{type(optimizer).__name__} has no fused step for the shards that each rank has with zero_stage=1, 2 or 3 and with "
            "tensor_parallel: leave out fused_optimizer=True and fused=True, or give torch.optim.AdamW or Adam."
        )
