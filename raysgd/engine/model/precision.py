"""Reduced precision: autocast around a model's forward pass, and the scale of fp16 losses. Worker side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from raysgd.engine.model.local_tensors import local_of
from raysgd.session import api
from raysgd.torch.attached import AttachedForward
from raysgd.torch.devices import device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16}
#: How far the search for logits goes back from a loss: a criterion is a few operations.
_CRITERION_NODES = 64


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model compute in ``dtype`` where autocast allows it; its outputs are fp32, see `to_fp32`.

    The model keeps its class, its parameters and their names.
    """
    forward = model.forward

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device().type, dtype):  # offloaded parameters are on the CPU
            outputs = forward(*args, **kwargs)
        return to_fp32(outputs, needs_loss_alone=model.training)

    model.forward = AttachedForward(forward, autocast)


def cast_inputs(
    model: nn.Module, dtype: torch.dtype, *, gathers_parameters: bool = False, keeps_outputs: bool = False
) -> None:
    """Give a model whose parameters are in ``dtype`` inputs of that type, or of the type to which the loop has converted it.

    Args:
        model: Its outputs are fp32.
        dtype: That of its parameters now.
        gathers_parameters: It always computes in ``dtype``, with gathered copies of its parameters.
        keeps_outputs: Its outputs stay as they are, for the next stage of a pipeline.
    """
    forward = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        floats = () if gathers_parameters else (each.dtype for each in model.parameters() if _is_float(each))
        computed = next(iter(floats), dtype)
        args, kwargs = pytree.tree_map(lambda value: _floats_to(value, computed), (args, kwargs))
        outputs = forward(*args, **kwargs)
        return outputs if keeps_outputs else to_fp32(outputs, needs_loss_alone=model.training)

    model.forward = AttachedForward(forward, cast)


def widen_parameters(model: nn.Module) -> None:
    """Let norms whose parameters are gathered in a reduced precision compute in fp32 where autocast does not see to it.

    These are batch norms, whose statistics are fp32, and on a CPU all layers that torch computes in the type of their inputs:
    autocast on a GPU converts their parameters. Where the inputs have the type of the parameters, nothing is converted.
    """
    kinds = (
        (_NormBase,) if device().type == "cuda" else (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Bilinear)
    )
    for module in model.modules():
        if isinstance(module, kinds):
            module.forward = AttachedForward(module.forward, _Widened(module).call)  # type: ignore[method-assign]


class _Widened(nn.Module):
    """Calls a layer's own ``forward`` with its parameters in fp32, unless its inputs and statistics have their type."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self._own = layer, layer.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        parameters, buffers = self.layer._parameters, self.layer._buffers
        used = (*parameters.values(), *buffers.values(), *args, *kwargs.values())
        if len({each.dtype for each in used if _is_float(each)}) <= 1:
            return self._own(*args, **kwargs)
        widened = {f"layer.{name}": each.float() for name, each in parameters.items() if each is not None}
        return functional_call(self, widened, args, kwargs)


def to_fp32(outputs: Any, *, needs_loss_alone: bool = False) -> Any:
    """Return the same structure with all floating point tensors in fp32; fp64 stays.

    Args:
        outputs: What a model returned.
        needs_loss_alone: If the model has computed its loss, convert scalars alone: copies of the logits would cost time and
            memory, and a training loop has no use for them. The loss is the scalar ``loss`` of a dict, as models of transformers
            return it, or a scalar that was computed from another output.
    """
    if needs_loss_alone and isinstance(outputs, MutableMapping) and _is_scalar(outputs.get("loss")):
        outputs["loss"] = outputs["loss"].float()
        return outputs
    is_converted = _is_scalar if needs_loss_alone and _has_loss(pytree.tree_leaves(outputs)) else _is_float
    return pytree.tree_map(
        lambda value: value.float() if is_converted(value) and value.dtype.itemsize < 4 else value, outputs
    )


def _has_loss(outputs: list[Any]) -> bool:
    """Return whether a scalar was computed from another output; False if torch compiles, where there is no graph yet."""
    scalars = [each for each in outputs if _is_scalar(each)]
    others = {each.grad_fn for each in outputs if _is_float(each) and not _is_scalar(each)} - {None}
    if not scalars or not others or torch.compiler.is_compiling():
        return False
    nodes = deque(each.grad_fn for each in scalars if each.grad_fn is not None)
    seen: set[Any] = set()
    while nodes and len(seen) < _CRITERION_NODES:
        node = nodes.popleft()
        if node in others:
            return True
        if node not in seen:
            seen.add(node)
            nodes.extend(each for each, _ in node.next_functions if each is not None)
    return False


def _is_scalar(value: Any) -> bool:
    return _is_float(value) and value.ndim == 0 and value.dtype.itemsize <= 4


def _floats_to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class LossScale:
    """The dynamic scale of fp16 losses, with the defaults of `torch.amp.GradScaler`.

    That class decides by rank whether gradients overflowed; here all ranks decide together.

    Args:
        is_enabled: False: the scale is 1 and stays.

    Attributes:
        is_searched: The scale is not that of a checkpoint or of the user, so that the first backward pass may find a better one.
    """

    GROWTH = 2.0
    BACKOFF = 0.5
    GROWTH_INTERVAL = 2000
    #: A smaller scale would make all gradients zero: something else is wrong.
    MINIMUM = 2.0**-14

    def __init__(self, is_enabled: bool, scale: float = 2.0**16) -> None:
        self.is_enabled = is_enabled
        self.scale = scale if is_enabled else 1.0
        self.is_searched = is_enabled and scale == 2.0**16
        self._num_finite = 0

    def update(self, *, overflowed: bool) -> None:
        """Halve the scale after a step that was skipped; double it after `GROWTH_INTERVAL` steps without one.

        Raises:
            FloatingPointError: Gradients overflow at any scale.
        """
        if not self.is_enabled:
            return
        if overflowed:
            self.scale *= self.BACKOFF
            self._num_finite = 0
            if self.scale < self.MINIMUM:
                raise FloatingPointError(
                    f"fp16 gradients are infinite or NaN even at a loss scale of {self.scale:g}: the model diverges, or its "
                    'activations exceed what fp16 holds (65,504). Give precision="bf16", or a smaller learning rate.'
                )
            return
        self._num_finite += 1
        if self._num_finite == self.GROWTH_INTERVAL:
            self.scale *= self.GROWTH
            self._num_finite = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale; nothing if it is not enabled."""
        return {"scale": self.scale, "num_finite": self._num_finite} if self.is_enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a scale, if it is enabled here and was where it was saved."""
        if self.is_enabled and state:
            self.scale, self._num_finite, self.is_searched = state["scale"], state["num_finite"], False

    def search(self, overflows: Callable[[], bool | None]) -> None:
        """Halve the first scale until gradients do not overflow, so that no step is lost for it.

        Args:
            overflows: Computes gradients with the scale that there is; returns whether one of any rank is infinite or NaN, or
                None if they cannot be computed.
        """
        self.is_searched = False
        first = self.scale
        while (found := overflows()) and self.scale > self.MINIMUM:
            self.scale *= self.BACKOFF
        if found is not False:  # another scale does not help, or is not known: steps are skipped
            self.scale = first


def overflows(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> bool | None:
    """Return whether gradients of a scaled loss overflow on any rank, without keeping them; None if that cannot be computed.

    All ranks call it.
    """
    try:
        found: Any = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    except RuntimeError:  # torch.compile and some checkpointing allow one pass; or there is no memory for two
        state = torch.tensor(0)
    else:
        # Of each gradient this rank's shard: all ranks compare what they have found.
        norms = torch.stack([local_of(each).float().norm() for each in found if each is not None])
        state = torch.isfinite(norms).all().to(torch.int64) + 1
    state = state.to(device())
    if api.world_size() > 1:
        dist.all_reduce(state, op=dist.ReduceOp.MIN)
    return None if not state else bool(state == 1)
