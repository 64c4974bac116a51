"""`prepare_model` and `unwrap`. Worker side; the process group is the backend's affair."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.torch.devices import device
from raysgd.torch.reduction import use_rank_order
from raysgd.torch.waiting import time_waiting
from raysgd.torch.wrapper import DistributedModel

# By name, so that nobody who does not use them has to import them.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def prepare_model(
    model: nn.Module, *, move_to_device: bool = True, ddp_kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make a model ready for training on all workers: on this worker's device, gradients averaged over all of them.

    All ranks start with the weights and buffers of rank 0. The result is used as the model itself: its ``state_dict()``
    has no ``module.`` prefix, ``load_state_dict`` takes state with and without it, the model's own attributes and
    methods are there, and it is copied and pickled as the model; see `DistributedModel`. Parameters stay the same
    objects, so an optimizer may be made before or after. Every rank must call it, in the same order for several models.

    With ``Trainer(deterministic=True)`` and three or more workers gradients are added in rank order, so that a resumed
    run is bit-identical to one that was not interrupted; see `raysgd.torch.reduction`.

    Args:
        model: In a world of one it is moved and returned as it is, as is one without trainable parameters (its tensors
            are then set to rank 0's once). A model that is wrapped already is returned untouched.
        move_to_device: Move it to `device()`; False where the model places itself.
        ddp_kwargs: More arguments of ``torch.nn.parallel.DistributedDataParallel``, such as
            ``find_unused_parameters=True``.

    Raises:
        UsageError: There are several workers but no torch process group.
        ConfigError: A setting of DDP that cannot go with ``deterministic=True``.
    """
    if is_wrapped(model):
        return model
    if move_to_device:
        model = model.to(device())
    if context.current().world_size == 1:
        return model
    _check_group()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _take_from_rank_0(model)
        return model
    return _wrap(model, dict(ddp_kwargs or {}))


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside what `prepare_model` or DistributedDataParallel made; any other model as it is."""
    while True:
        if callable(inner := getattr(model, "__raysgd_unwrap__", None)):
            model = inner()
        elif isinstance(model, DistributedDataParallel):
            model = cast(nn.Module, model.module)
        else:
            return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether DDP or FSDP has the model already."""
    return not _WRAPPERS.isdisjoint(base.__name__ for base in type(model).__mro__)


def _wrap(model: nn.Module, settings: dict[str, Any]) -> DistributedModel:
    deterministic = context.current().deterministic
    if deterministic and settings.get("skip_all_reduce_unused_params"):
        raise ConfigError(
            "ddp_kwargs: skip_all_reduce_unused_params=True leaves out buckets, which adding gradients in rank order "
            "cannot do; drop it, or deterministic=True."
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (only := devices.pop()).type == "cuda":
        settings.setdefault("device_ids", [only])
    waiting = context.current().progress.waiting
    wrapped = DistributedModel(model, waiting=waiting, **settings)
    time_waiting(wrapped, waiting)
    if deterministic and wrapped.process_group.size() > 2:
        use_rank_order(wrapped, waiting)
    return wrapped


def _check_group() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"prepare_model with {context.current().world_size} workers needs a torch process group, and there is none; "
            'use Trainer(backend="torch").'
        )


def _take_from_rank_0(model: nn.Module) -> None:
    """What DDP does when it is made: frozen random layers would differ from rank to rank otherwise."""
    for tensor in chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
