"""The state of a training, and how it is sharded: parameters by the plan, the optimizer's state by ZeRO-1. Worker side.

Shapes and shardings are computed without any array, so the state can be made, or restored, in shards from the beginning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raysgd.functions.sharding import DATA_AXIS, MODEL_AXIS, ParameterSharding, ShardingPlan
from raysgd.functions.trees import as_nested_dict, key_of
from raysgd.jax.restoring import restore
from raysgd.session.live.state import NotComputedError

#: Bytes of an optimizer's state from which on it is sharded along the data axis. To gather the parameters after each update costs
#: a collective for each one, which takes longer than the step of a small model.
MIN_SHARDED_BYTES = 16 << 20
#: Bytes of a state up to which a step leaves the one before in memory, so that training can continue from it.
MAX_KEPT_BYTES = 256 << 20
#: Seconds to wait for a step that has begun, when an attempt has ended.
FETCH_S = 2.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training changes, and what a checkpoint holds.

    Attributes:
        step: The number of updates applied, an int32 scalar.
        params: The tree of parameters.
        opt_state: The state of the optimizer.
        rng: The random key as `jax.random.PRNGKey` makes it, uint32 of shape (2,). Each update splits it.
        model_state: The variables of a module of nnx that are not trained, or None.
        apply_fn: The user's function, unchanged. It is not an array, and not saved.
    """

    step: Any
    params: Any
    opt_state: Any
    rng: Any
    model_state: Any = None
    apply_fn: Any = field(default=None, metadata={"static": True})

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays in nested dicts, for `raysgd.save_checkpoint`, whatever classes hold them.

        `raysgd.jax.restore` makes a state of it again, on any mesh: ``restore(saved, like=steps.state_like)``.
        """
        return as_nested_dict(self)


def is_kept(like: TrainState | None) -> bool:
    """Return whether a process keeps the whole state before each step, as it can if it has all of it and it is not too large."""
    leaves = jax.tree.leaves(like)
    is_whole = all(_num_own(leaf) == math.prod(leaf.shape) for leaf in leaves)
    return is_whole and sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) <= MAX_KEPT_BYTES


def _num_own(leaf: Any) -> int:
    """Return how many elements of an array the devices of this process have."""
    pieces = {
        tuple(each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True))
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    }
    return sum(math.prod(stop - start for start, stop in piece) for piece in pieces)


def fetch(tree: Any) -> Any:
    """Copy the arrays of a tree, of which this process has all, to the memory of the host.

    Raises:
        NotComputedError: The devices do not compute them, since a process has left.
    """
    leaves, structure = jax.tree.flatten(tree)
    deadline = time.monotonic() + FETCH_S
    try:
        while not all(leaf.is_ready() for leaf in leaves):
            if time.monotonic() > deadline:
                raise NotComputedError
            time.sleep(0.001)
        return jax.tree.unflatten(structure, map(_fetched, leaves))
    except (RuntimeError, ValueError) as error:  # of a collective, or the array's memory was reused
        raise NotComputedError from error


def _fetched(array: Any) -> Any:
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepState:
    """The state as an own ``train_step_fn`` gets and returns it.

    Attributes:
        step: The number of updates applied before this one.
        params: The tree of parameters.
        opt_state: The state of the optimizer.
        apply_fn: The user's function, unchanged.
        tx: The optimizer.
    """

    step: Any
    params: Any
    opt_state: Any
    apply_fn: Any = field(default=None, metadata={"static": True})
    tx: Any = field(default=None, metadata={"static": True})

    def apply_gradients(self, *, grads: Any) -> StepState:
        """Return the state after an update by these gradients, which has the structure of ``params``."""
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        return self.replace(step=self.step + 1, params=optax.apply_updates(self.params, updates), opt_state=opt_state)

    def replace(self, **changes: Any) -> StepState:
        """Return a copy with other values of these attributes."""
        return dataclasses.replace(self, **changes)


def params_like(mesh: Mesh, plan: ShardingPlan) -> Any:
    """Return the tree of parameters with a `jax.ShapeDtypeStruct` and its sharding for each array."""
    return jax.tree_util.tree_unflatten(
        plan.structure, [_like(each.shape, each.dtype, mesh, each.spec) for each in plan.parameters]
    )


def key_like(mesh: Mesh) -> Any:
    """Return a `jax.ShapeDtypeStruct` of a random key, replicated."""
    key = jax.eval_shape(jax.random.PRNGKey, 0)
    return _like(key.shape, key.dtype, mesh, PartitionSpec())


def zero_shardings(mesh: Mesh, plan: ShardingPlan, optimizer: optax.GradientTransformation) -> Any:
    """Return the tree of parameters with the sharding of what the optimizer holds for each one."""
    spec_of = _spec_of(jax.eval_shape(optimizer.init, params_like(mesh, plan)))
    specs = [spec_of(mesh, each.shape, each.spec) for each in plan.parameters]
    return jax.tree_util.tree_unflatten(plan.structure, [NamedSharding(mesh, spec) for spec in specs])


def state_like(
    mesh: Mesh,
    plan: ShardingPlan,
    optimizer: optax.GradientTransformation,
    apply_fn: Any,
    model_state: Any = None,
) -> TrainState:
    """Return the state with a `jax.ShapeDtypeStruct` and its sharding for each array."""
    params = params_like(mesh, plan)
    opt_state = jax.eval_shape(optimizer.init, params)
    paths = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    by_path = dict(zip(paths, plan.parameters, strict=True))
    spec_of = _spec_of(opt_state)

    def shard(keys: Any, leaf: Any) -> Any:
        # Most optimizers hold trees like the parameters: their paths end alike.
        ends = (by_path.get(keys[start:]) for start in range(len(keys)))
        owner: ParameterSharding | None = next((each for each in ends if each is not None), None)
        spec = owner.spec if owner is not None and owner.shape == leaf.shape else PartitionSpec()
        return _like(leaf.shape, leaf.dtype, mesh, spec_of(mesh, leaf.shape, spec))

    return TrainState(
        _like((), np.int32, mesh, PartitionSpec()),
        params,
        jax.tree_util.tree_map_with_path(shard, opt_state),
        key_like(mesh),
        model_state,
        apply_fn,
    )


def with_plain_keys(optimizer: optax.GradientTransformation, params: Any) -> optax.GradientTransformation:
    """Return an optimizer whose state has the data of random keys in place of typed keys, which a checkpoint does not take."""
    like = jax.eval_shape(optimizer.init, params)

    def is_key(leaf: Any) -> bool:
        return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    if not any(map(is_key, jax.tree.leaves(like))):
        return optimizer

    def plain(state: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, state)

    def typed(state: Any) -> Any:
        return jax.tree.map(lambda leaf, one: jax.random.wrap_key_data(leaf) if is_key(one) else leaf, state, like)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        updates, new = optimizer.update(updates, typed(state), params, **more)
        return updates, plain(new)

    return optax.GradientTransformationExtraArgs(lambda params: plain(optimizer.init(params)), update)


def _spec_of(opt_state: Any) -> Callable[[Mesh, tuple[int, ...], PartitionSpec], PartitionSpec]:
    """Return what makes the spec of a leaf of this state from that of its parameter."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state))
    return zero_spec if size >= MIN_SHARDED_BYTES else lambda mesh, shape, spec: spec


def with_kind_of_dicts(optimizer: optax.GradientTransformation, params: Any) -> optax.GradientTransformation:
    """Let labels and masks of an optimizer be flax's `FrozenDict`s where the parameters are dicts, or the other way round.

    An optimizer that takes neither is returned as it is.
    """

    def takes(tree: Any) -> bool:
        try:
            jax.eval_shape(optimizer.init, tree)
        except (TypeError, ValueError):
            return False
        return True

    if "flax" not in sys.modules or takes(params):
        return optimizer
    from flax.core import freeze, unfreeze

    convert = next((each for each in (freeze, unfreeze) if takes(each(params))), None)
    if convert is None:
        return optimizer
    optimizer = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        structure = jax.tree.structure(updates)
        updates, new = optimizer.update(convert(updates), state, None if params is None else convert(params), **more)
        return jax.tree.unflatten(structure, jax.tree.leaves(updates)), new

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(convert(params)), update)


def zero_spec(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    """Add the data axis to a spec: to the largest dimension that divides and is not sharded, else to the one that is.

    Returns:
        The new spec, or the given one if no dimension divides or it uses the data axis already.
    """
    num_data, num_model = mesh.shape[DATA_AXIS], mesh.shape[MODEL_AXIS]
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    used = [axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))]
    if num_data == 1 or DATA_AXIS in used:
        return spec
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        if entries[dim] is None and shape[dim] and shape[dim] % num_data == 0:
            entries[dim] = DATA_AXIS
            return PartitionSpec(*entries)
    for dim, entry in enumerate(entries):
        if entry == MODEL_AXIS and shape[dim] % (num_data * num_model) == 0:
            entries[dim] = (MODEL_AXIS, DATA_AXIS)
            return PartitionSpec(*entries)
    return spec


def restore_arrays(saved: Any, like: Any) -> Any:
    """Place saved arrays as `raysgd.jax.restore` does, and convert floating-point numbers to the types of ``like``."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    saved_leaves, _ = jax.tree_util.tree_flatten_with_path(saved)
    dtypes = {tuple(map(key_of, keys)): np.dtype(leaf.dtype) for keys, leaf in saved_leaves}

    def as_saved(keys: Any, leaf: Any) -> Any:
        dtype = dtypes.get(tuple(map(key_of, keys)), leaf.dtype)
        return jax.ShapeDtypeStruct(
            leaf.shape, dtype if _can_cast(dtype, leaf.dtype) else leaf.dtype, sharding=leaf.sharding
        )

    stored = jax.tree_util.tree_unflatten(structure, [as_saved(keys, leaf) for keys, leaf in leaves])
    restored = restore(saved, like=stored)
    return jax.tree.map(lambda array, leaf: cast(array, leaf.dtype), restored, like)


def cast(array: Any, dtype: Any) -> Any:
    """Convert an array to a type, on the devices that hold it; return it as it is if it has the type."""
    if array.dtype == dtype:
        return array
    return _convert(array, np.dtype(dtype), array.sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _convert(array: Any, dtype: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(array.astype(dtype), sharding)


def set_schedule_step(opt_state: Any, step: Any) -> Any:
    """Make the schedules of a new optimizer state continue after ``step`` updates."""

    def is_schedule(node: Any) -> bool:
        return type(node).__name__ in (
            "ScaleByScheduleState",
            "WrappedScheduleState",
        )  # optax exports the first one only

    def change(node: Any) -> Any:
        return node._replace(count=jax.numpy.asarray(step, node.count.dtype)) if is_schedule(node) else node

    return jax.tree.map(change, opt_state, is_leaf=is_schedule)


def hyperparameters_of(opt_state: Any) -> dict[str, Any]:
    """Return the settings of `optax.inject_hyperparams` in the state of an optimizer, by their place."""
    found = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_injected)[0]
    return {
        f"{jax.tree_util.keystr(path)}.{name}": value
        for path, node in found
        if _is_injected(node)
        for name, value in node.hyperparams.items()
    }


def set_hyperparameters(opt_state: Any, values: Mapping[str, Any]) -> Any:
    """Return the state with other settings of `optax.inject_hyperparams`, named as by `hyperparameters_of`."""

    def change(path: Any, node: Any) -> Any:
        if not _is_injected(node):
            return node
        place = jax.tree_util.keystr(path)
        return node._replace(
            hyperparams={name: values.get(f"{place}.{name}", value) for name, value in node.hyperparams.items()}
        )

    return jax.tree_util.tree_map_with_path(change, opt_state, is_leaf=_is_injected)


def _is_injected(node: Any) -> bool:
    return isinstance(node, (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState))


def _can_cast(one: Any, other: Any) -> bool:
    return bool(jax.numpy.issubdtype(one, jax.numpy.floating) and jax.numpy.issubdtype(other, jax.numpy.floating))


def _like(shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def accumulates(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """Return whether an optimizer for such parameters is, or has in it, an `optax.MultiSteps`."""

    def is_multi(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    return any(map(is_multi, jax.tree.leaves(jax.eval_shape(optimizer.init, params), is_leaf=is_multi)))
