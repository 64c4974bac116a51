"""ZeRO 3: FSDP2 divides parameters, gradients and optimizer state over the data-parallel ranks. Worker side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from raysgd.engine.checks import NO_AVERAGES, check_averages
from raysgd.engine.data_parallel.replicas import DataParallel
from raysgd.engine.gradients.accumulation import Accumulation
from raysgd.engine.model.local_tensors import free_dims, local_of, make_data_settable
from raysgd.engine.model.precision import DTYPES, widen_parameters
from raysgd.engine.optimizer.shards import DividedShards, OptimizerShards
from raysgd.errors import ConfigError, UsageError
from raysgd.torch.attached import AttachedHook
from raysgd.torch.devices import device

#: Calls of each block in which its parameters are checked for changes.
_CHECKED_CALLS = 2


class FullySharded(DataParallel):
    """Each rank holds its shards of the parameters, which FSDP2 gathers block by block for each pass."""

    is_sharded = True
    gathers_parameters = True
    _use: ParameterUse | None = None  # if there are several ranks
    _parameters: Mapping[str, nn.Parameter]

    def shard_model(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        config, replicas, precision = self._config, self._mesh()["dp"], self._precision()
        if config.precision != "bf16-true" and precision.param_dtype is not None:
            widen_parameters(model)
        settings: dict[str, Any] = {"mesh": replicas, "mp_policy": precision}
        settings["offload_policy"] = (
            CPUOffloadPolicy(pin_memory=device().type == "cuda") if config.cpu_offload else OffloadPolicy()
        )
        if config.tensor_parallel > 1:
            settings["shard_placement_fn"] = fsdp_shard_placement(replicas.size())
        is_free = config.find_unused_parameters and replicas.size() > 1
        if scalars := {each for each in model.parameters() if not each.ndim}:
            settings["ignored_params"] = scalars
        for each in model.parameters():
            each.data = each.data.contiguous()  # FSDP takes no other, such as channels_last
        sharded = {**({} if is_free else _without_shared(blocks, model)), "": model}
        for module in sharded.values():
            fully_shard(module, **settings)
            module.__deepcopy__ = AttachedHook(_refuse_copy)  # type: ignore[assignment]
        check_averages()
        make_data_settable()
        if replicas.size() > 1:
            self._use = ParameterUse(model, replicas.get_group(), is_free=is_free)
            # FSDP cannot divide scalars. An optimizer that the loop makes itself updates them as they are.
            self.shards = OptimizerShards(list(scalars), replicas.get_group(), is_early=self._is_early)
        self._divided = {each for each in model.parameters() if each.ndim}
        self._groups = list(_groups(model))
        for parameters in self._groups:
            parameters.post_forward = _checking(parameters, replicas.get_local_rank())
            for each in parameters.fsdp_params:
                check = AttachedHook(functools.partial(_check_gathered, parameters, each))
                each._module_info.module.register_forward_pre_hook(check)
        self._note(sharded, f"FSDP over {replicas.size()} ranks")

    def make_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._use is not None:  # scalars, and what the loop adds later, are divided as with ZeRO 2
            scalars = [each for each in parameters if not each.ndim]
            self.shards = DividedShards(scalars, self._mesh(), is_early=self._is_early)

    def parameters_of(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        if any(each.is_unsharded for each in self._groups):
            return self._parameters  # a graph is kept, and some layers have gathered parameters now
        for each in (each for group in self._groups for each in group.fsdp_params):
            place, local = each._module_info, each.sharded_param._local_tensor
            if place.module._parameters.get(place.param_name) is not each.sharded_param:
                raise UsageError(
                    f"the parameter {each._param_fqn or place.param_name} was replaced by another one, which FSDP "
                    "(zero_stage=3) does not use: change its values, as by parameter.copy_(values), or give zero_stage=2."
                )
            if getattr(each, "orig_dtype", local.dtype) != local.dtype:  # FSDP sets it in the first pass
                raise UsageError(
                    f"the parameter {each._param_fqn or place.param_name} is {local.dtype} now, and FSDP (zero_stage=3) gathers "
                    f"it as {each.orig_dtype}: convert the model before engine.compose, or give precision=."
                )
            if (
                local.numel()
                and local.untyped_storage().data_ptr() != each._sharded_param_data.untyped_storage().data_ptr()
            ):
                each.reset_sharded_param()  # its memory was exchanged
        self._parameters = super().parameters_of(model)
        return self._parameters

    def follow(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        super().follow(model, (each for each in parameters if each not in self._divided))
        # An evaluation shall leave no gathered parameters behind: what the loop changes in them would be lost.
        model.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)  # type: ignore[operator]

    def _precision(self) -> MixedPrecisionPolicy:
        precision = self._config.precision
        is_cast = precision == "bf16-true" or (precision != "fp32" and self._config.pipeline_parallel == 1)
        if not is_cast:
            return MixedPrecisionPolicy()
        # Also with autocast: it would keep a copy of each gathered weight until the backward pass. Of a pipeline's stage, some
        # layers are called outside of autocast.
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        return model  # FSDP reduces the gradients of parameters that are unfrozen later, too

    def begin_pass(self, accumulation: Accumulation) -> None:
        super().begin_pass(accumulation)
        for group in self._groups:
            # All of it was frozen in the first pass, and may be trained now; in a pipeline, a pass begins before FSDP has set it.
            if getattr(group, "_orig_dtype", group) is None:
                group._init_mp_dtypes()
        if self._use is not None:
            self._use.begin_pass(is_first=accumulation.is_first_pass, begins_step=not accumulation.is_open)

    def end_pass(self, accumulation: Accumulation) -> None:
        if self._use is not None:
            self._use.end_pass()
            if accumulation.is_complete:
                self._use.drop_unused()
        super().end_pass(accumulation)

    def share_gradients(self) -> None:
        if self._use is not None:
            self._use.drop_unused()
        super().share_gradients()

    def resume_gradients(self) -> None:
        if self._use is not None:
            self._use.resume()


class ParameterUse:
    """Compares which parameters a backward pass used over the ranks, or makes up for it with ``find_unused_parameters``.

    FSDP2 gathers the blocks that a rank computes, and reduces the gradients that a rank has: ranks that use different blocks or
    parameters would exchange different tensors, which torch does not notice where these have the same size.

    Args:
        model: Was given to ``fully_shard``, as its blocks may have been.
        group: The ranks that the parameters are divided over.
        is_free: Whether ranks may use different parameters. The model is one group of FSDP then.

    Raises:
        ConfigError: This version of torch cannot do that.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, is_free: bool) -> None:
        self._names = dict(model.named_parameters())
        self._group = group
        self._is_free = is_free
        self._used: set[int] = set()  # ids of parameters, in this pass
        self._used_in_step: set[int] = set()
        self._pass = 0  # of its batch
        self._left_out: dict[int, frozenset[str]] = {}  # names of parameters that passes of this number do not use
        if is_free:
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                raise ConfigError("find_unused_parameters=True with zero_stage=3 needs torch 2.13 or newer.")
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # zeros, where this rank has no gradient
        for parameters in _groups(model):
            parameters.post_backward = _noting(parameters, parameters.post_backward, self._used)

    def begin_pass(self, *, is_first: bool, begins_step: bool) -> None:
        """Begin a backward pass, maybe the first one of its batch, or of the step."""
        self._used.clear()
        if begins_step:
            self._used_in_step.clear()
        self._pass = 0 if is_first else self._pass + 1

    def end_pass(self) -> None:
        """Check that this rank has used what the others have, if it must.

        Raises:
            UsageError: It has used other parameters than other ranks, or than in the first such pass.
        """
        if self._is_free:
            self._used_in_step |= self._used
            return
        missing = frozenset(
            name
            for name, each in self._names.items()
            if each.requires_grad and each.ndim and id(each) not in self._used
        )
        expected = self._left_out.get(self._pass)
        if expected is None:
            of_ranks: list[Any] = [None] * self._group.size()
            dist.all_gather_object(of_ranks, missing, group=self._group)
            self._left_out[self._pass] = missing
            expected = next((each for each in of_ranks if each != missing), missing)
        frozen = {name for name in expected if not self._names[name].requires_grad}
        if odd := sorted((missing ^ expected) - frozen):
            raise UsageError(
                f"zero_stage=3: not all ranks and steps use the same parameters ({odd[0]} is one): give "
                "Engine(find_unused_parameters=True), which gathers the model as a whole, or zero_stage=2."
            )

    def resume(self) -> None:
        """Continue a step: the parameters that have a gradient were used."""
        self._used_in_step |= {id(each) for each in self._names.values() if each.grad is not None}

    def drop_unused(self) -> None:
        """Drop the gradients of parameters that no rank has used in the step so far. All ranks call it."""
        if not self._is_free:
            return
        parameters = [each for each in self._names.values() if each.requires_grad and each.ndim]
        is_used_here = [id(each) in self._used_in_step for each in parameters]
        flags = torch.tensor(is_used_here, dtype=torch.int32, device=device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, is_used in zip(parameters, flags.tolist(), strict=True):
            if not is_used:
                parameter.grad = None


def _groups(model: nn.Module) -> Iterable[Any]:
    """Return FSDP's groups of parameters, which torch has no public name for."""
    for module in model.modules():
        if callable(get_state := getattr(module, "_get_fsdp_state", None)):
            state = get_state()
            several = getattr(state, "_fsdp_param_groups", None)
            yield from [state._fsdp_param_group] if several is None and state._fsdp_param_group else several or []


def _noting(parameters: Any, post_backward: Callable[..., None], used: set[int]) -> Callable[..., None]:
    """Return a ``post_backward`` that notes which parameters have a gradient now."""

    def note(*args: Any) -> None:
        for each in parameters.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None and (whole.grad is not None or each.unsharded_accumulated_grad is not None):
                used.add(id(each.sharded_param))
        post_backward(*args)

    return note


def _checking(parameters: Any, rank: int) -> Callable[..., Any]:
    """Return a ``post_forward`` that checks in its first calls that the pass has not changed the parameters.

    The gathered ones are dropped after the pass. Later calls would make a device wait.
    """
    post_forward, calls = parameters.post_forward, iter(range(_CHECKED_CALLS))

    def check(*args: Any) -> Any:
        if next(calls, None) is not None:
            for each in parameters.fsdp_params:
                whole, own = local_of(each._unsharded_param.detach()), local_of(each.sharded_param.detach())
                dim = each.fsdp_placement.dim
                most = -(-whole.shape[dim] // parameters.mesh_info.shard_mesh_size)
                gathered = whole.narrow(dim, min(rank * most, whole.shape[dim]), own.shape[dim])
                if not torch.allclose(gathered, own.to(gathered), rtol=0, atol=0, equal_nan=True):
                    raise UsageError(
                        f"zero_stage=3: the parameter {each._param_fqn} was changed in a forward pass, for which it is gathered, "
                        "and the change would be lost: change parameters after optimizer.step(), or give zero_stage=2."
                    )
        return post_forward(*args)

    return check


def _check_gathered(parameters: Any, parameter: Any, module: nn.Module, args: Any) -> None:
    """Check that a layer is called within the model, for whose passes alone its parameters are gathered."""
    if not (torch.compiler.is_compiling() or parameters.is_unsharded):
        name = parameter._param_fqn or parameter._module_info.param_name
        raise UsageError(
            f"zero_stage=3: the layer of {name} was called by itself, and its parameters are gathered when the model is called: "
            "evaluate with the whole model, or give zero_stage=2."
        )


def _without_shared(blocks: Mapping[str, nn.Module], model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that share no parameter with others: FSDP gathers shared ones with the parameters outside of blocks."""
    owners: dict[nn.Parameter, set[int]] = {}
    inside = {id(part): id(block) for block in blocks.values() for part in block.modules()}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(id(part), 0))
    shared = {owner for several in owners.values() if len(several) > 1 for owner in several}
    return {name: block for name, block in blocks.items() if id(block) not in shared}


def _refuse_copy(*_: Any) -> Any:
    raise ConfigError(NO_AVERAGES)


def fsdp_shard_placement(data_parallel_size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a `shard_placement_fn` for `fully_shard`, which shards another dim than tensor parallelism where it can.

    FSDP2 by itself shards dim 0, where a fused weight's description would be wrong, and its checkpoints with it: where it
    would have to, a ConfigError is raised.
    """

    def placement_of(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor) or parameter.ndim < 2:
            return None
        free = free_dims(parameter)
        if 0 in free:
            return None
        even = [dim for dim in free if parameter.shape[dim] % data_parallel_size == 0]
        if not even and any(isinstance(one, _StridedShard) and one.dim == 0 for one in parameter.placements):
            shape = tuple(parameter.shape)
            raise ConfigError(
                f"zero_stage=3 with tensor_parallel cannot divide a fused weight of shape {shape} over {data_parallel_size} "
                f"replicas: {data_parallel_size} does not divide "
                f"{' or '.join(str(shape[dim]) for dim in free) or 'a free dimension'}. Give another number of workers, or "
                "zero_stage=2."
            )
        return Shard(even[0]) if even else None

    return placement_of
