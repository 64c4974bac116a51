"""A training step of logical workers, whatever framework computes it: who computes which batch, and what is added when.

`raysgd.torch.logical_steps` and `raysgd.jax.logical_steps` make the steps; `Arithmetic` is what they differ in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Generic, Protocol, TypeVar, cast

from raysgd.errors import UsageError
from raysgd.session import context
from raysgd.session.base import Session
from raysgd.session.logical import LogicalWorkers, Node, TreeSum

T = TypeVar("T")
V = TypeVar("V")
#: Metrics that a step can record.
MAX_METRICS = 32


class Arithmetic(Protocol[V]):
    """Computes with the values that logical workers add to a step.

    Attributes:
        metric_names: Of the recorded metrics, in their order in a value; None: no batch was computed here yet.
    """

    metric_names: list[str] | None

    def begin_step(self) -> None: ...

    def begin_leaf(self) -> None:
        """Prepare for the batch of a logical worker."""

    def end_leaf(self, metrics: list[Any], *, weight: int, is_first: bool) -> V:
        """Return what the batch adds to the step, times ``weight``. ``is_first``: logical worker 0 has computed it."""

    def empty_leaf(self) -> V:
        """Return what a logical worker without rows adds. A batch was computed here, or `inherit` was called."""

    def add(self, left: V, right: V) -> V:
        """Return the sum of two nodes; may change and return the left one."""

    def finish(self, nodes: list[tuple[Node, V]], divisor: int) -> list[Any]:
        """Add the nodes of all ranks, divide, set the results, and return the metrics' means. Every rank calls it."""

    def describe(self) -> Any:
        """Return what a rank that has computed no batch needs to know of the values; pickles."""

    def inherit(self, described: Any) -> None:
        """Take over what `describe` returned on rank 0."""


class LogicalStep(Generic[T]):
    """One training step; iterate over it once, for the batches of this process's logical workers.

    A logical worker without rows in a short last step has no batch.
    """

    def __init__(self, step: Any, workers: LogicalWorkers, arithmetic: Arithmetic[Any]) -> None:
        self._step = step
        self._workers = workers
        self._arithmetic = arithmetic
        self._recorded: dict[str, Any] | None = None
        self._means: dict[str, Any] = {}
        self._state = "new"

    @property
    def logical_rank(self) -> int:
        """The logical worker that computes now, in the inner loop, for generators and files of its own."""
        if self._workers.acting is None:
            raise UsageError("step.logical_rank has a value only in the loop over the step.")
        return self._workers.acting

    def record(self, **metrics: Any) -> None:
        """Record scalars of the current batch, each a mean over its rows. Does not wait for a device.

        Raises:
            UsageError: It is called outside of the loop over the step.
        """
        if self._recorded is None:
            raise UsageError("step.record() belongs into the loop over the step, once per batch.")
        self._recorded.update(metrics)

    def means(self) -> dict[str, Any]:
        """Return the means over the rows of all logical workers of what was recorded, for `raysgd.report`.

        A float, or a scalar on the model's device.

        Raises:
            UsageError: The loop over the step has not ended.
        """
        self._check_known("step.means()")
        return dict(self._means)

    def check_finished(self) -> None:
        """Raise a UsageError if the loop over the step was left, or never entered."""
        if self._state != "finished":
            what = "was never entered" if self._state == "new" else "was left before its end"
            raise UsageError(
                f"the loop over a step of logical_steps() {what}: each worker must compute the batches of all its logical "
                "workers, `for batch in step: ...`."
            )

    def __iter__(self) -> Iterator[T]:
        if self._state != "new":
            raise UsageError("a step of logical_steps() can be iterated over once.")
        self._state = "entered"
        arithmetic, workers, is_even = self._arithmetic, self._workers, self._step.is_even
        slices = dict(zip(workers.own, self._step.slices, strict=True))
        tree = TreeSum[Any](workers.num_workers, arithmetic.add)
        arithmetic.begin_step()
        for number, rows in slices.items():
            if len(rows):
                with workers.acting_as(number):
                    arithmetic.begin_leaf()
                    self._recorded = {}
                    yield self._step.read(rows)
                    recorded, self._recorded = self._recorded, None
                    weight = 1 if is_even else len(rows)
                    leaf = arithmetic.end_leaf(self._in_order(recorded), weight=weight, is_first=number == 0)
                tree.put(Node(0, number), leaf)
        if not is_even:
            self._agree()
            for number, rows in slices.items():  # the last ones
                if not len(rows):
                    tree.put(Node(0, number), arithmetic.empty_leaf())
        with context.current().progress.waiting:
            means = arithmetic.finish(tree.take(), workers.num_workers if is_even else self._step.num_rows)
        self._means = dict(zip(arithmetic.metric_names or [], means, strict=False))
        self._step.finish()
        self._state = "finished"

    def _check_known(self, what: str) -> None:
        if self._state != "finished":
            raise UsageError(f"{what} is known after the loop over the step, in which the sums are made.")

    def _agree(self) -> None:
        """Send what is added to ranks that have had no rows yet. In the first uneven step of a loop all ranks call it."""
        workers, arithmetic = self._workers, self._arithmetic
        if workers.world_size > 1 and arithmetic not in workers.agreed:
            names, described = context.acting().broadcast((arithmetic.metric_names, arithmetic.describe()))
            if arithmetic.metric_names is None:
                arithmetic.metric_names = names
                arithmetic.inherit(described)
            workers.agreed.add(arithmetic)

    def _in_order(self, recorded: Mapping[str, Any]) -> list[Any]:
        """Return the recorded values in the order of the first batch."""
        names, known = list(recorded), self._arithmetic.metric_names
        if len(names) > MAX_METRICS:
            raise UsageError(f"step.record() takes up to {MAX_METRICS} metrics; {len(names)} were given.")
        if known is None:
            known = self._arithmetic.metric_names = names
        elif sorted(names) != sorted(known):
            found = [", ".join(each) or "nothing" for each in (names, known)]
            raise UsageError(
                f"step.record() got {found[0]} for one batch and {found[1]} for another: record the same metrics for each "
                "batch, so that their means can be taken."
            )
        return [recorded[name] for name in known]


S = TypeVar("S", bound=LogicalStep[Any])


def workers_of(session: Session) -> LogicalWorkers:
    """Return the logical workers of this process; without a Trainer there is one.

    Raises:
        UsageError: There are several workers, and no logical ones.
    """
    if session.logical is None and session.world_size > 1:
        raise UsageError("logical_steps() with several workers needs Trainer(deterministic=True, logical_workers=...).")
    return session.logical or LogicalWorkers(1, 0, 1, session.seed)


def iterate(batches: Any, workers: LogicalWorkers, arithmetic: Arithmetic[Any], kind: type[S]) -> Iterator[S]:
    """Yield the steps of an epoch."""
    with closing(cast(Any, batches.sliced_steps())) as sliced:
        for each in sliced:
            step = kind(each, workers, arithmetic)
            yield step
            step.check_finished()
