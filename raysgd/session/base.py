"""The base of all sessions: what the functions of `raysgd.session.api` act on, and the datasets that a session holds."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.session.logical import LogicalWorkers
from raysgd.session.progress import Progress

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint
    from raysgd.data.dataset import WorkerDataset, WorkerDatasets
    from raysgd.data.order.handed_out import Passes
    from raysgd.session.live.state import LiveState


@dataclass(frozen=True)
class Identity:
    """The ranks and sizes of one worker in its group. ``rank`` alone always means the world rank."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    workers_per_replica: int = 1

    @property
    def data_parallel_rank(self) -> int:
        """The replica of the model that this worker holds, or holds a part of; from 0. It decides which rows the worker reads."""
        return self.world_rank // self.workers_per_replica

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas of the model."""
        return self.world_size // self.workers_per_replica


class Datasets:
    """The datasets of one attempt. They are opened at their first use, because reading data imports NumPy and Arrow.

    Args:
        plan: The datasets that were given.
        open_all: Opens the datasets of a plan.
    """

    def __init__(self, plan: DatasetPlan, open_all: Callable[[DatasetPlan], WorkerDatasets]) -> None:
        self._plan = plan
        self._open_all: Callable[[DatasetPlan], WorkerDatasets] | None = open_all
        self._opened: WorkerDatasets | None = None
        self._lock = threading.Lock()  # user threads must not open datasets twice, each with its own position

    def get(self, name: str | None) -> WorkerDataset:
        return self._open().get(name)

    def all(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        return self._open().all()

    def positions(self) -> dict[str, Any]:
        """Return the position in each dataset; empty if no dataset was given."""
        return self._open().positions() if self._plan.sources else {}

    def own_positions(self) -> dict[str, Any]:
        """Return this rank's position in each dataset that it has read whole."""
        return {} if self._opened is None else self._opened.own_positions()

    def end_epochs(self, *, only_finished: bool) -> None:
        if self._opened is not None:
            self._opened.end_epochs(only_finished=only_finished)

    def restore(self, positions: Mapping[str, Any], own_positions: Mapping[str, Any]) -> None:
        """Resume at these positions.

        Raises:
            CheckpointError: A position does not fit its dataset; then no position changes.
        """
        if self._plan.sources:
            self._open().restore(positions, own_positions)

    def close(self) -> None:
        """Release the rows and all references to them."""
        self._plan = NO_DATASETS
        if self._opened is not None:
            self._opened.close()
        self._opened = None
        self._open_all = None  # it refers to the session: a cycle, and `raysgd.workers.process.reset` freezes cycles

    def _open(self) -> WorkerDatasets:
        with self._lock:
            if self._opened is None:
                assert self._open_all is not None, "the datasets are closed"
                self._opened = self._open_all(self._plan)
            return self._opened


class Session(ABC):
    """What the worker-side functions need from the place they run in.

    Called from the training thread, and from threads that the user starts. Any thread may call `should_stop` and `report`;
    `save_checkpoint`, `barrier` and `broadcast` are called by one thread at a time, in the same order on every rank.

    Args:
        plan: The datasets that were given.
        fetch: Returns what a reference in ``plan`` refers to.

    Attributes:
        identity: Ranks and sizes.
        seed: The Trainer's seed, or None.
        deterministic: Whether the user asked for bit-identical repetition.
        logical: The logical workers that this process acts as; None: ``Trainer(logical_workers=)`` was not given.
        attempt: Its number, from 1; 0 in single-machine use.
        in_worker: False in single-machine use.
        progress: The calls made so far, and where the time went.
        save_checks: Called before a checkpoint is saved; they raise an error if it would lack something. References, as the
            session outlives what they belong to.
    """

    in_worker: bool = False

    def __init__(
        self,
        identity: Identity,
        *,
        seed: int | None = None,
        deterministic: bool = False,
        plan: DatasetPlan = NO_DATASETS,
        fetch: Callable[[Any], Any] = lambda block: block,
        attempt: int = 0,
        logical_workers: int | None = None,
    ) -> None:
        self.attempt = attempt
        self.progress = Progress()
        self.save_checks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.identity = identity
        self.seed = seed
        self.deterministic = deterministic
        self.logical = (
            LogicalWorkers(logical_workers, identity.world_rank, identity.world_size, seed) if logical_workers else None
        )
        self._fetch = fetch
        self._datasets = Datasets(plan, self.open_datasets)

    @cached_property
    def passes(self) -> Passes:
        """Shows the passes of models to the datasets."""
        from raysgd.data.order.handed_out import Passes  # the controller imports this module without it

        return Passes()

    @property
    def world_rank(self) -> int:
        return self.identity.world_rank

    @property
    def world_size(self) -> int:
        return self.identity.world_size

    @abstractmethod
    def report(self, metrics: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, allow_pickle: bool
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(self, path: Any, *, allow_pickle: bool) -> Any: ...

    def live_state(self, objects: Mapping[str, Any]) -> LiveState:
        from raysgd.session.live.state import LiveState

        return LiveState(None, objects)

    def own_live_state(
        self, objects: Mapping[str, Any], *, has_own_state: bool = True, problem: str | None = None
    ) -> LiveState | None:
        """Return the live state of a loop of raysgd; None if train_func has one, or nothing would continue from it.

        Args:
            objects: As for `raysgd.session.live.LiveState`.
            has_own_state: As there.
            problem: Why the loop cannot have one; None if it can. It is in the warning after a death.
        """
        return None

    def check_savable(self) -> None:
        """Raise if a state that is saved now would lack something."""
        for reference in self.save_checks:
            if (check := reference()) is not None:
                check()

    @abstractmethod
    def list_checkpoints(self) -> list[Checkpoint]: ...

    def get_dataset(self, name: str | None) -> WorkerDataset:
        self.check_live()
        return self._datasets.get(name)

    def get_datasets(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        self.check_live()
        return self._datasets.all()

    def end_epochs(self, *, only_finished: bool) -> None:
        """End the running loops over datasets and their epochs, or only of those loops that have got their last batch.

        A framework's loop may leave an epoch at its last batch, without asking whether there is another.
        """
        self._datasets.end_epochs(only_finished=only_finished)

    @abstractmethod
    def should_stop(self) -> bool: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def broadcast(self, obj: Any) -> Any: ...

    @abstractmethod
    def gather(self, obj: Any) -> list[Any]: ...

    def open_datasets(self, plan: DatasetPlan, fetch: Callable[[Any], Any] | None = None) -> WorkerDatasets:
        """Open datasets for this rank, at their beginnings. Positions of those that are not of the run are not saved.

        Args:
            plan: The datasets.
            fetch: Returns a block that the plan refers to; None: as for the datasets of the run.
        """
        from raysgd.data.dataset import WorkerDatasets

        rank, world_size, num_logical = self.identity.data_parallel_rank, self.identity.data_parallel_size, None
        if (logical := self.logical) is not None:
            rank, world_size, num_logical = logical.own.start, logical.num_workers, len(logical.own)
        return WorkerDatasets(
            plan,
            rank,
            world_size,
            self.seed,
            attempt=self.attempt,
            is_deterministic=self.deterministic,
            reader=self.world_rank,
            fetch=self._fetch if fetch is None else fetch,
            read_context=self._read_context,
            num_logical=num_logical,
            passes=self.passes,
        )

    def _read_context(self) -> AbstractContextManager[None]:
        """Called before each batch of a dataset; the batch is read inside the returned context."""
        self.check_live()
        self.progress.mark("batch")
        return self.progress.data

    def check_live(self) -> None:  # noqa: B027  (most sessions never end)
        """Raise if the session is over."""
