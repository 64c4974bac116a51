"""Checks that an optimizer makes its steps with gradients of all ranks, however a loop computes them. Worker side.

DDP averages the gradients of a backward pass that follows a call of its model, and of no other: not of one through a part of the
model, of a second pass after two calls, or of ``torch.autograd.grad``. Each rank would then train a model of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.errors import UsageError

#: Steps of each optimizer whose gradients are compared in any case: a loop may change them after DDP.
_COMPARED_STEPS = 2
#: Relative difference of norms. Averages have equal bits on all ranks.
_TOLERANCE = 1e-5
_all: weakref.WeakSet[Averages] = weakref.WeakSet()


class Averages:
    """Follows which gradients of a model DDP has averaged.

    Args:
        parameters: Those that are averaged, by name.
        group: The ranks.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = {
            id(each): (weakref.ref(each), name) for name, each in parameters.items() if not is_dtensor(each)
        }
        self._group = group
        self._averaged: set[int] = set()  # the identities of parameters that no optimizer has updated since
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._will_average = False
        self._pass = -1
        self.is_checked = True
        _all.add(self)
        _check_optimizers()

    def begin(self) -> None:
        """DDP averages the gradients of the next backward pass."""
        self._will_average = True

    def add(self, parameter: nn.Parameter) -> bool:
        """A backward pass has added to a gradient; returns whether it is the first of one whose gradients are averaged."""
        current, is_first = torch._C._current_graph_task_id(), self._will_average
        if is_first:
            self._will_average, self._pass = False, current
        if current == self._pass:
            self._averaged.add(id(parameter))
        else:
            self._averaged.discard(id(parameter))
        return is_first

    def check(self, optimizer: Optimizer) -> None:
        """Check the gradients with which an optimizer makes a step. All ranks call it.

        Raises:
            UsageError: They differ between ranks.
        """
        updated = [each for group in optimizer.param_groups for each in group["params"] if self._has(each)]
        if not updated:
            return
        number = self._num_steps.get(optimizer, 0)
        has_others = any(each.grad is not None and id(each) not in self._averaged for each in updated)
        self._averaged.difference_update(map(id, updated))
        if number >= _COMPARED_STEPS and not has_others:
            return
        self._num_steps[optimizer] = number + 1
        if differing := [each for each, differs in zip(updated, self._compare(updated), strict=True) if differs]:
            _, name = self._parameters[id(differing[0])]
            raise UsageError(
                f"optimizer.step() was called with gradients that differ between ranks, of {name!r} and "
                f"{len(differing) - 1} more parameters, so that each rank would train a model of its own. DDP averages those of "
                "one backward pass after a call of the model that prepare_model returned: not of parts of it, of "
                "torch.autograd.grad, of a second pass after two calls, or of no_sync(). Call the model once for each pass, or "
                "add losses up; raysgd.Engine takes several passes. Or average parameter.grad by torch.distributed.all_reduce. "
                "For models that shall differ, make the DistributedDataParallel yourself."
            )

    def _has(self, parameter: nn.Parameter) -> bool:
        known = self._parameters.get(id(parameter))
        return known is not None and known[0]() is parameter

    def _compare(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return whether the gradient of each parameter differs between ranks."""
        found = torch.stack([_describe(each) for each in parameters])
        bounds = torch.stack([found, -found])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._group)
        spread = (bounds[0] + bounds[1]).abs().amax(1)
        is_different: list[bool] = (spread > _TOLERANCE * bounds[0, :, 0].abs()).tolist()
        return is_different


def _describe(parameter: nn.Parameter) -> torch.Tensor:
    """Return norm and sum of a gradient, and whether there is one."""
    gradient = parameter.grad
    if gradient is None:
        return torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64, device=parameter.device)
    values = gradient.detach()
    values = (values.coalesce().values() if values.is_sparse else values).reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    values = values.to(torch.float64)
    return torch.nan_to_num(torch.stack([values.norm(), values.sum(), values.new_ones(())]), nan=-1.0)


@functools.cache
def _check_optimizers() -> None:
    inside: weakref.WeakSet[Optimizer] = (
        weakref.WeakSet()
    )  # of others, which are checked; each rank may have other parameters

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        inside.update(each for each in vars(optimizer).values() if isinstance(each, Optimizer))
        if optimizer in inside:
            return
        for each in list(_all):
            if each.is_checked:
                each.check(optimizer)

    register_optimizer_step_pre_hook(check)
