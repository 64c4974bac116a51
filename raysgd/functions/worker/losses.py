"""Losses as sums with weights, so that micro-batches of any sizes add up to the loss of their batch. Runs in the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from raysgd.errors import ConfigError
from raysgd.functions.worker.random_rows import key_of_rows


class Loss(NamedTuple):
    """The loss of a batch, as two float32 scalars.

    Attributes:
        total: The sum over what counts: rows, or what the weight counts, such as tokens.
        weight: The number of what counts.
    """

    total: Any
    weight: Any


def as_loss(returned: Any, num_rows: int, counts: Any) -> Loss:
    """Convert what loss_fn returned for a batch.

    Args:
        returned: As above.
        num_rows: The rows of the batch.
        counts: For each row whether it counts. Rows of a loss that is a scalar all count.

    Raises:
        ConfigError: It is neither a scalar or one number for each row, nor a pair of these.
    """
    advice = (
        "Return a scalar, the mean over the rows of its batch, or (loss_sum, weight), two scalars; or the same for each row, as "
        "arrays."
    )
    is_pair = isinstance(returned, (tuple, list))
    values = list(returned) if is_pair else [returned]
    if len(values) != (2 if is_pair else 1):
        raise ConfigError(f"loss_fn returned a {type(returned).__name__} of {len(values)} values. {advice}")
    for value in values:
        if not isinstance(value, (int, float, jax.Array)) and not hasattr(value, "dtype"):
            raise ConfigError(f"loss_fn returned a value of type {type(value).__name__}. {advice}")
        if jnp.shape(value) not in ((), (num_rows,)) or jnp.shape(value) != jnp.shape(values[0]):
            raise ConfigError(f"loss_fn returned an array of shape {jnp.shape(value)}. {advice}")
    if not jnp.issubdtype(jnp.result_type(values[0]), jnp.floating):
        raise ConfigError(
            f"loss_fn returned a loss of dtype {jnp.result_type(values[0])}, which has no gradient. {advice}"
        )
    total, *given = (jnp.asarray(value, jnp.float32) for value in values)
    if total.shape:
        weight = given[0] if given else jnp.ones_like(total)
        return Loss(jnp.where(counts, total, 0).sum(), jax.lax.stop_gradient(jnp.where(counts, weight, 0).sum()))
    if given:
        return Loss(total, jax.lax.stop_gradient(given[0]))
    return Loss(total * num_rows, jnp.float32(num_rows))


def sum_of_losses(
    loss_of: Callable[..., tuple[Loss, Any]], params: Any, model_state: Any, rng: Any, stacks: list[Any]
) -> tuple[Loss, Any, Any]:
    """Add up losses and gradients of micro-batches.

    Args:
        loss_of: Returns the loss of ``(params, model_state, rng, micro_batch)``, and the new ``model_state``.
        params: The tree of parameters.
        model_state: What the model changes itself, from one micro-batch to the next; a tree of arrays, or None.
        rng: The key of the step; each micro-batch gets one for its rows.
        stacks: Trees of arrays of shape (micro-batches, rows, ...). A micro-batch has every n-th row of a stack of n.

    Returns:
        The sum of the losses, the gradient of its total in the structure of ``params``, at least in float32, and the new
        ``model_state``.
    """

    def step(model_state: Any, rng: Any, micro_batch: Any) -> tuple[tuple[Loss, Any], Any]:
        def total_of(params: Any) -> tuple[Any, Any]:
            loss, new = loss_of(params, model_state, rng, micro_batch)
            return loss.total, (loss.weight, new)

        (total, (weight, new)), grads = jax.value_and_grad(total_of, has_aux=True)(params)
        return (Loss(total, weight), grads), new

    sizes = [jax.tree.leaves(stack)[0].shape[:2] for stack in stacks]
    num_all = sum(length * rows for length, rows in sizes)
    first = 0
    found: Any = None
    for stack, (length, rows) in zip(stacks, sizes, strict=True):
        key_of = functools.partial(key_of_rows, rng, stride=length, num_rows=rows, num_all=num_all)
        if length == 1:
            new, model_state = step(model_state, key_of(first), jax.tree.map(lambda array: array[0], stack))
        else:
            new, model_state = _scanned(step, params, model_state, key_of, stack, first, length)
        found = new if found is None else jax.tree.map(jnp.add, found, new)
        first += length * rows
    return *found, model_state


def _scanned(step: Any, params: Any, model_state: Any, key_of: Any, stack: Any, first: int, length: int) -> Any:
    def body(carried: Any, numbered: Any) -> tuple[Any, None]:
        (summed, model_state), (number, micro_batch) = carried, numbered
        new, model_state = step(model_state, key_of(number), micro_batch)
        return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), summed, new), model_state), None

    zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.promote_types(param.dtype, jnp.float32)), params)
    start = (Loss(jnp.float32(0), jnp.float32(0)), zeros)
    return jax.lax.scan(body, (start, model_state), (first + jnp.arange(length), stack))[0]
