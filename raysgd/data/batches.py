"""What loops iterate over: the batches, or the single rows, of a share. Worker side, in the training thread.

Reading and counting meet here: a batch is read, then counted as consumed, then handed to the loop body. The ranks of a
group never speak to each other for it; they are at the same place because they take equally many batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from raysgd.data.ahead import Making
from raysgd.data.cursor import Cursor, Pass
from raysgd.data.ledger import Deal, Indices, Shuffle, as_array
from raysgd.data.reader import Follower
from raysgd.errors import ConfigError

T = TypeVar("T")
Row = dict[str, Any] | Any
#: Makes ready for a pass; what it returns is told where the pass is.
Follow = Callable[[Deal, Any, int], Follower]
#: The same for a look at the first rows.
Peek = Callable[[Deal, Any], Follower]
#: Called before a batch is read; it is read within what this returns.
Reading = Callable[[], AbstractContextManager[Any]]


class Copies(Protocol):
    """Brings batches to where the loop has them."""

    def choose(self) -> None:
        """Called in the loop's thread, before the first."""

    def begin(self, batch: Any) -> Any:
        """In the thread that makes batches."""

    def finish(self, begun: Any) -> Any:
        """In the loop's thread: the batch of what `begin` returned."""


@dataclass(frozen=True, repr=False)
class Batches(Generic[T]):
    """The batches of this share, again and again: each ``iter()`` goes on with the epoch that is under way, then with the next.

    An epoch ends when its iterator is exhausted or closed, as it is by ``break``. ``len()`` counts the steps of a whole
    epoch, the same on every rank; an epoch that was begun before a restart has fewer left.

    All ranks get equally many batches. In the last step of an epoch there may be too few rows for all: a rank then gets
    what there is, perhaps a batch of 0 rows with the shapes and types of the others, lest collectives wait for it. What
    averages over rows, such as a mean loss, must weight it by 0: its mean is not a number.
    """

    _cursor: Cursor
    _deal: Deal
    _shuffle: Shuffle
    _lanes: int
    _read: Callable[[Indices], T]
    _follow: Follow
    _peek: Peek
    _reading: Reading
    _making: Making
    _ahead: int = 0
    _copies: Copies | None = None

    def __iter__(self) -> Iterator[T]:
        with (
            _walk(self._cursor, self._shuffle, self._lanes) as walk,
            closing(self._follow(self._deal, walk.order, walk.start)) as follower,
        ):
            if self._copies is not None:
                self._copies.choose()
            made, place = self._made(follower, walk.start), walk.start
            with _ending(self._making.ahead(made, self._ahead) if self._ahead else made, follower) as batches:
                while self._deal.may_go_on(place):
                    with _abandoning(walk), self._reading():
                        step = next(batches, None)
                        if step is not None:
                            batch, place = step
                            if self._copies is not None:
                                batch = self._copies.finish(batch)
                            walk.consume(place)
                            walk.is_finished = not self._deal.may_go_on(place)
                    if step is None:
                        return
                    step = None  # a batch the loop is done with is not held here
                    yield batch
                    del batch
                    walk.check_live()

    def _made(self, follower: Follower, place: int) -> Generator[tuple[Any, int], None, None]:
        """Batches, and where their steps end. What they are read with is shared with other loops."""
        for rows, stop in chain.from_iterable(follower.steps()):
            with self._making.lock:
                follower.at(place)
                batch: Any = self._read(rows)
            if self._copies is not None:
                batch = self._copies.begin(batch)
            place = stop
            yield batch, stop
            del batch

    def __len__(self) -> int:
        if not self._deal.is_sized:
            raise no_length(self._cursor.name)
        return self._deal.num_steps

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next ``iter()`` begins; from 0."""
        return self._cursor.epoch

    def first_batch(self) -> T:
        """The batch this epoch began, or will begin, with on this rank. A peek: nothing is consumed.

        Raises:
            ConfigError: The dataset has no rows.
        """
        order = self._cursor.order(self._shuffle, self._lanes)
        deal = replace(self._deal, drop_last=False)
        with self._making.lock, closing(self._peek(deal, order)) as follower:
            rows = follower.first()
            if rows is not None:
                batch = self._read(rows)
                if self._copies is not None:
                    self._copies.choose()
                    batch = self._copies.finish(self._copies.begin(batch))
                return batch
        raise ConfigError(f"dataset {self._cursor.name!r} has no rows, and so no first batch.")


@dataclass(frozen=True, repr=False)
class Rows:
    """The rows of this share one by one; like `Batches`, but a rank that has no row in the last step gets none."""

    _cursor: Cursor
    _deal: Deal
    _shuffle: Shuffle
    _lanes: int
    _read: Callable[[Indices], Iterator[Any]]
    _follow: Follow
    _reading: Reading
    _making: Making

    def __iter__(self) -> Iterator[Any]:
        with (
            _walk(self._cursor, self._shuffle, self._lanes) as walk,
            closing(self._follow(self._deal, walk.order, walk.start)) as follower,
        ):
            made, place = self._made(follower, walk.start), walk.start
            while self._deal.may_go_on(place):
                with _abandoning(walk), self._reading():
                    step = next(made, None)
                    if step is not None:
                        place = step[1]
                        walk.consume(place)
                if step is None:
                    return
                yield from step[0]
                walk.check_live()

    def _made(self, follower: Follower, place: int) -> Iterator[tuple[tuple[Any, ...], int]]:
        """A row for each step, or none, and where the step ends. Rows are read some thousand at a time."""
        for steps in follower.steps():
            values: Iterator[Any] = iter(())
            for number, (rows, stop) in enumerate(steps):
                if not number:
                    with self._making.lock:
                        follower.at(place)
                        values = self._read(np.concatenate([as_array(part) for part, _ in steps]))
                    place = steps[-1][1]
                yield ((next(values),) if len(rows) else ()), stop

    def __len__(self) -> int:
        if not self._deal.is_sized:
            raise no_length(self._cursor.name)
        return len(range(self._deal.rank, self._deal.num_rows, self._deal.world_size))

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next ``iter()`` begins; from 0."""
        return self._cursor.epoch


@contextmanager
def _ending(batches: Any, follower: Follower) -> Iterator[Any]:
    """Ends what makes them, which may be waiting for something of the pass."""
    try:
        yield batches
    finally:
        follower.stop()
        batches.close()


def no_length(name: str) -> TypeError:
    """What is raised where a dataset's length is asked for that nobody knows."""
    return TypeError(
        f"dataset {name!r} is executed while it is read: how many rows it has is not known before. Count in the loop, or give "
        "ds.materialize()."
    )


@contextmanager
def _walk(cursor: Cursor, shuffle: Shuffle, lanes: int) -> Iterator[Pass]:
    """A pass whose epoch ends when the generator it is in is exhausted or closed."""
    walk = cursor.begin(shuffle, lanes)
    try:
        yield walk
    finally:
        walk.end()


@contextmanager
def _abandoning(walk: Pass) -> Iterator[None]:
    """What fails in here was not handed out: the position stays where it is."""
    try:
        yield
    except BaseException:
        walk.abandon()
        raise
