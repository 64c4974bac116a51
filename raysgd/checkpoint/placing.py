"""Places the tensors of a loaded state where a module or an optimizer of torch has its own: on their meshes, or whole.

Runs in workers. torch is loaded by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raysgd.checkpoint.codecs.shards import ShardIndex
from raysgd.checkpoint.codecs.torch import LocalShards, is_dtensor, local_shards, torch
from raysgd.checkpoint.resharding import SavedArray
from raysgd.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_saved_array(value: Any) -> bool:
    """Return whether a value of a loaded state is an array: saved in shards, a shard, or a tensor."""
    return isinstance(value, (SavedArray, LocalShards, torch().Tensor))


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name: `load_state_dict` does not copy one of them onto itself."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def place_state(module: nn.Module, state: dict[str, Any], prefix: str = "") -> None:
    """Change a state dict so that a module can load it: tensors lie where the module's own do.

    Args:
        module: Its parameters may be distributed.
        state: Changed in place; tensors, DTensors or saved arrays by name. Names that the module does not have stay.
        prefix: What the names begin with.
    """
    for name, target in held_tensors(module).items():
        value = state.get(key := prefix + name)
        is_placed = isinstance(value, torch().Tensor) and is_dtensor(value) == is_dtensor(target)
        if not is_placed and is_saved_array(value):
            value = value.full_tensor() if is_dtensor(value) else value
            state[key] = place_array(value, target, f"state[{key!r}]")


def place_optimizer_state(saved: Any, optimizer: Any, place: str) -> Any:
    """Return a state dict for the optimizer: state of a parameter's shape lies where the parameter does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(enumerate(parameters))
    state = {
        number: {
            name: place_like(name, value, by_number.get(number), f"{place}['state'][{number!r}][{name!r}]")
            for name, value in of_parameter.items()
        }
        if isinstance(of_parameter, Mapping)
        else of_parameter
        for number, of_parameter in saved["state"].items()
    }
    return {**saved, "state": state}


def place_like(name: str, value: Any, parameter: Tensor | None, place: str) -> Any:
    """Return an optimizer's value for a parameter: distributed as the parameter is, if it has the parameter's shape.

    Args:
        name: Its name in the optimizer's state. ``step`` is a number, also for a parameter without dimensions.
        value: As it was saved; only tensors are placed.
        parameter: None: the value stays as it is.
        place: Where it was saved, for errors.
    """
    if not is_saved_array(value):
        return value
    if parameter is not None and tuple(value.shape) == tuple(parameter.shape) and (value.shape or name != "step"):
        return place_array(value, parameter, place)
    return _whole(value, place)


def check_array(value: Any, target: Tensor, place: str) -> None:
    if not is_saved_array(value):
        raise CheckpointError(f"{place} was saved as {type(value).__name__}; a tensor is needed there.")
    if tuple(value.shape) != tuple(target.shape):
        raise CheckpointError(
            f"{place} was saved with shape {tuple(value.shape)}; restore(..., into=...) has {tuple(target.shape)} there."
        )


def place_array(value: Any, target: Tensor, place: str) -> Any:
    """Return a value as ``target`` is distributed: a DTensor on its mesh, or a plain tensor."""
    check_array(value, target, place)
    if not is_dtensor(target):
        return _whole(value, place)
    from torch.distributed.tensor import DTensor

    if is_dtensor(value):
        if value.device_mesh == target.device_mesh and value.placements == target.placements:
            return value
        value = value.full_tensor()
    held = target.detach()._local_tensor  # type: ignore[attr-defined]
    shards = local_shards(target)
    whole = next(iter(shards), None)
    if isinstance(value, LocalShards) and value.places != tuple(shards):
        raise _other_shards(value, target, place)
    is_plain = held.device.type == "cpu" and held.is_contiguous()
    if isinstance(value, LocalShards):
        local = value.local
    elif isinstance(value, SavedArray) and is_plain and whole is not None and whole.shape == held.shape:
        local = _read(value, whole)  # new memory costs more than what is read into it, so there is no second copy
    else:
        local = torch().empty_like(held, dtype=value.dtype)
        for index, where in shards.items():
            local[where] = _read(value, index)
    return DTensor.from_local(
        local,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def _whole(value: Any, place: str) -> Any:
    """Return a value as a plain tensor."""
    if isinstance(value, LocalShards) and tuple(value.local.shape) != value.shape:
        raise _other_shards(value, value.local, place)
    return value.local if isinstance(value, LocalShards) else value.read() if isinstance(value, SavedArray) else value


def _other_shards(value: LocalShards, target: Tensor, place: str) -> CheckpointError:
    held = ", ".join(map(str, value.places))
    return CheckpointError(
        f"{place} is this rank's shard {held} of a live state, and the {type(target).__name__} needs other elements: distribute "
        "the model as the last attempt did."
    )


def _read(value: Any, index: ShardIndex) -> Any:
    if isinstance(value, SavedArray):
        return value[index.slices()] if index.begin else value.read()
    return value[index.slices()] if index.begin else value
