"""The datasets of one attempt, as a session holds them. Opened at their first use: reading data loads NumPy and Arrow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from raysgd.data.plan import NO_DATASETS, DatasetPlan

if TYPE_CHECKING:
    from raysgd.data import DataContext, WorkerDataset


class Datasets:
    """What a plan describes, for one rank. Positions are those of `raysgd.data.DataContext`.

    Args:
        fetch: Gives what the plan's references stand for.
        reading: Called before each batch, which is then read within what it returns; what it raises ends the loop.
    """

    def __init__(
        self,
        plan: DatasetPlan,
        rank: int,
        world_size: int,
        seed: int | None,
        *,
        attempt: int = 0,
        is_deterministic: bool = False,
        fetch: Callable[[Any], Any],
        reading: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._attempt = attempt
        self._is_deterministic = is_deterministic
        self._fetch = fetch
        self._reading = reading
        self._context: DataContext | None = None
        self._lock = threading.Lock()  # threads of the user's must not open two, each with a position of its own

    def get(self, name: str | None) -> WorkerDataset:
        return self._open().get(name)

    def all(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        return self._open().all()

    def positions(self) -> dict[str, Any]:
        """Where training stands in each dataset; empty where none was given."""
        return self._open().positions() if self._plan.sources else {}

    def end_passes(self, *, only_finished: bool) -> None:
        """See `raysgd.data.DataContext.end_passes`."""
        if self._context is not None:
            self._context.end_passes(only_finished=only_finished)

    def restore(self, positions: Mapping[str, Any]) -> None:
        """Go on at these positions.

        Raises:
            CheckpointError: One of them does not fit its dataset; then all stay where they are.
        """
        if self._plan.sources:
            self._open().restore(positions)

    def close(self) -> None:
        """Let go of the rows and of all references to them."""
        self._plan = NO_DATASETS
        if self._context is not None:
            self._context.close()
        self._context = None

    def _open(self) -> DataContext:
        from raysgd.data import DataContext

        with self._lock:
            if self._context is None:
                self._context = DataContext(
                    self._plan,
                    self._rank,
                    self._world_size,
                    self._seed,
                    attempt=self._attempt,
                    is_deterministic=self._is_deterministic,
                    fetch=self._fetch,
                    reading=self._reading,
                )
            return self._context
