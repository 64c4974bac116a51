"""Batches of examples: which rows a process collates, padding, and the random numbers of ``collate_fn``. Worker side.

Every rank reads the order of all rows, and its own position in it is part of the checkpoint. What ``collate_fn`` makes of a row
may depend on the other rows, as padding to the longest one does, so every rank collates whole batches. The arrays then do not
depend on the number of ranks. Where an example is large, a rank can collate the rows of its own devices alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from raysgd.data.batches.batches import Batches
from raysgd.data.dataset import WorkerDataset, WorkerDatasets
from raysgd.data.order.position import Position
from raysgd.data.plan import DatasetPlan, Source
from raysgd.errors import ConfigError
from raysgd.functions.examples import ExampleRef, Examples, call_by_name, check_examples
from raysgd.functions.worker.steps import Steps
from raysgd.session import api, context


@dataclass(frozen=True)
class HostBatch:
    """One batch in the memory of the host.

    Attributes:
        refs: All its examples.
        num_rows: The number of rows with padding.
        full_rows: The rows of the other batches, to which a short last one may be padded; else ``num_rows``.
        arrays: What ``collate_fn`` returned.
        rows: The rows that the arrays have.
        signature: What all ranks must have in common: the names, shapes and types of the arrays, and the values of those that
            several ranks use.
    """

    refs: list[ExampleRef]
    num_rows: int
    full_rows: int
    arrays: Any
    rows: slice
    signature: str


class ExampleBatches:
    """The batches of a dataset of examples, made ahead by a thread.

    Args:
        dataset: A dataset of `raysgd.functions.examples.Examples`.
        collate_fn: The user's function.
        steps: Says which rows this process needs.
        rows: Rows of a batch on all devices together.
        seed: For random numbers that ``collate_fn`` draws.
        shuffle: Whether each epoch has an order of its own.
        pads: Whether a short last batch is filled up with copies of its first example.
        per_worker: Whether each rank collates the rows of its own devices alone; see `raysgd.functions.Deployer`.
        agreement: Compares the batches of all ranks; it may have been used for earlier ones.
    """

    def __init__(
        self,
        dataset: WorkerDataset,
        collate_fn: Callable[[list[Any]], Any],
        steps: Steps,
        rows: int,
        *,
        seed: int,
        shuffle: bool = False,
        pads: bool = False,
        per_worker: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        self._agreement = agreement or Agreement()
        self._collate_fn = collate_fn
        self._steps = steps
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._pads = pads
        self._per_worker = per_worker
        self._is_alone = api.world_size() == 1
        self._shapes = ""  # of the first batch
        self._dataset = dataset
        self._shard = dataset.get_split(whole=True)
        self._batches: Batches[HostBatch] = self._shard.iter_batches(
            rows, collate_fn=self._collate, shuffle="full" if shuffle else False
        )

    def __iter__(self) -> Iterator[HostBatch]:
        for batch in self._batches:
            self._agreement.add(batch.signature)
            yield batch
        self._agreement.check()

    def first(self) -> HostBatch:
        """Return the first batch; consumes nothing."""
        return self._batches.first_batch()

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the one that the next iteration begins."""
        return self._shard.epoch

    @property
    def position(self) -> Position:
        """The position of training in the dataset."""
        return self._dataset.whole_position

    def _collate(self, refs: list[ExampleRef]) -> HostBatch:
        padded = refs + [refs[0]] * (self._rows - len(refs) if self._pads else 0)
        num_rows = len(padded)
        used = self._steps.local_rows(num_rows)
        rows = used if self._per_worker else slice(0, num_rows)
        self._seed_generators(padded[rows])
        arrays = _as_tree(call_by_name(self._collate_fn, examples=[ref.load() for ref in padded[rows]]))
        leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
        shapes = ", ".join(f"{jax.tree_util.keystr(k)} {np.shape(a)[1:]} {np.asarray(a).dtype}" for k, a in leaves)
        is_shared = used == slice(0, num_rows) and not self._is_alone
        values = [zlib.crc32(np.asarray(leaf).tobytes()) for _, leaf in leaves] if is_shared else ""
        self._shapes = self._shapes or shapes
        if self._per_worker and shapes != self._shapes:
            raise ConfigError(
                f"collate_fn returned arrays of the names, shapes and types {shapes:.300}, and {self._shapes:.300} before. With "
                "Deployer(collate_per_worker=True) they must be the same in each batch: pad to a fixed length."
            )
        has_full_batch = not self._per_worker and len(self._batches) > 1
        full_rows = self._rows if has_full_batch else num_rows
        return HostBatch(refs, num_rows, full_rows, arrays, rows, f"{shapes} {values}")

    def _seed_generators(self, own: list[ExampleRef]) -> None:
        """Seed Python's and NumPy's generators by the batch: processes that hold the same rows must make the same arrays of them.

        A training that resumes here draws the same numbers again.
        """
        epoch = self._shard.epoch if self._shuffle else 0
        seed = zlib.crc32(repr((self._seed, epoch, own[0].row, len(own))).encode())
        random.seed(seed)
        np.random.seed(seed)


def place_for_loss(steps: Steps, batch: HostBatch, *, is_training: bool) -> tuple[Any, int]:
    """Place a batch on the devices, and return how many of its rows count.

    A short last batch is padded with copies of its first row if the loss is one of single rows: another shape would be compiled,
    and rows that do not divide by the devices would be computed by each of them.
    """
    missing = batch.full_rows - batch.num_rows
    if not missing or not steps.is_loss_of_rows(batch.arrays, is_training=is_training):
        return steps.place_batch(batch.arrays, batch.num_rows, batch.rows), batch.num_rows

    def pad(array: Any) -> Any:
        return np.concatenate([array, np.repeat(np.asarray(array)[:1], missing, 0)])

    return steps.place_batch(jax.tree.map(pad, batch.arrays), batch.full_rows), batch.num_rows


class Agreement:
    """Checks that all ranks make the same batches. Else they would compute different programs, or let replicas differ.

    Each check is an exchange between the ranks: after the batches 1, 2, 4, 8 and so on, and after the last one of each epoch.
    """

    def __init__(self) -> None:
        self._number = self._checked = self._sum = 0
        self._newest = ""

    def add(self, signature: str) -> None:
        """Note the batch that comes next."""
        self._newest = signature
        self._number += 1
        self._sum = zlib.crc32(signature.encode(), self._sum)
        if self._number & (self._number - 1) == 0:
            self.check()

    def check(self) -> None:
        """Compare all batches so far.

        Raises:
            ConfigError: The ranks have different ones.
        """
        if self._checked == self._number or api.world_size() == 1:
            return
        found = api.gather((self._sum, self._newest))
        for rank, each in enumerate(found):
            if each[0] != found[0][0]:
                raise ConfigError(
                    f"collate_fn returned other arrays on rank {rank} than on rank 0, in one of the batches {self._checked + 1} "
                    f"to {self._number}; the newest is {each[1]:.300} there, and {found[0][1]:.300} on rank 0. Return the same "
                    "for the same examples: draw random numbers from the generators of the modules random and numpy.random, "
                    "which are seeded for each batch."
                )
        self._checked = self._number


def _as_tree(returned: Any) -> Any:
    """Return what ``collate_fn`` returned with dicts in place of other mappings, such as the encodings of tokenizers."""
    return jax.tree.map(lambda leaf: _as_tree(dict(leaf)) if isinstance(leaf, Mapping) else leaf, returned)


class BatchesByEpoch:
    """The batches of a training whose examples are a function of the epoch.

    Every rank calls the function when an epoch begins, and when it resumes within one; all must get the same examples.

    Args:
        name: The argument, for messages.
        make_examples: The user's function.
        open_batches: Returns the batches of a dataset.
        seed: For random numbers that the function draws from Python's and NumPy's generators.
        is_same: Whether the ranks are known to get equally many examples.
    """

    def __init__(
        self,
        name: str,
        make_examples: Callable[..., Any],
        open_batches: Callable[[WorkerDataset], ExampleBatches],
        *,
        seed: int,
        is_same: bool = False,
    ) -> None:
        self._is_same = is_same
        self._name = name
        self._make_examples = make_examples
        self._open_batches = open_batches
        self._seed = seed
        self._start = Position()
        self._datasets: WorkerDatasets | None = None
        self._batches: ExampleBatches | None = None
        self._made_for = -1

    def restore(self, position: Position) -> None:
        """Continue at this position."""
        self.close()
        self._start = position

    @property
    def position(self) -> Position:
        """The position of training in the examples of the epoch."""
        return self._start if self._batches is None else self._batches.position

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the one that the next iteration begins."""
        return self._start.epoch if self._batches is None else self._batches.epoch

    def __iter__(self) -> Iterator[HostBatch]:
        if self._batches is None or self.epoch != self._made_for:
            self._open(self.epoch)
        assert self._batches is not None
        return iter(self._batches)

    def close(self) -> None:
        """Release the examples."""
        if self._datasets is not None:
            self._datasets.close()
        self._datasets, self._batches = None, None

    def _open(self, epoch: int) -> None:
        start = self.position if self.position.epoch == epoch else Position(epoch=epoch)
        self.close()
        self._start = start
        examples = self._make(epoch)
        numbers = [] if self._is_same else api.gather(len(examples))
        if len(set(numbers)) > 1:
            raise ConfigError(
                f"{self._name}(epoch_idx={epoch}) returned different numbers of examples on the ranks: "
                f"{', '.join(map(str, numbers))}. Return the same examples on all."
            )
        source = Source("items", (examples,), (len(examples),))
        self._made_for = epoch
        self._datasets = context.acting().open_datasets(DatasetPlan({self._name: source}), fetch=lambda block: block)
        dataset = self._datasets.get(self._name)
        dataset.check(start)
        dataset.restore(Position(), start)
        self._batches = self._open_batches(dataset)

    def _make(self, epoch: int) -> Examples:
        seed = zlib.crc32(repr((self._seed, epoch)).encode())
        random.seed(seed)
        np.random.seed(seed)
        return check_examples(f"{self._name}(epoch_idx={epoch})", call_by_name(self._make_examples, epoch_idx=epoch))
