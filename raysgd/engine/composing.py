"""Applies the strategies to a model and its optimizer. Worker side.

The order: pipeline stages, shared layers, activation checkpointing, precision, FSDP, the optimizer's parameters, pieces of them,
compilation, DDP. Each step finds parameters by the names that they have in the user's model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from raysgd._util.text import with_article
from raysgd.engine.attached import AttachedHook
from raysgd.engine.blocks import find_blocks, find_stage_blocks
from raysgd.engine.config import EngineConfig
from raysgd.engine.optimizer import refuse_optimizer, replace_parameters
from raysgd.engine.pieces import OptimizerPieces
from raysgd.engine.pipeline.model import PipelinedModel
from raysgd.engine.precision import DTYPES, autocast_forward, cast_inputs
from raysgd.engine.recomputation import recompute
from raysgd.engine.saving import OptimizerNumbers
from raysgd.engine.sharding import ShardedUse
from raysgd.engine.tensor_parallel import apply_tensor_plan, fsdp_shard_placement, make_tensor_plan
from raysgd.errors import ConfigError
from raysgd.session import api
from raysgd.torch.devices import device
from raysgd.torch.model import is_wrapped, prepare_model, prepare_optimizer
from raysgd.torch.restoring import place_state


class Composition:
    """The model to train and its optimizer's parts, made by applying the strategies.

    Args:
        mesh: Returns the mesh of all workers; called only if a strategy needs it, because it makes process groups.

    Attributes:
        model: The model to train.
        pipeline: The stages of the model that this rank has, if there are several.
        pieces: What the optimizer updates in place of parameters, if it does not update all of them as they are.
        numbers: Of the optimizer's parameters, before any was replaced.
        use: What backward passes use of a model that FSDP divides over several ranks.
        copied: Ids of the tensors that the optimizer updates and whose gradients another stage counts.
        tied: Names of parameters that are another one too, and the first name of that one.
        changes: What was done to each module, by its name.
    """

    def __init__(self, config: EngineConfig, mesh: Callable[[], DeviceMesh]) -> None:
        self._config = config
        self._mesh = mesh
        self.model: nn.Module = nn.Identity()
        self.pipeline: PipelinedModel | None = None
        self.pieces: OptimizerPieces | None = None
        self.numbers: OptimizerNumbers | None = None
        self.use: ShardedUse | None = None
        self.copied: set[int] = set()
        self.tied: dict[str, str] = {}
        self.changes: dict[str, list[str]] = {}

    def apply(self, model: nn.Module, optimizer: Optimizer | None, tensor_plan: Any) -> None:
        """Apply all strategies. All ranks call it.

        Raises:
            ConfigError: A strategy cannot be applied to the model, or the optimizer has other parameters.
        """
        self._check_sparse(model, optimizer)
        if optimizer is not None and type(optimizer).__name__ == "Adafactor" and not self._is_whole:
            raise refuse_optimizer(optimizer)
        is_late = self._config.zero_stage == 3 or self._config.precision == "fp16"
        if hooked := [name for name, each in model.named_parameters() if each._backward_hooks and is_late]:
            raise ConfigError(
                f"the parameter {hooked[0]} has a hook, which would not find its gradient with zero_stage=3 or fp16: change "
                "parameter.grad between engine.backward and optimizer.step() in place of the hook."
            )
        before = dict(model.named_parameters(remove_duplicate=False))
        first_names = {parameter: name for name, parameter in reversed(before.items())}
        self.tied = {name: first for name, parameter in before.items() if (first := first_names[parameter]) != name}
        if optimizer is not None:
            self.numbers = OptimizerNumbers(optimizer)
            replace_parameters(optimizer, {parameter: parameter for parameter in before.values()})  # refuses others
        model = model.to(device())
        self._start_alike(model)
        blocks = find_blocks(model)
        if self._config.pipeline_parallel > 1:
            blocks = self._split(model, blocks)
        if self._config.tensor_parallel > 1:
            self._share_layers(model, tensor_plan)
        self._recompute(model, blocks)
        self._set_precision(model)
        if self._config.zero_stage == 3:
            self._shard(model, blocks)
        if optimizer is not None:
            self._move_optimizer(optimizer, model, before)
        self._compile(model, blocks)
        self.model = self._distribute(model)

    @property
    def _is_plain(self) -> bool:
        """Whether each rank holds and updates the whole model."""
        return self._config.zero_stage == 0 and self._config.workers_per_replica == 1

    @property
    def _is_whole(self) -> bool:
        """Whether each rank updates whole parameters."""
        return self._config.zero_stage == 0 and self._config.tensor_parallel == 1

    def _check_sparse(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Refuse sparse gradients where they cannot be carried."""
        layers = [
            f"{type(layer).__name__} {name}".strip() for name, layer in model.named_modules() if _is_sparse(layer)
        ]
        if type(optimizer).__name__ == "SparseAdam":
            layers.append("SparseAdam")
        allowed = {
            "precision": ("bf16",),
            "accumulation_steps": None,
            "activation_checkpointing": None,
            "compile": None,
        }
        given = self._config.given().items()
        refused = [
            f"{name}={value!r}"
            for name, value in given
            if name not in allowed or ((values := allowed[name]) is not None and value not in values)
        ]
        if layers and refused:
            raise ConfigError(
                f"{layers[0]} has sparse gradients, which {', '.join(refused)} cannot carry: leave them out, or make the "
                "layer with sparse=False and the optimizer a dense one, such as AdamW."
            )

    def _start_alike(self, model: nn.Module) -> None:
        """Give all ranks the values of rank 0, as DDP does; before the master weights are made of them."""
        is_ddp = self._is_plain and not self._config.find_unused_parameters
        if api.world_size() > 1 and not (is_ddp and self._config.precision != "bf16-true"):
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def _split(self, model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
        stages = self._mesh()["pp"]
        if device().type != "cpu" and dist.get_backend(stages.get_group()) == "gloo":
            raise ConfigError(
                f"pipeline_parallel={self._config.pipeline_parallel} sends tensors of GPUs from stage to stage, and gloo, which "
                "workers that share a GPU use, sends tensors of the CPU only. Give each worker a GPU of its own "
                "(gpus_per_worker=1, with nccl), or use zero_stage or tensor_parallel instead."
            )
        self.pipeline = PipelinedModel(model, stages, self._config.pipeline_schedule, self._config.micro_batches)
        if self._config.tensor_parallel > 1 and len(self.pipeline.split.stacks) > 1:
            raise ConfigError(
                f"a {type(model).__name__} cannot have tensor_parallel and pipeline_parallel together: the stages of an encoder "
                "and a decoder share a position bias, which tensor parallelism divides by its own rules. Use one of the two."
            )
        blocks = find_stage_blocks(model, blocks)
        for name in blocks:
            (stage,) = self.pipeline.split.stages_of(name)
            self._note({name: model}, f"stage {stage} of {len(self.pipeline.split.ranges)}")
        return blocks

    def _share_layers(self, model: nn.Module, plan: Any) -> None:
        config, mesh = self._config, self._mesh()["tp"]
        if plan is None:
            plan = make_tensor_plan(model, config.tensor_parallel, config.sequence_parallel)
        apply_tensor_plan(model, mesh, plan)
        self._note({"": model}, f"layers shared by {config.tensor_parallel} ranks")
        # Outside of the shared layers, all ranks of a copy draw the same random numbers.
        seed = torch.tensor(torch.initial_seed() % 2**62, device=device())
        dist.broadcast(seed, group=mesh.get_group(), group_src=0)
        torch.manual_seed(int(seed))

    def _recompute(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        kind = self._config.activation_checkpointing
        if kind is not None:
            for part in model.modules():
                config: Any = getattr(part, "config", None)
                if getattr(
                    config, "use_cache", False
                ):  # of transformers: the second computation would fill the cache again
                    config.use_cache = False
            recompute(blocks.values() or [model], selective=kind == "selective")
            self._note(blocks or {"": model}, f"{kind} activation checkpointing")

    def _set_precision(self, model: nn.Module) -> None:
        precision = self._config.precision
        if precision == "fp32":
            return
        dtype = DTYPES[precision]
        if precision == "bf16-true":
            _convert(model, dtype, with_parameters=self._config.zero_stage < 3)
            cast_inputs(model, dtype, keeps_outputs=self.pipeline is not None)
            self._note({"": model}, "parameters in bf16, master weights in fp32")
        else:
            autocast_forward(model, dtype)
            self._note({"": model}, f"autocast to {precision}")

    def _shard(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        is_cast = self._config.precision == "bf16-true" or (self._config.precision != "fp32" and self.pipeline is None)
        if is_cast:
            # Also with autocast: it would keep a copy of each gathered weight until the backward pass. Of a pipeline's stage,
            # some layers are called outside of autocast.
            dtype = DTYPES[self._config.precision]
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        is_offloaded, copies = self._config.cpu_offload, self._mesh()["dp"]
        offload = CPUOffloadPolicy(pin_memory=device().type == "cuda") if is_offloaded else OffloadPolicy()
        settings: dict[str, Any] = {"mesh": copies, "mp_policy": policy, "offload_policy": offload}
        if self._config.tensor_parallel > 1:
            settings["shard_placement_fn"] = fsdp_shard_placement(copies.size())
        is_free = self._config.find_unused_parameters and copies.size() > 1
        blocks = {} if is_free else _without_shared(blocks, model)
        if scalars := {parameter for parameter in model.parameters() if not parameter.ndim}:
            settings["ignored_params"] = scalars  # FSDP cannot divide them: their gradients are averaged as in DDP
        for module in (*blocks.values(), model):
            fully_shard(module, **settings)
            module.__deepcopy__ = AttachedHook(_refuse_copy)  # type: ignore[assignment]
        _check_averages()
        if copies.size() > 1:
            self.use = ShardedUse(model, copies.get_group(), is_free=is_free)
        self._note({**blocks, "": model}, f"FSDP over {copies.size()} ranks")

    def _move_optimizer(self, optimizer: Optimizer, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        """Make the optimizer update the parameters that this rank has now, or pieces of them."""
        assert self.numbers is not None
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced: dict[Any, torch.Tensor] = {before[name]: parameter for name, parameter in after.items()}
        replace_parameters(optimizer, replaced, dropped=set(before.values()))
        self.numbers.replace(replaced)
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self.pieces = self._make_pieces([each for each in model.parameters() if each.requires_grad and each in trained])
        pieces = {} if self.pieces is None else self.pieces.piece_of
        replace_parameters(optimizer, {parameter: pieces.get(parameter, parameter) for parameter in trained})
        if self._config.fused_optimizer:
            _fuse(optimizer)
        prepare_optimizer(optimizer)
        self.numbers.replace(pieces)
        if self.pipeline is not None:
            copied = (after[name] for name in self.pipeline.copied_parameters)
            self.copied = {id(pieces.get(parameter, parameter)) for parameter in copied}

    def _make_pieces(self, parameters: list[nn.Parameter]) -> OptimizerPieces | None:
        config = self._config
        if config.zero_stage == 3:  # FSDP divides all others
            parameters = [parameter for parameter in parameters if not parameter.ndim]
        has_masters = config.precision == "bf16-true" and config.zero_stage < 3
        if not parameters or (self._is_plain and not has_masters and not config.find_unused_parameters):
            return None
        is_divided = config.zero_stage in (1, 2)
        if is_divided:
            what = "optimizer state" if config.zero_stage == 1 else "optimizer state and gradients"
            self._note({"": nn.Identity()}, f"{what} divided over {self._mesh()['dp'].size()} ranks")
        is_averaged = self._is_plain and not config.find_unused_parameters
        return OptimizerPieces(parameters, self._mesh(), is_divided=is_divided, is_averaged=is_averaged)

    def _compile(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        if self._config.compile is None:
            return
        targets = {"": model} if self._config.compile == "model" or not blocks else blocks
        for module in targets.values():
            module.compile()
        self._note(targets, "compiled")

    def _distribute(self, model: nn.Module) -> nn.Module:
        if not self._is_plain or (self.pieces is not None and self._config.find_unused_parameters):
            return model  # the pieces average gradients
        if api.world_size() > 1:
            self._note({"": model}, "DDP")
        settings = {"find_unused_parameters": True} if self._config.find_unused_parameters else {}
        return prepare_model(model, move_to_device=False, ddp_kwargs=settings)

    def _note(self, modules: dict[str, nn.Module], what: str) -> None:
        for name in modules:
            self.changes.setdefault(name, []).append(what)


def _is_sparse(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad


def _without_shared(blocks: dict[str, nn.Module], model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that share no parameter with others: FSDP gathers shared ones with the parameters outside of blocks."""
    owners: dict[nn.Parameter, set[int]] = {}
    inside = {id(part): id(block) for block in blocks.values() for part in block.modules()}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(id(part), 0))
    shared = {owner for several in owners.values() if len(several) > 1 for owner in several}
    return {name: block for name, block in blocks.items() if id(block) not in shared}


def place_loaded(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepare a state dict, which may be of a checkpoint of any ranks, for a composed model; before it is loaded."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and is_wrapped(module):
            reshard()
    place_state(model, state, prefix)


_NO_AVERAGES = (
    "zero_stage=3 divides the parameters over the ranks, so that neither copy.deepcopy(model) nor "
    "torch.optim.swa_utils.AveragedModel has whole ones: give zero_stage=2, with which both work."
)


def _refuse_copy(*_: Any) -> Any:
    raise ConfigError(_NO_AVERAGES)


def _check_averages() -> None:
    """Let averages that were made before the parameters were divided raise an error that says so."""
    from torch.optim.swa_utils import AveragedModel

    update = AveragedModel.update_parameters
    if getattr(update, "is_checked", False):
        return

    @functools.wraps(update)
    def checked(self: Any, model: nn.Module) -> Any:
        pairs = zip(self.module.parameters(), model.parameters(), strict=False)
        if any(isinstance(new, DTensor) and not isinstance(own, DTensor) for own, new in pairs):
            raise ConfigError(_NO_AVERAGES)
        return update(self, model)

    checked.is_checked = True  # type: ignore[attr-defined]
    AveragedModel.update_parameters = checked  # type: ignore[method-assign]


def _convert(model: nn.Module, dtype: torch.dtype, *, with_parameters: bool) -> None:
    """Convert parameters, and buffers that are part of the state; tables that are not, as rotary frequencies, stay exact.

    FSDP keeps its pieces of parameters in fp32, and gathers them in ``dtype``.
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


def check_parts(model: Any, optimizer: Any, lr_scheduler_fn: Any) -> None:
    """Check the parts of a loop that `raysgd.Engine.compose` gets.

    Raises:
        ConfigError: One of them cannot be composed; the text says what to do.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"engine.compose(model=...) is {with_article(type(model).__name__)}; give a torch module.")
    if wrapped := [type(module).__name__ for module in model.modules() if is_wrapped(module)]:
        raise ConfigError(
            f"the model, a {type(model).__name__}, is wrapped by {wrapped[0]} already, and the engine does that itself: give "
            "the model inside."
        )
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    if len(devices) > 1:
        raise ConfigError(
            f"the model's parameters are on {len(devices)} devices ({', '.join(devices)}), and the engine moves a model to "
            "one: make it on one device, and give zero_stage=3 if it is too large for that."
        )
    if devices == ["meta"]:
        raise ConfigError(
            "the model is on the meta device, where parameters have no values: make it on the CPU, or load its values first."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is {with_article(type(optimizer).__name__)}; give a torch optimizer.")
    if lr_scheduler_fn is None:
        return
    if hasattr(lr_scheduler_fn, "optimizer") or not callable(lr_scheduler_fn):
        raise ConfigError(
            f"lr_scheduler_fn is {with_article(type(lr_scheduler_fn).__name__)} that belongs to an optimizer already; give a "
            "function that makes it, such as functools.partial(StepLR, step_size=30)."
        )
    if optimizer is None:
        raise ConfigError("lr_scheduler_fn needs an optimizer: give optimizer=... too.")
