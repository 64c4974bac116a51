"""`restore`: loads a checkpoint into models and optimizers; each rank reads the pieces that it holds. Worker side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from raysgd.checkpoint.codecs.shards import ShardIndex
from raysgd.checkpoint.codecs.torch import is_dtensor, local_pieces
from raysgd.checkpoint.resharding import SavedArray
from raysgd.errors import CheckpointError
from raysgd.torch.model import unwrap


def restore(saved: Any, *, into: Any) -> None:
    """Load a checkpoint into objects that are made already, whatever mesh and number of workers saved it.

    A plain model can be restored from what FSDP or tensor-parallel ranks saved, and the other way round. Reading does not
    communicate, so ranks may call this at different times.

        state = raysgd.load_checkpoint()
        if state is not None:
            raysgd.torch.restore(state, into={"model": model, "optimizer": optimizer})
            step = state["step"]

    Args:
        saved: The state that `raysgd.load_checkpoint` returned, or a part of it.
        into: A module, an optimizer, another object with ``state_dict`` and ``load_state_dict``, or a tensor; or a dict, list
            or tuple of them that has the structure of ``saved``. Of a dict, keys that ``saved`` has in addition are ignored.

    Raises:
        CheckpointError: Something was not saved, or has another shape; the text names the place.
        CheckpointCorruptError: A file is missing, or does not match its checksum.
    """
    _restore(saved, into, "state")


def _restore(saved: Any, into: Any, place: str) -> None:
    if isinstance(into, (Mapping, list, tuple)):
        for key, target in _items(saved, into, place):
            _restore(saved[key], target, f"{place}[{key!r}]")
    elif isinstance(into, torch.Tensor):
        with torch.no_grad():
            into.copy_(_placed(saved, into, place))
    elif isinstance(into, nn.Module):
        _load_module(saved, into, place)
    elif hasattr(into, "param_groups") and hasattr(into, "load_state_dict"):
        into.load_state_dict(_optimizer_state(saved, into, place))
    elif hasattr(into, "load_state_dict"):
        into.load_state_dict(saved)
    else:
        raise CheckpointError(
            f"{place}: restore(..., into=...) has {type(into).__name__} there, which has no load_state_dict; read it from the "
            "loaded state."
        )


def _items(saved: Any, into: Any, place: str) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of ``into``, all of which were saved."""
    if isinstance(into, Mapping):
        missing = [key for key in into if not isinstance(saved, Mapping) or key not in saved]
        if missing:
            raise CheckpointError(
                f"{place}[{missing[0]!r}] is in restore(..., into=...) but was not saved: leave it out."
            )
        return into.items()
    if not isinstance(saved, (list, tuple)) or len(saved) != len(into):
        raise CheckpointError(f"{place} was not saved as {len(into)} values, which restore(..., into=...) has there.")
    return enumerate(into)


def _load_module(saved: Any, module: nn.Module, place: str) -> None:
    module = unwrap(module)
    own = module.state_dict()
    if unknown := [key for key in saved if key not in own]:
        raise CheckpointError(f"{place}[{unknown[0]!r}] was saved but the {type(module).__name__} has no such name.")
    if missing := [key for key in own if key not in saved]:
        raise CheckpointError(f"{place}[{missing[0]!r}] is in the {type(module).__name__} but was not saved.")
    state = saved.copy()  # an OrderedDict keeps the versions that load_state_dict upgrades from
    if (metadata := getattr(saved, "_metadata", None)) is not None:
        state._metadata = metadata
    for key, value in saved.items():
        if isinstance(own[key], torch.Tensor):
            state[key] = _placed(value, own[key], f"{place}[{key!r}]")
    module.load_state_dict(state)


def _optimizer_state(saved: Any, optimizer: Any, place: str) -> Any:
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


def place_like(name: str, value: Any, parameter: torch.Tensor | None, place: str) -> Any:
    """Return an optimizer's value for a parameter: distributed as the parameter is, if it has the parameter's shape.

    Args:
        name: Its name in the optimizer's state. ``step`` is a number, also for a parameter without dimensions.
        value: As it was saved; only tensors are placed.
        parameter: None: the value stays as it is.
        place: Where it was saved, for errors.
    """
    if not isinstance(value, (SavedArray, torch.Tensor)):
        return value
    if parameter is not None and tuple(value.shape) == tuple(parameter.shape) and (value.shape or name != "step"):
        return _placed(value, parameter, place)
    return value.read() if isinstance(value, SavedArray) else value


def _placed(value: Any, target: torch.Tensor, place: str) -> Any:
    """Return a value as ``target`` is distributed: a DTensor on its mesh, or a plain tensor."""
    if not isinstance(value, (SavedArray, torch.Tensor)):
        raise CheckpointError(f"{place} was saved as {type(value).__name__}; a tensor is needed there.")
    if tuple(value.shape) != tuple(target.shape):
        raise CheckpointError(
            f"{place} was saved with shape {tuple(value.shape)}; restore(..., into=...) has {tuple(target.shape)} there."
        )
    if not is_dtensor(target):
        return value.read() if isinstance(value, SavedArray) else value
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(target.detach()._local_tensor, dtype=value.dtype)  # type: ignore[attr-defined]
    for index, where in local_pieces(target).items():
        local[where] = _read(value, index)
    return DTensor.from_local(
        local,
        target.device_mesh,  # type: ignore[attr-defined]
        target.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def _read(value: Any, index: ShardIndex) -> Any:
    if isinstance(value, SavedArray):
        return value[index.slices()] if index.begin else value.read()
    return value[index.slices()] if index.begin else value
