"""A stream: a lazy dataset that is executed while it is read, and what is known of its blocks so far.

A *pass* is one execution, read by some ranks together. Who reads says from which row on it needs blocks, and how many rows
it wants to know of; what is behind all readers is let go, so that the object store holds what is between the slowest and
the fastest of them and no more. One that comes when rows it needs are gone gets a pass of its own.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

#: What identifies a pass: the number of the attempt, whose share it is for, where it stands. Of later attempts is greater.
PassKey = tuple[Any, ...]


class Produced(NamedTuple):
    """A block that the execution has given.

    Attributes:
        ref: What `Stream.fetch` takes.
        num_rows, num_bytes: Its size.
        columns: Their names.
        schema: The `pyarrow.Schema`, where it is one of Arrow's.
    """

    ref: Any
    num_rows: int
    num_bytes: int
    columns: tuple[str, ...]
    schema: Any = None


#: Executes a lazy dataset: its blocks in order. Closing the iterator ends the execution.
Execute = Callable[[], Iterator[Produced]]


class First(NamedTuple):
    """The first block of the first execution that there was: how long stretches are is made of it, for all readers alike."""

    num_rows: int
    num_bytes: int


class Have(NamedTuple):
    """What a reader knows of a pass: so many blocks, of this execution; and the first block that it was told of."""

    num_blocks: int = 0
    execution: str = ""
    first: First | None = None


@dataclass(frozen=True)
class Known:
    """What is known of a pass's blocks.

    Attributes:
        block_rows: Rows of each block after those that were known.
        num_rows: Of all blocks.
        is_all: There are no more.
        columns: Their names; None before the first block.
        schema: See `Produced`.
        first: See `First`; None before there is one.
        execution: Which one gave them; another, after a loss, may give other blocks.
        error: What the execution failed with; it goes no further.
        is_gone: Rows that are needed have been let go: take a pass of your own.
    """

    block_rows: tuple[int, ...] = ()
    num_rows: int = 0
    is_all: bool = False
    columns: tuple[str, ...] | None = None
    schema: Any = None
    first: First | None = None
    execution: str = ""
    error: str | None = None
    is_gone: bool = False


class StreamLostError(Exception):
    """What a pass had is lost, as with the process that had it. Ask again from the beginning: it is executed anew."""


class StreamGoneError(Exception):
    """The process that executes cannot be had any more."""


class Stream(Protocol):
    """What readers ask of a stream."""

    def look(self, key: PassKey) -> Known:
        """Columns, schema and first block; waits for these. Begins the pass, where nothing was executed yet.

        Raises:
            StreamGoneError: See there.
        """

    def extend(self, key: PassKey, rank: int, needed: int, upto: int, have: Have, is_over: Callable[[], bool]) -> Known:
        """Wait until ``upto`` rows are known, or all there are.

        Args:
            key: The pass; it begins with the first one that asks.
            rank: Who asks.
            needed: The first row it needs from now on.
            upto: How many rows it wants to know of.
            have: What it knows already.
            is_over: Looked at now and then: nobody waits for the answer any more.

        Raises:
            StreamLostError: The process that executes was started again, or it is another execution.
            StreamGoneError: See there.
        """

    def blocks(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        """What these blocks are fetched by, by number.

        Raises:
            StreamLostError: As by `extend`, or they have been let go.
            StreamGoneError: See there.
        """

    def fetch(self, ref: Any) -> Any:
        """A block: a `pyarrow.Table`, each column in one chunk. Called by several threads at a time.

        Raises:
            StreamLostError: It is lost.
        """

    def leave(self, key: PassKey, rank: int) -> None:
        """It needs nothing more of this pass."""


class BlockIndex:
    """The blocks of one pass, as they come. Those that nobody needs any more are let go."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}
        self._ends: list[int] = []
        self._columns: tuple[str, ...] | None = None
        self._schema: Any = None
        self._gone_until = 0
        self._released = 0
        self.execution = uuid.uuid4().hex
        self.first: First | None = None
        self.is_complete = False
        self.error: str | None = None

    @property
    def num_rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def gone_until(self) -> int:
        """Rows before this one have been let go."""
        return self._gone_until

    def add(self, block: Produced) -> None:
        if self._columns is None or (not self.num_rows and block.columns):
            self._columns, self._schema = block.columns, block.schema
        if not block.num_rows:
            return
        self.first = self.first or First(block.num_rows, block.num_bytes)
        self._ends.append(self.num_rows + block.num_rows)
        if self.num_rows > self._gone_until:
            self._refs[len(self._ends) - 1] = block.ref

    def finish(self, error: str | None = None) -> None:
        self.is_complete, self.error = True, error

    def release(self, row: int) -> None:
        """Nobody needs rows before this one."""
        until = bisect_right(self._ends, row)
        for number in range(self._released, until):
            self._refs.pop(number, None)
        self._released = max(self._released, until)
        self._gone_until = max(self._gone_until, row)

    def is_another(self, execution: str) -> bool:
        """Whether what a reader knows is of another execution."""
        return execution not in ("", self.execution)

    def known(self, have: int) -> Known:
        starts = [self._ends[have - 1] if have else 0, *self._ends[have:]]
        return Known(
            block_rows=tuple(stop - start for start, stop in pairwise(starts)),
            num_rows=self.num_rows,
            is_all=self.is_complete,
            columns=() if self._columns is None and self.is_complete else self._columns,
            schema=self._schema,
            first=self.first,
            execution=self.execution,
            error=self.error,
        )

    def refs(self, numbers: Iterable[int]) -> list[Any]:
        """What these blocks are fetched by.

        Raises:
            StreamLostError: One was let go.
        """
        try:
            return [self._refs[number] for number in numbers]
        except KeyError:
            raise StreamLostError from None


class InlineStream:
    """A stream for a world of one: executed in this process, when somebody asks.

    Args:
        execute: Executes it.
        fetch: As `Stream.fetch`.
    """

    def __init__(self, execute: Execute, fetch: Callable[[Any], Any]) -> None:
        self._execute = execute
        self.fetch = fetch
        self._passes: dict[PassKey, tuple[BlockIndex, Iterator[Produced]]] = {}
        self._first: First | None = None

    def look(self, key: PassKey) -> Known:
        """As `Stream.look`."""
        return self._pulled(key, 1, 0)

    def extend(self, key: PassKey, rank: int, needed: int, upto: int, have: Have, is_over: Callable[[], bool]) -> Known:
        """As `Stream.extend`."""
        if have.execution and key not in self._passes:
            raise StreamLostError
        self._first = self._first or have.first
        index, _ = self._begun(key)
        if index.is_another(have.execution):
            raise StreamLostError
        if needed < index.gone_until:
            return Known(is_gone=True)
        index.release(needed)
        return self._pulled(key, upto, have.num_blocks)

    def _begun(self, key: PassKey) -> tuple[BlockIndex, Iterator[Produced]]:
        if key not in self._passes:
            self._passes[key] = BlockIndex(), self._execute()
        return self._passes[key]

    def _pulled(self, key: PassKey, upto: int, have: int) -> Known:
        index, blocks = self._begun(key)
        while index.num_rows < upto and not index.is_complete:
            try:
                index.add(next(blocks))
            except StopIteration:
                index.finish()
            except Exception as error:
                index.finish(told(error))
        self._first = self._first or index.first
        return replace(index.known(have), first=self._first)

    def blocks(self, key: PassKey, execution: str, numbers: Sequence[int]) -> list[Any]:
        """As `Stream.blocks`."""
        if key not in self._passes or self._passes[key][0].is_another(execution):
            raise StreamLostError
        return self._passes[key][0].refs(numbers)

    def leave(self, key: PassKey, rank: int) -> None:
        """As `Stream.leave`."""
        self._passes.pop(key, None)


def told(error: BaseException) -> str:
    """What of an execution's error a user is told: Ray puts tracebacks into its text, of which the end of the first one tells."""
    first = str(error).partition("\n\nThe above exception was the direct cause")[0]
    lines = [line for line in first.strip().splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines:
        return kind
    return lines[-1].strip() if len(lines) > 1 else f"{kind}: {lines[0]}"
