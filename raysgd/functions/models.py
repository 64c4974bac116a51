"""`Model`: what the script gives as ``params``, in parts. Any process; it makes JAX arrays for modules alone.

A tree of arrays is its parameters alone. A module of flax's nnx has in addition variables that are not trained, such as the
statistics of batch normalization, and streams of random numbers. Functions get a tree as it is, and a module put together again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from raysgd._util.imports import imported
from raysgd.errors import ConfigError
from raysgd.functions.trees import as_nested_dict, as_numbers, as_numpy, from_nested_dict, keys_of, shapes_of
from raysgd.workers.pickling import dumps_named, loads

#: Folded into the key of a step for the streams of a module, so that they differ from what functions draw with the key.
_STREAMS = 0x6E6E78


@dataclass(frozen=True)
class Model:
    """A tree of parameters, or a module of nnx.

    Attributes:
        params: The tree of what is trained. In a module: the state of variables of the type that ``wrt`` says.
        model_state: The other variables of a module; None for a tree, or if there are none.
        streams: The variables of the module's random numbers, as shapes.
        definition: Pickle of the module's ``GraphDef`` and filter; None for a tree.
        declared: The shardings that the variables declare, by path.
    """

    params: Any
    model_state: Any = None
    streams: Any = None
    definition: bytes | None = None
    declared: Mapping[tuple[str, ...], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, wrt: Any = None) -> Model:
        """Take apart what the script gives, with NumPy arrays.

        Args:
            given: A tree of arrays, or a module.
            wrt: The filter of nnx for the variables that are trained; None: `flax.nnx.Param`.

        Raises:
            ConfigError: A leaf cannot be trained, or is not an array.
        """
        model = cls._split(given, wrt)
        return replace(model, params=as_numpy(model.params), model_state=as_numbers(model.model_state))

    @classmethod
    def like(cls, given: Any) -> Model:
        """Take apart what the script gives, or shapes of it, as `shapes` of the result of `of`."""
        return cls._split(given, None).shapes()

    @classmethod
    def _split(cls, given: Any, wrt: Any) -> Model:
        nnx, declared = imported("flax.nnx"), _declared_specs(given)
        if nnx is None or not isinstance(given, nnx.Module):
            return cls(given, declared=declared)
        wrt = nnx.Param if wrt is None else wrt
        graphdef, params, streams, others = nnx.split(given, wrt, nnx.RngState, ...)
        if not jax.tree.leaves(params):
            raise ConfigError(
                f"params is a {type(given).__name__} without variables of the type {wrt!r}: give another."
            )
        definition = dumps_named((graphdef, wrt), "params")
        others = others if jax.tree.leaves(others) else None
        return cls(params, others, jax.eval_shape(lambda: streams), definition, declared)

    @property
    def is_module(self) -> bool:
        return self.definition is not None

    def shapes(self) -> Model:
        """Return it with a `jax.ShapeDtypeStruct` in place of each array."""
        return replace(self, params=shapes_of(self.params), model_state=shapes_of(self.model_state))

    def as_state(self) -> dict[str, Any]:
        """Return its arrays in nested dicts, for the ``train_state`` of a checkpoint."""
        found = {"params": as_nested_dict(self.params)}
        return found if self.model_state is None else {**found, "model_state": as_nested_dict(self.model_state)}

    def from_state(self, state: Mapping[str, Any], seed: int) -> Any:
        """Return the tree, or the module in the mode of evaluation, with the arrays of a ``train_state``."""
        model = self.with_arrays(state)
        if not self.is_module:
            return model.params
        params, others = jax.tree.map(  # arrays of JAX, as a module may change what is in its variables
            lambda each: jax.numpy.asarray(each) if isinstance(each, np.ndarray) else each,
            (model.params, model.model_state),
        )
        return self.build(params, others, jax.random.PRNGKey(seed), is_training=False)

    def with_arrays(self, state: Mapping[str, Any]) -> Model:
        """Return it with the arrays of a ``train_state``."""
        # A program with orbax may have saved the whole state of a module as one tree.
        saved = state.get("model_state", state["params"])
        others = None if self.model_state is None else from_nested_dict(saved, self.model_state)
        return replace(self, params=from_nested_dict(state["params"], self.params), model_state=others)

    def build(self, params: Any, model_state: Any, rng: Any, *, is_training: bool) -> Any:
        """Return what functions get: the tree, or a module in the mode of training or evaluation, with streams from a key."""
        if self.definition is None:
            return params
        from flax import nnx

        graphdef, _ = loads(self.definition)
        others: tuple[Any, ...] = () if model_state is None else (model_state,)
        # Copied, as variables may only be changed in the trace that made them.
        module = nnx.merge(graphdef, params, self._new_streams(rng), *others, copy=True)
        (module.train if is_training else module.eval)()
        return module

    def state_of(self, module: Any) -> Any:
        """Return the new ``model_state`` of a module that `build` made, after a function has used it.

        Raises:
            ConfigError: The function added or removed variables, or changed their shapes.
        """
        if self.definition is None or self.model_state is None:
            return None
        from flax import nnx

        _, wrt = loads(self.definition)
        nnx.pop(module, nnx.Intermediate)
        found = nnx.split(module, wrt, nnx.RngState, ...)[-1]
        expected, new = (
            {keys_of(keys): np.shape(leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
            for tree in (self.model_state, found)
        )
        if expected != new:
            odd = next(iter(dict(expected.items() ^ new.items())))
            raise ConfigError(
                f"a function changed which variables the model has, or their shapes: {'/'.join(map(str, odd))}. Make all "
                "variables in __init__, and let functions change their values alone."
            )
        return jax.tree.map(lambda old, leaf: leaf.astype(old.dtype), self.model_state, found)

    def _new_streams(self, rng: Any) -> Any:
        if jax.numpy.issubdtype(rng.dtype, np.integer):
            rng = jax.random.wrap_key_data(rng)
        leaves, structure = jax.tree.flatten(self.streams)
        keys = jax.random.split(jax.random.fold_in(rng, _STREAMS), len(leaves) + 1)

        def begin(leaf: Any, key: Any) -> Any:
            if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.numpy.zeros(leaf.shape, leaf.dtype)  # how many numbers a stream has given
            return jax.random.split(key, leaf.shape) if leaf.shape else key

        return jax.tree.unflatten(structure, map(begin, leaves, keys))


def _declared_specs(params: Any) -> dict[tuple[str, ...], Any]:
    """Return the sharding that a variable of nnx, or a box of linen, declares, by path. Logical names are resolved."""
    nnx, linen = imported("flax.nnx"), imported("flax.linen")
    variables = () if nnx is None else nnx.Variable
    boxes = () if linen is None else linen.Partitioned
    found = {}
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, (variables, boxes)))[0]
    for keys, node in nodes:
        spec = None
        if isinstance(node, variables):
            spec = nnx.get_partition_spec(node).get_value()
        elif isinstance(node, boxes):
            spec = node.get_partition_spec()
            if isinstance(node, linen.LogicallyPartitioned) and (rules := node.rules or linen.get_logical_axis_rules()):
                spec = linen.logical_to_mesh(spec, rules)
        if spec is not None and any(spec):
            found[tuple(map(str, keys_of(keys)))] = spec
    return found
