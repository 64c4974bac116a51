"""What is attached to a user's model, so that copies and pickles of the model are those of the model alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree


class AttachedForward:
    """A ``forward`` that was put in the place of a module's own. A copy or a pickle has the module's own.

    Args:
        original: The module's own ``forward``.
        call: Called in its place.
    """

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._original,)


class AttachedHook(AttachedForward):
    """A hook of a module. A copy or a pickle of the module has one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(_nothing, call)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (_NOTHING, "__exit__")


def _same(value: Any) -> Any:
    return value


#: Its ``__exit__`` does nothing, and is unpickled also where raysgd is not installed.
_NOTHING = nullcontext()
_nothing = _NOTHING.__exit__


def differentiable(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree through which a backward pass can go."""
    if not torch.is_grad_enabled():
        return []
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor) and each.requires_grad]
