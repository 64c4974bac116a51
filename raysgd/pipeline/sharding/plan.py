"""Sharding plans: a `PartitionSpec` and a reason for each parameter, from the tree itself or from a user's own rules.

Pure, any process: `plan_sharding` needs shapes, no devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from raysgd.errors import ConfigError
from raysgd.pipeline.sharding.kernel_dims import choose_dims
from raysgd.pipeline.sharding.parameters import Choice, Parameter, build_modules, list_parameters

#: The axes of the mesh: batches are sharded along the first one, parameters along the second one.
DATA_AXIS, MODEL_AXIS = "data", "model"

#: A regular expression that is searched in the path of a parameter, joined by "/", and the spec of what it matches.
Rule: TypeAlias = "tuple[str, PartitionSpec | tuple[Any, ...] | None]"


@dataclass(frozen=True)
class ParameterSharding:
    """The sharding of one parameter.

    Attributes:
        path: Its path, joined by "/".
        shape: Its shape.
        dtype: Its dtype.
        spec: How it is stored: one entry for each dimension, or no entry if it is replicated.
        used_spec: How the step uses it. It differs from `spec` for a table of embeddings whose rows do not divide, for
            example: there it has shards of rows of unequal size.
        reason: Why, for people.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    used_spec: PartitionSpec
    reason: str


@dataclass(frozen=True)
class ShardingPlan:
    """The shardings of all parameters. `str(plan)` is a table.

    Attributes:
        parameters: In the order of `jax.tree.leaves`.
        structure: The structure of the tree of parameters.
        axis_sizes: The axes of the mesh and their sizes.
    """

    parameters: tuple[ParameterSharding, ...]
    structure: Any
    axis_sizes: Mapping[str, int]

    @property
    def specs(self) -> Any:
        """The tree of parameters with a `PartitionSpec` in place of each array."""
        return jax.tree_util.tree_unflatten(self.structure, [parameter.spec for parameter in self.parameters])

    @property
    def rules(self) -> list[Rule]:
        """The plan as rules that match one parameter each, to read, change and give as own rules."""
        return [(f"^{re.escape(parameter.path)}$", parameter.spec) for parameter in self.parameters]

    @property
    def bytes_per_device(self) -> int:
        """The bytes of parameters that each device holds."""
        sizes = self.axis_sizes
        return sum(_num_bytes(each) // _num_shards_of(each.spec, sizes) for each in self.parameters)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "spec", "why")]
        for each in self.parameters:
            shown = ", ".join("-" if entry is None else str(entry) for entry in each.spec) or "replicated"
            rows.append((each.path, "x".join(map(str, each.shape)) or "scalar", shown, each.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]])
            for row in rows
        )


def plan_sharding(params: Any, axis_sizes: Mapping[str, int], own_rules: Sequence[Rule] | None = None) -> ShardingPlan:
    """Decide how parameters are sharded over a mesh.

    Args:
        params: The tree of parameters: arrays, or `jax.ShapeDtypeStruct`s.
        axis_sizes: The axes of the mesh and their sizes, such as ``{"data": 4, "model": 2}`` or ``mesh.shape``.
        own_rules: Rules of the user. The first one that matches a parameter decides; parameters that no rule matches are
            sharded by the structure of the tree.

    Raises:
        ConfigError: A leaf has no gradient, or a rule does not fit: it matches no parameter, names an unknown axis or one
            axis twice, has more entries than the parameter has dimensions, or shards a dimension that does not divide.
    """
    parameters, structure = list_parameters(params)
    num_shards = axis_sizes.get(MODEL_AXIS, 1)
    root = build_modules(parameters)
    choices = choose_dims(root, num_shards) if num_shards > 1 else {}
    planned = {parameter: _by_structure(parameter, choices.get(parameter), num_shards) for parameter in parameters}
    for kernel, choice in choices.items():
        if kernel.bias is not None:
            planned[kernel.bias] = _bias_of(kernel, choice)
    planned |= _by_own_rules(parameters, axis_sizes, own_rules or ())
    return ShardingPlan(tuple(planned[parameter] for parameter in parameters), structure, dict(axis_sizes))


# ---------------------------------------------------------------------------------------------------------- structure


def _by_structure(parameter: Parameter, choice: Choice | None, num_shards: int) -> ParameterSharding:
    if choice is None:
        reason = "one model shard" if num_shards == 1 else "a norm scale or another vector"
        return _sharding(parameter, PartitionSpec(), reason)
    used = _spec(parameter, choice.used_dim)
    return _sharding(parameter, _spec(parameter, choice.dim), choice.reason, used)


def _bias_of(kernel: Parameter, choice: Choice) -> ParameterSharding:
    """Shard a bias as the outputs of its kernel are. The bias of a row-parallel kernel is added after the sum, by all."""
    bias = kernel.bias
    assert bias is not None
    is_at_end = not choice.outputs_first and bias.dims == kernel.dims[-len(bias.dims) :]
    offset = len(kernel.dims) - len(bias.dims) if is_at_end else 0
    dim = None if choice.used_dim is None else choice.used_dim - offset
    if dim is None or not 0 <= dim < len(bias.dims) or choice.used_dim != choice.dim:
        return _sharding(bias, PartitionSpec(), f"the bias of {kernel.name}, whose outputs are whole")
    return _sharding(bias, _spec(bias, dim), f"the bias of {kernel.name}, whose outputs are sharded")


def _spec(parameter: Parameter, dim: int | None) -> PartitionSpec:
    if dim is None:
        return PartitionSpec()
    entries: list[str | None] = [None] * len(parameter.shape)
    entries[parameter.num_stacked + dim] = MODEL_AXIS
    return PartitionSpec(*entries)


def _sharding(
    parameter: Parameter, spec: PartitionSpec, reason: str, used: PartitionSpec | None = None
) -> ParameterSharding:
    return ParameterSharding(
        parameter.name, parameter.shape, parameter.dtype, spec, spec if used is None else used, reason
    )


# ---------------------------------------------------------------------------------------------------------- own rules


def _by_own_rules(
    parameters: list[Parameter], axis_sizes: Mapping[str, int], rules: Sequence[Rule]
) -> dict[Parameter, ParameterSharding]:
    patterns = [_compiled(rule) for rule in rules]
    planned: dict[Parameter, ParameterSharding] = {}
    is_used = [False] * len(rules)
    for parameter in parameters:
        matching = [number for number, pattern in enumerate(patterns) if pattern.search(parameter.name)]
        for number in matching:
            is_used[number] = True
        if matching:
            pattern, entries = rules[matching[0]]
            spec = PartitionSpec(*(entries or ()))
            _check(spec, parameter, axis_sizes, f"The sharding rule ({pattern!r}, {entries})")
            planned[parameter] = _sharding(parameter, spec, f"your rule {pattern!r}")
    for (pattern, entries), used in zip(rules, is_used, strict=True):
        if not used:
            some = ", ".join(parameter.name for parameter in parameters[:3])
            raise ConfigError(
                f"The sharding rule ({pattern!r}, {entries}) matches no parameter: change or remove it. Paths are joined by "
                f"'/', such as {some}."
            )
    return planned


def _compiled(rule: Any) -> re.Pattern[str]:
    if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], (PartitionSpec, tuple, type(None)))):
        raise ConfigError(
            f"The sharding rule {rule!r} is not a pair: give (regular expression, PartitionSpec or tuple)."
        )
    try:
        return re.compile(rule[0])
    except (re.error, TypeError) as error:
        raise ConfigError(f"The sharding rule {rule!r} does not begin with a regular expression: {error}.") from error


def _check(spec: PartitionSpec, parameter: Parameter, axis_sizes: Mapping[str, int], rule: str) -> None:
    where = f"{rule} does not fit {parameter.name} of shape {parameter.shape}"
    if len(spec) > len(parameter.shape):
        raise ConfigError(f"{where}: it has {len(spec)} entries for {len(parameter.shape)} dimensions.")
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = _axes_of(entry)
        for axis in axes:
            if axis not in axis_sizes:
                raise ConfigError(f"{where}: the mesh has no axis {axis!r}; its axes are {', '.join(axis_sizes)}.")
            if axis in seen:
                raise ConfigError(f"{where}: it names the axis {axis!r} twice.")
            seen.add(axis)
        number = math.prod(axis_sizes[axis] for axis in axes)
        if parameter.shape[dim] % number:
            raise ConfigError(
                f"{where}: dimension {dim} of size {parameter.shape[dim]} does not divide by {number}. Shard another "
                "dimension, or replicate with ()."
            )


def _axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _num_shards_of(spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> int:
    return math.prod(axis_sizes[axis] for entry in spec for axis in _axes_of(entry))


def _num_bytes(parameter: ParameterSharding) -> int:
    return math.prod(parameter.shape) * int(jax.numpy.dtype(parameter.dtype).itemsize)
