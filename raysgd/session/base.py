"""What a session is: the thing the functions of `raysgd.session.api` act on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysgd.data.plan import NO_DATASETS, DatasetPlan
from raysgd.session.datasets import Datasets
from raysgd.session.progress import Progress

if TYPE_CHECKING:
    from raysgd.data import WorkerDataset


@dataclass(frozen=True)
class Identity:
    """Where a worker stands in its group. ``rank`` without a word before it is always the world rank."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


class Session(ABC):
    """What the worker-side functions need of the place they run in.

    Called from the training thread, and from threads the user starts; `should_stop` and `report` may be called from
    any of them, `save_checkpoint`, `barrier` and `broadcast` from one at a time, in the same order on every rank.

    Args:
        plan: The datasets that were given.
        fetch: Gives what the references in ``plan`` stand for.

    Attributes:
        identity: Ranks and sizes.
        seed: The Trainer's seed, or None.
        deterministic: Whether bit-identical repetition was asked for.
        attempt: Its number, from 1; 0 in single-machine use.
        in_worker: False in single-machine use.
        progress: What was called so far, and what the time went into.
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
    ) -> None:
        self.attempt = attempt
        self.progress = Progress()
        self.identity = identity
        self.seed = seed
        self.deterministic = deterministic
        self._datasets = Datasets(
            plan,
            identity.world_rank,
            identity.world_size,
            seed,
            attempt=attempt,
            is_deterministic=deterministic,
            fetch=fetch,
            reading=self._reading,
        )

    @property
    def world_rank(self) -> int:
        return self.identity.world_rank

    @property
    def world_size(self) -> int:
        return self.identity.world_size

    @property
    def local_rank(self) -> int:
        return self.identity.local_rank

    @property
    def local_world_size(self) -> int:
        return self.identity.local_world_size

    @property
    def node_rank(self) -> int:
        return self.identity.node_rank

    @abstractmethod
    def report(self, metrics: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def save_checkpoint(
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, trusted: bool
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(self, path: Any, *, trusted: bool) -> Any: ...

    def get_dataset(self, name: str | None) -> WorkerDataset:
        self._check_live()
        return self._datasets.get(name)

    def get_datasets(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        self._check_live()
        return self._datasets.all()

    @property
    def iteration(self) -> int:
        """Rounds of the run so far, by the reports of this rank."""
        return 0

    def hand_on(self) -> None:  # noqa: B027  (a session alone has nobody to tell)
        """Wait until what was reported so far would arrive though this process died."""

    def data_positions(self) -> dict[str, Any]:
        """Where training stands in each dataset, the same on all ranks; empty where none was given."""
        return self._datasets.positions()

    def go_on_in_data(self, positions: Mapping[str, Any]) -> None:
        """Go on where `data_positions` said this, in whatever group; loops that are under way are over."""
        self._datasets.restore(positions)

    def end_passes(self, *, only_finished: bool) -> None:
        """Loops over datasets that are under way, or only those that have had their last batch, are over, and their epochs.

        A framework's loop may leave an epoch at its last batch, without asking whether there is another.
        """
        self._datasets.end_passes(only_finished=only_finished)

    @abstractmethod
    def should_stop(self) -> bool: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def broadcast(self, obj: Any) -> Any: ...

    def _reading(self) -> AbstractContextManager[None]:
        """Called before each batch of a dataset, which is then read within what this returns."""
        self._check_live()
        self.progress.mark("batch")
        return self.progress.data

    def _check_live(self) -> None:  # noqa: B027  (most sessions never end)
        """Raise, if nothing may be done here any more."""
