"""A worker's part in a pass over a lazy dataset, and what it knows of the pass's blocks. Worker side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.stream import First, Have, Known, PassKey, Stream, StreamGoneError, StreamLostError
from raysgd.errors import DataError


@dataclass
class Access:
    """How a worker gets at a lazy dataset.

    Attributes:
        name: The dataset's, for messages.
        rank: Of this worker.
        first: The first block that it was told of; see `First`.
    """

    name: str
    stream: Stream
    rank: int
    first: First | None = None


class Joined:
    """This worker's part in a pass, and what it knows of the pass's blocks. Used by one thread at a time.

    Attributes:
        key: Of the pass.
        execution: That it knows of.
        ends, starts: Where blocks end and begin, in rows; int64.
        is_all: There are no more.
        is_over: It has left, or is about to.
    """

    def __init__(self, access: Access, key: PassKey) -> None:
        self.key = key
        self.is_over = False
        self._access = access
        self._shared_key = key
        self.ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self.starts: NDArray[np.int64] = self.ends
        self.is_all, self.execution = False, ""

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def ask(self, needed: int, upto: int) -> Known:
        """What `apply` takes: wait until ``upto`` rows are known, or all there are; those from ``needed`` on can be had.

        Raises:
            StreamLostError: What was known is not so any more.
            DataError: The execution failed, or cannot be had.
        """
        have = Have(len(self.ends), self.execution, self._access.first)
        known = self._extend(needed, upto, have)
        if (
            known.is_gone
        ):  # others are ahead, and what this one needs has been let go: it is executed for this one alone
            self._access.stream.leave(self.key, self._access.rank)
            self.key = (*self._shared_key, "alone", self._access.rank)
            if have.num_blocks:
                raise StreamLostError
            known = self._extend(needed, upto, have)
        if known.error is not None:
            raise failed(self._access.name, known.error)
        return known

    def apply(self, known: Known) -> None:
        """Take what was asked for."""
        ends = self.num_rows + np.cumsum(known.block_rows, dtype=np.int64)
        self.ends = np.concatenate([self.ends, ends])
        self.starts = np.concatenate([self.starts, ends - np.asarray(known.block_rows, np.int64)])
        self.is_all, self.execution = known.is_all, known.execution
        self._access.first = self._access.first or known.first

    def forget(self) -> None:
        """Nothing is known."""
        self.ends = self.starts = np.zeros(0, np.int64)
        self.is_all, self.execution = False, ""

    def load(self, execution: str, number: int) -> Any:
        """A block of an execution, a Table. May be called in another thread.

        Raises:
            StreamLostError: It is lost.
        """
        stream = self._access.stream
        try:
            (ref,) = stream.blocks(self.key, execution, [number])
            return stream.fetch(ref)
        except StreamGoneError as error:
            raise failed(self._access.name, str(error)) from error

    def leave(self) -> None:
        """It is over for this worker."""
        self.is_over = True
        self._access.stream.leave(self.key, self._access.rank)

    def _extend(self, needed: int, upto: int, have: Have) -> Known:
        access = self._access
        if self.is_over:
            return Known(error="it is over")
        try:
            return access.stream.extend(self.key, access.rank, needed, upto, have, lambda: self.is_over)
        except StreamGoneError as error:
            raise failed(access.name, str(error)) from error


def failed(name: str, why: str) -> DataError:
    """What is raised where a lazy dataset cannot be read."""
    return DataError(f"dataset {name!r} could not be executed: {why}")
