"""Which parameters of a sharded model a backward pass used. Worker side.

FSDP2 gathers the blocks that a rank computes, and reduces the gradients that a rank has: ranks that use different blocks or
parameters would exchange different tensors, which torch does not notice where these have the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysgd.errors import ConfigError, UsageError
from raysgd.torch.devices import device


class ShardedUse:
    """Compares what the ranks use, or makes up for it with ``find_unused_parameters``.

    Args:
        model: Was given to ``fully_shard``, as its blocks may have been.
        group: The ranks that the parameters are divided over.
        is_free: Whether ranks may use different parameters. The model is one group of FSDP then.

    Raises:
        ConfigError: This version of torch cannot do that.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, is_free: bool) -> None:
        self._names = dict(model.named_parameters())
        self._group = group
        self._is_free = is_free
        self._used: set[int] = set()  # ids of parameters, in this pass
        self._used_in_step: set[int] = set()
        self._pass = 0  # of its batch
        self._left_out: dict[int, frozenset[str]] = {}  # names of parameters that passes of this number do not use
        if is_free:
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                raise ConfigError("find_unused_parameters=True with zero_stage=3 needs torch 2.13 or newer.")
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # zeros, where this rank has no gradient
        for parameters in _groups(model):
            parameters.post_backward = _noting(parameters, parameters.post_backward, self._used)

    def begin_pass(self, *, is_first: bool) -> None:
        """Begin a backward pass, maybe the first one of its batch."""
        self._used.clear()
        self._pass = 0 if is_first else self._pass + 1

    def end_pass(self) -> None:
        """Check that this rank has used what the others have, if it must.

        Raises:
            UsageError: It has used other parameters than other ranks, or than in the first such pass.
        """
        if self._is_free:
            self._used_in_step |= self._used
            return
        missing = frozenset(
            name
            for name, each in self._names.items()
            if each.requires_grad and each.ndim and id(each) not in self._used
        )
        expected = self._left_out.get(self._pass)
        if expected is None:
            of_ranks: list[Any] = [None] * self._group.size()
            dist.all_gather_object(of_ranks, missing, group=self._group)
            self._left_out[self._pass] = missing
            expected = next((each for each in of_ranks if each != missing), missing)
        frozen = {name for name in expected if not self._names[name].requires_grad}
        if odd := sorted((missing ^ expected) - frozen):
            raise UsageError(
                f"zero_stage=3: not all ranks and steps use the same parameters ({odd[0]} is one): give "
                "Engine(find_unused_parameters=True), which gathers the model as a whole, or zero_stage=2."
            )

    def end_step(self) -> None:
        """Drop the gradients of parameters that no rank has used in the step. All ranks call it."""
        if not self._is_free:
            return
        parameters = [each for each in self._names.values() if each.requires_grad and each.ndim]
        is_used_here = [id(each) in self._used_in_step for each in parameters]
        flags = torch.tensor(is_used_here, dtype=torch.int32, device=device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, is_used in zip(parameters, flags.tolist(), strict=True):
            if not is_used:
                parameter.grad = None
        self._used_in_step.clear()


def _groups(model: nn.Module) -> Iterable[Any]:
    """Return FSDP's groups of parameters, which torch has no public name for."""
    for module in model.modules():
        if callable(get_state := getattr(module, "_get_fsdp_state", None)):
            state = get_state()
            several = getattr(state, "_fsdp_param_groups", None)
            yield from [state._fsdp_param_group] if several is None and state._fsdp_param_group else several or []


def _noting(parameters: Any, post_backward: Callable[..., None], used: set[int]) -> Callable[..., None]:
    """Return a ``post_backward`` that notes which parameters have a gradient now."""

    def note(*args: Any) -> None:
        for each in parameters.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None and (whole.grad is not None or each.unsharded_accumulated_grad is not None):
                used.add(id(each.sharded_param))
        post_backward(*args)

    return note
