"""`restore`: loads a checkpoint into models and optimizers; each rank reads the shards that it holds. Worker side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from raysgd.checkpoint.codecs.leaves import ByteArray
from raysgd.checkpoint.codecs.shards import ShardIndex, full_index
from raysgd.checkpoint.codecs.torch import is_dtensor, local_shards
from raysgd.checkpoint.placing import check_array, held_tensors, place_array, place_optimizer_state
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
        CheckpointCorruptError: A file is missing, or does not match its checksum. The object for which it was read is as it
            was.
        StorageError: Reading failed. A module may be restored in part then.
    """
    _restore(saved, into, "state")


def _restore(saved: Any, into: Any, place: str) -> None:
    if isinstance(into, (Mapping, list, tuple)):
        for key, target in _items(saved, into, place):
            _restore(saved[key], target, f"{place}[{key!r}]")
    elif isinstance(into, torch.Tensor):
        with torch.no_grad():
            into.copy_(place_array(saved, into, place))
    elif isinstance(into, nn.Module):
        _load_module(saved, into, place)
    elif hasattr(into, "param_groups") and hasattr(into, "load_state_dict"):
        into.load_state_dict(place_optimizer_state(saved, into, place))
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
    tensors = {key: value for key, value in saved.items() if isinstance(own[key], torch.Tensor)}
    for key, value in tensors.items():
        check_array(value, own[key], f"{place}[{key!r}]")
    # Nothing is overwritten before everything else is read, and what shall be read in place is found whole.
    filled = _find_fillable(tensors, own) if _loads_plainly(module) else {}
    for key, value in tensors.items():
        if key not in filled:
            state[key] = place_array(value, own[key], f"{place}[{key!r}]")
    held = held_tensors(module)
    for key, (index, memory) in filled.items():
        saved[key].read_into(index.slices(), memory)
        state[key] = held.get(key, own[key])  # load_state_dict copies nothing onto itself
    module.load_state_dict(state)


def _find_fillable(
    tensors: Mapping[str, Any], own: Mapping[str, torch.Tensor]
) -> dict[str, tuple[ShardIndex, ByteArray]]:
    """Find tensors that can be read straight into the module's memory, since what is saved of them matches its checksums.

    Returns:
        By name, what this rank holds of the tensor, and the memory for it.
    """
    found = {}
    for key, value in tensors.items():
        if isinstance(value, SavedArray) and value.dtype == own[key].dtype:
            area = _area(own[key])
            if area is not None and value.check(area[0].slices()):
                found[key] = area
    return found


def _area(target: torch.Tensor) -> tuple[ShardIndex, ByteArray] | None:
    """Return the elements that this rank holds and the bytes of their memory; None if they are not one block of host memory."""
    held = target.detach()
    index = full_index(tuple(target.shape))
    if is_dtensor(target):
        held = held._local_tensor  # type: ignore[attr-defined]
        index = next(iter(local_shards(target)), index)
    is_plain = type(held) is torch.Tensor and held.device.type == "cpu" and held.layout == torch.strided
    if (
        not is_plain
        or not held.is_contiguous()
        or not held.numel()
        or index.shape != tuple(held.shape)
        or held.is_conj()
        or held.is_neg()
    ):
        return None
    return index, held.reshape(-1).view(torch.uint8).numpy()


def _loads_plainly(module: nn.Module) -> bool:
    """Whether loading is torch's alone: code of others may exchange values, and must not find them written already."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return False
    functions = [
        function
        for part in module.modules()
        for function in (
            type(part)._load_from_state_dict,
            *(getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values()),
        )
    ]
    known = ("torch.", "raysgd.")
    return all((getattr(function, "__module__", None) or "").startswith(known) for function in functions)
