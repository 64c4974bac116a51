"""Loaders that say what they hand out, or begin within an epoch, and checks of the order that they resume. Worker side.

Which rows a rank reads is decided in `raysgd.torch.samplers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from raysgd.errors import CheckpointError
from raysgd.session import context
from raysgd.torch.batches import take_rows
from raysgd.torch.loader import BatchRows, PreparedLoader
from raysgd.torch.passes import HandedBatch

_END = object()


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
        self._keeps_repeated = keeps_repeated

    def _hand_out(self, batches: Iterator[tuple[Any, BatchRows]], number: int) -> Iterator[Any]:
        try:
            for (batch, rows), is_last in self._with_ends(batches, number):
                self.num_rows = rows.num if self._keeps_repeated else rows.own
                if 0 < self.num_rows < rows.num:
                    batch = take_rows(batch, self.num_rows, rows.num)
                self._on_batch(HandedBatch(batch, self.num_rows, is_last=is_last))
                yield from super()._hand_out(iter([(batch, rows)]), number)
        finally:
            self._on_end()

    def _with_ends(self, batches: Iterator[Any], number: int) -> Iterator[tuple[Any, bool]]:
        """Yield batches from ``number`` on, and whether each is the last one."""
        try:
            total = None if isinstance(self.loader.dataset, IterableDataset) else len(self.loader)
        except TypeError:  # a sampler without a length
            total = None
        if total is not None:
            for place, batch in enumerate(batches, start=number + 1):
                yield batch, place == total
            return
        # How many there are is not known: the next one is fetched before this one is used.
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)
            yield batch, following is _END
            batch = following


def skip_batches(loader: PreparedLoader, num_batches: int) -> Iterator[Any]:
    """Iterate over a loader without its first batches, whose rows are not read where there is a sampler."""
    return loader.start_epoch(num_batches)


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
