"""Steps with a convolution for each row, such as its gradient for each row. Each device computes all rows of such a step.

``jax.vmap`` makes one convolution of them, with a group for each row. Where rows are sharded, XLA's partitioner computes wrong
values of some of them without a word (JAX 0.10.2; 0.4.35 raises an internal error): gradients of kernels for each row were wrong
by up to 99 % of the largest, with strides, with dilation and in transposed layers, too. Gradients of a batch are right, also
those of a loss for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raysgd._util.logs import get_logger


class CompiledStep:
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
        leaves = [len(jax.tree.leaves(each)) for each in args]
        rows = -(-jax.tree.leaves(args[self._batch_at])[0].shape[0] // self._num_parts)
        search = _Search(rows)
        program = self._jitted.trace(*args).jaxpr.jaxpr  # which the first call uses
        search.follow(program, [at == self._batch_at for at, number in enumerate(leaves) for _ in range(number)])
        if rows < 2 or not search.has_found:
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


class _Search:
    """Finds convolutions for each row in a program, by following what depends on the batch.

    They have a group, or several, for each row, and a kernel that depends on the batch: another one for each row, or the gradient
    of the output. A depthwise layer has groups too, but one kernel for all rows.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.has_found = False

    def follow(self, jaxpr: Any, is_given: Sequence[bool]) -> list[bool]:
        """Return for each output whether it depends on the inputs that are given."""
        known = {variable for variable, is_one in zip(jaxpr.invars, is_given, strict=True) if is_one}

        def depends(variables: Sequence[Any]) -> list[bool]:
            return [not hasattr(each, "val") and each in known for each in variables]  # a literal has a value

        for equation in jaxpr.eqns:
            found = self._through(equation, depends(equation.invars))
            known.update(variable for variable, is_one in zip(equation.outvars, found, strict=True) if is_one)
        return depends(jaxpr.outvars)

    def _through(self, equation: Any, is_given: list[bool]) -> list[bool]:
        if equation.primitive.name == "conv_general_dilated":
            groups = equation.params["feature_group_count"]
            self.has_found |= groups > 1 and groups % self._rows == 0 and is_given[1]
        inner = [getattr(each, "jaxpr", each) for each in _programs_in(equation.params)]
        if equation.primitive.name == "scan":
            return self._through_scan(inner[0], equation.params, is_given)
        if len(inner) == 1 and len(inner[0].invars) == len(is_given):
            return self.follow(inner[0], is_given)
        for each in inner:  # such as the branches of a condition
            self.follow(each, [any(is_given)] * len(each.invars))
        return [any(is_given)] * len(equation.outvars)

    def _through_scan(self, body: Any, settings: Any, is_given: list[bool]) -> list[bool]:
        first, number = settings["num_consts"], settings["num_carry"]
        while True:
            found = self.follow(body, is_given)
            carried = [old or new for old, new in zip(is_given[first : first + number], found, strict=False)]
            if carried == is_given[first : first + number]:
                return found
            is_given = [*is_given[:first], *carried, *is_given[first + number :]]


def _programs_in(settings: Any) -> Iterator[Any]:
    for value in settings.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each
