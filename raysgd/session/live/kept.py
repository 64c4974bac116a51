"""`KeptState`: the state of a complete step, which a process keeps for the next attempt. Worker side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from raysgd._util.imports import imported
from raysgd.session.events import HeldStep


@final
class KeptState:
    """The state of a complete step, in the memory of this process.

    Args:
        held: The step.
        state: As `LiveState.state_dict` returns it.

    Attributes:
        state: The state without meshes, which end with their process groups.
    """

    def __init__(self, held: HeldStep, state: dict[str, Any]) -> None:
        self.held = held
        self.state = without_meshes(state)
        self._tensors = list(_tensors_in(state))
        self._versions = versions(self._tensors)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed the tensors, as far as torch counts changes."""
        return versions(self._tensors) == self._versions


def _tensors_in(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        tensor = getattr(state, "local", state)
        if hasattr(tensor, "_version"):
            yield from counted(tensor)
        return
    for each in state:
        yield from _tensors_in(each)


def counted(tensor: Any) -> tuple[Any, ...]:
    """Return what counts the changes of a tensor: an operation on a DTensor counts there, or at its local tensor."""
    return (tensor, tensor._local_tensor) if hasattr(tensor, "_local_tensor") else (tensor,)


def versions(tensors: Any) -> list[int]:
    """Return torch's counts of changes."""
    return [tensor._version for tensor in tensors]


def without_meshes(state: Any) -> Any:
    """Copy dicts and lists of a state; in place of DTensors, the copy has what this rank holds of them."""
    if isinstance(state, dict):
        copied = state.copy()
        for key, value in state.items():
            copied[key] = without_meshes(value)
        return copied
    if isinstance(state, list):
        return [without_meshes(each) for each in state]
    if not hasattr(state, "_local_tensor"):
        return state
    from raysgd.checkpoint.codecs.torch import LocalShards

    return LocalShards.of(state)


def leave_room(state: Any) -> Any:
    """Return a state, moved to the host's memory if the GPU has no room for it next to what the attempt took at most.

    The next attempt takes as much again while this state is kept. Shards of DTensors stay where they are.
    """
    torch = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        return state
    num_bytes = sum(each.numel() * each.element_size() for each in _tensors_in(state) if each.is_cuda)
    _, total = torch.cuda.mem_get_info()
    return state if torch.cuda.max_memory_reserved() + num_bytes <= total else _on_host(state)


def _on_host(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_on_host(each) for each in state]
    is_whole = hasattr(state, "_version") and not hasattr(state, "_local_tensor")
    return state.cpu() if is_whole else state
