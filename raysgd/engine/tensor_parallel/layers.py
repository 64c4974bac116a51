"""Layers of a tensor-parallel model for which torch has no style: classes that are mixed into those of the model's own layers.

A layer keeps its class, its name and the names of its parameters, which become DTensors. Only its forward pass changes: it
computes with this rank's values. Output layers, and embeddings that are cut by features, have torch's own styles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

# At run time too: transformers evaluates the annotations of a subclass of its models.
from raysgd.engine.tensor_parallel.context import SequenceStack, TensorContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass
class Style(ParallelStyle):
    """A style for layers that torch's own styles do not know: it cuts parameters, and gives a layer another forward pass.

    Attributes:
        context: What the model's layers share.
        layer: One of the classes of this module; the layer's class becomes a subclass of it.
        placements: How the layer's own parameters are cut; others are replicated.
        options: The class's attributes, without their prefix ``_tp_``.
        attributes: Attributes with which the layer's own forward pass counts heads or features: this rank's values.
    """

    context: TensorContext = field(repr=False)
    layer: Any
    placements: Mapping[str, Placement] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = self.placements.get(name, Replicate())
            cut = distribute_tensor(parameter.detach().contiguous(), device_mesh, [placement])
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        options = {f"_tp_{name}": value for name, value in self.options.items()}
        own = {"_tp": self.context, "_tp_class": type(module), "_tp_draws": draws(module)}
        of: Any = type(module)
        module.__class__ = _subclass(self.layer, of)
        for name, value in {**own, **options, **self.attributes}.items():
            setattr(module, name, value)
        return module


def draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers when it trains, as far as its attributes say."""
    return any(
        (isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0)
        or any("drop" in name and isinstance(value, (int, float)) and value > 0 for name, value in vars(one).items())
        for one in module.modules()
    )


@cache
def _subclass(mixin: Any, of: Any) -> type:
    names = {"__module__": of.__module__, "__qualname__": of.__qualname__, "__doc__": of.__doc__}
    return type(of.__name__, (mixin, of), names)


class _Layer(nn.Module if TYPE_CHECKING else object):  # type: ignore[misc]
    """Base of the mixins. All names have a prefix, as the module's class has names of its own.

    Attributes:
        _tp: What the model's layers share.
        _tp_class: The module's own class.
        _tp_draws: Whether the module draws random numbers when it trains.
    """

    _tp: TensorContext
    _tp_class: type
    _tp_draws: bool


class ColumnLinear(_Layer):
    """A linear layer of whose outputs each rank computes its part.

    torch's ``ColwiseParallel`` computes the same on DTensors, which takes twice the time of a small model's step.

    Attributes:
        _tp_is_input: Whether the input comes from outside of the region, not from a `Region` around the layer.
        _tp_num_parts: The fused layers in this one, each of which is cut.
    """

    weight: Tensor
    bias: Tensor | None
    _tp_is_input: bool = False
    _tp_num_parts: int = 1

    def forward(self, hidden: Tensor) -> Tensor:
        if self._tp_is_input:
            hidden = self._tp.enter(hidden)
        return linear(self, hidden, self._tp.local(self.weight), self._own_bias())

    def _own_bias(self) -> Tensor | None:
        if self.bias is None or self._tp_num_parts == 1:
            return self._tp.local(self.bias)  # type: ignore[no-any-return]
        return self._tp.own_of_fused(self.bias, self._tp_num_parts).reshape(-1)


class RowLinear(_Layer):
    """A linear layer of whose inputs each rank has its part."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, hidden: Tensor) -> Tensor:
        output = self._tp.leave(linear(self, hidden, self._tp.local(self.weight), None))
        self._tp.end_own_draws()
        if self.bias is None:
            return output
        bias: Tensor = self._tp.replicated(self.bias)
        return output + bias.to(output.dtype)


def linear(layer: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer: ``nn.Linear``, or the ``Conv1D`` of transformers, whose weight is transposed."""
    return functional.linear(hidden, weight if isinstance(layer, nn.Linear) else weight.t(), bias)


class VocabularyEmbedding(_Layer):
    """An embedding of whose rows each rank has its part: an ``nn.Embedding``, or a class that scales what this returns.

    torch's ``RowwiseParallel`` leaves the gradient of the whole vocabulary on each rank.
    """

    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self._tp.local(self.weight)
        first, rows = self._tp.rank * weight.shape[0], weight.shape[0]
        is_own = (input >= first) & (input < first + rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        embedded = self._embed(torch.where(is_own, input - first, 0), weight, padding)
        return self._tp.sum(embedded.masked_fill(~is_own.unsqueeze(-1), 0))

    def _embed(self, input: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        if self._tp_class is nn.Embedding:
            return functional.embedding(input, weight, padding_idx)
        whole, self.padding_idx = self.padding_idx, padding_idx
        try:
            return _call_with({self: {"weight": weight}}, super().forward, input)  # type: ignore[no-any-return]
        finally:
            self.padding_idx = whole


class Replicated(_Layer):
    """A layer that all ranks compute alike, or on their part of the sequence, or on their own heads.

    Attributes:
        _tp_is_inside: Whether the layer is inside of a region, so that the ranks' gradients are added up.
    """

    _tp_is_inside: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)
        # A layer with weights of its own may use those of its children too, without calling them.
        layers = [self, *(one for one in self.children() if isinstance(one, Replicated))]
        return _call_with({one: one._values() for one in layers}, super().forward, *args, **kwargs)

    def _values(self) -> dict[str, Any]:
        if self._tp_is_inside:
            return {
                name: self._tp.copy(self._tp.local(one)) for name, one in self._parameters.items() if one is not None
            }
        return {name: self._tp.replicated(one) for name, one in self._parameters.items()}


def _call_with(
    values: Mapping[nn.Module, dict[str, Any]], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a forward pass that finds these values in place of its modules' own parameters."""
    own = {module: dict(module._parameters) for module in values}
    for module, found in values.items():
        module._parameters.update(found)
    try:
        return forward(*args, **kwargs)
    finally:
        for module, parameters in own.items():
            module._parameters.update(parameters)


class Region(_Layer):
    """A layer whose heads or features the ranks share.

    Attributes:
        _tp_inputs: The arguments that come from outside of the region: hidden states, and then those of another stack, which
            all ranks have.
        _tp_weights: Where the outputs have the attention's weights; None if there are none.
    """

    _tp_inputs: tuple[str, ...]
    _tp_weights: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, *others = self._tp_inputs
        args, kwargs = _with_argument(self, args, kwargs, hidden, self._tp.enter)
        for other in others:
            args, kwargs = _with_argument(self, args, kwargs, other, self._tp.copy)
        # Without `with` where nothing is drawn: torch.compile does not compile such a context manager.
        if self.training and self._tp_draws:
            with self._tp.own_generator():
                outputs = super().forward(*args, **kwargs)
        else:
            outputs = super().forward(*args, **kwargs)
        at = self._tp_weights
        if at is None or not isinstance(outputs, tuple) or outputs[at] is None:
            return outputs
        return (*outputs[:at], self._tp.concatenate(outputs[at], 1), *outputs[at + 1 :])


class RegionDropout(_Layer):
    """A dropout inside of a region: each rank has its own features."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or getattr(self, "p", 0) == 0:
            return super().forward(input)  # type: ignore[no-any-return]
        with self._tp.own_generator():
            return super().forward(input)  # type: ignore[no-any-return]


class Block(_Layer):
    """A block that runs as it is, on whole sequences; see `Style.attributes`."""


class SequenceBlock(_Layer):
    """A block of a stack that runs on parts of the sequence.

    Attributes:
        _tp_stack: The stack.
        _tp_is_first: Whether the block is the stack's first.
        _tp_is_last: Whether the block is the stack's last.
    """

    _tp_stack: SequenceStack
    _tp_is_first: bool
    _tp_is_last: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stack = self._tp_stack
        if self._tp_is_first:
            args, kwargs = _with_argument(
                self,
                args,
                kwargs,
                _parameters_of(self._tp_class)[0],
                lambda hidden: self._tp.open_sequence(hidden, stack, self.training),
            )
        outer = self._tp.set_stack(stack)
        try:
            if self.training and stack.is_sharded and self._tp_draws:
                with self._tp.own_generator():
                    outputs = super().forward(*args, **kwargs)
            else:
                outputs = super().forward(*args, **kwargs)
        finally:
            self._tp.set_stack(outer)
        if not self._tp_is_last:
            return outputs
        if isinstance(outputs, Tensor):
            return self._tp.close_sequence(outputs, stack)
        return (self._tp.close_sequence(outputs[0], stack), *outputs[1:])


@cache
def _parameters_of(of: type) -> tuple[str, ...]:
    return tuple(inspect.signature(of.forward).parameters)[1:]  # type: ignore[attr-defined]


def _with_argument(
    module: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change one argument of a call, whether it was given by position or by name."""
    if isinstance(kwargs.get(name), Tensor):
        return args, {**kwargs, name: change(kwargs[name])}
    names = _parameters_of(module._tp_class)
    at = names.index(name) if name in names else len(args)
    if at < len(args) and isinstance(args[at], Tensor):
        return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs
    return args, kwargs
