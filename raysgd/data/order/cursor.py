"""The cursor of one dataset in one run: the only object that moves the position. Used in the worker's training thread.

A batch is consumed when it is handed to the loop body; `HandedOut` knows of those that are read ahead. The epoch ends when its
iterator is exhausted or closed, as by ``break``. A checkpoint before that may be at the end of an epoch: a loop that resumes
there finds no rows left in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.data.order.epoch_order import EpochOrder, Shuffle, layout_checksum
from raysgd.data.order.handed_out import Passes
from raysgd.data.order.position import Position
from raysgd.data.order.stream_order import StreamOrder
from raysgd.data.plan import UNKNOWN_ROWS, WINDOW_ROWS
from raysgd.errors import CheckpointError, ConfigError, UsageError


class Cursor:
    """The position in a dataset; at most one `EpochIteration` moves it at a time.

    Args:
        block_rows: Rows in each block.
        seed: For the order of the epochs that begin here. An epoch that was begun before keeps its seed.
        position: Where to resume.
        window_rows: See `EpochOrder`.
        passes: Shows the passes of models.

    Attributes:
        passes: As given.
        handed_out: The batches that were handed out last.

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
        *,
        passes: Passes | None = None,
    ) -> None:
        self.passes = Passes() if passes is None else passes
        self.handed_out = self.passes.follow(name)
        self.name = name
        self._window_rows = window_rows
        self._block_rows = block_rows
        self._num_rows = sum(block_rows)
        self._seed = seed
        self._iteration: EpochIteration | None = None
        self._num_restores = self._num_retries = 0
        self.restore(position)

    def check(self, position: Position) -> None:
        """Raise a CheckpointError if training cannot resume at ``position`` of this dataset."""
        if position.consumed and position.num_rows != self._num_rows:
            raise self.other_dataset_error(position, f"has {self._num_rows} rows now")

    def other_dataset_error(self, position: Position, state: str) -> CheckpointError:
        """Return the error for a position at which training cannot resume; ``state`` says what the dataset is now."""
        of = f" of {position.num_rows}" if position.num_rows != UNKNOWN_ROWS else ""
        return CheckpointError(
            f"the checkpoint was saved in the middle of dataset {self.name!r} ({position}{of}), which {state}. Give the "
            "dataset that the run had, or start from the checkpoint's state alone: run(resume_from=checkpoint.load())."
        )

    def restore(self, position: Position) -> None:
        """Resume at ``position``. An iteration in progress ends."""
        self.check(position)
        self._position = position
        self.handed_out.clear()
        self._iteration = None
        self._num_restores += 1
        self._num_retries = 0

    @property
    def position(self) -> Position:
        """The position at which the loop continues to read."""
        return self._position

    @property
    def trained_position(self) -> Position:
        """The position at which a training resumes: that before the batches that the loop has read ahead."""
        unused = self.handed_out.first_unused()
        return self._position if unused is None else unused

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def order(self, shuffle: Shuffle, lanes: int = 1) -> Any:
        """Return the order of the current epoch. An epoch in progress keeps its number of lanes and its seed."""
        at = self._position
        return EpochOrder(
            self._block_rows,
            seed=at.seed if at.consumed else self._seed,
            epoch=at.epoch,
            shuffle=shuffle,
            lanes=at.lanes if at.consumed else lanes,
            window_rows=self._window_rows,
        )

    def begin(self, shuffle: Shuffle, lanes: int = 1) -> EpochIteration:
        """Begin or resume the current epoch. An iteration in progress ends its own epoch first.

        Args:
            shuffle: See `EpochOrder`.
            lanes: For an epoch that begins here.

        Raises:
            ConfigError: Rows of this epoch were consumed in another order.
        """
        self.end_epoch()
        at = self._position
        if at.consumed and not self._has_same_order(shuffle):
            raise ConfigError(
                f"dataset {self.name!r} resumes inside an epoch ({at}) whose order is that of shuffle={at.shuffle!r}"
                + (" over other blocks of rows" if at.shuffle == shuffle else f", not of shuffle={shuffle!r}")
                + ": some rows would come twice and others never. Read this epoch to its end in the order it began with."
            )
        self._iteration = EpochIteration(self, self.order(shuffle, lanes))
        return self._iteration

    def end_epoch(self, *, only_finished: bool = False) -> None:
        """End the iteration in progress, if there is one, and its epoch.

        Args:
            only_finished: End it only if it has handed out its last batch.
        """
        if self._iteration is not None and (self._iteration.is_finished or not only_finished):
            self._iteration.end()

    def _has_same_order(self, shuffle: Shuffle) -> bool:
        """Whether the epoch in progress can resume with this ``shuffle``."""
        layout = layout_checksum(self._block_rows, shuffle, self._window_rows)
        return (self._position.shuffle, self._position.layout) == (shuffle, layout)

    def _layout_of(self, order: Any) -> int:
        """Return `Position.layout` for an epoch that begins in this order."""
        return layout_checksum(self._block_rows, order.shuffle, self._window_rows)

    def _advance(self, consumed: int, order: Any) -> None:
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

    def _end_iteration(self, ends_epoch: bool) -> None:
        if self._iteration is not None:
            self.handed_out.end_iteration(is_whole=not self._iteration.start)
            self.passes.on_batch(self.name, None)
        self._iteration = None
        if ends_epoch:
            self._position = Position(epoch=self.epoch + 1)
            self._num_retries = 0
        else:
            self._num_retries += 1


class StreamCursor(Cursor):
    """The position in a lazy dataset, whose number of rows is unknown."""

    def __init__(self, name: str, seed: int, position: Position, *, passes: Passes | None = None) -> None:
        super().__init__(name, (), seed, position, passes=passes)
        self._num_rows = UNKNOWN_ROWS

    def check(self, position: Position) -> None:
        if position.consumed and position.num_rows != UNKNOWN_ROWS:
            raise self.other_dataset_error(position, "is a lazy dataset now, executed while it is read")

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

    def _has_same_order(self, shuffle: Shuffle) -> bool:
        return bool(self._position.shuffle == shuffle)

    def _layout_of(self, order: StreamOrder) -> int:
        return order.stretch_rows


class EpochIteration:
    """One iteration over the rest of an epoch. It ends when another begins.

    Attributes:
        is_finished: Whether the last batch was handed out. For a lazy dataset this is never known, and stays False.
    """

    def __init__(self, cursor: Cursor, order: Any) -> None:
        self.is_finished = False
        self._cursor = cursor
        self.start = cursor.position.consumed
        self.order = order

    def check_current(self) -> None:
        """Raise a UsageError if this iteration ended before its last batch, because the position moved without it."""
        if self._cursor._iteration is not self and not self.is_finished:
            name = self._cursor.name
            raise UsageError(
                f"this iteration over dataset {name!r} ended because another one began or a checkpoint was loaded: a dataset "
                "has one position. To read the same rows in two loops at once, pass the dataset to run under two names."
            )

    def consume(self, stop: int, batch: Any = None) -> None:
        """Record that all ranks together have handed out everything before the place ``stop``, this rank a batch of it."""
        cursor = self._cursor
        cursor.passes.on_batch(cursor.name, batch)
        cursor.handed_out.add(cursor.passes.recognize(batch), cursor.position)
        cursor._advance(stop, self.order)

    def end(self) -> None:
        """End the epoch, whether or not all of it was consumed."""
        if self._cursor._iteration is self:
            self._cursor._end_iteration(ends_epoch=True)

    def abandon(self) -> None:
        """End this iteration after a failed read. The position stays, so that the next iteration reads from there again."""
        if self._cursor._iteration is self:
            self._cursor._end_iteration(ends_epoch=False)
