"""The trees of arrays that logical workers add to a step, and how the ranks add them up. Worker side.

What a logical worker adds is one flat array. The nodes of all processes are the rows of one global array; a compiled function
cuts it into columns, one part for each process, adds each part in the order of the tree, and copies the result to all. XLA
makes an all-to-all and an all-gather of that.

Precision: arrays are of float32, or of float64 if a gradient is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raysgd.errors import ConfigError, UsageError
from raysgd.session.logical import LogicalWorkers, Node, TreeSum, border_nodes
from raysgd.session.logical_step import MAX_METRICS


class TreeArithmetic:
    """Adds trees of arrays; an `raysgd.session.logical_step.Arithmetic`.

    Attributes:
        added: What the current logical worker has added.
        mean: The result of the last step.
    """

    metric_names: list[str] | None = None
    added: Any = None
    mean: Any = None

    def __init__(self, workers: LogicalWorkers) -> None:
        self._workers = workers
        self._form: Any = None
        self._like: list[jax.ShapeDtypeStruct] = []

    def begin_step(self) -> None:
        """Do nothing: nothing is kept from one step to the next."""

    def begin_leaf(self) -> None:
        """Forget what another logical worker has added."""
        self.added = None

    def end_leaf(self, metrics: list[Any], *, weight: int, is_first: bool) -> Any:
        """Return what the batch adds to the step."""
        if self.added is None:
            raise UsageError("a batch of logical_steps() added nothing: call step.add(gradients) for each batch.")
        leaves, form = jax.tree_util.tree_flatten(self.added)
        like = [jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
        if self._form is None:
            self._set_form(form, like)
        elif (form, like) != (self._form, self._like):
            raise UsageError(
                "step.add() got another tree than for the first batch: add the same arrays for each batch."
            )
        self.added = None
        return _flatten(leaves, metrics, np.asarray(weight, self._dtype), self._size)

    def empty_leaf(self) -> Any:
        """Return what a logical worker without rows adds."""
        return jnp.zeros(self._size, self._dtype)

    def add(self, left: Any, right: Any) -> Any:
        """Return the sum of two nodes."""
        return _add(left, right)

    def finish(self, nodes: list[tuple[Node, Any]], divisor: int) -> list[Any]:
        """Set ``mean``, and return the means of the metrics."""
        flats = [flat for _, flat in nodes]
        total = flats[0] if self._workers.world_size == 1 else self._add_all(flats)
        leaves, metrics = _unflatten(total, np.asarray(divisor, self._dtype), tuple(map(_as_key, self._like)))
        self.mean = jax.tree_util.tree_unflatten(self._form, leaves)
        return [float(each) for each in np.asarray(metrics)]

    def describe(self) -> Any:
        """Return the structure of what is added."""
        return self._form, self._like

    def inherit(self, described: Any) -> None:
        """Take over the structure that rank 0 knows."""
        self._set_form(*described)

    def _set_form(self, form: Any, like: list[jax.ShapeDtypeStruct]) -> None:
        kinds = {each.dtype for each in like}
        if other := sorted(str(kind) for kind in kinds if not jnp.issubdtype(kind, jnp.floating)):
            raise ConfigError(f"step.add() takes arrays of real numbers, and the tree has {', '.join(other)}.")
        self._form, self._like = form, like
        self._dtype = jnp.float64 if jnp.dtype("float64") in kinds else jnp.float32
        size = sum(int(np.prod(each.shape)) for each in like) + MAX_METRICS
        self._size = size + -size % self._workers.world_size

    def _add_all(self, flats: list[Any]) -> Any:
        """Return the sum of the nodes of all processes, as an array of this process."""
        kept = self._workers.kept
        if "sum" not in kept:
            ranges = map(self._workers.range_of, range(self._workers.world_size))
            borders = [border_nodes(own, self._workers.num_workers) for own in ranges]
            mesh = _make_mesh()
            rows = NamedSharding(mesh, PartitionSpec("process"))
            kept["sum"] = rows, max(map(len, borders)), _compile_sum(mesh, borders, self._workers.num_workers)
        rows, height, add_rows = kept["sum"]
        padded = [np.asarray(flat) for flat in flats] + [np.zeros(self._size, self._dtype)] * (height - len(flats))
        total = add_rows(jax.make_array_from_process_local_data(rows, np.stack(padded)))
        return total.addressable_data(0)


def _as_key(like: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], str]:
    return like.shape, str(like.dtype)


@partial(jax.jit, static_argnums=3)
def _flatten(leaves: list[Any], metrics: list[Any], weight: Any, size: int) -> Any:
    scalars = [jnp.reshape(metric, (1,)) for metric in metrics]  # raises where a metric is none
    parts = [*leaves, *scalars, jnp.zeros(MAX_METRICS - len(metrics))]
    flat = jnp.concatenate([jnp.ravel(part).astype(weight.dtype) for part in parts]) * weight
    return jnp.pad(flat, (0, size - flat.size))


@partial(jax.jit, donate_argnums=0)
def _add(left: Any, right: Any) -> Any:
    return left + right


@partial(jax.jit, static_argnums=2)
def _unflatten(total: Any, divisor: Any, like: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[list[Any], Any]:
    mean, place, leaves = total / divisor, 0, []
    for shape, dtype in like:
        size = int(np.prod(shape))
        leaves.append(mean[place : place + size].reshape(shape).astype(dtype))
        place += size
    return leaves, mean[place : place + MAX_METRICS]


def _make_mesh() -> Mesh:
    """Return a mesh of the first device of each process, by rank."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([first[rank] for rank in sorted(first)]), ("process",))


def _compile_sum(mesh: Mesh, borders: list[list[Node]], num_leaves: int) -> Any:
    """Return the function that adds the nodes of all processes; its argument has as many rows for each process."""
    height = max(map(len, borders))
    places = [(node, rank * height + place) for rank, nodes in enumerate(borders) for place, node in enumerate(nodes)]
    columns, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(None, "process"), PartitionSpec()))

    def add_rows(stacked: Any) -> Any:
        cut = jax.lax.with_sharding_constraint(stacked, columns)
        tree = TreeSum[Any](num_leaves, lambda left, right: left + right)
        for node, row in places:
            tree.put(node, cut[row])
        return tree.take_root()

    return jax.jit(add_rows, out_shardings=everywhere)
