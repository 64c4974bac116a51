"""The datasets of one attempt. They are opened at their first use, because reading data imports NumPy and Arrow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from raysgd.data.plan import NO_DATASETS, DatasetPlan

if TYPE_CHECKING:
    from raysgd.data.dataset import WorkerDataset, WorkerDatasets


class Datasets:
    """The datasets that a plan describes, for one rank. Positions are those of `raysgd.data.WorkerDatasets`.

    Args:
        fetch: Returns what a reference in the plan refers to.
        read_context: Called before each batch, which is read inside the returned context. What it raises ends the loop.
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
        read_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._attempt = attempt
        self._is_deterministic = is_deterministic
        self._fetch = fetch
        self._read_context = read_context
        self._context: WorkerDatasets | None = None
        self._lock = threading.Lock()  # user threads must not open two contexts, each with its own position

    def get(self, name: str | None) -> WorkerDataset:
        return self._open().get(name)

    def all(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        return self._open().all()

    def positions(self) -> dict[str, Any]:
        """Return the position in each dataset; empty where no dataset was given."""
        return self._open().positions() if self._plan.sources else {}

    def end_epochs(self, *, only_finished: bool) -> None:
        if self._context is not None:
            self._context.end_epochs(only_finished=only_finished)

    def restore(self, positions: Mapping[str, Any]) -> None:
        """Resume at these positions.

        Raises:
            CheckpointError: A position does not fit its dataset; then no position changes.
        """
        if self._plan.sources:
            self._open().restore(positions)

    def close(self) -> None:
        """Release the rows and all references to them."""
        self._plan = NO_DATASETS
        if self._context is not None:
            self._context.close()
        self._context = None

    def _open(self) -> WorkerDatasets:
        from raysgd.data.dataset import WorkerDatasets

        with self._lock:
            if self._context is None:
                self._context = WorkerDatasets(
                    self._plan,
                    self._rank,
                    self._world_size,
                    self._seed,
                    attempt=self._attempt,
                    is_deterministic=self._is_deterministic,
                    fetch=self._fetch,
                    read_context=self._read_context,
                )
            return self._context
