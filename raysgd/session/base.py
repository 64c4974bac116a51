"""The base of all sessions: what the functions of `raysgd.session.api` act on, and the datasets that a session holds."""

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
    from raysgd.data.dataset import WorkerDataset


@dataclass(frozen=True)
class Identity:
    """The ranks and sizes of one worker in its group. ``rank`` alone always means the world rank."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


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
        attempt: Its number, from 1; 0 in single-machine use.
        in_worker: False in single-machine use.
        progress: The calls made so far, and where the time went.
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
            read_context=self._read_context,
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
        self, state: Any, *, files: bool, metrics: Mapping[str, Any] | None, all_ranks: bool, allow_pickle: bool
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(self, path: Any, *, allow_pickle: bool) -> Any: ...

    def get_dataset(self, name: str | None) -> WorkerDataset:
        self._check_live()
        return self._datasets.get(name)

    def get_datasets(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        self._check_live()
        return self._datasets.all()

    def end_epochs(self, *, only_finished: bool) -> None:
        """Loops over datasets that are under way, or only those that have had their last batch, are over, and their epochs.

        A framework's loop may leave an epoch at its last batch, without asking whether there is another.
        """
        self._datasets.end_epochs(only_finished=only_finished)

    @abstractmethod
    def should_stop(self) -> bool: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def broadcast(self, obj: Any) -> Any: ...

    def _read_context(self) -> AbstractContextManager[None]:
        """Called before each batch of a dataset; the batch is read inside the returned context."""
        self._check_live()
        self.progress.mark("batch")
        return self.progress.data

    def _check_live(self) -> None:  # noqa: B027  (most sessions never end)
        """Raise if the session is over."""
