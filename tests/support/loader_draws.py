"""Rows that draw random numbers when they are loaded, and what ranks and processes of loaders draw."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from raysgd.session import context
from raysgd.session.base import Identity
from raysgd.session.progress import Progress
from raysgd.torch import prepare_data_loader
from raysgd.torch.rows import skip_batches

Enter = Callable[..., None]


@contextlib.contextmanager
def worlds() -> Iterator[Enter]:
    """Return a function that makes this process a worker: ``world(rank, size, seed=...)``."""

    def enter(
        rank: int = 0,
        size: int = 1,
        *,
        seed: int | None = None,
        in_worker: bool = True,
        workers_per_replica: int = 1,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        session = SimpleNamespace(
            progress=Progress(),
            identity=Identity(world_rank=rank, world_size=size, workers_per_replica=workers_per_replica),
            world_rank=rank,
            world_size=size,
            seed=seed,
            in_worker=in_worker,
            deterministic=False,
            logical=None,
            gather=gather or (lambda obj: [obj] * size),
        )
        context.install(cast(Any, session))

    yield enter
    context.uninstall()


class _WaitsForRanksError(Exception):
    """A rank waits for what the others have."""


def on_ranks(world: Enter, size: int, call: Callable[[int], Any], **session: Any) -> list[Any]:
    """Return what ``call`` returns on each rank, where all ranks gather values; each rank begins again when they are known."""
    known: list[list[Any]] = []
    while True:
        asked: list[Any] = []
        results = []
        for rank in range(size):
            answers = iter(known)

            def gather(value: Any, answers: Iterator[list[Any]] = answers, asked: list[Any] = asked) -> list[Any]:
                for answer in answers:
                    return answer
                asked.append(value)
                raise _WaitsForRanksError

            world(rank, size, gather=gather, **session)
            with contextlib.suppress(_WaitsForRanksError):
                results.append(call(rank))
        if not asked:
            return results
        assert len(asked) == size, "some ranks gather, and others do not"
        known.append(asked)


class Augmented(Dataset[Any]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Draws(Dataset[Any]):
    """Items that draw from the generators of the process that loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def check_augmented_alike(seed: int | None, num_workers: int) -> None:
    """Check that the ranks of a replica of the model draw the same numbers for a row, and no others do."""
    draws = []
    with worlds() as world:
        for rank in range(4):
            world(rank, 4, seed=seed, workers_per_replica=2)
            torch.manual_seed(rank)  # as a Trainer seeds ranks: dropout differs
            before = torch.get_rng_state()
            dataset: Any = Augmented(8)
            loader = prepare_data_loader(DataLoader(dataset, batch_size=2, num_workers=num_workers))
            draws.append([[torch.stack(batch) for batch in loader] for _ in range(2)])
            assert torch.equal(torch.get_rng_state(), before)
    of_rank = [torch.stack([torch.cat(epoch, dim=1) for epoch in epochs]) for epochs in draws]
    assert torch.equal(of_rank[0], of_rank[1]) and torch.equal(of_rank[2], of_rank[3])
    numbers = torch.cat([of_rank[0].flatten(), of_rank[2].flatten()])
    assert len(numbers.unique()) == len(numbers)  # of all copies, epochs, batches and rows


def check_draws() -> None:
    """Check that processes of loaders draw different numbers on each rank, and the same when they are made again."""

    def draws(rank: int) -> list[Any]:
        torch.manual_seed(0)  # as a script does on every rank
        world(rank, 2, seed=4)
        given = DataLoader(Draws(), num_workers=2, worker_init_fn=None, batch_size=1)
        return [float(value) for batch in prepare_data_loader(given, add_sampler=False) for value in batch]

    with worlds() as world:
        first, second = draws(0), draws(1)
        assert len({*first, *second}) == 24
        assert draws(0) == first


def check_left_out() -> None:
    """Check that processes leave out the first batches of one epoch alone, and which rows are a rank's own."""
    with worlds() as world:
        world(1, 2)
        five: Any = DataLoader(list(range(5)), batch_size=2, num_workers=1)  # type: ignore[arg-type]
        short = prepare_data_loader(five)
        assert [(batch.tolist(), short.rows.own) for batch in skip_batches(short, 1)] == [([0], 0)]
        assert [(batch.tolist(), short.rows.own) for batch in short] == [([1, 3], 2), ([0], 0)]
        world(1, 2)
        given: Any = DataLoader(list(range(12)), batch_size=2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
        loader = prepare_data_loader(given)
        whole = [[1, 3], [5, 7], [9, 11]]
        for num in (2, 0, 1, 0):
            found = [batch.tolist() for batch in skip_batches(loader, num)]
            assert found == whole[num:], (num, found)
