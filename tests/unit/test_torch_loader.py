"""`prepare_data_loader`: shards, epochs, settings that are kept, and arguments that are refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import raysgd.torch
from raysgd.errors import ConfigError, UsageError
from raysgd.torch import prepare_data_loader
from raysgd.torch.evaluation import interleave
from raysgd.torch.rows import FollowedLoader, skip_batches
from support.loader_draws import Augmented, Enter, check_augmented_alike, worlds
from support.project import ROOT


class Numbers(Dataset[Any]):
    def __init__(self, num: int = 12) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index)]), "pair": (index, f"name {index}")}


class Stream(IterableDataset[Any]):
    epoch: int | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.fixture
def world() -> Iterator[Enter]:
    with worlds() as enter:
        yield enter


def items(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch["x"].flatten()]


def orders(world: Enter, make: Callable[[], Any], size: int, **session: Any) -> list[list[int]]:
    """Return what each rank reads in its first epoch."""
    found = []
    for rank in range(size):
        world(rank, size, **session)
        found.append(items(prepare_data_loader(make())))
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_of_all_ranks_cover_the_data(world: Enter, shuffle: bool) -> None:
    each = orders(world, lambda: DataLoader(Numbers(), batch_size=2, shuffle=shuffle), 3)
    assert sorted(chain.from_iterable(each)) == list(range(12))
    assert [len(shard) for shard in each] == [4, 4, 4]


def test_unshuffled_data_stays_in_order(world: Enter) -> None:
    assert orders(world, lambda: DataLoader(Numbers(6), batch_size=2), 2) == [[0, 2, 4], [1, 3, 5]]


def test_remainder_is_repeated_or_dropped(world: Enter) -> None:
    repeated = orders(world, lambda: DataLoader(Numbers(5)), 2)
    left_out = orders(world, lambda: DataLoader(Numbers(5), drop_last=True), 2)
    assert sorted(chain(*repeated)) == [0, 0, 1, 2, 3, 4]
    assert sorted(chain(*left_out)) == [0, 1, 2, 3]


def test_order_depends_on_seed(world: Enter) -> None:
    def make() -> Any:
        return DataLoader(Numbers(), shuffle=True)

    assert orders(world, make, 2, seed=1) == orders(world, make, 2, seed=1)
    assert orders(world, make, 2, seed=1) != orders(world, make, 2, seed=2)
    assert orders(world, make, 2) == orders(world, make, 2, seed=0)


def test_each_iteration_is_the_next_epoch(world: Enter) -> None:
    world(1, 2)
    loader = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
    epochs = [items(loader) for _ in range(3)]
    assert loader.epoch == 2
    assert epochs[0] != epochs[1] != epochs[2]
    again = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
    assert [items(again) for _ in range(3)] == epochs


def test_resumed_loop_continues_with_its_epoch(world: Enter) -> None:
    world(1, 2)
    whole = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
    epochs = [items(whole) for _ in range(4)]
    resumed = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
    resumed.set_epoch(2)
    assert resumed.epoch == 2
    assert [items(resumed), items(resumed)] == epochs[2:]
    for epoch in (1, 2):  # calling it before every epoch works too
        resumed.set_epoch(epoch)
        assert items(resumed) == epochs[epoch]


def test_one_worker_shuffles_like_several(world: Enter) -> None:
    def make() -> Any:
        return DataLoader(Numbers(), shuffle=True)

    alone = orders(world, make, 1, seed=3)[0]
    assert [item for step in zip(*orders(world, make, 2, seed=3), strict=True) for item in step] == alone


def test_loader_keeps_its_order_outside_a_worker(world: Enter) -> None:
    world(in_worker=False)
    given = DataLoader(Numbers(), shuffle=True, batch_size=5)
    torch.manual_seed(1)
    expected = items(given)
    torch.manual_seed(1)
    prepared = prepare_data_loader(given)
    assert items(prepared) == expected
    assert prepared.sampler is given.sampler
    assert len(prepared) == 3


def test_length_is_that_of_this_rank(world: Enter) -> None:
    world(0, 3)
    assert len(prepare_data_loader(DataLoader(Numbers(12), batch_size=2))) == 2
    assert len(prepare_data_loader(DataLoader(Numbers(13), batch_size=2))) == 3
    assert len(prepare_data_loader(DataLoader(Numbers(13), batch_size=3, drop_last=True))) == 1


def test_all_settings_are_kept(world: Enter) -> None:
    world(0, 2)
    generator = torch.Generator()
    settings: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": list,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 7,
        "generator": generator,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "in_order": False,
    }
    given = DataLoader(Numbers(), shuffle=True, multiprocessing_context="spawn", **settings)
    loader = prepare_data_loader(given)
    assert {name: getattr(loader, name) for name in settings} == settings
    assert loader.multiprocessing_context is given.multiprocessing_context
    assert loader.dataset is given.dataset


def test_the_given_loader_is_not_changed(world: Enter) -> None:
    world(1, 2)
    given = DataLoader(Numbers(4))
    prepare_data_loader(given, global_batch_size=2)
    assert (items(given), given.batch_size, given.worker_init_fn) == ([0, 1, 2, 3], 1, None)


def test_subclass_of_data_loader_is_kept(world: Enter) -> None:
    class Loader(DataLoader[Any]):
        def __init__(self, dataset: Any, flavour: str) -> None:
            super().__init__(dataset, shuffle=True)
            self.flavour = flavour

    world(0, 2)
    loader = prepare_data_loader(Loader(Numbers(), "sweet"))
    assert isinstance(loader.loader, Loader)
    assert (loader.flavour, len(loader)) == ("sweet", 6)


def test_batch_sampler_over_torch_samplers_is_rebuilt(world: Enter) -> None:
    def make() -> Any:
        return DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 3, False))

    assert orders(world, make, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    world(0, 2)
    assert [len(batch["x"]) for batch in prepare_data_loader(make())] == [3, 1]


@pytest.mark.parametrize("seed", [None, 3])
def test_ranks_of_a_copy_of_the_model_augment_their_rows_alike(seed: int | None) -> None:
    check_augmented_alike(seed, num_workers=0)


def test_processes_of_loaders_draw_the_numbers_of_their_rows() -> None:
    """In a new process: threads of the libraries that other tests have loaded make a forked process crash now and then."""
    program = (
        "from support.loader_draws import check_augmented_alike, check_draws, check_left_out\n"
        "check_augmented_alike(None, num_workers=1)\ncheck_augmented_alike(3, num_workers=1)\ncheck_draws()\n"
        "check_left_out()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_rows_are_augmented_alike_when_an_epoch_is_resumed(world: Enter) -> None:
    world(1, 2, workers_per_replica=2)
    dataset: Any = Augmented(8)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=2))
    whole = [torch.stack(batch) for batch in loader]
    loader.set_epoch(0)
    remaining = [torch.stack(batch) for batch in skip_batches(loader, 2)]
    assert torch.equal(torch.stack(remaining), torch.stack(whole[2:]))


def test_shuffling_batch_sampler_changes_with_the_epoch(world: Enter) -> None:
    world(0, 2)
    dataset = Numbers(20)
    loader = prepare_data_loader(DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 5, False)))
    assert items(loader) != items(loader)


def test_single_items_are_split(world: Enter) -> None:
    assert orders(world, lambda: DataLoader(Numbers(4), batch_size=None), 2) == [[0, 2], [1, 3]]


def test_distributed_sampler_is_kept_and_gets_the_epoch(world: Enter) -> None:
    world(0, 2)
    dataset = Numbers()
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = prepare_data_loader(DataLoader(dataset, sampler=sampler))
    assert loader.sampler is sampler
    assert items(loader) != items(loader)
    assert sampler.epoch == 1


def test_loader_is_not_split_without_add_sampler(world: Enter) -> None:
    world(1, 2)
    given = DataLoader(Numbers(4), shuffle=True)
    loader = prepare_data_loader(given, add_sampler=False)
    assert loader.sampler is given.sampler
    assert sorted(items(loader)) == [0, 1, 2, 3]


def test_prepared_loader_is_returned_unchanged(world: Enter) -> None:
    world(1, 2)
    loader = prepare_data_loader(DataLoader(Numbers()))
    assert prepare_data_loader(cast(Any, loader)) is loader


def test_iterable_dataset_is_refused_with_advice(world: Enter) -> None:
    world(0, 4)
    with pytest.raises(UsageError, match=r"Stream is an IterableDataset.*4 workers.*add_sampler=False"):
        prepare_data_loader(DataLoader(Stream()))


def test_iterable_dataset_that_splits_itself_gets_the_epoch(world: Enter) -> None:
    world(0, 4)
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=4), add_sampler=False, global_batch_size=8)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert loader.dataset.epoch == 0
    world(0, 1)
    assert len(list(prepare_data_loader(DataLoader(Stream())))) == 6


def test_global_batch_is_split(world: Enter) -> None:
    world(0, 3)
    loader = prepare_data_loader(DataLoader(Numbers(), batch_size=5), global_batch_size=6)
    assert [len(batch["x"]) for batch in loader] == [2, 2]
    assert (loader.batch_size, len(loader)) == (2, 2)


def batches_by_rank(world: Enter, num_ranks: int, size: int, epoch: int = 0, **settings: Any) -> list[list[list[int]]]:
    """Return the items of each step, by step and rank."""
    by_rank = []
    for rank in range(num_ranks):
        world(rank, num_ranks)
        loader = prepare_data_loader(DataLoader(Numbers(), batch_size=5, **settings), global_batch_size=size)
        loader.set_epoch(epoch)
        by_rank.append([[int(x) for x in batch["x"]] for batch in loader])
        assert len(loader) == len(by_rank[-1])
    return [list(step) for step in zip(*by_rank, strict=True)]


def test_global_batch_that_does_not_divide_is_split_evenly(world: Enter) -> None:
    assert batches_by_rank(world, 3, 8) == [[[0, 3, 6], [1, 4, 7], [2, 5]], [[8, 11], [9, 0], [10, 1]]]
    assert batches_by_rank(world, 3, 8, drop_last=True) == [[[0, 3, 6], [1, 4, 7], [2, 5]]]
    assert batches_by_rank(world, 5, 11)[1] == [[11], [0], [1], [2], [3]], "too few items for all ranks"


@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 3), st.booleans())
def test_global_batches_do_not_depend_on_number_of_ranks(num_ranks: int, more: int, epoch: int, shuffle: bool) -> None:
    size = num_ranks + more
    with worlds() as world:
        of_many = batches_by_rank(world, num_ranks, size, epoch, shuffle=shuffle)
        of_one = batches_by_rank(world, 1, size, epoch, shuffle=shuffle)
    for step, (whole,) in zip(of_many, of_one, strict=True):
        assert interleave(step)[: len(whole)] == whole
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
        assert sum(sizes) <= size


@pytest.mark.parametrize(
    ("size", "batch_size", "text"),
    [
        (2, 3, "global_batch_size=2 leaves some of 3 workers without an item: give 3 or more"),
        (0, 3, "give an int >= 1"),
        (6, None, "makes its batches by size; this one has batch_size=None"),
    ],
)
def test_global_batch_that_cannot_be_split_is_refused(
    world: Enter, size: int, batch_size: int | None, text: str
) -> None:
    world(0, 3)
    with pytest.raises(ConfigError, match=text):
        prepare_data_loader(DataLoader(Numbers(), batch_size=batch_size), global_batch_size=size)


def test_uneven_global_batch_of_split_data_is_refused(world: Enter) -> None:
    world(0, 3)
    sampler = DistributedSampler(Numbers(), num_replicas=3, rank=0)
    for loader, settings in (
        (DataLoader(Numbers(), batch_size=5, sampler=sampler), {}),
        (DataLoader(Stream(), batch_size=5), {"add_sampler": False}),
    ):
        with pytest.raises(ConfigError, match=r"=8 does not divide by 3 workers, and .* split already: give 6 or 9"):
            prepare_data_loader(loader, global_batch_size=8, **settings)


def test_other_types_than_data_loader_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a list"):
        prepare_data_loader(cast(Any, [1, 2]))


def test_epoch_must_be_a_count(world: Enter) -> None:
    world()
    with pytest.raises(ConfigError, match="set_epoch"):
        prepare_data_loader(DataLoader(Numbers())).set_epoch(-1)


class Movable:
    """Stands for a tensor on another device; records where it is moved."""

    device: torch.device | None = None

    def to(self, device: torch.device) -> Movable:
        self.device = device
        return self


def test_batches_are_moved(world: Enter) -> None:
    def collate(items: list[Any]) -> Any:
        return {"x": Movable(), "pair": (Movable(), [item["pair"][1] for item in items])}

    world()
    batch = next(iter(prepare_data_loader(DataLoader(Numbers(), batch_size=2, collate_fn=collate))))
    assert batch["x"].device == batch["pair"][0].device == raysgd.torch.device()
    assert batch["pair"][1] == ["name 0", "name 1"]
    loader = prepare_data_loader(DataLoader(Numbers(), collate_fn=collate), move_to_device=False)
    assert next(iter(loader))["x"].device is None


def test_iterating_does_not_draw_from_torch_generator(world: Enter) -> None:
    world(1, 2)
    loader = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
    before = torch.get_rng_state()
    items(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_copy_of_a_prepared_loader_works(world: Enter) -> None:
    world(0, 2)
    loader = copy.copy(prepare_data_loader(DataLoader(Numbers(4))))
    assert items(loader) == [0, 2]
    with pytest.raises(AttributeError, match="no_such_name"):
        loader.no_such_name  # noqa: B018


class Positioned(DataLoader[Any]):
    """A DataLoader that was set to a position by itself: it begins with its second batch."""

    def __iter__(self) -> Any:
        return islice(super().__iter__(), 1, None)


def test_loader_at_a_position_of_its_own_counts_rows_from_there(world: Enter) -> None:
    world(1, 2)
    counted: list[tuple[int, bool]] = []
    prepared = prepare_data_loader(Positioned(Numbers(3)))  # batch 1 of rank 1 repeats row 0
    loader = FollowedLoader(
        prepared, lambda batch: counted.append((batch.num_rows, batch.is_last)), keeps_repeated=False
    )
    loader.first_batch = 1
    assert items(loader) == [0]
    assert counted == [(0, True)]
