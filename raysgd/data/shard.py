"""`DatasetShard`: the rows of a dataset that one worker takes, and the ways to read them. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raysgd.config.checks import check_choice, check_count
from raysgd.data.batches.batches import Batches, ReadContext, Rows, ShardLoop
from raysgd.data.batches.conversion import BatchContents, PlainConversion
from raysgd.data.batches.jax import JaxConversion, JaxPut, check_sharding
from raysgd.data.batches.tensorflow import TFConversion, as_tf_dataset
from raysgd.data.batches.torch import CudaCopies, TorchConversion
from raysgd.data.batches.values import is_cuda, is_host
from raysgd.data.order.cursor import Cursor
from raysgd.data.order.epoch_order import SHUFFLES, Indices, Shuffle
from raysgd.data.order.handed_out import Passes
from raysgd.data.order.rank_assignment import RankAssignment
from raysgd.data.plan import UNKNOWN_ROWS, Source, check_columns
from raysgd.data.reading.readers import Fetch, ItemReader, TableReader
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax
    import tensorflow as tf
    import torch

Format = Literal["numpy", "pandas", "pyarrow"]
FORMATS = ("numpy", "pandas", "pyarrow")
#: Rows of a worker's batch if neither ``batch_size`` nor ``global_batch_size`` is given: Keras's default. Ray Data's, 256,
#: would be multiplied by the number of workers.
DEFAULT_BATCH_SIZE = 32
#: Lanes of shuffled files whose order must not depend on the number of workers. More lanes would let more workers read
#: separate files, but each of a few workers would hold more blocks at a time.
FIXED_LANES = 8
#: ``batch_size`` and ``global_batch_size`` as given.
_Sizes = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """Settings of all datasets of an attempt in one worker; `raysgd.data.dataset.WorkerDatasets` describes them.

    Attributes:
        rank: The worker's data-parallel rank.
        world_size: The number of data-parallel ranks, which all read different rows.
        reader: The worker's world rank; another worker may have the same data-parallel rank.
        is_whole: Whether all rows are read, as by rank 0 of 1.
        num_logical: Logical workers that the process acts as, from the one with the number ``rank`` on; ``world_size`` is
            that of all. None: ranks are those of processes.
        passes: Shows the passes of models to the datasets.
    """

    rank: int
    world_size: int
    seed: int
    attempt: int
    is_deterministic: bool
    fetch: Fetch
    read_context: ReadContext
    reader: int
    is_whole: bool = False
    num_logical: int | None = None
    passes: Passes = field(default_factory=Passes)


@dataclass(frozen=True, repr=False)
class DatasetShard:
    """The rows of a dataset that one rank takes: in every step, its slice of the rows that all ranks take together.

    All loops over one dataset in a run share its position, whichever method they read with. Each new iteration is the next
    epoch; after a restart, the first one resumes exactly where the checkpoint was taken, with any number of workers.
    ``len()`` is the number of rows of this rank if batches have one row; with larger batches the short last step goes to the
    lowest ranks. ``len()`` of a lazy dataset raises a TypeError.

    The order of rows is a function of the dataset, the seed and the epoch. ``shuffle`` selects it: ``False`` takes rows in
    the order of the dataset, ``"full"`` mixes all rows, ``"window"`` shuffles blocks and mixes the rows of neighbouring
    blocks, so that few blocks are needed at a time.
    """

    _name: str
    _rank: int
    _source: Source
    _cursor: Cursor
    _reader: TableReader | ItemReader
    _settings: ReadSettings

    def __len__(self) -> int:
        return len(self.iter_rows())

    def __repr__(self) -> str:
        rows = f", {len(self)} of {self._source.num_rows} rows" if self._is_sized else ""
        if self._settings.is_whole:
            return f"DatasetShard({self._name!r}, whole{rows})"
        kind = "rank" if self._settings.num_logical is None else f"{self._settings.num_logical} logical workers from"
        return f"DatasetShard({self._name!r}, {kind} {self._rank} of {self._settings.world_size}{rows})"

    @property
    def _is_sized(self) -> bool:
        return self._source.num_rows != UNKNOWN_ROWS

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the epoch that the next iteration begins; from 0."""
        return self._cursor.epoch

    def set_read_ahead(self, num_batches: int) -> None:
        """State how many of the newest batches the loop has not trained on, before it saves a checkpoint.

        Checkpoints leave them out, so that a training that resumes reads them again. It counts for all further saves until the
        next call, or until `raysgd.load_checkpoint`. All ranks give the same.

            queue.extend(itertools.islice(batches, 4))
            train(queue.popleft())
            shard.set_read_ahead(len(queue))
            raysgd.save_checkpoint(state)

        Loops that train on each batch before they read the next one do not need it, nor loops that call a model of
        `raysgd.torch.prepare_model` or `raysgd.Engine` with the tensors of a batch.

        Args:
            num_batches: 0 or more. For `iter_rows`, rows.

        Raises:
            ConfigError: Fewer batches were handed out.
        """
        self._cursor.handed_out.state_ahead(check_count("set_read_ahead(num_batches)", num_batches, minimum=0))

    def to_torch(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        label_column: str | None = None,
        feature_columns: Sequence[str] | None = None,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
    ) -> Batches[Any]:
        """Return batches as dicts of tensors by column, or as tuples ``(x, y)`` if ``label_column`` is given.

        Batches of a map-style dataset are made by torch's `default_collate`.

            for x, y in shard.to_torch(batch_size=64, label_column="price", feature_columns=["rooms", "area"]):
                loss = loss_fn(model(x), y)  # x has shape (64, 2)

        Args:
            batch_size: Rows of a batch on this worker; a step consumes ``batch_size * world_size`` rows. 32 by default: small,
                as in Keras, because the number of workers multiplies it.
            global_batch_size: Give this instead to set the rows of all workers in a step; they are divided among the workers.
            columns: Columns of the dict, in this order; all by default.
            label_column: Makes each batch a tuple ``(features, label)``, of tensors.
            feature_columns: The features that go with ``label_column``; by default all other columns. One column is taken as it
                is; several columns of numbers are stacked to shape (batch, num_features), in this order and with the type
                of `torch.promote_types`.
            dtypes: A type for all columns, the label too, or a dict of types by column. By default those of the data.
            device: Where tensors go; by default they stay in host memory. With ``prefetch`` they are pinned, and copied to a
                CUDA device while the loop computes.
            drop_last: Leave out the last step if it has fewer than ``batch_size`` rows for every worker.
            collate_fn: Makes the batch from a dict of NumPy arrays, or from the list of a map-style dataset's rows. One that
                takes a list of dicts, as those of torch and transformers do, gets that: if it fails on the dict of the first
                batch, it is called with the list. It must return new tensors: with ``prefetch`` earlier batches may still be
                waiting. They are moved to ``device``. It is never called without rows: a worker without rows in the last step
                gets another row's batch, emptied.
            prefetch: Batches made ahead of the loop by a thread, at most about 256 MB of them. Only batches that take work are
                made ahead: by ``collate_fn``, from a map-style dataset, or for a device other than the CPU. With 0, or with
                ``Trainer(deterministic=True)``, each batch is made when the loop asks for it, so that random numbers
                are drawn in the order of the loop.
            shuffle: See `DatasetShard`.

        Raises:
            ConfigError: The dataset has no such column, an argument is out of range, or arguments exclude each other. While
                iterating: torch has no type for a column, such as strings, ragged rows or nulls, or feature columns
                cannot be stacked.
        """
        num_prefetched = self._num_prefetched(prefetch, collate_fn, takes_work=not is_host(device))
        transfer = CudaCopies(device) if num_prefetched and is_cuda(device) else None
        contents = BatchContents("to_torch", columns, label_column, feature_columns, dtypes, collate_fn)
        read = contents.read_from(self._name, self._reader, TorchConversion(device if transfer is None else None))
        loop = self._loop(read.reader, (batch_size, global_batch_size), shuffle, drop_last)
        return Batches(loop, read, num_prefetched, transfer)

    def to_jax(  # noqa: D417 - the others are described in to_torch
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        label_column: str | None = None,
        feature_columns: Sequence[str] | None = None,
        dtypes: Any = None,
        device: jax.Device | jax.sharding.Sharding | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
    ) -> Batches[Any]:
        """Return batches as dicts of `jax.Array` by column, or as tuples ``(x, y)`` if ``label_column`` is given.

        Items of a map-style dataset are stacked. A short last step has fewer rows, for which a jitted function is compiled
        again; ``drop_last=True`` leaves it out.

        Arguments that are not described here are those of `to_torch`.

        Args:
            feature_columns: See `to_torch`; the type of several columns is `numpy.result_type`'s.
            dtypes: A type that NumPy takes, such as ``jnp.bfloat16``, for all columns, or a dict of types by column. By default
                those of the data, which JAX reduces to 32 bits unless ``jax_enable_x64`` is set; integers out of range are
                an error.
            device: A device of this process, or a sharding over several; by default JAX's choice. With a sharding over
                devices of other workers, the batches of all ranks are one array: give ``drop_last=True``, so that they are
                equally long.
            collate_fn: Makes the batch from a dict of NumPy arrays, or from the list of a map-style dataset's rows. NumPy
                arrays in its result become JAX arrays.
            prefetch: See `to_torch`. JAX copies to a device while the loop computes in any case.

        Raises:
            ConfigError: See `to_torch`; also integers that do not fit into 32 bits, and a sharding over other workers'
                devices without ``drop_last``.
        """
        num_prefetched = self._num_prefetched(prefetch, collate_fn)
        check_sharding(device, drop_last)
        contents = BatchContents("to_jax", columns, label_column, feature_columns, dtypes, collate_fn)
        read = contents.read_from(self._name, self._reader, JaxConversion())
        loop = self._loop(read.reader, (batch_size, global_batch_size), shuffle, drop_last)
        return Batches(loop, read, num_prefetched, JaxPut(read.origin, device))

    def to_tf(  # noqa: D417 - the others are described in to_torch
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        label_column: str | None = None,
        feature_columns: Sequence[str] | None = None,
        dtypes: Any = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
        output_signature: Any = None,
    ) -> tf.data.Dataset:
        """Return a `tf.data.Dataset` of dicts by column, or of tuples ``(x, y)``, as ``fit`` takes them, with ``label_column``.

        Columns may hold strings. Each ``iter()`` of the dataset is the next epoch. A batch counts as consumed when tf.data
        takes it, which is when the loop asks for it, also behind ``.map(...)`` and in Keras's ``fit``. Behind
        ``.prefetch(n)``, ``.shuffle(n)`` or a parallel map, tf.data takes batches ahead, and a checkpoint counts these as
        consumed. A multi-worker strategy also takes batches ahead and divides them, except
        `raysgd.tensorflow.MultiWorkerMirroredStrategy`. ``.cache()`` keeps the first epoch for all epochs. TensorFlow turns an
        exception into one of its own with the same text, also at the end of the attempt, where ``except Exception`` then
        catches it. ``data_wait_fraction`` does not include this loop's waiting.

        Arguments that are not described here are those of `to_torch`.

        Args:
            feature_columns: See `to_torch`; the type of several columns is `numpy.result_type`'s.
            dtypes: A `tf.DType` for all columns, or a dict of types by column. By default those of the data.
            collate_fn: Makes the batch from a dict of NumPy arrays, or from the list of a map-style dataset's rows.
            output_signature: As for `tf.data.Dataset.from_generator`, for batches whose shapes differ in more than the number
                of rows. By default that of the first batch, which is read once more for it and consumes nothing. A batch of
                other types is an error and does not count as consumed, because TensorFlow would convert it.

        Raises:
            ConfigError: See `to_torch`; or there is no row to derive types from.
        """
        num_prefetched = self._num_prefetched(prefetch, collate_fn)
        contents = BatchContents("to_tf", columns, label_column, feature_columns, dtypes, collate_fn)
        read = contents.read_from(self._name, self._reader, TFConversion())
        if not read.columns and not isinstance(read.reader, ItemReader):
            raise ConfigError("to_tf(columns=[]): tf.data takes no empty batches; give at least one column.")
        loop = self._loop(read.reader, (batch_size, global_batch_size), shuffle, drop_last)
        return as_tf_dataset(Batches(loop, read, num_prefetched), read.origin, output_signature)

    def iter_batches(  # noqa: D417 - the others are described in to_torch
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        format: Format = "numpy",
        columns: Sequence[str] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
    ) -> Batches[Any]:
        """Return batches as dicts of NumPy arrays, pandas DataFrames or pyarrow Tables.

        Without shuffling, batches refer to the dataset's own memory, and NumPy arrays are read-only. Arguments that are not
        described here are those of `to_torch`.

        Args:
            format: ``"numpy"``, ``"pandas"`` or ``"pyarrow"``.
            collate_fn: Makes the batch from a dict of NumPy arrays, or from the list of a map-style dataset's rows. What it
                returns is the batch, unchanged.
            prefetch: See `to_torch`. Only what ``collate_fn`` makes is made ahead.

        Raises:
            ConfigError: See `to_torch`; or the rows have no columns, in a map-style dataset, and there is no ``collate_fn``.
        """
        if collate_fn is not None:
            if format != "numpy":
                raise ConfigError(
                    f"iter_batches(format={format!r}, collate_fn=...) exclude each other: collate_fn gets NumPy arrays."
                )
            contents = BatchContents("iter_batches", columns, None, None, None, collate_fn)
            read_all = contents.read_from(self._name, self._reader, PlainConversion())
            loop = self._loop(read_all.reader, (batch_size, global_batch_size), shuffle, drop_last)
            return Batches(loop, read_all, self._num_prefetched(prefetch, collate_fn))
        reader, read = self._read_as(format, columns)
        return Batches(self._loop(reader, (batch_size, global_batch_size), shuffle, drop_last), read)

    def iter_rows(self, *, shuffle: Shuffle = False) -> Rows:
        """Return single rows: dicts by column, or the items of a map-style dataset.

        A worker may get one row less than another: in loops with collectives use batches.
        """
        if isinstance(self._reader, TableReader):
            self._reader.check_numbers(self._reader.columns)
        return Rows(self._loop(self._reader, (1, None), shuffle), self._read_rows)

    def first_batch(
        self, batch_size: int = 1, *, format: Format = "numpy", columns: Sequence[str] | None = None
    ) -> Any:
        """Return the first rows of this shard as `iter_batches` does, to look at shapes and types. Consumes nothing.

        The first batch of a loop is returned by that loop's own batches: ``shard.to_torch(...).first_batch()``.
        """
        reader, read = self._read_as(format, columns)
        return Batches(self._loop(reader, (batch_size, None), shuffle=False), read).first_batch()

    def _loop(
        self, reader: TableReader | ItemReader, sizes: _Sizes, shuffle: Shuffle, drop_last: bool = False
    ) -> ShardLoop:
        self._check_shuffle(shuffle)
        return ShardLoop(
            self._cursor,
            self._assignment(sizes, drop_last),
            shuffle,
            self._num_lanes(sizes, shuffle),
            reader,
            self._settings.read_context,
            is_logical=self._settings.num_logical is not None,
        )

    def _assignment(self, sizes: _Sizes, drop_last: bool) -> RankAssignment:
        batch_size, global_batch_size = sizes
        if global_batch_size is None:
            batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
            global_batch = check_count("batch_size", batch_size, minimum=1) * self._settings.world_size
        elif batch_size is None:
            global_batch = check_count("global_batch_size", global_batch_size, minimum=1)
        else:
            raise ConfigError(
                f"batch_size={batch_size!r} and global_batch_size={global_batch_size!r} exclude each other: give batch_size "
                "for the rows of each worker's batch, or global_batch_size for those of all workers together."
            )
        if self._settings.num_logical is not None and global_batch < self._settings.world_size:
            raise ConfigError(
                f"global_batch_size={global_batch_size!r} with {self._settings.world_size} logical workers: each of them "
                "computes rows in every step; give at least as many rows."
            )
        return RankAssignment(
            num_rows=self._source.num_rows,
            global_batch=global_batch,
            rank=self._rank,
            world_size=self._settings.world_size,
            drop_last=drop_last,
            num_slices=self._settings.num_logical or 1,
        )

    def _num_lanes(self, sizes: _Sizes, shuffle: Shuffle) -> int:
        """Return the number of lanes for an epoch that begins now. With one lane per worker, each reads its own files."""
        if self._source.kind not in ("files", "stream"):
            return 1
        if sizes[1] is None:
            return self._settings.world_size
        if shuffle is False:
            return 1
        return FIXED_LANES if not self._is_sized else max(1, min(FIXED_LANES, len(self._source.blocks) // 2))

    def _num_prefetched(self, prefetch: int, collate_fn: Any, takes_work: bool = False) -> int:
        """Return how many batches to make ahead: none if that takes no work, or if random numbers must be drawn in order."""
        check_count("prefetch", prefetch, minimum=0)
        takes_work = takes_work or collate_fn is not None or isinstance(self._reader, ItemReader)
        return prefetch if takes_work and not self._settings.is_deterministic else 0

    def _read_as(self, format: str, columns: Sequence[str] | None) -> tuple[TableReader, Callable[[Indices], Any]]:
        check_choice("format", format, FORMATS)
        reader = self._reader
        if isinstance(reader, ItemReader):
            raise ConfigError(
                f"dataset {self._name!r} is a map-style dataset, whose rows have no columns: read it with to_torch(...), "
                "iter_rows() or iter_batches(collate_fn=...)."
            )
        names = reader.columns if columns is None else check_columns(self._name, columns, reader.columns)
        reader = reader.select(names)
        if format == "numpy":
            reader.check_numbers(names)
        read = {"numpy": reader.arrays, "pandas": reader.frame, "pyarrow": reader.table}[format]
        return reader, lambda rows: read(rows, names)

    def _read_rows(self, rows: Indices) -> Iterator[Any]:
        reader = self._reader
        if isinstance(reader, ItemReader):
            return (reader.items([row])[0] for row in rows)  # one by one: items may be large
        arrays = reader.arrays(rows, reader.columns)
        return (dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True))

    def _check_shuffle(self, shuffle: Any) -> None:
        if not any(shuffle is choice or (isinstance(shuffle, str) and shuffle == choice) for choice in SHUFFLES):
            raise ConfigError(f"shuffle={shuffle!r} is not known; give 'full', 'window' or False.")
        if shuffle == "full" and not self._is_sized:
            raise ConfigError(
                f"shuffle='full' mixes all rows, but dataset {self._name!r} is lazy and executed while it is read. Give "
                "shuffle='window', let Ray shuffle it (ds.random_shuffle(seed=...)), or hold it in memory (ds.materialize())."
            )
