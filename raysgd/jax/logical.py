"""`logical_steps`: training steps whose result does not depend, to the bit, on the number of workers. Worker side.

`raysgd.session.logical` explains logical workers and the tree in which their gradients are added, and
`raysgd.jax.logical_trees` how the ranks add them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd._util.text import with_article
from raysgd.data.batches.batches import Batches
from raysgd.errors import ConfigError, UsageError
from raysgd.session import context, logical_step
from raysgd.session.logical_step import iterate, workers_of

if TYPE_CHECKING:
    from raysgd.jax.logical_trees import TreeArithmetic

T = TypeVar("T")


def logical_steps(batches: Batches[T]) -> Iterator[LogicalStep[T]]:
    """Yield the steps of an epoch, each to be computed by logical workers one after the other.

        for step in raysgd.jax.logical_steps(shard.to_jax(batch_size=32)):
            for x, y in step:  # the batches of this process's logical workers
                key = jax.random.fold_in(step_key, step.logical_rank)
                loss, gradients = loss_and_gradients(params, x, y, key)
                step.add(gradients)
                step.record(loss=loss)
            updates, state = optimizer.update(step.gradients, state, params)
            params = optax.apply_updates(params, updates)
            raysgd.report(step.means())

    With ``Trainer(backend="jax", deterministic=True, logical_workers=L)`` gradients and metrics have the same bits on any
    number of workers. ``batch_size`` is that of a logical worker: a step consumes ``batch_size * L`` rows. Parameters and
    batches are arrays of this process alone, on one device, and all ranks begin with the same parameters.

    In the inner loop Python's and NumPy's random numbers are the logical worker's own; keys of JAX are made of its number, as
    above. Without a Trainer, each step is one batch.

    Args:
        batches: From ``get_split().to_jax(...)``, without a sharding.

    Raises:
        ConfigError: ``batches`` is something else.
        UsageError: There are several workers without ``Trainer(logical_workers=...)``, or the inner loop was left or never
            entered.
    """
    if not isinstance(batches, Batches):
        raise ConfigError(
            f"logical_steps() got {with_article(type(batches).__name__)}; give raysgd.get_dataset().get_split().to_jax(...), "
            "whose rows raysgd divides among logical workers."
        )
    from raysgd.jax.logical_trees import TreeArithmetic  # imports JAX

    workers = workers_of(context.current())
    return iterate(batches, workers, TreeArithmetic(workers), LogicalStep[T])


class LogicalStep(logical_step.LogicalStep[T]):
    """One training step; iterate over it once, for the batches of this process's logical workers."""

    _arithmetic: TreeArithmetic

    def add(self, gradients: Any) -> None:
        """Add the gradients of the current batch's mean loss: a tree of arrays, which may have other means of rows too.

        Raises:
            UsageError: It is called outside of the loop over the step, or twice for a batch.
        """
        if self._recorded is None or self._arithmetic.added is not None:
            raise UsageError("step.add() belongs into the loop over the step, once per batch.")
        self._arithmetic.added = gradients

    @property
    def gradients(self) -> Any:
        """The mean over the rows of all logical workers of what was added: a tree of arrays of this process.

        Raises:
            UsageError: The loop over the step has not ended.
        """
        self._check_known("step.gradients")
        return self._arithmetic.mean
