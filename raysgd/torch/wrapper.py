"""`DistributedModel`: DistributedDataParallel that looks like the model inside it. Worker side.

State dicts, parameter names, attributes, copies and pickles are those of the inner model, so that neither checkpoints
nor user code notice the wrapper. The forward and backward passes are DDP's own, untouched.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.errors import UsageError

_PREFIX = "module."
_logger = logging.getLogger(__name__)


class DistributedModel(DistributedDataParallel):
    """A model whose gradients are averaged over all workers, and which else behaves as the model itself.

    - ``state_dict()``, ``named_parameters()`` and ``named_buffers()`` have no ``module.`` prefix; ``load_state_dict``
      takes state with and without it.
    - Attributes and methods of the inner model can be read, called and set. The few public names that DDP has itself
      (``join``, ``logger``, ``scatter``, ...) hide the inner model's; `unwrap` reaches those.
    - ``copy.deepcopy`` and pickle give the inner model, pickle with its tensors on the CPU.

    For functions that walk the module tree, such as those of ``torch.distributed.checkpoint``, `unwrap` it first.

    Args:
        waiting: Entered while buffers are set to those of rank 0, before a forward pass.
        **settings: Of DistributedDataParallel.
    """

    def __init__(
        self, module: nn.Module, *, waiting: AbstractContextManager[Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(module, **settings)
        self._waiting = waiting or nullcontext()
        if hasattr(module, "dim"):
            self.__dict__.pop("dim", None)  # DDP's own, for scattering over several devices, is without use here
        self.__dict__["_is_built"] = True
        if hidden := _hidden_names(self, module):
            _logger.warning(
                "%s of %s are hidden by DistributedDataParallel's own; reach them by raysgd.torch.unwrap(model).",
                ", ".join(hidden),
                type(module).__name__,
            )

    def __raysgd_unwrap__(self) -> nn.Module:
        """The inner model; what saving a checkpoint and returning from train_func look for."""
        return cast(nn.Module, self.module)

    def _sync_buffers(self) -> None:
        with self._waiting:
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
        return getattr(inner, name)  # its error names the model's class, which the user knows

    def __setattr__(self, name: str, value: Any) -> None:
        # What the inner model reads as self.name must not end up on the wrapper. DDP's own names stay with DDP.
        if "_is_built" in self.__dict__ and not self._has_itself(name) and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})  # type: ignore[no-untyped-call]

    def _has_itself(self, name: str) -> bool:
        return name in self.__dict__ or name in self._modules or hasattr(type(self), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the inner model; keys may have the ``module.`` prefix of a plain DistributedDataParallel.

        Raises:
            UsageError: ``assign=True``, which would replace the parameters that DDP averages the gradients of.
        """
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) after prepare_model would leave gradients out; load before it."
            )
        return self.module.load_state_dict(without_prefix(state_dict, self.module.state_dict().keys()), strict=strict)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """As a part of a larger module: give the keys the prefix that the module tree has, and state_dict has not."""
        mine = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        for key, value in without_prefix(mine, self.module.state_dict().keys()).items():
            state_dict[prefix + _PREFIX + key] = value
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.__raysgd_unwrap__().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.__raysgd_unwrap__().named_buffers(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.__raysgd_unwrap__(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # `cast` gives back its second argument: an identity that can be unpickled where there is no raysgd.
        return cast, (None, copy_to(self.__raysgd_unwrap__(), torch.device("cpu")))


def without_prefix(state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """A state dict without the ``module.`` prefix of DDP, if it has it.

    Args:
        state: With the prefix or without.
        names: The names of the model. A model may itself have a part called ``module``: what fits more names is right.
    """
    bare = OrderedDict((key.removeprefix(_PREFIX), value) for key, value in state.items())
    if _num_known(bare, names) <= _num_known(state, names):
        return state
    metadata = getattr(state, "_metadata", None)  # versions of the modules, by their path
    if metadata is not None:
        inner = {path for path in metadata if path == "module" or path.startswith(_PREFIX)}
        bare._metadata = OrderedDict((path[len(_PREFIX) :], metadata[path]) for path in metadata if path in inner)  # type: ignore[attr-defined]
    return bare


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with its parameters and buffers on a device: itself if they are there, else a copy.

    The copy's tensors are made on the device: no second copy ever lies beside the original.
    """
    tensors = list(chain(module.parameters(), module.buffers()))
    if all(tensor.device == device for tensor in tensors):
        return module
    memo: dict[int, Any] = {id(tensor): _tensor_to(tensor, device) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _tensor_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _num_known(keys: Iterable[str], names: Collection[str]) -> int:
    return sum(key in names for key in keys)


def _hidden_names(wrapper: DistributedModel, inner: nn.Module) -> list[str]:
    ddp_names = {*wrapper.__dict__, *vars(DistributedDataParallel)} - {*dir(nn.Module()), "device"}
    return sorted(name for name in ddp_names if not name.startswith("_") and hasattr(inner, name))
