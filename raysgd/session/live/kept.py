"""`KeptState`: the state of a complete step, which a process keeps for the next attempt. Worker side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from raysgd.session.events import HeldStep


@final
class KeptState:
    """The state of a complete step, in the memory of this process.

    Args:
        held: The step.
        state: As `LiveState.state_dict` returns it.
    """

    def __init__(self, held: HeldStep, state: dict[str, Any]) -> None:
        self.held = held
        self.state = state
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
        if hasattr(state, "_version"):
            yield state
        return
    for each in state:
        yield from _tensors_in(each)


def versions(tensors: Any) -> list[int]:
    return [tensor._version for tensor in tensors]
