"""How parameters are sharded: a `PartitionSpec` and a reason for each one, from own rules or by default. Pure, any process.

A plan needs shapes, no devices; `raysgd.functions.worker.steps` places arrays by it. What no rule of the user matches is
sharded by `choose_by_names`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from raysgd._util.text import with_article
from raysgd.errors import ConfigError
from raysgd.functions.default_sharding import Choice, choose_by_names
from raysgd.functions.trees import Parameter, list_parameters

#: The axes of the mesh: batches are sharded along the first one, parameters along the second one.
DATA_AXIS, MODEL_AXIS = "data", "model"
#: The names of these axes in rules for redco.
_AXES_OF_REDCO = {"dp": DATA_AXIS, "mp": MODEL_AXIS}

#: A pattern, and the `PartitionSpec`, tuple or None (replicated) of the parameters that it matches. The pattern is a regular
#: expression that is searched in a path joined by "/"; or, as in redco, a tuple of regular expressions for keys in a row.
Rule: TypeAlias = "tuple[str | tuple[str, ...], Any]"
#: Rules, or those for the parameters below each key.
Rules: TypeAlias = "Sequence[Rule] | Mapping[Any, Any]"


@dataclass(frozen=True)
class ParameterSharding:
    """The sharding of one parameter.

    Attributes:
        path: Its path, joined by "/".
        spec: How it is stored: one entry for each dimension, or no entry if it is replicated.
        used_spec: How the step uses it. A vocabulary that does not divide is stored by its width, and used in shards of rows of
            unequal size.
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


def plan_sharding(
    params: Any,
    axis_sizes: Mapping[str, int],
    own_rules: Rules | None = None,
    declared: Mapping[tuple[str, ...], Any] | None = None,
    *,
    is_trained: bool = True,
) -> ShardingPlan:
    """Decide how parameters are sharded over a mesh.

    Args:
        params: The tree of parameters: arrays, or `jax.ShapeDtypeStruct`s.
        axis_sizes: The axes of the mesh and their sizes, such as ``{"data": 4, "model": 2}`` or ``mesh.shape``.
        own_rules: Rules of the user. The first one that matches a parameter decides; parameters that no rule matches are
            sharded as the model declares, or else by the names of layers.
        declared: The `PartitionSpec`s that the model declares, by path; see `raysgd.functions.models.Model`.
        is_trained: As for `raysgd.functions.trees.list_parameters`.

    Raises:
        ConfigError: A leaf has no gradient, or a rule does not fit: it matches no parameter, names an unknown axis or one
            axis twice, has more entries than the parameter has dimensions, or shards a dimension that does not divide.
    """
    parameters, structure = list_parameters(params, is_trained=is_trained)
    num_shards = axis_sizes.get(MODEL_AXIS, 1)
    choices = choose_by_names(parameters, num_shards)
    whole = Choice(None, None, "a vector, or small" if num_shards > 1 else "one model shard")
    own = _apply_rules(own_rules or (), parameters, axis_sizes)
    shapes = {path: shape for path, shape, _ in parameters if path not in own}
    for path, entries in (declared or {}).items():
        if path not in shapes:
            continue
        spec = PartitionSpec(*map(_in_own_axes, entries))
        if why := _misfit(spec, shapes[path], axis_sizes):
            raise ConfigError(
                f"The model declares the sharding {spec} of {'/'.join(path)}, whose shape is {shapes[path]}: {why}. Declare axes "
                "of the mesh, by flax's logical_axis_rules if their names are logical, or give a rule for this parameter in "
                "params_sharding_rules."
            )
        own[path] = spec, spec, "declared by the model"
    planned = []
    for path, shape, dtype in parameters:
        stored, used, reason = choices.get(path, whole)
        specs = own.get(path) or (_spec(shape, stored), _spec(shape, used), reason)
        planned.append(ParameterSharding("/".join(path), shape, dtype, *specs))
    return ShardingPlan(tuple(planned), structure, dict(axis_sizes))


def _spec(shape: tuple[int, ...], dim: int | None) -> PartitionSpec:
    if dim is None:
        return PartitionSpec()
    entries: list[str | None] = [None] * len(shape)
    entries[dim] = MODEL_AXIS
    return PartitionSpec(*entries)


# ---------------------------------------------------------------------------------------------------------- own rules


class ShardingRules(list[Any]):
    """A list of rules (regular expression, spec), one for each parameter. Its text is a table with the reasons.

    Rules that are changed or added count as own rules, which must fit. The others are decided again where they are used.
    """

    def __init__(self, plan: ShardingPlan) -> None:
        super().__init__((f"^{re.escape(parameter.path)}$", parameter.spec) for parameter in plan.parameters)
        self._table = str(plan)
        self._decided = tuple(self)

    def __str__(self) -> str:
        return self._table

    @property
    def own(self) -> list[Any]:
        """The rules that are not as they were decided."""
        return [rule for rule in self if rule not in self._decided]


def own_rules(rules: Iterable[Any] | None) -> Any:
    """Return the rules of the user among ``params_sharding_rules``, in a list, or in a dict if they are for submodules.

    Raises:
        ConfigError: The argument is not a list.
    """
    if rules is None:
        return None
    if isinstance(rules, Mapping):
        return {key: own_rules(below) for key, below in rules.items()}
    if isinstance(rules, ShardingRules):
        return rules.own
    if not isinstance(rules, (list, tuple)):
        raise ConfigError(
            f"params_sharding_rules is {with_article(type(rules).__name__)}; give deployer.get_sharding_rules(params), or a list "
            "of (regular expression, PartitionSpec), or a dict of them for submodules."
        )
    return list(rules)


def _apply_rules(
    rules: Rules, parameters: Sequence[Parameter], axis_sizes: Mapping[str, int]
) -> dict[tuple[str, ...], tuple[PartitionSpec, PartitionSpec, str]]:
    """Return the spec for storing and for use, and the reason, of each parameter that a rule matches."""
    found: dict[tuple[str, ...], tuple[PartitionSpec, PartitionSpec, str]] = {}
    if isinstance(rules, Mapping):
        for key, below in rules.items():
            inner = [each._replace(path=each.path[1:]) for each in parameters if each.path[0] == str(key)]
            if not inner:
                some = ", ".join(dict.fromkeys(each.path[0] for each in parameters))
                raise ConfigError(
                    f"params_sharding_rules has rules for {key!r}, and params has {some}: change the name."
                )
            found |= {(str(key), *path): specs for path, specs in _apply_rules(below or (), inner, axis_sizes).items()}
        return found
    for rule in rules:
        matches = _matcher_of(rule)
        pattern, given = rule
        shown = f"The sharding rule ({pattern!r}, {given})"
        spec = PartitionSpec(*(_in_own_axes(entry) for entry in given or ()))
        matching = [each for each in parameters if matches(each.path)]
        if not matching:
            some = ", ".join("/".join(each.path) for each in parameters[:3])
            raise ConfigError(
                f"{shown} matches no parameter: change or remove it. Paths are joined by '/', such as {some}."
            )
        for path, shape, _ in (each for each in matching if each.path not in found):
            if why := _misfit(spec, shape, axis_sizes):
                where = f"{shown} does not fit {'/'.join(path)} of shape {shape}"
                raise ConfigError(f"{where}: {why}. Change it, or replicate with ().")
            found[path] = spec, spec, f"your rule {pattern!r}"
    return found


def _matcher_of(rule: Any) -> Callable[[tuple[str, ...]], bool]:
    """Return a function from a path, the keys from the root to a parameter, to whether the rule matches it.

    Raises:
        ConfigError: The rule is not a pair, or its pattern is not one.
    """
    is_pair = isinstance(rule, tuple) and len(rule) == 2
    if not is_pair or isinstance(rule[1], str) or not isinstance(rule[1], (Iterable, type(None))):
        raise ConfigError(
            f"The sharding rule {rule!r} is not a pair: give (regular expression, PartitionSpec or tuple)."
        )
    pattern = rule[0]
    try:
        if not isinstance(pattern, tuple):
            expression = re.compile(pattern)
            return lambda path: expression.search("/".join(path)) is not None
        parts = [re.compile(part) for part in pattern]
    except (re.error, TypeError) as error:
        raise ConfigError(f"The sharding rule {rule!r} does not begin with a regular expression: {error}.") from error
    return lambda path: any(
        all(part.fullmatch(key) for part, key in zip(parts, path[start:], strict=False))
        for start in range(len(path) - len(parts) + 1)
    )


def _misfit(spec: PartitionSpec, shape: tuple[int, ...], axis_sizes: Mapping[str, int]) -> str | None:
    """Return why a spec does not fit a shape, or None."""
    axes_of = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    if len(spec) > len(shape):
        return f"it has {len(spec)} entries for {len(shape)} dimensions"
    for axis, number in Counter(axis for axes in axes_of for axis in axes).items():
        if axis not in axis_sizes:
            return f"the mesh has no axis {axis!r}; its axes are {', '.join(axis_sizes)}"
        if number > 1:
            return f"it names the axis {axis!r} twice"
    for dim, axes in enumerate(axes_of):
        if shape[dim] % (number := math.prod(axis_sizes[axis] for axis in axes)):
            return f"dimension {dim} of size {shape[dim]} does not divide by {number}"
    return None


def _in_own_axes(entry: Any) -> Any:
    if isinstance(entry, (tuple, list)):
        return tuple(map(_in_own_axes, entry))
    return _AXES_OF_REDCO.get(entry, entry)
