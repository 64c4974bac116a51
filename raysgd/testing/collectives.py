"""Where ranks meet in torch: tells of each collective before it begins. Worker side; torch is used where it is loaded."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from raysgd.testing.replacing import replace

#: Functions of ``torch.distributed``; those with other names are made of these, or are told of by none.
_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def install(undone: contextlib.ExitStack, tell: Callable[[], None]) -> None:
    """Call ``tell`` before each collective, until ``undone``. Without torch, or a group, there are none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return
    for name in _FUNCTIONS:
        if hasattr(dist, name):
            replace(undone, dist, name, _telling(getattr(dist, name), tell))
    _install_reductions(undone, tell)


def _install_reductions(undone: contextlib.ExitStack, tell: Callable[[], None]) -> None:
    """DistributedDataParallel reduces from C++, in the first backward pass after a forward pass with gradients."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    forward: Callable[..., Any] = DistributedDataParallel.forward
    backward: Callable[..., Any] = torch.autograd.backward
    is_due = False

    @functools.wraps(forward)
    def told_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        is_due = is_due or (torch.is_grad_enabled() and self.require_backward_grad_sync)
        return forward(self, *args, **kwargs)

    @functools.wraps(backward)
    def told_backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        if is_due:
            is_due = False
            tell()
        return backward(*args, **kwargs)

    replace(undone, DistributedDataParallel, "forward", told_forward)
    replace(undone, torch.autograd, "backward", told_backward)


def _telling(function: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        tell()
        return function(*args, **kwargs)

    return told
