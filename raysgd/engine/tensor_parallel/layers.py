"""The layers of a tensor-parallel model: classes that are mixed into the classes of the model's own layers.

A layer keeps its class, its name and the names of its parameters, which become DTensors. Only its forward pass changes: it
computes with this rank's values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

if TYPE_CHECKING:
    from raysgd.engine.tensor_parallel.context import SequenceStack, TensorContext


def mix_in(module: nn.Module, mixin: type, context: TensorContext, **attributes: Any) -> None:
    """Give a module the forward pass of `mixin`.

    Args:
        module: The module; its class becomes a subclass of its class.
        mixin: One of the classes of this module.
        context: What the model's layers share.
        attributes: Further attributes of the module.
    """
    attributes.setdefault("_tp_class", getattr(module, "_tp_class", type(module)))
    of: Any = type(module)
    module.__class__ = _subclass(mixin, of)
    for name, value in {"_tp": context, **attributes}.items():
        setattr(module, name, value)


@cache
def _subclass(mixin: Any, of: Any) -> type:
    names = {"__module__": of.__module__, "__qualname__": of.__qualname__, "__doc__": of.__doc__}
    return type(of.__name__, (mixin, of), names)


class _Layer(nn.Module if TYPE_CHECKING else object):  # type: ignore[misc]
    """Base of the mixins: the attributes that `mix_in` sets.

    Attributes:
        _tp: What the model's layers share.
        _tp_class: The module's class before the first `mix_in`.
    """

    _tp: TensorContext
    _tp_class: type


class ColumnLinear(_Layer):
    """A linear layer of whose outputs each rank computes its part.

    Attributes:
        _tp_is_entrance: Whether the input comes from outside of the region, not from a `Region` around the layer.
        _tp_is_head: Whether the output is the whole model's, which all ranks need.
        _tp_num_parts: The fused layers in this one, each of which is cut.
    """

    weight: Tensor
    bias: Tensor | None
    _tp_is_entrance: bool
    _tp_is_head: bool
    _tp_num_parts: int

    def forward(self, hidden: Tensor) -> Tensor:
        if self._tp_is_head:
            hidden = self._tp.copy(hidden)
        elif self._tp_is_entrance:
            hidden = self._tp.enter(hidden)
        output = linear(self, hidden, self._tp.local(self.weight), self._own_bias())
        return self._tp.concatenate(output, -1) if self._tp_is_head else output

    def _own_bias(self) -> Tensor | None:
        if self.bias is None or self._tp_num_parts == 1:
            return self._tp.local(self.bias)  # type: ignore[no-any-return]
        # The bias of a fused layer is replicated: small, and so it is never cut into several pieces.
        parts = self._tp.copy(self._tp.local(self.bias)).view(self._tp_num_parts, -1)
        width = parts.shape[1] // self._tp.size
        return parts.narrow(1, self._tp.rank * width, width).reshape(-1)


class RowLinear(_Layer):
    """A linear layer of whose inputs each rank has its part.

    Attributes:
        _tp_is_head: Whether the input is one that all ranks have, and the output the whole model's.
    """

    weight: Tensor
    bias: Tensor | None
    _tp_is_head: bool

    def forward(self, hidden: Tensor) -> Tensor:
        if self._tp_is_head:
            hidden = self._tp.split(hidden, hidden.dim() - 1)
        partial = linear(self, hidden, self._tp.local(self.weight), None)
        output = self._tp.sum(partial) if self._tp_is_head else self._tp.leave(partial)
        if self.bias is None:
            return output
        bias: Tensor = self._tp.replicated(self.bias)
        return output + bias.to(output.dtype)


def linear(layer: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer: ``nn.Linear``, or the ``Conv1D`` of transformers, whose weight is transposed."""
    if isinstance(layer, nn.Linear):
        return functional.linear(hidden, weight, bias)
    return functional.linear(hidden, weight.t(), bias)


class VocabularyEmbedding(_Layer):
    """An embedding of whose rows each rank has its part."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self._tp.local(self.weight)
        first, rows = self._tp.rank * weight.shape[0], weight.shape[0]
        is_own = (input >= first) & (input < first + rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        embedded = functional.embedding(torch.where(is_own, input - first, 0), weight, padding)
        return self._tp.sum(embedded.masked_fill(~is_own.unsqueeze(-1), 0))


class FeatureEmbedding(_Layer):
    """An embedding of whose columns each rank has its part.

    Attributes:
        _tp_is_inside: Whether the layer is inside of a region, so that the output is this rank's part too.
    """

    weight: Tensor
    padding_idx: int | None
    _tp_is_inside: bool

    def forward(self, input: Tensor) -> Tensor:
        embedded = functional.embedding(input, self._tp.local(self.weight), self.padding_idx)
        return embedded if self._tp_is_inside else self._tp.concatenate(embedded, embedded.dim() - 1)


class Replicated(_Layer):
    """A layer that all ranks compute alike, or on their part of the sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)
        own = dict(self._parameters)
        for name, parameter in own.items():
            self._parameters[name] = self._tp.replicated(parameter)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(own)


class Region(_Layer):
    """A layer whose heads or features the ranks share.

    Attributes:
        _tp_entrances: The arguments that come from outside of the region: hidden states, and states of another stack,
            which all ranks have.
        _tp_weights: Where the outputs have the attention's weights; None if there are none.
        _tp_draws: Whether a module draws random numbers when it trains.
    """

    _tp_entrances: tuple[str, str | None]
    _tp_weights: int | None
    _tp_draws: Callable[[Any], bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, other = self._tp_entrances
        args, kwargs = _with_argument(self, args, kwargs, hidden, self._tp.enter)
        if other is not None:
            args, kwargs = _with_argument(self, args, kwargs, other, self._tp.copy)
        # Without `with` where nothing is drawn: torch.compile does not compile such a context manager.
        if self.training and self._tp_draws(self):
            with self._tp.own_generator():
                outputs = super().forward(*args, **kwargs)
        else:
            outputs = super().forward(*args, **kwargs)
        at = self._tp_weights
        if at is None or outputs[at] is None:
            return outputs
        return (*outputs[:at], self._tp.concatenate(outputs[at], 1), *outputs[at + 1 :])


class RegionDropout(_Layer):
    """A dropout inside of a region: each rank has its own features."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or getattr(self, "p", 0) == 0:
            return super().forward(input)  # type: ignore[no-any-return]
        with self._tp.own_generator():
            return super().forward(input)  # type: ignore[no-any-return]


class SharedDropout(_Layer):
    """A dropout of a region's module after the region's end: all ranks have the same features."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or getattr(self, "p", 0) == 0:
            return super().forward(input)  # type: ignore[no-any-return]
        with self._tp.shared_generator():
            return super().forward(input)  # type: ignore[no-any-return]


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
            name = _parameters_of(self._tp_class)[0]
            args, kwargs = _with_argument(
                self, args, kwargs, name, lambda hidden: self._tp.open_sequence(hidden, stack, self.training)
            )
        outer = self._tp.set_stack(stack)
        try:
            if self.training and stack.is_sharded and self._draws():
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

    def _draws(self) -> bool:
        for one in self.modules():
            draws = one.__dict__.get("_tp_draws")
            if one.p > 0 if isinstance(one, nn.Dropout) else draws is not None and draws(one):
                return True
        return False


@cache
def _parameters_of(of: type) -> tuple[str, ...]:
    return tuple(inspect.signature(of.forward).parameters)[1:]  # type: ignore[attr-defined]


def _with_argument(
    module: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change one argument of a call, whether it was given by position or by name."""
    if isinstance(kwargs.get(name), Tensor):
        return args, {**kwargs, name: change(kwargs[name])}
    at = _parameters_of(module._tp_class).index(name)
    if at < len(args) and isinstance(args[at], Tensor):
        return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs
    return args, kwargs
