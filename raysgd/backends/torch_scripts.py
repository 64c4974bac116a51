"""Lets scripts for torchrun run in train_func: the group that they ask for is the one that raysgd has made. Worker side.

`install` puts functions of this module in the place of ``torch.distributed.init_process_group`` and
``destroy_process_group``, for the life of the process. Without a group of raysgd they are torch's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.errors import UsageError
from raysgd.session import context


@dataclass
class GivenGroup:
    """The group that raysgd has made in this process.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``.
        was_destroyed: The script has asked to destroy it, and may make another one.
    """

    backend: str
    rank: int
    world_size: int
    was_destroyed: bool = False

    def is_asked_for(self, arguments: dict[str, Any]) -> bool:
        """Return True if these arguments of ``init_process_group`` describe this group, in whatever way its members meet."""
        expected = {"rank": self.rank, "world_size": self.world_size}
        if any(arguments.get(name, -1) not in (-1, value) for name, value in expected.items()):
            return False
        backend = arguments.get("backend")
        return backend is None or _backends_of_devices(str(backend).lower()) <= {self.backend, "undefined"}

    def refuse(self, arguments: dict[str, Any]) -> UsageError:
        """Return the error for arguments that describe another group."""
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name != "store")
        return UsageError(
            f"torch.distributed.init_process_group({given}) in train_func asks for another group than the one that raysgd "
            f"has made: {self.backend}, rank {self.rank} of {self.world_size}. Leave the call out, or ask for that group; "
            'Trainer(num_workers=..., backend_args={"backend": ...}) sets its size and its library.'
        )


#: An attribute of the functions that `install` puts in place.
_MARK = "_is_of_raysgd"
_given: GivenGroup | None = None


def install() -> None:
    """Replace torch's functions, once in a process, before the user's modules import them."""
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d.init_process_group, _MARK):
        _replace(distributed_c10d.init_process_group, _init_process_group)
        _replace(distributed_c10d.destroy_process_group, _destroy_process_group)


def give(group: GivenGroup) -> None:
    """Make this group the one that scripts get, until `take_back`."""
    global _given
    _given = group


def take_back() -> None:
    """Give torch's functions their own meaning again; without a given group, do nothing."""
    global _given
    _given = None


def _replace(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> None:
        replacement(original, *args, **kwargs)

    setattr(function, _MARK, True)
    for module in (dist, distributed_c10d):
        setattr(module, original.__name__, function)


def _init_process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    import torch.distributed as dist

    if _given is None or not dist.is_initialized():
        original(*args, **kwargs)
        return
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    if _given.is_asked_for(arguments):
        _given.was_destroyed = False
        _count_steps()
        if (timeout := arguments.get("timeout")) is not None:
            dist.distributed_c10d._set_pg_timeout(timeout)
    elif _given.was_destroyed:
        take_back()
        dist.destroy_process_group()
        original(*args, **kwargs)
    else:
        raise _given.refuse(arguments)


@functools.cache
def _count_steps() -> None:
    """Count the steps of a script by its optimizers, once in a process: it may make no calls of raysgd."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        context.current().progress.on_optimizer_step(id(optimizer))

    register_optimizer_step_post_hook(hook)


def _destroy_process_group(original: Callable[..., Any], group: Any = None) -> None:
    import torch.distributed as dist

    if _given is not None and dist.is_initialized() and group in (None, dist.group.WORLD):
        _given.was_destroyed = True  # it stays until the attempt ends: other ranks may not have come as far
    else:
        original(group)


def _backends_of_devices(backend: str) -> set[str]:
    """Return the libraries that ``backend``, such as ``"cpu:gloo,cuda:nccl"``, names for the devices of this process."""
    import torch

    if ":" not in backend:
        return {backend}
    of_device = dict(part.split(":", 1) for part in backend.split(","))
    return {
        of_device[name]
        for name in ("cpu", "cuda")
        if name in of_device and (name == "cpu" or torch.cuda.is_available())
    }
