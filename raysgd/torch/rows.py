"""Which rows of its batches a prepared loader repeats, loaders that leave them out, and that begin within an epoch. Worker side.

`raysgd.torch.prepare_data_loader` gives all ranks equally many batches, which sharded models need, and repeats the first rows
for that. The repeated rows are the last ones in the order of the data, so their places are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from raysgd.errors import CheckpointError
from raysgd.session import context
from raysgd.torch.batches import count_rows, take_rows
from raysgd.torch.loader import PreparedLoader
from raysgd.torch.passes import HandedBatch
from raysgd.torch.samplers import StridedSampler, UnevenBatchSampler

_END = object()


class RowPlaces:
    """Says how many rows of a batch of a prepared loader are not repeated ones.

    Args:
        loader: The prepared loader.

    Attributes:
        rank: The data-parallel rank.
        num_ranks: The number of data-parallel ranks.
        by_rows: Whether ranks take turns by rows; else by whole batches.
        batch_size: Rows of a full batch of this rank; 0 if batches have no fixed size.
        repeats: Whether the loader may repeat rows.
        is_even: Whether each rank's place in the order of the data is known: row, or batch, r of N.
    """

    def __init__(self, loader: PreparedLoader) -> None:
        identity = context.current().identity
        self.rank, self.num_ranks = identity.data_parallel_rank, identity.data_parallel_size
        batches: Any = loader.loader.batch_sampler
        self.by_rows = batches is not None and not isinstance(batches, StridedSampler)
        self.batch_size = int(getattr(batches, "batch_size", 0) or 0)
        self.repeats = loader.train and self.num_ranks > 1
        self._uneven = batches if isinstance(batches, UnevenBatchSampler) else None
        sampler = loader.loader.sampler if batches is None else batches
        #: What splits the data over the ranks.
        self._sampler: Any = getattr(sampler, "sampler", None) if self.by_rows else sampler
        takes_turns = self._uneven is None and isinstance(self._sampler, (DistributedSampler, StridedSampler))
        self.is_even = self.num_ranks == 1 or takes_turns

    def total(self) -> int | None:
        """Return how many rows, or whole batches, all ranks have without the repeated ones; None: none are repeated."""
        if not self.is_even or not self.repeats:
            return None
        if isinstance(self._sampler, DistributedSampler):
            return len(self._sampler.dataset)  # type: ignore[arg-type]
        inner = self._sampler.sampler
        return len(inner) if hasattr(inner, "__len__") else None  # a sampler without a length repeats nothing

    def num_own(self, batch: int, rows_before: int, rows: int) -> int:
        """Return how many of a batch's rows this rank counts; they are the first ones.

        Args:
            batch: Number of the batch in this rank's epoch, from 0.
            rows_before: Rows of this rank's earlier batches.
            rows: Rows of the batch.
        """
        if self._uneven is not None:
            left = len(self._uneven.sampler) - batch * self._uneven.size
            return rows if left >= self.num_ranks or self.rank < left else 0
        total = self.total()
        if total is None:
            return rows
        if not self.by_rows:
            return rows if batch * self.num_ranks + self.rank < total else 0
        num_of_rank = -(-(total - self.rank) // self.num_ranks)
        return max(0, min(rows, num_of_rank - rows_before))


class FollowedLoader(PreparedLoader):
    """A prepared loader that says what it hands out.

    Args:
        prepared: The loader.
        on_batch: Called before each batch.
        on_end: Called when the loop over the loader has ended, or was left.
        keeps_repeated: False: rows that it would repeat are left out. A batch that only repeats rows is handed out all the
            same, since all ranks make equally many steps; it counts no row.
    """

    def __init__(
        self,
        prepared: PreparedLoader,
        on_batch: Callable[[HandedBatch], None],
        *,
        on_end: Callable[[], None] = lambda: None,
        keeps_repeated: bool,
    ) -> None:
        vars(self).update(vars(prepared))
        self._on_batch, self._on_end = on_batch, on_end
        self.num_rows = 0
        self._places = None if keeps_repeated else RowPlaces(prepared)

    def _batches(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        rows_before = number * (0 if self._places is None else self._places.batch_size)
        try:
            for batch, is_last in self._with_ends(super()._batches(batches, number), number):
                self.num_rows = rows = count_rows(batch)
                if self._places is not None:
                    self.num_rows = self._places.num_own(number, rows_before, rows)
                    batch = take_rows(batch, self.num_rows or rows)
                self._on_batch(HandedBatch(batch, self.num_rows, is_last=is_last))
                yield batch
                number, rows_before = number + 1, rows_before + rows
        finally:
            self._on_end()

    def _with_ends(self, batches: Iterator[Any], number: int) -> Iterator[tuple[Any, bool]]:
        """Yield batches from ``number`` on, and whether each is the last one."""
        if not isinstance(self.loader.dataset, IterableDataset):
            total = len(self.loader)
            for place, batch in enumerate(batches, start=number + 1):
                yield batch, place == total
            return
        # How many there are is not known: the next one is fetched before this one is used.
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)
            yield batch, following is _END
            batch = following


class _RemainingItems:
    """A sampler that leaves out its first items when it is read for the first time.

    Attributes:
        num_left_out: The number of items that the next reader does not get.
    """

    def __init__(self, sampler: Any, num_items: int) -> None:
        self._sampler = sampler
        self.num_left_out = num_items

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        num_items, self.num_left_out = self.num_left_out, 0
        return islice(iter(self._sampler), num_items, None)


def skip_batches(loader: PreparedLoader, num_batches: int) -> Iterator[Any]:
    """Iterate over a loader without its first batches, whose rows are not read where there is a sampler."""
    inner = loader.loader
    if not num_batches or isinstance(inner.dataset, IterableDataset):
        return islice(iter(loader), num_batches, None)
    name = "sampler" if inner.batch_sampler is None else "batch_sampler"
    sampler = getattr(inner, name)
    vars(inner)[name] = _RemainingItems(sampler, num_batches)
    try:
        return iter(loader)
    finally:
        vars(inner)[name] = sampler


def describe_order(loader: Any) -> dict[str, int | None]:
    """Return what the order of a loader's rows depends on besides the epoch, for a checkpoint within one.

    Args:
        loader: A prepared loader, a DataLoader, or any other iterable, of which nothing is known.
    """
    given = loader.loader if isinstance(loader, PreparedLoader) else loader
    data: Any = getattr(given, "dataset", None)
    sampler = getattr(loader.given if isinstance(loader, PreparedLoader) else given, "sampler", None)
    return {
        "rows": len(data) if hasattr(data, "__len__") else None,
        "seed": None if sampler is None or isinstance(sampler, SequentialSampler) else context.current().seed or 0,
    }


def check_order(saved: dict[str, int | None], loader: Any, epoch: int) -> None:
    """Check that the rows that a checkpoint within an epoch has trained on are the first ones of this loader, too.

    Args:
        saved: What `describe_order` returned when it was saved.
        loader: The loader that continues.
        epoch: For the error.

    Raises:
        CheckpointError: The data has another number of rows, or another seed shuffles it.
    """
    for name, now in describe_order(loader).items():
        then = saved[name]
        if then is not None and now is not None and then != now:
            what = (
                f"of {then} rows, and the data has {now}"
                if name == "rows"
                else f"in the order of seed {then}, not {now}"
            )
            raise CheckpointError(
                f"the checkpoint was saved within epoch {epoch} {what}: which rows are left is not known. Give what the saved "
                "training got, or resume from a checkpoint at the end of an epoch."
            )
