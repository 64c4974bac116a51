"""The datasets of a run as a worker sees them. Worker side; `DataContext` is what the session holds of `raysgd.data`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from raysgd.config.checks import check_count
from raysgd.data.batches import Reading
from raysgd.data.cursor import Cursor, StreamCursor
from raysgd.data.file_blocks import FileBlocks
from raysgd.data.file_reader import FileReader
from raysgd.data.names import nearest
from raysgd.data.plan import LONE, UNKNOWN_ROWS, DatasetPlan, Source
from raysgd.data.position import Position
from raysgd.data.reader import ChosenRows, Fetch, ItemReader, StoredBlocks, TableReader
from raysgd.data.shard import Shard
from raysgd.data.stream_reader import StreamReader
from raysgd.errors import ConfigError


class WorkerDataset:
    """One dataset. `get_split` is this worker's share of it.

    Attributes:
        name: As given to run.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        *,
        rank: int,
        world_size: int,
        seed: int,
        attempt: int,
        is_deterministic: bool,
        fetch: Fetch,
        reading: Reading,
    ) -> None:
        self.name = name
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._reading = reading
        self._is_deterministic = is_deterministic
        self._seed = seed
        self._start = Position()
        self._cursors = {rank: self._cursor_at(self._start)}
        self._reader = self._open(fetch, attempt)

    @property
    def num_rows(self) -> int | None:
        """Rows of the whole dataset; None of one that is executed while it is read."""
        return None if self._source.num_rows == UNKNOWN_ROWS else self._source.num_rows

    @property
    def schema(self) -> Any:
        """The columns and their types, a `pyarrow.Schema`; None for a map-style dataset."""
        return None if isinstance(self._reader, ItemReader) else self._reader.schema

    @property
    def position(self) -> Position:
        """Where training stands."""
        return self._cursors[self._rank].position

    def get_split(self) -> Shard:
        """This worker's share. Called again it stands at the same place: the position belongs to the run."""
        return self.get_shard(self._rank)

    def get_shard(self, rank: int) -> Shard:
        """The share of ``rank``. Another's has a position of its own: where this run's began, and in no checkpoint."""
        check_count("get_shard(rank)", rank, minimum=0)
        if rank >= self._world_size:
            raise ConfigError(f"get_shard({rank}): there are {self._world_size} workers; give a rank below that.")
        if rank not in self._cursors:
            self._cursors[rank] = self._cursor_at(self._start)
        return Shard(
            self.name,
            rank,
            self._world_size,
            self._source,
            self._cursors[rank],
            self._reader,
            self._reading,
            self._is_deterministic,
        )

    def close(self) -> None:
        """Let go of the rows."""
        self._reader.close()

    def check(self, position: Position) -> None:
        """Raise a CheckpointError if training cannot go on at this position."""
        self._cursors[self._rank].check(position)

    def restore(self, position: Position) -> None:
        """Go on at this position, in the shares that were handed out too."""
        self._start = position
        for cursor in self._cursors.values():
            cursor.restore(position)

    def end_pass(self, *, only_finished: bool) -> None:
        """A loop that is under way is over, and its epoch; see `DataContext.end_passes`."""
        self._cursors[self._rank].end_pass(only_finished=only_finished)

    def _cursor_at(self, position: Position) -> Cursor:
        if self._source.kind == "stream":
            return StreamCursor(self.name, self._seed, position)
        return Cursor(self.name, self._source.block_rows, self._seed, position, self._source.window_rows)

    def _open(self, fetch: Fetch, attempt: int) -> TableReader | ItemReader:
        name, source = self.name, self._source
        chosen = None if source.choice is None else ChosenRows(source.choice, fetch)
        if source.kind == "items":
            return ItemReader(source, fetch, chosen)
        if source.kind == "files":
            return FileReader(name, source, FileBlocks(name, source), chosen=chosen)
        if source.kind == "stream":
            cursor = self._cursors[self._rank]
            assert isinstance(cursor, StreamCursor)
            return StreamReader(name, source, cursor, self._rank, attempt)
        return TableReader(name, source, StoredBlocks(source, fetch), chosen=chosen)


class DataContext:
    """The datasets of one attempt in one worker, and where training stands in each. For the training thread.

    Args:
        plan: From `resolve_datasets`.
        rank: World rank of this worker.
        world_size: Workers in this attempt.
        seed: The Trainer's; None counts as 0.
        positions: What `positions` gave when the checkpoint was taken, on any rank: they agree. Datasets it does not name
            begin at their beginning, and names that were not given now are left out.
        fetch: Gives what ``put`` stored: `ray.get`; the identity in a world of one.
        reading: Called before each batch, which is then read within what it returns; what it raises ends the loop, and
            consumes nothing.
        attempt: Its number, greater than that of any before.
        is_deterministic: Whether a run is to be repeatable bit by bit.

    Raises:
        CheckpointError: A position lies inside an epoch of another number of rows, or is none.
    """

    def __init__(
        self,
        plan: DatasetPlan,
        rank: int,
        world_size: int,
        seed: int | None,
        positions: Mapping[str, Any] | None = None,
        *,
        fetch: Fetch,
        reading: Reading = nullcontext,
        attempt: int = 0,
        is_deterministic: bool = False,
    ) -> None:
        self._folds = plan.folds
        self._datasets = {
            name: WorkerDataset(
                name,
                source,
                rank=rank,
                world_size=world_size,
                seed=seed or 0,
                attempt=attempt,
                is_deterministic=is_deterministic,
                fetch=fetch,
                reading=reading,
            )
            for name, source in plan.sources.items()
        }
        self.restore(positions or {})

    def get(self, name: str | None = None) -> WorkerDataset:
        """A dataset by the name it was given under; without one, the only dataset.

        Raises:
            ConfigError: There is none of that name, or more than one and no name.
        """
        known = list(self._datasets)
        if not known:
            raise ConfigError(
                "no dataset was given; give one: run(train_func, dataset=...), or raysgd.local(dataset=...) without a Trainer."
            )
        if name is None and len(known) == 1:
            return self._datasets[known[0]]
        there = "there are " + ", ".join(map(repr, known)) if known != [LONE] else "one was given without a name"
        if self._folds is not None:
            there += "; get_datasets() gives them in the order of the tuple"
        if name is None:
            raise ConfigError(f"get_dataset() without a name, but {there}.")
        if name not in self._datasets:
            raise ConfigError(f"there is no dataset {name!r}{nearest(str(name), known)}; {there}.")
        return self._datasets[name]

    def all(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        """All by name; of a tuple given for cross-validation a tuple of the same form: datasets, or pairs of them."""
        if self._folds is None:
            return dict(self._datasets)
        return tuple(
            self._datasets[fold] if isinstance(fold, str) else tuple(self._datasets[name] for name in fold)
            for fold in self._folds
        )

    def positions(self) -> dict[str, Any]:
        """Where training stands in each dataset, JSON-able, for this rank's state in a checkpoint.

        All ranks give the same if they have taken equally many batches: `raysgd.data.check_agreement` tells.
        """
        return {name: dataset.position.to_json() for name, dataset in self._datasets.items()}

    def end_passes(self, *, only_finished: bool) -> None:
        """Loops that are under way are over, and their epochs, as if the next ones had begun.

        Args:
            only_finished: Only those that have had their last batch. Of a stream nobody knows.
        """
        for dataset in self._datasets.values():
            dataset.end_pass(only_finished=only_finished)

    def check(self, positions: Mapping[str, Any]) -> None:
        """That training could go on with these datasets at these positions.

        Raises:
            CheckpointError: As by the constructor.
        """
        self._checked(positions)

    def restore(self, positions: Mapping[str, Any]) -> None:
        """Go on at these positions, as when a checkpoint is loaded; loops that are under way are over.

        Shares and loaders that were made before go on there too.

        Raises:
            CheckpointError: As by the constructor; then all stay where they are.
        """
        for name, position in self._checked(positions).items():
            self._datasets[name].restore(position)

    def close(self) -> None:
        """Let go of all rows, and of the threads that read."""
        for dataset in self._datasets.values():
            dataset.close()

    def _checked(self, positions: Mapping[str, Any]) -> dict[str, Position]:
        given = {name: positions.get(name, Position().to_json()) for name in self._datasets}
        checked = {name: Position.from_json(value, name) for name, value in given.items()}
        for name, position in checked.items():
            self._datasets[name].check(position)
        return checked
