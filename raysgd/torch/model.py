"""`prepare_model`, `unwrap`, `prepare_optimizer`: a model and its optimizer for training on all workers. Worker side.

`DistributedModel` is a DistributedDataParallel that behaves like the model inside it: state dicts, parameter names,
attributes, copies and pickles are those of the inner model, so that neither checkpoints nor user code notice the wrapper.
The forward and backward passes are DDP's own. The torch backend makes the process group.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd._util.logs import get_logger
from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.torch import is_dtensor
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context
from raysgd.torch.averages import Averages
from raysgd.torch.devices import device, to_device
from raysgd.torch.passes import follow_passes
from raysgd.torch.reduction import call_at_the_end, time_waiting, use_rank_order

_PREFIX = "module."
# Class names, so that FSDP need not be imported to recognise it.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
#: Buffers are sent in messages of this size.
_MESSAGE_BYTES = 25 * 2**20
#: What containers such as ``nn.Sequential`` have in addition to a module's methods. Python looks these up on the class.
_CONTAINER_METHODS = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


def prepare_model(
    model: nn.Module, *, move_to_device: bool = True, ddp_kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Prepare a model for training on all workers: move it to this worker's device and average its gradients.

    All ranks start with the weights and buffers of rank 0, and get its buffers after each backward pass that averages gradients:
    rank 0 can evaluate or save the model alone, and every rank evaluates with the same statistics. Buffers with
    ``persistent=False`` are computed by each rank. The result behaves like the model itself: its ``state_dict()``
    has no ``module.`` prefix, ``load_state_dict`` takes state with and without it, and the model's own attributes and
    methods are available; see `DistributedModel`. Parameters stay the same objects, so an optimizer may be made before or
    after. Every rank must call this function, in the same order for several models.

    An optimizer's step is refused if its gradients differ between ranks, as those of a backward pass through a part of the
    model, or of ``torch.autograd.grad``, do: see `raysgd.torch.averages`.

    With ``Trainer(deterministic=True)`` and three or more workers, gradients are added in rank order, so that a resumed
    run is bit-identical to an uninterrupted one; see `raysgd.torch.reduction`.

    Args:
        model: With one worker, with logical workers, or without trainable parameters, it is moved and returned without a
            wrapper (its tensors are then set once to those of rank 0). A model that is wrapped already is returned unchanged.
        move_to_device: Move the model to `device()`; False if the model places itself.
        ddp_kwargs: More arguments of ``torch.nn.parallel.DistributedDataParallel``, such as
            ``find_unused_parameters=True``.

    Raises:
        UsageError: There are several workers but no torch process group.
        ConfigError: A DDP setting does not work with ``deterministic=True``.
    """
    if is_wrapped(model):
        follow_passes(model)
        return model
    if move_to_device:
        model = model.to(device())
    session = context.current()
    if any(parameter.requires_grad for parameter in model.parameters()):
        follow_passes(model)
    if session.world_size == 1 or session.logical is not None:  # `logical_steps` adds the gradients
        return model
    check_group()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        broadcast_from_rank_0(model)
        return model
    return _wrap(model, dict(ddp_kwargs or {}))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model inside the wrapper of `prepare_model` or DistributedDataParallel; other models unchanged."""
    while True:
        if callable(inner := getattr(model, "__raysgd_unwrap__", None)):
            model = inner()
        elif isinstance(model, DistributedDataParallel):
            model = cast(nn.Module, model.module)
        else:
            return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether the model is wrapped by DDP or FSDP."""
    return not _WRAPPERS.isdisjoint(base.__name__ for base in type(model).__mro__)


def _wrap(model: nn.Module, settings: dict[str, Any]) -> DistributedModel:
    deterministic = context.current().deterministic
    if deterministic and settings.get("skip_all_reduce_unused_params"):
        raise ConfigError(
            "ddp_kwargs: skip_all_reduce_unused_params=True skips buckets, but deterministic=True adds the gradients of all "
            "buckets in rank order: leave out one of the two."
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (only := devices.pop()).type == "cuda":
        settings.setdefault("device_ids", [only])
    wrapped = _wrapper_class(model)(model, **settings)
    time_waiting(wrapped, context.current().progress.waiting)
    if deterministic and wrapped.process_group.size() > 2:
        use_rank_order(wrapped)
    return wrapped


def check_group() -> None:
    """Raise a UsageError if there is no process group of torch."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"prepare_model with {context.current().world_size} workers needs a torch process group, but there is none: "
            'use Trainer(backend="torch").'
        )


def broadcast_from_rank_0(model: nn.Module) -> None:
    """Broadcast all tensors, as DDP does when it is made: frozen random layers would differ between ranks otherwise."""
    for tensor in chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def broadcast_buffers(model: nn.Module, group: dist.ProcessGroup | None = None, ignored: Collection[str] = ()) -> None:
    """Give all ranks of a group the buffers of its first rank that are part of the model's state. All ranks call it.

    Those with ``persistent=False`` are not: a rank computes them from its own batches, as tables for a length.

    Args:
        model: It may have got buffers, or others in their places, since the last call.
        group: None: all ranks.
        ignored: Names of buffers that stay as they are.
    """
    buffers = {
        id(buffer): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name not in module._non_persistent_buffers_set
        and not (ignored and f"{path}.{name}".removeprefix(".") in ignored)
    }
    # Backward passes of graphs that are still there find their buffers changed, but by no operation of the loop.
    tensors = [(each._local_tensor if is_dtensor(each) else each).data for each in buffers.values()]
    group = dist.group.WORLD if group is None else group
    if tensors and group is not None:
        with context.current().progress.waiting:
            dist._broadcast_coalesced(group, tensors, _MESSAGE_BYTES, 0)  # type: ignore[attr-defined]


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Prepare an optimizer for training: move its state to the devices of its parameters.

    The state is on another device if it was loaded before `prepare_model` moved the model. In all other cases nothing
    changes: the model averages the gradients, so the optimizer works the same for any number of workers. Call it after
    `prepare_model`.

    Args:
        optimizer: Any optimizer that keeps its state by parameter in ``state``, as those of torch do.

    Returns:
        The same object.

    Raises:
        ConfigError: It is not an optimizer.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise ConfigError(f"prepare_optimizer takes a torch optimizer, not {with_article(type(optimizer).__name__)}.")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                _move_state(optimizer.state[parameter], group, parameter.device)
    return optimizer


def _move_state(state: Any, group: dict[str, Any], device: torch.device) -> None:
    # torch keeps step counts on the CPU, unless a kernel reads them on the device (capturable, fused).
    step_stays = not (group.get("capturable") or group.get("fused"))
    for name, value in state.items():
        if not (name == "step" and step_stays):
            state[name] = to_device(value, device)


class DistributedModel(DistributedDataParallel):
    """A model whose gradients are averaged over all workers, and which otherwise behaves like the inner model.

    - ``state_dict()``, ``named_parameters()`` and ``named_buffers()`` have no ``module.`` prefix; ``load_state_dict``
      takes state with and without it.
    - Attributes and methods of the inner model can be read, called, set and deleted; new attributes are set on the inner
      model. The few public names of DDP itself (``join``, ``logger``, ``scatter``, ...) hide those of the inner model, which
      `unwrap` reaches.
    - It has length, index and iteration if the inner model has them, as ``nn.Sequential`` does.
    - ``copy.deepcopy`` and pickle return the inner model; pickle moves its tensors to the CPU.

    For functions that walk the module tree, such as those of ``torch.distributed.checkpoint``, `unwrap` it first.

    Args:
        **settings: Arguments of DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        named = {name: each for name, each in module.named_parameters() if name not in self.parameters_to_ignore}
        self._averages = Averages(named, self.process_group)
        self._gradient_bytes = sum(each.nbytes for each in named.values() if each.requires_grad)
        # The hooks are held by DDP's C++ part, in a cycle that the garbage collector cannot see.
        hook = functools.partial(_after_gradient, weakref.ref(self))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if hasattr(module, "dim"):
            self.__dict__.pop("dim", None)  # DDP uses its own only to scatter over several devices
        self.__dict__["_is_built"] = True
        if hidden := _hidden_names(self, module):
            get_logger().warning(
                "DistributedDataParallel hides %s of %s: use raysgd.torch.unwrap(model) to reach them.",
                ", ".join(hidden),
                type(module).__name__,
            )

    def __raysgd_unwrap__(self) -> nn.Module:
        """Return the inner model, which is saved in a checkpoint and returned from train_func."""
        return cast(nn.Module, self.module)

    def average_trained(self) -> None:
        """Average the gradients of the parameters that require one now: some were frozen, or unfrozen. All ranks call it."""
        parameters, are_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, are_sparse, names, self.static_graph)  # type: ignore[no-untyped-call]
        for hook, state in self._comm_hooks:
            dist._register_comm_hook(self.reducer, state, hook)  # type: ignore[attr-defined]

    def leave_unchecked(self) -> None:
        """Do not check the gradients of optimizers: the caller averages them."""
        self._averages.is_checked = False

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0. All ranks call it."""
        broadcast_buffers(self.__raysgd_unwrap__(), self.process_group, self.parameters_to_ignore)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        # DDP would broadcast buffers in each forward pass, also in one that rank 0 makes alone. With join(), ranks make no
        # backward passes any more, and DDP has to find out who sends.
        return self._join_config.enable and super()._check_sync_bufs_pre_fwd()  # type: ignore[no-untyped-call, no-any-return]

    def _post_forward(self, output: Any) -> Any:
        if self._join_config.enable:
            self.leave_unchecked()  # ranks make different numbers of steps
        elif torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._averages.begin()
            context.current().progress.sent_bytes += self._gradient_bytes
        return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
        return getattr(inner, name)  # its error names the model's class, which the user knows

    def __setattr__(self, name: str, value: Any) -> None:
        # The inner model's methods read what is set. DDP keeps its own names.
        if "_is_built" in self.__dict__ and not self._is_own_name(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if "_is_built" in self.__dict__ and not self._is_own_name(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})  # type: ignore[no-untyped-call]

    def _is_own_name(self, name: str) -> bool:
        if name in self.__dict__ or name in self._modules or hasattr(type(self), name):
            return True
        # DDP makes some private names after its constructor.
        return name.startswith("_") and not hasattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the inner model; keys may have the ``module.`` prefix of a plain DistributedDataParallel.

        Raises:
            UsageError: ``assign=True``, which would replace the parameters whose gradients DDP averages.
        """
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) after prepare_model would replace parameters that DDP synchronizes: load before it."
            )
        return self.module.load_state_dict(without_prefix(state_dict, self.module.state_dict().keys()), strict=strict)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load as a part of a larger module: add the prefix that the module tree has but state_dict does not."""
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
        # `cast` returns its second argument: an identity that unpickles also where raysgd is not installed.
        return cast, (None, copy_to(self.__raysgd_unwrap__(), torch.device("cpu")))


def _after_gradient(reference: weakref.ref[DistributedModel], parameter: Any) -> None:
    """Give all ranks the buffers of rank 0 at the end of a backward pass that averages gradients; a hook of parameters."""
    model = reference()
    if model is not None and model._averages.add(parameter) and model.broadcast_buffers:
        # After DDP's own callback, which waits until the gradients are there.
        call_at_the_end(lambda: call_at_the_end(model._share_buffers))


def _wrapper_class(model: nn.Module) -> type[DistributedModel]:
    """Return the wrapper's class for a model, with the container methods that the model has."""
    names = tuple(name for name in _CONTAINER_METHODS if hasattr(type(model), name))
    return _container_class(names) if names else DistributedModel


@functools.cache
def _container_class(names: tuple[str, ...]) -> type[DistributedModel]:
    return type(DistributedModel.__name__, (DistributedModel,), {name: _method_of_inner(name) for name in names})


def _method_of_inner(name: str) -> Callable[..., Any]:
    def method(self: DistributedModel, *args: Any) -> Any:
        inner = self.__raysgd_unwrap__()
        return getattr(type(inner), name)(inner, *args)

    return method


def without_prefix(state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Remove DDP's ``module.`` prefix from a state dict, if it has one.

    Args:
        state: With the prefix or without.
        names: The names of the model's own state. A model may itself have a part called ``module``: the variant that
            matches more of these names is returned.
    """
    bare = OrderedDict((key.removeprefix(_PREFIX), value) for key, value in state.items())
    if _num_known(bare, names) <= _num_known(state, names):
        return state
    metadata = getattr(state, "_metadata", None)  # versions of the modules, by their path
    if metadata is not None:
        inner = {path[len(_PREFIX) :]: metadata[path] for path in metadata if f"{path}.".startswith(_PREFIX)}
        bare._metadata = OrderedDict(inner)  # type: ignore[attr-defined]
    return bare


def _num_known(keys: Iterable[str], names: Collection[str]) -> int:
    return sum(key in names for key in keys)


def _hidden_names(wrapper: DistributedModel, inner: nn.Module) -> list[str]:
    ddp_names = {*wrapper.__dict__, *vars(DistributedDataParallel)} - {*dir(nn.Module()), "device"}
    return sorted(name for name in ddp_names if not name.startswith("_") and hasattr(inner, name))


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module if all its parameters and buffers are on a device, else a copy of it there.

    The tensors of the copy are made on the target device, so that no second copy exists on the original device.
    """
    tensors = list(chain(module.parameters(), module.buffers()))
    if all(tensor.device == device for tensor in tensors):
        return module
    memo: dict[int, Any] = {id(tensor): _tensor_to(tensor, device) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _tensor_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
