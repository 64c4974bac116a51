"""The tree of parameters as the sharding rules read it: paths, kernels, and the biases that belong to them. Pure, any process.

A tree is any pytree of arrays or of `jax.ShapeDtypeStruct`: nested dicts and lists, flax's frozen dicts, `nnx.State`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from raysgd.errors import ConfigError

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Words of the names of leaves. They distinguish a bias from the kernel it belongs to.
_BIAS_WORDS = {"b", "bias", "biases"}
_KERNEL_WORDS = {"w", "kernel", "weight", "weights"}
#: Stands for the dimension of the storage.
SAME = -1


@dataclass(eq=False)
class Parameter:
    """One array of the tree.

    Attributes:
        path: The keys from the root to the leaf.
        shape: The whole shape.
        num_stacked: The number of leading dimensions that count layers, as `flax.linen.scan` makes them.
        bias: The bias that is added to the output of this kernel, or None.
        is_bias: This parameter is the bias of a kernel.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    num_stacked: int = 0
    bias: Parameter | None = None
    is_bias: bool = False

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def dims(self) -> tuple[int, ...]:
        """The sizes of the dimensions of one layer."""
        return self.shape[self.num_stacked :]

    @property
    def is_kernel(self) -> bool:
        return not self.is_bias and sum(size > 1 for size in self.dims) > 1

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Choice:
    """The sharded dimension of a kernel, and why.

    Attributes:
        dim: The sharded dimension of `Parameter.dims`, or None.
        reason: Why, for people.
        used_dim: The dimension that is sharded where the step uses the kernel: the same one, another one, or None.
        outputs_first: The kernel is stored as (outputs, inputs).
    """

    dim: int | None
    reason: str
    used_dim: int | None = SAME
    outputs_first: bool = False

    def __post_init__(self) -> None:
        if self.used_dim == SAME:
            object.__setattr__(self, "used_dim", self.dim)


@dataclass(eq=False)
class Module:
    """An inner node of the tree: what it holds itself, and the modules below it, both in natural order of names."""

    path: tuple[str, ...] = ()
    own: dict[str, Parameter] = field(default_factory=dict)
    children: dict[str, Module] = field(default_factory=dict)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.own.values()
        for child in self.children.values():
            yield from child.parameters()

    def kernels(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters() if parameter.is_kernel]

    def modules(self) -> Iterator[Module]:
        yield self
        for child in self.children.values():
            yield from child.modules()


def list_parameters(params: Any) -> tuple[list[Parameter], Any]:
    """Return the parameters in the order of `jax.tree.leaves`, and the structure of the tree.

    Raises:
        ConfigError: The tree is empty, or a leaf is not an array of floating-point numbers.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if not leaves:
        raise ConfigError("params has no arrays: give the tree of parameters of a model.")
    found = []
    for keys, leaf in leaves:
        path = _path_of(keys) or ("params",)  # a tree may be a single array
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise ConfigError(f"params: {'/'.join(path)} is of type {type(leaf).__name__}: give an array.")
        if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            raise ConfigError(
                f"params: {'/'.join(path)} has dtype {dtype}, which has no gradient: keep it out of params, for example with "
                "nnx.split(model, nnx.Param, ...)."
            )
        found.append(Parameter(path, tuple(shape), dtype))
    return found, structure


def build_modules(parameters: list[Parameter]) -> Module:
    """Return the root of the tree. It marks stacked layers and biases in the parameters."""
    root = Module()
    for parameter in sorted(parameters, key=lambda parameter: natural_order(parameter.path)):
        module = root
        for key in parameter.path[:-1]:
            if key not in module.children:
                module.children[key] = Module((*module.path, key))
            module = module.children[key]
        module.own[parameter.path[-1]] = parameter
    _mark_stacks(root)
    for module in root.modules():
        _mark_biases(list(module.own.values()))
    return root


def natural_order(path: tuple[str, ...]) -> tuple[Any, ...]:
    """Return a sort key that puts layer_2 before layer_10."""
    return tuple(
        tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", key))
        for key in path
    )


def other_dim(dim: int, kernel: Parameter) -> int:
    """Return the other one of the last two dimensions: those before them are positions of a convolution, or experts."""
    last = len(kernel.dims) - 1
    return last - 1 if dim == last else last


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case: of ``outProj_2`` they are out, proj and 2."""
    return [word.lower() for word in _WORD.findall(name)]


def key_of(key: Any) -> Any:
    """Return the key, index or name of one node of a path of JAX: equal for a dict and for a class with fields."""
    return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


def _path_of(keys: Any) -> tuple[str, ...]:
    # Variables of nnx, and boxed values of linen, are nodes with one field.
    if len(keys) > 1 and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name in ("value", "raw_value"):
        keys = keys[:-1]
    return tuple(str(key_of(key)) for key in keys)


def _mark_stacks(module: Module) -> None:
    """Find modules whose parameters all begin with the number of layers: kernels, and norm scales or biases, alike."""
    parameters = list(module.parameters())
    if _are_stacked([parameter.dims for parameter in parameters]):
        for parameter in parameters:
            parameter.num_stacked += 1
        _mark_stacks(module)
        return
    for child in module.children.values():
        _mark_stacks(child)


def _are_stacked(shapes: list[tuple[int, ...]]) -> bool:
    if len({shape[:1] for shape in shapes}) != 1 or min(map(len, shapes)) != 2 or max(map(len, shapes)) < 3:
        return False
    widths = {size for shape in shapes if len(shape) > 2 for size in shape[1:]}
    return all(shape[1] in widths for shape in shapes if len(shape) == 2)


def _mark_biases(own: list[Parameter]) -> None:
    """Match the biases of a module with its kernels: by shape, and in modules of several kernels also by words of names."""
    kernels = [parameter for parameter in own if parameter.is_kernel]
    if len(own) == 2 and len(own[0].dims) != len(own[1].dims):
        # In the attention of linen a bias has two dimensions, heads and head size, and its kernel three.
        kernels = [max(own, key=lambda parameter: len(parameter.dims))]
    for bias in (p for p in own if p not in kernels):
        fitting = [kernel for kernel in kernels if kernel.bias is None and _fits(bias, kernel)]
        named = [kernel for kernel in fitting if _is_named_bias_of(bias.path[-1], kernel.path[-1])]
        ends = [kernel for kernel in fitting if kernel.dims[-len(bias.dims) :] == bias.dims]
        chosen = fitting if len(kernels) == 1 else named or (ends if len(own) == 2 * len(kernels) else [])
        if len(chosen) == 1:
            chosen[0].bias, bias.is_bias = bias, True


def _fits(bias: Parameter, kernel: Parameter) -> bool:
    num_dims = len(bias.dims)
    return 0 < num_dims < len(kernel.dims) and bias.dims in (kernel.dims[-num_dims:], kernel.dims[:num_dims])


def _is_named_bias_of(bias: str, kernel: str) -> bool:
    if bias[:1] == "b" and kernel[:1] == "w" and bias[1:] == kernel[1:]:
        return True
    of_bias, of_kernel = Counter(words_of(bias)), Counter(words_of(kernel))
    if not of_bias.keys() & _BIAS_WORDS:
        return False
    left_of_bias = {word: number for word, number in of_bias.items() if word not in _BIAS_WORDS}
    return left_of_bias == {word: number for word, number in of_kernel.items() if word not in _KERNEL_WORDS}
