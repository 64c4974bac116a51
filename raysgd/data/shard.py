"""`Shard`: one worker's share of a dataset, and the ways to read it. Worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raysgd.config.checks import check_choice, check_count
from raysgd.data.batches import Batches, Copies, Reading, Rows, no_length
from raysgd.data.cursor import Cursor
from raysgd.data.device_copies import CudaCopies
from raysgd.data.jax_batches import ItemsToArrays, JaxPut, TableToArrays, check_sharding
from raysgd.data.ledger import SHUFFLES, Deal, Indices, Shuffle
from raysgd.data.names import check_columns
from raysgd.data.plan import UNKNOWN_ROWS, Source
from raysgd.data.reader import ItemReader, TableReader
from raysgd.data.tf_batches import ItemsToTF, TableToTF, as_dtypes, as_tf_dataset
from raysgd.data.torch_batches import ItemsToTorch, TableToTorch, check_dtypes
from raysgd.data.trees import Origin, as_numpy_dtypes, is_cuda, is_host
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax
    import tensorflow as tf
    import torch

Format = Literal["numpy", "pandas", "pyarrow"]
FORMATS = ("numpy", "pandas", "pyarrow")
#: Lanes of shuffled files whose order must not depend on the number of workers. More would let more workers read apart
#: from each other, and each worker of a few hold more blocks at a time.
FIXED_LANES = 8
#: ``batch_size`` and ``global_batch_size``, one of them None.
_Sizes = tuple[int | None, int | None]


@dataclass(frozen=True, repr=False)
class Shard:
    """The rows of a dataset that fall to one rank: of every step's rows, in the order of the epoch, its slice.

    All readers of one dataset in a run share its position: iterating again, through whatever reader, is the next epoch,
    or, after a restart, goes on exactly where the checkpoint was taken, whatever the number of workers is now.
    ``len()`` is the number of its rows if they are dealt one by one; dealt in batches the last, short step falls to the
    first ranks. A lazy dataset has no ``len()``: it raises a TypeError.

    The order is a function of the dataset, the seed and the epoch. ``shuffle`` chooses it: ``False`` takes the rows as
    they come, ``"full"`` mixes all of them, ``"window"`` shuffles blocks and mixes the rows of neighbouring ones, which needs few
    blocks at a time.
    """

    _name: str
    _rank: int
    _world_size: int
    _source: Source
    _cursor: Cursor
    _reader: TableReader | ItemReader
    _reading: Reading
    _is_deterministic: bool

    def __len__(self) -> int:
        if not self._is_sized:
            raise no_length(self._name)
        return len(range(self._rank, self._source.num_rows, self._world_size))

    def __repr__(self) -> str:
        rows = f", {len(self)} of {self._source.num_rows} rows" if self._is_sized else ""
        return f"Shard({self._name!r}, rank {self._rank} of {self._world_size}{rows})"

    @property
    def _is_sized(self) -> bool:
        return self._source.num_rows != UNKNOWN_ROWS

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next iteration begins; from 0."""
        return self._cursor.epoch

    def to_torch(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
    ) -> Batches[Any]:
        """Batches as dicts of tensors by column; of a map-style dataset what torch's `default_collate` makes.

        Args:
            batch_size: Rows of a batch on this worker; ``batch_size * world_size`` rows are consumed in a step.
            global_batch_size: Instead: rows consumed in a step, whatever the number of workers; each gets its part of them.
            columns: Which ones, and in which order; all by default.
            dtypes: For all columns, or by column. By default those of the data.
            device: Where tensors go; by default they stay in host memory. With ``prefetch`` they are pinned, and copied to a
                CUDA device beside what the loop computes there.
            drop_last: Leave out a last step that has not ``batch_size`` rows for every worker.
            collate_fn: Makes the batch, of a dict of NumPy arrays or of the list of a map-style dataset's rows, in new
                tensors: with ``prefetch`` those before it may be waiting still. They are put on ``device``. It is never
                called with nothing: where a worker has no rows in the last step, the batch of another row is emptied.
            prefetch: Batches made ahead of the loop, in a thread, where making them takes work: by ``collate_fn``, of a
                map-style dataset's items, for a device that is not the CPU. At most about 256 MB of them. 0: each is made
                when the loop asks for it, as it is in any case with ``Trainer(deterministic=True)``, whose random numbers
                must be drawn in the order of the loop.
            shuffle: See the class.

        Raises:
            ConfigError: A column that is not there, or an argument out of range. While iterating: a column that torch
                cannot hold, naming it: strings, ragged rows, nulls.
        """
        check_count("prefetch", prefetch, minimum=0)
        reader, sizes = self._reader, (batch_size, global_batch_size)
        ahead = self._ahead(prefetch, collate_fn, takes_work=not is_host(device))
        copies = CudaCopies(device) if ahead and is_cuda(device) else None
        device = device if copies is None else None
        if isinstance(reader, ItemReader):
            self._refuse_columns("to_torch", columns=columns, dtypes=dtypes)
            read_items = ItemsToTorch(self._name, reader, device, collate_fn)
            return self._batches(reader, read_items, sizes, drop_last, shuffle, ahead, copies)
        chosen = self._choose(reader, columns)
        check_dtypes(self._name, dtypes, chosen, collate_fn)
        reader = reader.select(chosen)
        read = TableToTorch(self._name, reader, chosen, dtypes, device, collate_fn)
        return self._batches(reader, read, sizes, drop_last, shuffle, ahead, copies)

    def to_jax(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        dtypes: Any = None,
        device: jax.Device | jax.sharding.Sharding | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
    ) -> Batches[Any]:
        """Batches as dicts of `jax.Array` by column; of a map-style dataset its items, stacked.

        The last, short step has fewer rows, for which a jitted function is compiled once more; ``drop_last=True`` leaves it
        out.

        Args:
            batch_size: As in `to_torch`.
            global_batch_size: As in `to_torch`.
            columns: As in `to_torch`.
            dtypes: What NumPy takes for a dtype, such as ``jnp.bfloat16``, for all columns, or by column. By default those of
                the data, of which JAX makes 32 bits unless ``jax_enable_x64`` is set; integers that do not fit are an error.
            device: A device of this process, or a sharding over several; by default JAX's own choice. With a sharding over
                devices of other workers too, the batches of all ranks are one array: ``drop_last=True`` has them be equally
                long, as they must be.
            drop_last: As in `to_torch`.
            collate_fn: Makes the batch, of a dict of NumPy arrays or of the list of a map-style dataset's rows. NumPy arrays
                in what it returns become JAX arrays.
            prefetch: As in `to_torch`; JAX's own copies to a device go on beside the loop in any case.
            shuffle: See the class.

        Raises:
            ConfigError: As in `to_torch`; also integers that would not fit into 32 bits, and a sharding over other workers'
                devices without ``drop_last``.
        """
        check_count("prefetch", prefetch, minimum=0)
        check_sharding(device, drop_last)
        reader, origin = self._reader, self._origin(collate_fn)
        ahead, put = self._ahead(prefetch, collate_fn), JaxPut(origin, device)
        read: ItemsToArrays | TableToArrays
        if isinstance(reader, ItemReader):
            self._refuse_columns("to_jax", columns=columns, dtypes=dtypes)
            read = ItemsToArrays(origin, reader, collate_fn)
        else:
            chosen = self._choose(reader, columns)
            self._check_dtypes("to_jax", dtypes, chosen, collate_fn)
            reader = reader.select(chosen)
            read = TableToArrays(origin, reader, chosen, as_numpy_dtypes(dtypes), collate_fn)
        return self._batches(reader, read, (batch_size, global_batch_size), drop_last, shuffle, ahead, put)

    def to_tf(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        dtypes: Any = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        shuffle: Shuffle = False,
        output_signature: Any = None,
    ) -> tf.data.Dataset:
        """Batches as a `tf.data.Dataset` of dicts by column; strings are allowed. Each ``iter()`` of it is the next epoch.

        What tf.data takes counts as consumed. Its options are set so that it takes a batch when the loop asks for one, also
        behind ``.map(...)`` and in Keras's ``fit``; behind ``.prefetch(n)``, ``.shuffle(n)`` or a parallel map it takes some
        ahead, and a checkpoint stands behind those. A strategy for several workers takes some ahead too, and divides batches,
        unless it is `raysgd.tensorflow.MultiWorkerMirroredStrategy`. ``.cache()`` keeps the first epoch for all. An exception
        comes as one of TensorFlow's with its text, also to ``except Exception`` where the attempt has ended, and
        ``data_wait_fraction`` does not see this loop's waiting.

        Args:
            batch_size: As in `to_torch`.
            global_batch_size: As in `to_torch`.
            columns: As in `to_torch`.
            dtypes: A `tf.DType` for all columns, or by column. By default those of the data.
            drop_last: As in `to_torch`.
            collate_fn: Makes the batch, of a dict of NumPy arrays or of the list of a map-style dataset's rows: for
                ``fit`` a tuple ``(x, y)``.
            prefetch: As in `to_torch`.
            shuffle: See the class.
            output_signature: As of `tf.data.Dataset.from_generator`, for batches whose shapes differ in more than the number
                of rows. By default that of the first batch, which is made once more for it, and consumes nothing. A batch of
                other types is an error, and does not count as consumed: TensorFlow would convert it.

        Raises:
            ConfigError: As in `to_torch`; or there are no rows to tell types from.
        """
        check_count("prefetch", prefetch, minimum=0)
        reader, origin = self._reader, self._origin(collate_fn)
        ahead = self._ahead(prefetch, collate_fn)
        read: ItemsToTF | TableToTF
        if isinstance(reader, ItemReader):
            self._refuse_columns("to_tf", columns=columns, dtypes=dtypes)
            read = ItemsToTF(origin, reader, collate_fn)
        else:
            chosen = self._choose(reader, columns)
            if not chosen:
                raise ConfigError("to_tf(columns=[]): tf.data takes no batches of nothing; give at least one column.")
            self._check_dtypes("to_tf", dtypes, chosen, collate_fn)
            reader = reader.select(chosen)
            read = TableToTF(origin, reader, chosen, as_dtypes(dtypes), collate_fn)
        batches = self._batches(reader, read, (batch_size, global_batch_size), drop_last, shuffle, ahead)
        return as_tf_dataset(batches, origin, output_signature)

    def iter_batches(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        format: Format = "numpy",
        columns: Sequence[str] | None = None,
        drop_last: bool = False,
        shuffle: Shuffle = False,
    ) -> Batches[Any]:
        """Batches as dicts of NumPy arrays, pandas DataFrames or pyarrow Tables.

        Without shuffling they refer to the dataset's own memory; NumPy arrays are then read-only.

        Args:
            batch_size: Rows of a batch on this worker; ``batch_size * world_size`` rows are consumed in a step.
            global_batch_size: Instead: rows consumed in a step, whatever the number of workers; each gets its part of them.
            format: ``"numpy"``, ``"pandas"`` or ``"pyarrow"``.
            columns: Which ones, and in which order; all by default.
            drop_last: Leave out a last step that has not ``batch_size`` rows for every worker.
            shuffle: See the class.

        Raises:
            ConfigError: As in `to_torch`; a map-style dataset has no columns, and is read by `to_torch` or `iter_rows`.
        """
        reader, read = self._read_as(format, columns)
        return self._batches(reader, read, (batch_size, global_batch_size), drop_last, shuffle)

    def iter_rows(self, *, shuffle: Shuffle = False) -> Rows:
        """Single rows: dicts by column, or the items of a map-style dataset.

        A worker may get one row less than another: for loops with collectives take batches.
        """
        self._check_shuffle(shuffle)
        deal, lanes = self._deal((1, None), False), self._lanes((1, None), shuffle)
        return Rows(
            self._cursor, deal, shuffle, lanes, self._read_rows, self._reader.follow, self._reading, self._reader.making
        )

    def first_batch(
        self, batch_size: int = 1, *, format: Format = "numpy", columns: Sequence[str] | None = None
    ) -> Any:
        """The first rows of this share as a batch of `iter_batches`, to look at shapes and types. Consumes nothing.

        The batch a loop will begin with is that of its own reader: ``shard.to_torch(...).first_batch()``.
        """
        reader, read = self._read_as(format, columns)
        return self._batches(reader, read, (batch_size, None), False, False).first_batch()

    def _batches(
        self,
        reader: TableReader | ItemReader,
        read: Callable[[Indices], Any],
        sizes: _Sizes,
        drop_last: bool,
        shuffle: Shuffle,
        ahead: int = 0,
        copies: Copies | None = None,
    ) -> Batches[Any]:
        self._check_shuffle(shuffle)
        deal, lanes = self._deal(sizes, drop_last), self._lanes(sizes, shuffle)
        return Batches(
            self._cursor,
            deal,
            shuffle,
            lanes,
            read,
            reader.follow,
            reader.peek,
            self._reading,
            reader.making,
            ahead,
            copies,
        )

    def _origin(self, collate_fn: Any) -> Origin:
        given: Literal["columns", "items"] = "items" if isinstance(self._reader, ItemReader) else "columns"
        return Origin(self._name, given if collate_fn is None else "collate_fn")

    def _ahead(self, prefetch: int, collate_fn: Any, takes_work: bool = False) -> int:
        """How many batches are made ahead of the loop: none where that takes no work, or draws random numbers in order."""
        takes_work = takes_work or collate_fn is not None or isinstance(self._reader, ItemReader)
        return prefetch if takes_work and not self._is_deterministic else 0

    def _deal(self, sizes: _Sizes, drop_last: bool) -> Deal:
        of_each, of_all = sizes
        if of_all is not None:
            if of_each is not None:
                raise ConfigError(
                    f"batch_size={of_each!r} and global_batch_size={of_all!r}: give batch_size for the rows of each worker's "
                    "batch, or global_batch_size for those of all workers together."
                )
            check_count("global_batch_size", of_all, minimum=1)
        else:
            check_count("batch_size", of_each, minimum=1)
        return Deal(
            num_rows=self._source.num_rows,
            global_batch=(of_each or 0) * self._world_size if of_all is None else of_all,
            rank=self._rank,
            world_size=self._world_size,
            drop_last=drop_last,
        )

    def _lanes(self, sizes: _Sizes, shuffle: Shuffle) -> int:
        """How many lanes an epoch has that begins now. Where there is one for each worker, each reads its own files."""
        if self._source.kind not in ("files", "stream"):
            return 1
        if sizes[1] is None:
            return self._world_size
        if shuffle is False:
            return 1
        return FIXED_LANES if not self._is_sized else max(1, min(FIXED_LANES, len(self._source.blocks) // 2))

    def _read_as(self, format: str, columns: Sequence[str] | None) -> tuple[TableReader, Callable[[Indices], Any]]:
        check_choice("format", format, FORMATS)
        reader = self._reader
        if isinstance(reader, ItemReader):
            raise ConfigError(
                f"dataset {self._name!r} is a map-style dataset, whose rows have no columns: read it with to_torch(...) or "
                "iter_rows()."
            )
        chosen = self._choose(reader, columns)
        reader = reader.select(chosen)
        read = {"numpy": reader.arrays, "pandas": reader.frame, "pyarrow": reader.table}[format]
        return reader, lambda rows: read(rows, chosen)

    def _read_rows(self, rows: Indices) -> Iterator[Any]:
        reader = self._reader
        if isinstance(reader, ItemReader):
            return (reader.items([row])[0] for row in rows)  # not before it is wanted: items may be large
        arrays = reader.arrays(rows, reader.columns)
        return (dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True))

    def _choose(self, reader: TableReader, columns: Sequence[str] | None) -> list[str]:
        return reader.columns if columns is None else check_columns(self._name, columns, reader.columns)

    def _refuse_columns(self, method: str, **arguments: Any) -> None:
        for argument, value in arguments.items():
            if value is not None:
                raise ConfigError(
                    f"{method}({argument}=...): dataset {self._name!r} is a map-style dataset, whose rows have no columns; "
                    "choose in collate_fn, which gets a list of rows."
                )

    def _check_dtypes(self, method: str, dtypes: Any, chosen: list[str], collate_fn: Any) -> None:
        if dtypes is not None and collate_fn is not None:
            raise ConfigError(
                f"{method}(dtypes=..., collate_fn=...): the batch is made by collate_fn; set its types there."
            )
        if isinstance(dtypes, Mapping):
            check_columns(self._name, dtypes, chosen, "dtypes")

    def _check_shuffle(self, shuffle: Any) -> None:
        if not any(shuffle is choice or (isinstance(shuffle, str) and shuffle == choice) for choice in SHUFFLES):
            raise ConfigError(f"shuffle={shuffle!r} is not known; give 'full', 'window' or False.")
        if shuffle == "full" and not self._is_sized:
            raise ConfigError(
                f"shuffle='full' mixes all rows, and dataset {self._name!r} is executed while it is read; take 'window', have "
                "Ray shuffle it (ds.random_shuffle(seed=...)), or hold it in memory: ds.materialize()."
            )
