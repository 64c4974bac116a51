"""Steps with a convolution for each row, such as its gradient for each row. Each device computes all rows of such a step.

``jax.vmap`` makes one convolution of them, with a group for each row. Where rows are sharded, XLA's partitioner computes wrong
values of some of them without a word (JAX 0.10.2; 0.4.35 raises an internal error): those of ``vmap(grad(conv))`` were wrong by
87 % of the largest. Gradients of a batch are right, also those of a loss for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raysgd._util.logs import get_logger


class Step:
    """A compiled step, which finds out at its first call whether it has such convolutions.

    Args:
        function: The step.
        batch_at: The position of the batch among its arguments.
        num_parts: The number of parts in which the step computes the batch.
        on_dropped: Called when a trace of ``function`` is not compiled.
        **settings: As for `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        *,
        batch_at: int,
        num_parts: int = 1,
        on_dropped: Callable[[], None],
        **settings: Any,
    ) -> None:
        self._function, self._settings, self._batch_at = function, settings, batch_at
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._num_parts, self._on_dropped = num_parts, on_dropped
        self._jitted = jax.jit(function, **settings)
        self._is_checked = mesh.size == 1

    def __call__(self, *args: Any) -> Any:
        if not self._is_checked:
            self._check(args)
        return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """Lower the step, as `jax.jit` does."""
        if not self._is_checked:
            self._check(args)
        return self._jitted.lower(*args)

    def _check(self, args: tuple[Any, ...]) -> None:
        self._is_checked = True
        rows = -(-jax.tree.leaves(args[self._batch_at])[0].shape[0] // self._num_parts)
        traced = self._jitted.trace(*args)  # which the first call uses
        if rows < 2 or not any(groups % rows == 0 for groups in _groups_in(traced.jaxpr.jaxpr) if groups > 1):
            return
        get_logger().warning(
            "a step has a convolution for each row, which XLA computes wrong where rows are on several devices: each device "
            "computes all rows of the batch."
        )
        self._on_dropped()

        def whole(*args: Any) -> Any:
            given = list(args)
            given[self._batch_at] = jax.lax.with_sharding_constraint(given[self._batch_at], self._whole)
            return self._function(*given)

        self._jitted = jax.jit(whole, **self._settings)


def _groups_in(jaxpr: Any) -> Iterator[int]:
    """Yield the numbers of groups of the convolutions in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield max(equation.params["feature_group_count"], equation.params["batch_group_count"])
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _groups_in(inner)
