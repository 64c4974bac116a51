"""What loops iterate over: the batches, or the single rows, of a share. Worker side, in the training thread.

Reading and counting meet here: a batch is read, then counted as consumed, then handed to the loop body. The ranks of a
group never speak to each other for it; they are at the same place because they take equally many batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from raysgd.data.cursor import Cursor, Pass
from raysgd.data.ledger import Deal, EpochOrder, Indices, Shuffle
from raysgd.data.reader import Follower
from raysgd.errors import ConfigError

T = TypeVar("T")
Row = dict[str, Any] | Any
#: Makes ready for a pass; what it returns is told where the pass is.
Follow = Callable[[Deal, EpochOrder, int], Follower]
#: Called before a batch is read; it is read within what this returns.
Reading = Callable[[], AbstractContextManager[Any]]


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
    _reading: Reading

    def __iter__(self) -> Iterator[T]:
        with (
            _walk(self._cursor, self._shuffle, self._lanes) as walk,
            closing(self._follow(self._deal, walk.order, walk.start)) as follower,
        ):
            place = walk.start
            for steps in self._deal.steps(walk.order, walk.start):
                for rows, stop in steps:
                    with _abandoning(walk), self._reading():
                        follower.at(place)
                        place = stop
                        batch = self._read(rows)
                        walk.consume(stop)
                    yield batch
                    walk.check_live()

    def __len__(self) -> int:
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
        if not self._deal.num_rows:
            raise ConfigError(f"dataset {self._cursor.name!r} has no rows, and so no first batch.")
        return self._read(self._deal.rows(self._cursor.order(self._shuffle, self._lanes), 0))


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

    def __iter__(self) -> Iterator[Any]:
        with (
            _walk(self._cursor, self._shuffle, self._lanes) as walk,
            closing(self._follow(self._deal, walk.order, walk.start)) as follower,
        ):
            place = walk.start
            for steps in self._deal.steps(walk.order, walk.start):
                follower.at(place)
                place = steps[-1][1]
                values: Iterator[Any] | None = None
                for rows, stop in steps:
                    if len(rows):
                        with _abandoning(walk), self._reading():
                            if values is None:
                                values = self._read(np.concatenate([np.asarray(part, np.int64) for part, _ in steps]))
                            row = next(values)
                            walk.consume(stop)
                        yield row
                        walk.check_live()
                    walk.consume(stop)

    def __len__(self) -> int:
        return len(range(self._deal.rank, self._deal.num_rows, self._deal.world_size))

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next ``iter()`` begins; from 0."""
        return self._cursor.epoch


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
