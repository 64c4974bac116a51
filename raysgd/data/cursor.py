"""The cursor of one dataset in one run: the one thing that knows where training stands in it. Worker side.

A batch is consumed when it is handed to the loop body. The epoch ends when its iterator is exhausted or closed, as by
``break``; until then the position may be (epoch, everything consumed), and a run that goes on from there finds an empty
rest of that epoch first. Used from the training thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.data.ledger import EpochOrder, Shuffle, layout
from raysgd.data.plan import UNKNOWN_ROWS, WINDOW_ROWS
from raysgd.data.position import Position
from raysgd.data.stream_order import StreamOrder
from raysgd.errors import CheckpointError, ConfigError, UsageError


class Cursor:
    """The position in a dataset; at most one `Pass` moves it at a time.

    Args:
        name: The dataset's, for messages.
        block_rows: Rows in each of its blocks.
        seed: For the order of the epochs that begin here. One that was begun before keeps the seed it was begun with.
        position: Where to go on.
        window_rows: Of the order; see `EpochOrder`.

    Raises:
        CheckpointError: The position is inside an epoch of another number of rows.
    """

    def __init__(
        self,
        name: str,
        block_rows: Sequence[int],
        seed: int,
        position: Position,
        window_rows: int = WINDOW_ROWS,
    ) -> None:
        self.name = name
        self._window_rows = window_rows
        self._block_rows = block_rows
        self._num_rows = sum(block_rows)
        self._seed = seed
        self._live: Pass | None = None
        self._num_restores = self._num_retries = 0
        self.restore(position)

    def check(self, position: Position) -> None:
        """Raise a CheckpointError if this dataset cannot go on at ``position``."""
        if position.consumed and position.num_rows != self._num_rows:
            raise self.another_dataset(position, f"has {self._num_rows} rows")

    def another_dataset(self, position: Position, now: str) -> CheckpointError:
        """What is raised where training cannot go on at a position; ``now`` tells what the dataset is now."""
        of = f" of {position.num_rows}" if position.num_rows != UNKNOWN_ROWS else ""
        return CheckpointError(
            f"the checkpoint stands in the middle of dataset {self.name!r} ({position}{of}), which {now} now. Give the same "
            "dataset to go on with, or start from the checkpoint's state alone: run(checkpoint=checkpoint.load())."
        )

    def restore(self, position: Position) -> None:
        """Go on at ``position``; a pass that is under way is over."""
        self.check(position)
        self._position = position
        self._live = None
        self._num_restores += 1
        self._num_retries = 0

    @property
    def position(self) -> Position:
        return self._position

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def order(self, shuffle: Shuffle, lanes: int = 1) -> Any:
        """The order of the current epoch; one that was begun keeps the number of lanes, and the seed, it began with."""
        at = self._position
        return EpochOrder(
            self._block_rows,
            seed=at.seed if at.consumed else self._seed,
            epoch=at.epoch,
            shuffle=shuffle,
            lanes=at.lanes if at.consumed else lanes,
            window_rows=self._window_rows,
        )

    def begin(self, shuffle: Shuffle, lanes: int = 1) -> Pass:
        """Begin, or go on with, the current epoch; a pass that is still under way ends its own epoch first.

        Args:
            shuffle: See `EpochOrder`.
            lanes: For an epoch that begins here.

        Raises:
            ConfigError: A part of this epoch was consumed in another order.
        """
        self.end_pass()
        at = self._position
        if at.consumed and not self._goes_on(shuffle):
            raise ConfigError(
                f"dataset {self.name!r} goes on inside an epoch ({at}) whose order is that of shuffle={at.shuffle!r}"
                + (" over other blocks of rows" if at.shuffle == shuffle else f", not of shuffle={shuffle!r}")
                + ": some rows would come twice and others never. Read this epoch to its end as it was begun."
            )
        self._live = Pass(self, self.order(shuffle, lanes))
        return self._live

    def end_pass(self, *, only_finished: bool = False) -> None:
        """End the pass that is under way, and its epoch; does nothing where none is.

        Args:
            only_finished: Only one that has handed out its last batch.
        """
        if self._live is not None and (self._live.is_finished or not only_finished):
            self._live.end()

    def _goes_on(self, shuffle: Shuffle) -> bool:
        """Whether an epoch that was begun can go on in this order."""
        return (self._position.shuffle, self._position.layout) == (shuffle, self._layout(shuffle))

    def _layout(self, shuffle: Shuffle) -> int:
        return layout(self._block_rows, shuffle, self._window_rows)

    def _layout_of(self, order: Any) -> int:
        """What a position says of an order that it is the first one in."""
        return self._layout(order.shuffle)

    def _move(self, consumed: int, order: Any) -> None:
        at = self._position
        self._position = Position(
            epoch=at.epoch,
            consumed=consumed,
            num_rows=self._num_rows,
            seed=at.seed if at.consumed else self._seed,
            shuffle=order.shuffle,
            layout=at.layout if at.consumed else self._layout_of(order),
            lanes=order.lanes,
        )

    def _leave(self, ends_epoch: bool) -> None:
        self._live = None
        if ends_epoch:
            self._position = Position(epoch=self.epoch + 1)
            self._num_retries = 0
        else:
            self._num_retries += 1


class StreamCursor(Cursor):
    """The position in a dataset that is executed while it is read: nobody knows how many rows it has."""

    def __init__(self, name: str, seed: int, position: Position) -> None:
        super().__init__(name, (), seed, position)
        self._num_rows = UNKNOWN_ROWS

    def check(self, position: Position) -> None:
        if position.consumed and position.num_rows != UNKNOWN_ROWS:
            raise self.another_dataset(position, "is executed while it is read")

    def order(self, shuffle: Shuffle, lanes: int = 1) -> StreamOrder:
        at = self._position
        return StreamOrder(
            seed=at.seed if at.consumed else self._seed,
            epoch=at.epoch,
            shuffle=shuffle,
            lanes=at.lanes if at.consumed else lanes,
            stretch_rows=at.layout if at.consumed else 0,
            serial=(self._num_restores, self._num_retries),
        )

    def _goes_on(self, shuffle: Shuffle) -> bool:
        return bool(self._position.shuffle == shuffle)

    def _layout_of(self, order: StreamOrder) -> int:
        return order.stretch_rows


class Pass:
    """One walk through what is left of an epoch. It ends by itself when another begins.

    Attributes:
        is_finished: The last batch was handed out. Of a stream nobody knows.
    """

    def __init__(self, cursor: Cursor, order: Any) -> None:
        self.is_finished = False
        self._cursor = cursor
        self.start = cursor.position.consumed
        self.order = order

    def check_live(self) -> None:
        """Raise, if this pass is over before its last batch: the position has moved on without it."""
        if self._cursor._live is not self and not self.is_finished:
            name = self._cursor.name
            raise UsageError(
                f"another iteration over dataset {name!r} began, or a checkpoint was loaded, which ended this one: a dataset "
                "has one position. To read the same rows in two loops at a time give them to run under two names."
            )

    def consume(self, stop: int) -> None:
        """Everything before this place was handed out, by all ranks together."""
        self._cursor._move(stop, self.order)

    def end(self) -> None:
        """The epoch is over, whether or not all of it was consumed."""
        if self._cursor._live is self:
            self._cursor._leave(ends_epoch=True)

    def abandon(self) -> None:
        """What comes next could not be read: the position stays, and a new pass tries again from there."""
        if self._cursor._live is self:
            self._cursor._leave(ends_epoch=False)
