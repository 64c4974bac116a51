"""The datasets of a run as a worker sees them. Worker side; a session holds one `WorkerDatasets` per attempt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from raysgd.config.checks import check_count
from raysgd.data.batches.batches import ReadContext
from raysgd.data.order.cursor import Cursor, StreamCursor
from raysgd.data.order.handed_out import Passes
from raysgd.data.order.position import Position
from raysgd.data.plan import UNKNOWN_ROWS, UNNAMED, DatasetPlan, Source, did_you_mean
from raysgd.data.reading.files import FileBlocks, FileReader
from raysgd.data.reading.readers import Fetch, ItemReader, SelectedRows, StoredBlocks, TableReader
from raysgd.data.shard import DatasetShard, ReadSettings
from raysgd.data.streams.reader import StreamReader
from raysgd.errors import ConfigError


class WorkerDataset:
    """One dataset of the run, as this worker sees it. `get_split` returns this worker's shard.

    Attributes:
        name: The name that the dataset was given to run under.
    """

    def __init__(self, name: str, source: Source, settings: ReadSettings) -> None:
        self.name = name
        self._source = source
        self._settings = settings
        self._start = Position()
        self._cursors = {settings.rank: self._cursor_at(self._start)}
        self._reader = self._open_reader()
        self._whole: WorkerDataset | None = None  # the same dataset, as a world of one reads it
        self._whole_start = Position()

    @property
    def num_rows(self) -> int | None:
        """Rows in the whole dataset; None for a lazy dataset, whose rows are unknown before it is read."""
        return None if self._source.num_rows == UNKNOWN_ROWS else self._source.num_rows

    @property
    def schema(self) -> Any:
        """The columns and their types, a `pyarrow.Schema`; None for a map-style dataset."""
        return None if isinstance(self._reader, ItemReader) else self._reader.schema

    @property
    def position(self) -> Position:
        """The position of training in this dataset."""
        return self._cursors[self._settings.rank].trained_position

    @property
    def whole_position(self) -> Position:
        """This rank's position in ``get_split(whole=True)``."""
        return self._whole_start if self._whole is None else self._whole.position

    def get_split(self, *, whole: bool = False) -> DatasetShard:
        """Return this worker's shard. Every call returns a shard at the same position: the position belongs to the run.

        Args:
            whole: Return all rows on every worker, for example for validation. Each rank then has a position of its own, so
                ranks may read different numbers of batches, or none. A rank that is new after a resize begins where the
                lowest rank was.
        """
        return self._open_whole().get_split() if whole else self.get_shard(self._settings.rank)

    def get_shard(self, rank: int) -> DatasetShard:
        """Return the shard of ``rank``.

        The shard of another rank has its own position: it begins where this run began, and checkpoints leave it out.
        """
        check_count("get_shard(rank)", rank, minimum=0)
        world_size = self._settings.world_size
        if self._settings.num_logical is not None and rank != self._settings.rank:
            raise ConfigError(
                "get_shard() with Trainer(logical_workers=...): a process has only its own shard, get_split()."
            )
        if rank >= world_size:
            raise ConfigError(
                f"get_shard({rank}) has no such rank: give one below {world_size}, the number of workers."
            )
        if rank not in self._cursors:
            self._cursors[rank] = self._cursor_at(self._start)
        return DatasetShard(self.name, rank, self._source, self._cursors[rank], self._reader, self._settings)

    def close(self) -> None:
        """Release the rows."""
        self._reader.close()
        if self._whole is not None:
            self._whole.close()

    def check(self, position: Position) -> None:
        """Raise a CheckpointError if training cannot resume at this position."""
        self._cursors[self._settings.rank].check(position)

    def restore(self, position: Position, whole_position: Position = Position()) -> None:  # noqa: B008 - it is frozen
        """Resume at these positions, also in shards that were handed out before."""
        self._start, self._whole_start = position, whole_position
        for cursor in self._cursors.values():
            cursor.restore(position)
        if self._whole is not None:
            self._whole.restore(whole_position)

    def end_epoch(self, *, only_finished: bool) -> None:
        """End the iteration in progress and its epoch; see `WorkerDatasets.end_epochs`."""
        self._cursors[self._settings.rank].end_epoch(only_finished=only_finished)
        if self._whole is not None:
            self._whole.end_epoch(only_finished=only_finished)

    def _open_whole(self) -> WorkerDataset:
        if self._whole is None:
            settings = replace(self._settings, rank=0, world_size=1, is_whole=True, num_logical=None)
            self._whole = WorkerDataset(self.name, self._source, settings)
            self._whole.restore(self._whole_start)
        return self._whole

    def _cursor_at(self, position: Position) -> Cursor:
        if self._source.kind == "stream":
            return StreamCursor(self.name, self._settings.seed, position, passes=self._settings.passes)
        return Cursor(
            self.name,
            self._source.block_rows,
            self._settings.seed,
            position,
            self._source.window_rows,
            passes=self._settings.passes,
        )

    def _open_reader(self) -> TableReader | ItemReader:
        name, source, fetch = self.name, self._source, self._settings.fetch
        selected = None if source.selection is None else SelectedRows(source.selection, fetch)
        if source.kind == "items":
            return ItemReader(source, fetch, selected)
        if source.kind == "files":
            return FileReader(name, source, FileBlocks(name, source), selected=selected)
        if source.kind == "stream":
            cursor = self._cursors[self._settings.rank]
            assert isinstance(cursor, StreamCursor)
            settings = self._settings
            return StreamReader(
                name, source, cursor, settings.rank, settings.attempt, settings.reader, is_whole=settings.is_whole
            )
        return TableReader(name, source, StoredBlocks(name, source, fetch), selected=selected)


class WorkerDatasets:
    """All datasets of one attempt in one worker, and the position of training in each. For the training thread.

    Args:
        plan: From `resolve_datasets`.
        rank: Data-parallel rank of this worker.
        world_size: Data-parallel ranks in this attempt.
        seed: The Trainer's seed; None counts as 0.
        positions: The result of `positions` when the checkpoint was taken, on any rank: all agree. A dataset without a
            position begins at its beginning; positions of datasets that are not in the plan are ignored.
        fetch: Returns the object that ``put`` stored: `ray.get`; the identity in a world of one.
        read_context: Called before each batch; the batch is read within the context manager that it returns. An exception
            from it ends the loop, and no row is consumed.
        attempt: The attempt's number, greater than all earlier ones.
        is_deterministic: Whether the run must be repeatable bit by bit.
        reader: World rank of this worker; None: the same as ``rank``.
        num_logical, passes: See `ReadSettings`.

    Raises:
        CheckpointError: A position lies inside an epoch of another number of rows, or is not a position.
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
        read_context: ReadContext = nullcontext,
        attempt: int = 0,
        is_deterministic: bool = False,
        reader: int | None = None,
        num_logical: int | None = None,
        passes: Passes | None = None,
    ) -> None:
        settings = ReadSettings(
            rank=rank,
            world_size=world_size,
            seed=seed or 0,
            attempt=attempt,
            is_deterministic=is_deterministic,
            reader=rank if reader is None else reader,
            fetch=fetch,
            read_context=read_context,
            num_logical=num_logical,
            passes=Passes() if passes is None else passes,
        )
        self._folds = plan.folds
        self._datasets = {name: WorkerDataset(name, source, settings) for name, source in plan.sources.items()}
        self.restore(positions or {})

    def get(self, name: str | None = None) -> WorkerDataset:
        """Return the dataset of this name; without a name, the only dataset.

        Raises:
            ConfigError: No dataset has this name, or there are several and no name was given.
        """
        known = list(self._datasets)
        if not known:
            raise ConfigError(
                "the run has no dataset: give one as run(train_func, dataset=...), or raysgd.local(dataset=...) without a "
                "Trainer."
            )
        if name is None and len(known) == 1:
            return self._datasets[known[0]]
        listed = "the run has " + ", ".join(map(repr, known)) if known != [UNNAMED] else "the run's dataset has no name"
        if self._folds is not None:
            listed += "; get_datasets() returns them in the order of the tuple"
        if name is None:
            raise ConfigError(f"get_dataset() needs the name of a dataset: {listed}.")
        if name not in self._datasets:
            raise ConfigError(f"there is no dataset {name!r}{did_you_mean(str(name), known)}: {listed}.")
        return self._datasets[name]

    def all(self) -> dict[str, WorkerDataset] | tuple[Any, ...]:
        """Return all datasets by name. For a cross-validation tuple, return a tuple of datasets or pairs, in its order."""
        if self._folds is None:
            return dict(self._datasets)
        return tuple(
            self._datasets[fold] if isinstance(fold, str) else tuple(self._datasets[name] for name in fold)
            for fold in self._folds
        )

    def positions(self) -> dict[str, Any]:
        """Return the position in each dataset, JSON-able, for this rank's state in a checkpoint.

        Ranks that took equally many batches return the same; `raysgd.data.order.position.check_agreement` compares them.
        """
        return {name: dataset.position.to_json() for name, dataset in self._datasets.items()}

    def own_positions(self) -> dict[str, Any]:
        """Return this rank's position in each dataset that it has read whole, JSON-able. Ranks need not agree."""
        found = {name: dataset.whole_position for name, dataset in self._datasets.items()}
        return {name: position.to_json() for name, position in found.items() if position != Position()}

    def end_epochs(self, *, only_finished: bool) -> None:
        """End the iterations in progress and their epochs, as if the next ones had begun.

        Args:
            only_finished: End only iterations that have handed out their last batch; for a lazy dataset that is unknown.
        """
        for dataset in self._datasets.values():
            dataset.end_epoch(only_finished=only_finished)

    def restore(self, positions: Mapping[str, Any], own_positions: Mapping[str, Any] | None = None) -> None:
        """Resume at these positions, as when a checkpoint is loaded. Iterations in progress end.

        Shards and loaders that were made before resume there too.

        Args:
            positions: The result of `positions`.
            own_positions: The result of `own_positions` on this rank.

        Raises:
            CheckpointError: See the constructor. No position has changed then.
        """
        beginning = Position().to_json()
        given = (positions, own_positions or {})
        wanted = {
            name: [Position.from_json(each.get(name, beginning), name) for each in given] for name in self._datasets
        }
        for name, both in wanted.items():
            for position in both:
                self._datasets[name].check(position)
        for name, both in wanted.items():
            self._datasets[name].restore(*both)

    def close(self) -> None:
        """Release all rows, and end the threads that read."""
        for dataset in self._datasets.values():
            dataset.close()
