"""Prefetching: batches are made ahead of the loop, in order and bounded, by one thread that ends with the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raysgd.data.batches.batches import Batches
from raysgd.data.dataset import WorkerDatasets
from raysgd.data.reading import prefetch
from raysgd.data.reading.prefetch import PrefetchIterator, num_bytes
from raysgd.data.sources.resolve import resolve_datasets
from raysgd.errors import ConfigError


def batches(collate: Any, *, rows: int = 40, deterministic: bool = False, **options: Any) -> Batches[Any]:
    plan = resolve_datasets({"x": np.arange(rows)}, _same)
    datasets = WorkerDatasets(plan, 0, 1, 0, fetch=_same, is_deterministic=deterministic)
    return datasets.get().get_split().to_torch(4, collate_fn=collate, **options)


def _same(value: Any) -> Any:
    return value


def wait_until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return condition()


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "raysgd-batches"]


def test_one_thread_makes_batches_in_order_while_the_loop_runs() -> None:
    made_by = set()

    def collate(batch: dict[str, Any]) -> Any:
        made_by.add(threading.get_ident())
        return batch["x"] * 2

    loader = batches(collate)
    for _ in range(2):
        assert np.concatenate(list(loader)).tolist() == [2 * n for n in range(40)]
    assert threading.get_ident() not in made_by
    assert not prefetch_threads()


def check_batches_made_ahead(expected: int, **options: Any) -> None:
    """Run a loop that waits in each step until ``expected`` batches are made ahead, and check that there are never more."""
    made: list[int] = []
    taken: list[int] = []
    ahead = []

    def collate(batch: dict[str, Any]) -> Any:
        made.append(1)
        ahead.append(len(made) - len(taken))
        return batch["x"]

    for _ in batches(collate, **options):
        taken.append(1)
        assert wait_until(lambda: len(made) >= min(10, len(taken) + expected))
    assert max(ahead) <= expected + 1  # the loop may have taken one that is not counted yet
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_limits_the_batches_made_ahead(depth: int) -> None:
    check_batches_made_ahead(depth, prefetch=depth)


def test_prefetching_stops_at_the_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_BYTES", 40)  # a batch has 32 bytes
    check_batches_made_ahead(2, prefetch=5)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"deterministic": True}])
def test_deterministic_runs_make_batches_in_the_loop(options: dict[str, Any]) -> None:
    made_by = set()
    list(batches(lambda batch: made_by.add(threading.get_ident()), **options))
    assert made_by == {threading.get_ident()}


def test_batches_that_take_no_work_start_no_thread() -> None:
    loop = iter(batches(None))
    next(loop)
    assert not prefetch_threads()
    loop.close()  # type: ignore[attr-defined]


def test_prefetched_batches_are_not_consumed_and_errors_keep_the_position() -> None:
    plan = resolve_datasets({"x": np.arange(40)}, _same)
    datasets = WorkerDatasets(plan, 0, 1, 0, fetch=_same)

    def collate(batch: dict[str, Any]) -> Any:
        if is_broken and 20 in batch["x"]:
            raise ValueError("row 20 is bad")
        return batch["x"].tolist()

    is_broken = True
    loader = datasets.get().get_split().to_torch(4, collate_fn=collate)
    seen: list[int] = []

    def loop() -> None:
        for batch in loader:
            seen.extend(batch)
            assert datasets.get().position.consumed == len(seen)

    with pytest.raises(ValueError, match="row 20 is bad"):
        loop()
    assert seen == list(range(20))
    is_broken = False
    loop()
    assert seen == list(range(40)) and datasets.get().position.epoch == 1
    assert not prefetch_threads()


def test_leaving_the_loop_ends_the_thread_and_the_epoch() -> None:
    loader = batches(lambda batch: batch["x"])
    for _ in loader:
        break
    assert wait_until(lambda: not prefetch_threads())
    assert loader.epoch == 1


def test_first_batch_during_a_loop_disturbs_neither() -> None:
    loader = batches(lambda batch: batch["x"].tolist())
    seen = []
    for batch in loader:
        seen += batch
        assert loader.first_batch() == [0, 1, 2, 3]
    assert seen == list(range(40))


def test_prefetch_iterator_raises_an_error_once() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("x")

    made = PrefetchIterator(items(), 2)
    assert next(made) == 1
    with pytest.raises(KeyError):
        next(made)
    with pytest.raises(StopIteration):
        next(made)
    made.close()


def test_batch_size_in_bytes_counts_tensors_and_arrays() -> None:
    import torch

    assert num_bytes({"x": np.zeros(4), "y": [torch.zeros(2), "text"], "z": None}) == 40


def test_negative_prefetch_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        batches(None, prefetch=-1)


def test_closing_the_datasets_stops_prefetching() -> None:
    plan = resolve_datasets({"x": np.arange(40)}, _same)
    datasets = WorkerDatasets(plan, 0, 1, 0, fetch=_same)
    made: list[int] = []
    loop = iter(datasets.get().get_split().to_torch(4, collate_fn=lambda batch: made.append(1) or batch["x"]))
    next(loop)
    datasets.close()
    assert wait_until(lambda: not prefetch_threads())
    assert len(made) <= 4
    loop.close()  # type: ignore[attr-defined]


def test_leaving_the_loop_does_not_wait_long_for_a_slow_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.3)
    is_released = threading.Event()

    def collate(batch: dict[str, Any]) -> Any:
        if 4 in batch["x"]:
            is_released.wait(30)
        return batch["x"]

    loop = iter(batches(collate))
    next(loop)
    began = time.monotonic()
    loop.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 20
    is_released.set()
    assert wait_until(lambda: not prefetch_threads())


def test_containers_with_a_to_method_count_as_one_value() -> None:
    from raysgd.data.batches.values import map_leaves

    class Movable(dict[str, Any]):
        def to(self, device: Any, **_: Any) -> Any:
            return self

    batch = {"a": Movable(x=1), "b": [2, 3]}
    found = map_leaves(lambda leaf: leaf if isinstance(leaf, Movable) else -leaf, batch)
    assert found == {"a": {"x": 1}, "b": [-2, -3]} and type(found["a"]) is Movable
