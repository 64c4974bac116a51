"""What loops iterate over: the batches, or the single rows, of a shard. Worker side, in the training thread.

A batch is read, then counted as consumed, then handed to the loop body. Ranks do not communicate here: they are at the same
position because they take equally many batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from raysgd.data.order.cursor import Cursor, EpochIteration
from raysgd.data.order.epoch_order import Indices, Shuffle, as_array
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.reading.readers import EpochSteps, ItemReader, TableReader
from raysgd.errors import ConfigError, UsageError

T = TypeVar("T")
#: Called before a batch is read; the batch is read within the context manager that it returns.
ReadContext = Callable[[], AbstractContextManager[Any]]


class Transfer(Protocol):
    """Moves batches to the device where the loop uses them."""

    def prepare(self) -> None:
        """Prepare to move batches. Called in the loop's thread before the first batch."""

    def begin(self, batch: Any) -> Any:
        """Start to move a batch. Called in the thread that makes batches."""

    def finish(self, begun: Any) -> Any:
        """Return the moved batch, given the result of `begin`. Called in the loop's thread."""


@dataclass(frozen=True)
class ShardLoop:
    """The settings of a loop over a shard: which rows it reads, in which order, from where.

    Attributes:
        assignment: Which rows this rank takes.
        shuffle, lanes: The order of an epoch that begins with this loop.
        read_context: See `ReadContext`.
        is_logical: Whether the rows belong to logical workers, which read them one after the other.
    """

    cursor: Cursor
    assignment: RankAssignment
    shuffle: Shuffle
    lanes: int
    reader: TableReader | ItemReader
    read_context: ReadContext
    is_logical: bool = False

    def check_not_logical(self) -> None:
        """Raise a UsageError if a loop over all rows of this process would mix those of several logical workers."""
        if self.is_logical:
            raise UsageError(
                f"dataset {self.cursor.name!r} is divided among logical workers: loop over raysgd.torch.logical_steps(batches, "
                "model) or raysgd.jax.logical_steps(batches), or read all rows on every worker, get_split(whole=True)."
            )

    @contextmanager
    def open_epoch(self) -> Iterator[tuple[EpochIteration, EpochSteps]]:
        """Begin or resume an epoch; end it when the generator that uses it is exhausted or closed."""
        iteration = self.cursor.begin(self.shuffle, self.lanes)
        try:
            with closing(self.reader.open_epoch(self.assignment, iteration.order, iteration.start)) as epoch_steps:
                yield iteration, epoch_steps
        finally:
            iteration.end()

    @contextmanager
    def open_step(self, iteration: EpochIteration) -> Iterator[None]:
        """Read a step. If that fails, the position stays where it is, since nothing was handed out."""
        try:
            with self.read_context():
                yield
        except BaseException:
            iteration.abandon()
            raise

    def check_sized(self) -> None:
        """Raise a TypeError if the number of rows is unknown, so that there is no ``len()``."""
        if not self.assignment.is_sized:
            raise TypeError(
                f"dataset {self.cursor.name!r} is a lazy dataset, executed while it is read: its number of rows is unknown. "
                "Count in the loop, or give ds.materialize()."
            )


@dataclass(frozen=True)
class SlicedStep(Generic[T]):
    """A step whose rows are read in slices.

    Attributes:
        num_rows: Rows of all ranks in the step.
        is_even: Whether the slices of all ranks are equally long.
        slices: The rows of each slice of this rank; may be empty.
        read: Returns the batch of a slice.
        finish: Records that the step was consumed.
    """

    num_rows: int
    is_even: bool
    slices: Sequence[Indices]
    read: Callable[[Indices], T]
    finish: Callable[[], None]


@dataclass(frozen=True, repr=False)
class Batches(Generic[T]):
    """The batches of a shard. Each ``iter()`` reads the next epoch, or the rest of one that a checkpoint resumed.

    An epoch ends when its iterator is exhausted or closed, as by ``break``. ``len()`` is the number of steps in a whole
    epoch, equal on every rank; an epoch that was resumed has fewer left.

    All ranks get equally many batches, so that collectives match. In the last step of an epoch there may be too few rows for
    all ranks: a rank then gets a smaller batch, perhaps one of 0 rows with the usual shapes and types. The mean loss of 0
    rows is not a number: weight it by 0.
    """

    _loop: ShardLoop
    _read: Callable[[Indices], T]
    _num_prefetched: int = 0
    _transfer: Transfer | None = None

    def __iter__(self) -> Iterator[T]:
        self._loop.check_not_logical()
        return self._iterate()

    def _iterate(self) -> Iterator[T]:
        loop = self._loop
        with loop.open_epoch() as (iteration, epoch_steps):
            if self._transfer is not None:
                self._transfer.prepare()
            made, place = self._make(epoch_steps, iteration.start), iteration.start
            source = loop.reader.prefetchers.start(made, self._num_prefetched) if self._num_prefetched else made
            with _stopped_at_exit(source, epoch_steps) as batches:
                while loop.assignment.may_have_step(place):
                    with loop.open_step(iteration):
                        step = next(batches, None)
                        if step is not None:
                            batch, place = step
                            if self._transfer is not None:
                                batch = self._transfer.finish(batch)
                            iteration.consume(place, batch)
                            iteration.is_finished = not loop.assignment.may_have_step(place)
                    if step is None:
                        return
                    step = None  # keep no reference to a batch that the loop has finished with
                    yield batch
                    del batch
                    iteration.check_current()

    def sliced_steps(self) -> Iterator[SlicedStep[T]]:
        """Yield the steps of the next epoch, or the rest of one, whose slices are read when they are asked for.

        Like ``iter()``, except that a step counts as consumed when its ``finish`` is called.
        """
        loop = self._loop
        with loop.open_epoch() as (iteration, epoch_steps):
            place = iteration.start
            steps = chain.from_iterable(epoch_steps.steps())
            while loop.assignment.may_have_step(place):
                with loop.open_step(iteration):
                    step = next(steps, None)
                    if step is None:
                        return
                    with loop.reader.prefetchers.lock:
                        epoch_steps.advance_to(place)
                rows, stop = step
                yield SlicedStep(
                    stop - place,
                    loop.assignment.is_even(stop - place),
                    [rows[part.start : part.stop] for part in loop.assignment.cut(stop - place)],
                    partial(self._read_slice, iteration),
                    partial(self._finish_step, iteration, stop),
                )
                place = stop
                iteration.check_current()

    def _read_slice(self, iteration: EpochIteration, rows: Indices) -> T:
        with self._loop.open_step(iteration), self._loop.reader.prefetchers.lock:
            return self._read(rows)

    def _finish_step(self, iteration: EpochIteration, stop: int) -> None:
        iteration.check_current()
        iteration.consume(stop)
        iteration.is_finished = not self._loop.assignment.may_have_step(stop)

    def _make(self, epoch_steps: EpochSteps, place: int) -> Generator[tuple[Any, int], None, None]:
        """Yield batches with the end of their step. The lock is taken because loops share the reader."""
        for rows, stop in chain.from_iterable(epoch_steps.steps()):
            with self._loop.reader.prefetchers.lock:
                epoch_steps.advance_to(place)
                batch: Any = self._read(rows)
            if self._transfer is not None:
                batch = self._transfer.begin(batch)
            place = stop
            yield batch, stop
            del batch

    def __len__(self) -> int:
        self._loop.check_sized()
        return self._loop.assignment.num_steps

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the epoch that the next ``iter()`` begins; from 0."""
        return self._loop.cursor.epoch

    def first_batch(self) -> T:
        """Return this rank's first batch of the current epoch. Consumes nothing.

        Raises:
            ConfigError: The dataset has no rows.
        """
        loop = self._loop
        order = loop.cursor.order(loop.shuffle, loop.lanes)
        assignment = replace(loop.assignment, drop_last=False)
        with loop.reader.prefetchers.lock, closing(loop.reader.open_peek(assignment, order)) as epoch_steps:
            rows = epoch_steps.first_rows()
            if rows is not None:
                batch = self._read(rows)
                if self._transfer is not None:
                    self._transfer.prepare()
                    batch = self._transfer.finish(self._transfer.begin(batch))
                return batch
        raise ConfigError(f"dataset {loop.cursor.name!r} has no rows, so it has no first batch; give at least one row.")


@dataclass(frozen=True, repr=False)
class Rows:
    """The single rows of a shard. Like `Batches`, except that a rank without a row in the last step gets none."""

    _loop: ShardLoop
    _read: Callable[[Indices], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        self._loop.check_not_logical()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        loop = self._loop
        with loop.open_epoch() as (iteration, epoch_steps):
            made = self._make(epoch_steps, iteration.start)
            iteration.is_finished = not loop.assignment.may_have_step(iteration.start)
            while not iteration.is_finished:
                with loop.open_step(iteration):
                    step = next(made, None)
                    if step is not None:
                        iteration.consume(step[1])
                        iteration.is_finished = not loop.assignment.may_have_step(step[1])
                if step is None:
                    return
                yield from step[0]
                iteration.check_current()

    def _make(self, epoch_steps: EpochSteps, place: int) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yield a tuple of one row or none for each step, with the end of the step. Reads some thousand rows at a time."""
        for steps in epoch_steps.steps():
            values: Iterator[Any] = iter(())
            for number, (rows, stop) in enumerate(steps):
                if not number:
                    with self._loop.reader.prefetchers.lock:
                        epoch_steps.advance_to(place)
                        values = self._read(np.concatenate([as_array(part) for part, _ in steps]))
                    place = steps[-1][1]
                yield ((next(values),) if len(rows) else ()), stop

    def __len__(self) -> int:
        self._loop.check_sized()
        assignment = self._loop.assignment
        own = range(assignment.rank, assignment.rank + assignment.num_slices)
        return sum(len(range(number, assignment.num_rows, assignment.world_size)) for number in own)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the epoch that the next ``iter()`` begins; from 0."""
        return self._loop.cursor.epoch


@contextmanager
def _stopped_at_exit(batches: Any, epoch_steps: EpochSteps) -> Iterator[Any]:
    """Stop making batches at exit, also where a thread waits for data of the epoch."""
    try:
        yield batches
    finally:
        epoch_steps.stop()
        batches.close()
