"""A stream: a lazy dataset that is executed while it is read, and what is known of its blocks so far.

A *pass* is one reading of the dataset by some ranks together; an *execution* produces its blocks. Each reader says from which
row on it needs blocks, and how many rows it wants to know of. Blocks that all readers have passed are released, so that the
object store holds only what lies between the slowest and the fastest reader. A reader that needs rows which were released
gets a pass of its own.
"""

from __future__ import annotations

import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from raysgd._util.imports import imported

#: Identifies a pass: attempt, dataset, whose shard it reads, where it begins. Keys of later attempts compare greater.
PassKey = tuple[Any, ...]


class ProducedBlock(NamedTuple):
    """A block that the execution has produced.

    Attributes:
        ref: What `Stream.fetch` takes.
        num_rows, num_bytes: Size of the block.
        columns: Names of the columns.
        schema: The `pyarrow.Schema`, if the block is in Arrow's format.
    """

    ref: Any
    num_rows: int
    num_bytes: int
    columns: tuple[str, ...]
    schema: Any = None


#: Executes a lazy dataset and yields its blocks in order. Closing the iterator ends the execution.
Execute = Callable[[], Iterator[ProducedBlock]]


class FirstBlock(NamedTuple):
    """Size of the first block of the first execution. All readers derive the length of stretches from it."""

    num_rows: int
    num_bytes: int


class ReaderState(NamedTuple):
    """The knowledge of a reader about a pass: the number of blocks, their execution, and the first block."""

    num_blocks: int = 0
    execution: str = ""
    first: FirstBlock | None = None


@dataclass(frozen=True)
class PassState:
    """The state of a pass, in answer to a reader.

    Attributes:
        block_rows: Rows of each block that is new to the reader.
        is_all: Whether there are no more blocks.
        columns: Names of the columns; None before the first block.
        schema: See `ProducedBlock`.
        first: See `FirstBlock`; None before there is one.
        execution: Which execution produced the blocks; another one, after a loss, may cut blocks differently.
        error: Why the execution failed, if it did.
        is_released: Rows that the reader needs have been released: it must read a pass of its own.
    """

    block_rows: tuple[int, ...] = ()
    is_all: bool = False
    columns: tuple[str, ...] | None = None
    schema: Any = None
    first: FirstBlock | None = None
    execution: str = ""
    error: str | None = None
    is_released: bool = False


class StreamLostError(Exception):
    """Blocks or state of a pass are lost, for example with a process. Read it from the beginning: it is executed again."""


class StreamGoneError(Exception):
    """The process that executes the dataset is gone and does not come back."""


class Stream(Protocol):
    """A lazy dataset in execution, as readers use it."""

    def inspect(self, key: PassKey) -> PassState:
        """Return columns, schema and first block, and wait for them. Begins the pass if nothing was executed yet.

        Raises:
            StreamGoneError: The executing process is gone.
        """

    def wait_for_rows(
        self, key: PassKey, rank: int, needed: int, upto: int, have: ReaderState, is_over: Callable[[], bool]
    ) -> PassState:
        """Wait until ``upto`` rows are known, or all rows there are.

        Args:
            key: The pass; it begins with the first reader that asks.
            rank: The rank that asks.
            needed: The first row that this rank needs from now on.
            upto: The number of rows that it wants to know of.
            have: What it knows already.
            is_over: Polled while waiting: returns True once nobody waits for the answer.

        Raises:
            StreamLostError: The executing process was restarted, or the execution is another one.
            StreamGoneError: The executing process is gone.
        """

    def block_refs(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        """Return what `fetch` takes, for blocks by number.

        Raises:
            StreamLostError: See `wait_for_rows`; or a block was released.
            StreamGoneError: The executing process is gone.
        """

    def fetch(self, ref: Any) -> Any:
        """Return a block, a `pyarrow.Table` with each column in one chunk. Safe to call from several threads.

        Raises:
            StreamLostError: The block is lost.
        """

    def leave(self, key: PassKey, rank: int) -> None:
        """Record that this rank needs nothing more of the pass."""


class BlockIndex:
    """The blocks of one pass, as they are produced. Blocks that no reader needs are released."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}
        self._ends: list[int] = []
        self._columns: tuple[str, ...] | None = None
        self._schema: Any = None
        self._released_until = 0
        self._num_released = 0
        self.execution = uuid.uuid4().hex
        self.first: FirstBlock | None = None
        self.is_complete = False
        self.error: str | None = None

    @property
    def num_rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def released_until(self) -> int:
        """Rows before this one have been released."""
        return self._released_until

    def add(self, block: ProducedBlock) -> None:
        if self._columns is None or (not self.num_rows and block.columns):
            self._columns, self._schema = block.columns, block.schema
        if not block.num_rows:
            return
        self.first = self.first or FirstBlock(block.num_rows, block.num_bytes)
        self._ends.append(self.num_rows + block.num_rows)
        if self.num_rows > self._released_until:
            self._refs[len(self._ends) - 1] = block.ref

    def finish(self, error: str | None = None) -> None:
        self.is_complete, self.error = True, error

    def release(self, row: int) -> None:
        """Release all blocks before this row, which no reader needs."""
        until = bisect_right(self._ends, row)
        for number in range(self._num_released, until):
            self._refs.pop(number, None)
        self._num_released = max(self._num_released, until)
        self._released_until = max(self._released_until, row)

    def is_another(self, execution: str) -> bool:
        """Whether what a reader knows comes from another execution."""
        return execution not in ("", self.execution)

    def state(self, num_known: int) -> PassState:
        """Return the state of the pass for a reader that knows ``num_known`` blocks."""
        starts = [self._ends[num_known - 1] if num_known else 0, *self._ends[num_known:]]
        return PassState(
            block_rows=tuple(stop - start for start, stop in pairwise(starts)),
            is_all=self.is_complete,
            columns=() if self._columns is None and self.is_complete else self._columns,
            schema=self._schema,
            first=self.first,
            execution=self.execution,
            error=self.error,
        )

    def refs(self, numbers: Iterable[int]) -> list[Any]:
        """Return what `Stream.fetch` takes, for blocks by number.

        Raises:
            StreamLostError: A block was released.
        """
        try:
            return [self._refs[number] for number in numbers]
        except KeyError:
            raise StreamLostError from None


class InlineStream:
    """A `Stream` for a world of one: the reader's process executes the dataset when it asks for rows."""

    def __init__(self, execute: Execute, fetch: Callable[[Any], Any]) -> None:
        self._execute = execute
        self.fetch = fetch
        self._passes: dict[PassKey, tuple[BlockIndex, Iterator[ProducedBlock]]] = {}
        self._first: FirstBlock | None = None

    def inspect(self, key: PassKey) -> PassState:
        return self._execute_until(key, 1, 0)

    def wait_for_rows(
        self, key: PassKey, rank: int, needed: int, upto: int, have: ReaderState, is_over: Callable[[], bool]
    ) -> PassState:
        if have.execution and key not in self._passes:
            raise StreamLostError
        self._first = self._first or have.first
        index, _ = self._pass(key)
        if index.is_another(have.execution):
            raise StreamLostError
        if needed < index.released_until:
            return PassState(is_released=True)
        index.release(needed)
        return self._execute_until(key, upto, have.num_blocks)

    def _pass(self, key: PassKey) -> tuple[BlockIndex, Iterator[ProducedBlock]]:
        if key not in self._passes:
            self._passes[key] = BlockIndex(), self._execute()
        return self._passes[key]

    def _execute_until(self, key: PassKey, upto: int, num_known: int) -> PassState:
        index, blocks = self._pass(key)
        while index.num_rows < upto and not index.is_complete:
            try:
                index.add(next(blocks))
            except StopIteration:
                index.finish()
            except Exception as error:
                index.finish(summarize_error(error))
        self._first = self._first or index.first
        return replace(index.state(num_known), first=self._first)

    def block_refs(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        if key not in self._passes or self._passes[key][0].is_another(execution):
            raise StreamLostError
        return self._passes[key][0].refs(numbers)

    def leave(self, key: PassKey, rank: int) -> None:
        self._passes.pop(key, None)


def summarize_error(error: BaseException) -> str:
    """Return one line about an execution's error. Ray's text has tracebacks; the last line of the first one is the cause."""
    first = str(error).partition("\n\nThe above exception was the direct cause")[0]
    lines = [line for line in first.strip().splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines:
        return kind
    return lines[-1].strip() if len(lines) > 1 else f"{kind}: {lines[0]}"


_lock = threading.Lock()
#: Execution options with ``preserve_order`` set, by id: how many executions use them, and the value before.
_ordered_options: dict[int, tuple[int, bool]] = {}


def execute(dataset: Any) -> Iterator[ProducedBlock]:
    """Execute a `ray.data.Dataset` with its rows in order, and yield blocks whose ``ref`` is ``(reference, range of rows)``.

    Closing the iterator ends the execution.
    """
    with _order_preserved(dataset.context.execution_options):
        for bundle in dataset.iter_internal_ref_bundles():
            columns = tuple(bundle.schema.names) if bundle.schema is not None else ()
            is_arrow = hasattr(bundle.schema, "remove_metadata")  # the schema of pandas blocks is a class of Ray's
            schema = bundle.schema if is_arrow else None
            for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
                whole = entry.metadata
                rows = range(whole.num_rows) if part is None else range(part.start_offset, part.end_offset)
                num_bytes = (whole.size_bytes or 0) * len(rows) // max(1, whole.num_rows)
                yield ProducedBlock((entry.ref, rows), len(rows), num_bytes, columns, schema)


def materialize(dataset: Any) -> Any:
    """Execute a lazy `ray.data.Dataset` with its rows in order; return it with its rows in the object store."""
    with _order_preserved(dataset.context.execution_options):
        return dataset.materialize()


@contextmanager
def _order_preserved(options: Any) -> Iterator[None]:
    """Set ``preserve_order`` while an execution uses these options; several executions may share them."""
    with _lock:
        count, before = _ordered_options.get(id(options), (0, options.preserve_order))
        _ordered_options[id(options)] = count + 1, before
        options.preserve_order = True
    try:
        yield
    finally:
        with _lock:
            count, before = _ordered_options.pop(id(options))
            if count > 1:
                _ordered_options[id(options)] = count - 1, before
            else:
                options.preserve_order = before


def table_of(block: Any, rows: range) -> Any:
    """Return these rows of a Ray block as a Table with whole columns; without a copy if the block is in Arrow's format."""
    table: Any = imported("ray.data.block").BlockAccessor.for_block(block).to_arrow()
    if len(rows) != table.num_rows:
        table = table.slice(rows.start, len(rows))
    from raysgd.data.reading.columns import with_whole_columns

    return with_whole_columns(table)


def fetch_object(value: Any) -> Any:
    """Return the object that a Ray reference stands for; any other value as it is."""
    ray = imported("ray")
    return ray.get(value) if ray is not None and isinstance(value, ray.ObjectRef) else value


def inline_stream(dataset: Any) -> InlineStream:
    """Return a stream of a `ray.data.Dataset` that its reader's process executes."""

    def fetch(ref: Any) -> Any:
        block, rows = ref
        return table_of(imported("ray").get(block), rows)

    return InlineStream(lambda: execute(dataset), fetch)
