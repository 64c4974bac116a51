"""Apply a plan to a model: parameters become DTensors on the tensor-parallel mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from raysgd._util.text import with_article
from raysgd.config.argument_names import nearest
from raysgd.engine.tensor_parallel.collectives import broadcast_from_first
from raysgd.engine.tensor_parallel.context import TensorContext
from raysgd.engine.tensor_parallel.layers import Replicated, Style
from raysgd.engine.tensor_parallel.structure import holds_for_others
from raysgd.engine.tensor_parallel.tensor_plan import TensorPlan
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: A plan of a user: styles by module path, or a function that changes the model in place.
OwnPlan = Mapping[str, ParallelStyle] | Callable[[nn.Module, "DeviceMesh"], object]

_STYLES = "ColwiseParallel(), RowwiseParallel() or SequenceParallel() of torch.distributed.tensor.parallel"


def check_own_plan(model: nn.Module, plan: Any) -> None:
    """Check that a user's plan is a function, or has styles for layers that the whole model has.

    Raises:
        ConfigError: It is something else, a path matches no layer, or a layer cannot have its style.
    """
    if not isinstance(plan, Mapping):
        if callable(plan) and not isinstance(plan, (type, ParallelStyle)):
            return
        raise ConfigError(
            f"tensor_plan is {_say(plan)}; give a dict of module paths and styles, such as {{'layers.*.up': "
            "ColwiseParallel()}, or a function that is called with the model and the mesh."
        )
    if not plan:
        raise ConfigError(
            "tensor_plan is empty, so that it shards no layer: leave it out, which lets the engine make a plan, or give styles "
            "by module path."
        )
    modules = dict(model.named_modules())
    for path, style in plan.items():
        matched = match_modules(str(path), modules)
        if not matched:
            known = {re.sub(r"\b\d+\b", "*", name) for name in modules} if "*" in str(path) else modules
            raise ConfigError(
                f"tensor_plan[{path!r}] matches no module of the {type(model).__name__}{nearest(path, known)}; give the path of "
                "a module, in which * matches one name."
            )
        if not isinstance(style, ParallelStyle):
            raise ConfigError(f"tensor_plan[{path!r}] is {_say(style)}; give a style, such as {_STYLES}.")
        is_of_weights = type(style)._apply in (ColwiseParallel._apply, RowwiseParallel._apply)
        if is_of_weights and (
            odd := [one for one in matched if not isinstance(modules[one], (nn.Linear, nn.Embedding))]
        ):
            raise ConfigError(
                f"tensor_plan[{path!r}] is a {type(style).__name__}, which shards nn.Linear and nn.Embedding, and {odd[0]} is "
                f"{with_article(type(modules[odd[0]]).__name__)}: give the paths of the linear layers and embeddings inside of "
                "it, or SequenceParallel() for a norm."
            )


def match_modules(path: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules that `parallelize_module` takes for a path."""
    if path in modules:
        return [path]
    tokens = path.split(".")
    split = ((name, name.split(".")) for name in modules)
    return [name for name, parts in split if len(parts) == len(tokens) and all(map(fnmatch, parts, tokens))]


def _say(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else with_article(type(value).__name__)


def apply_tensor_plan(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan | OwnPlan) -> nn.Module:
    """Shard a model's layers over the ranks of a mesh; every rank calls it.

    All parameters become DTensors on the mesh, with the values of the mesh's first rank; buffers get that rank's values too.
    The names of parameters stay. An optimizer is made afterwards. `torch.distributed.fsdp.fully_shard` over a data-parallel
    axis of the same parent mesh may follow, with `fsdp_shard_placement`.

    Args:
        model: The model, which is changed in place.
        mesh: The tensor-parallel axis, ``mesh["tp"]``.
        plan: A plan of `make_tensor_plan`; or a user's: a dict of module paths (``*`` matches one name) and torch
            ParallelStyles, or a function that is called with the model and the mesh, and changes the model in place. Layers that
            a user's plan leaves out are replicated.

    Returns:
        The model.

    Raises:
        ConfigError: The plan is for another number of ranks, gives tied parameters two placements, or is a function that does
            something else than to shard the model.
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"A tensor plan is applied to one axis of a mesh, and this one has {mesh.ndim}: give mesh['tp']."
        )
    ties, context = _ties(model), plan.context if isinstance(plan, TensorPlan) else TensorContext()
    context.bind(mesh)
    if isinstance(plan, TensorPlan):
        if plan.size != mesh.size():
            raise ConfigError(f"The tensor plan is for {plan.size} ranks, and the mesh has {mesh.size()}.")
        parallelize_module(model, mesh, plan.styles)
        if plan.sequence_parallel:
            model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
    elif callable(plan):
        _call_function(plan, model, mesh)
    else:
        # A stage of a pipeline has some of the model's layers.
        here = {name: one for name, one in model.named_modules() if not hasattr(one, "is_elsewhere")}
        parallelize_module(model, mesh, {path: style for path, style in plan.items() if match_modules(path, here)})
    _tie_again(ties)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(one, DTensor) for one in own):
            parallelize_module(module, mesh, Style(context, Replicated))
    for buffer in model.buffers():
        broadcast_from_first(buffer, mesh.get_group())
    return model


def _call_function(plan: Callable[[nn.Module, DeviceMesh], object], model: nn.Module, mesh: DeviceMesh) -> None:
    """Call a user's function, which is that of Lightning Fabric's ``ModelParallelStrategy`` but for the mesh."""
    try:
        returned = plan(model, mesh)
    except KeyError as problem:
        if "mesh_dim_name" not in str(problem):
            raise
        raise ConfigError(
            f"The function that is given as tensor_plan asks its mesh for an axis that does not exist: {problem.args[0]} It gets "
            "the tensor-parallel axis alone: give the mesh itself to parallelize_module, and leave data parallelism to the "
            "engine."
        ) from problem
    if returned is not None and returned is not model:
        raise ConfigError(
            f"The function that is given as tensor_plan returned another module, a {type(returned).__name__}. Change the given "
            "model in place, as parallelize_module does, and return it or nothing."
        )
    if isinstance(model, FSDPModule):
        raise ConfigError(
            "The function that is given as tensor_plan has applied fully_shard. Leave it out, and give zero_stage=3."
        )
    if not any(isinstance(one, DTensor) for one in model.parameters()):
        raise ConfigError(
            "tensor_plan has sharded no parameter of the model: give styles for its linear layers and embeddings, such as "
            "ColwiseParallel() and RowwiseParallel()."
        )


def _ties(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places of each parameter that has more than one."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((path, module, name))
    return [one for one in places.values() if len(one) > 1]


def _tie_again(ties: list[list[tuple[str, nn.Module, str]]]) -> None:
    for places in ties:
        found = {id(module): module.get_parameter(name) for _, module, name in places}
        used = [found[id(module)] for _, module, _ in places if not holds_for_others(module)]
        shared = [one.placements for one in used if isinstance(one, DTensor)]
        if not shared:
            continue
        if len(shared) < len(used) or len(set(shared)) > 1:
            raise ConfigError(
                f"{', '.join(path for path, _, _ in places)} share one parameter, and the plan gives them different placements. "
                "Give each the same, or untie them."
            )
        for _, module, name in places:
            module.register_parameter(name, used[0])


def _refuse_hidden_states(model: nn.Module, args: object, kwargs: dict[str, object]) -> None:
    config = getattr(model, "config", None)
    if kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
        raise ConfigError(
            "output_hidden_states=True is not possible with sequence_parallel=True: each rank has its part of the sequence."
        )
