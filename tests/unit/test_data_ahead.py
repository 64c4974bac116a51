"""Batches that are made ahead of the loop: in order, bounded, by one thread that ends with the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raysgd.data import Batches, DataContext, ahead, resolve_datasets
from raysgd.data.ahead import MadeAhead, num_bytes
from raysgd.errors import ConfigError


def batches(collate: Any, *, rows: int = 40, deterministic: bool = False, **options: Any) -> Batches[Any]:
    plan = resolve_datasets({"x": np.arange(rows)}, _same)
    context = DataContext(plan, 0, 1, 0, fetch=_same, is_deterministic=deterministic)
    return context.get().get_split().to_torch(4, collate_fn=collate, **options)


def _same(value: Any) -> Any:
    return value


def comes_true(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return condition()


def makers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "raysgd-batches"]


def test_batches_come_in_order_made_by_one_thread_beside_the_loop() -> None:
    made_by = set()

    def collate(batch: dict[str, Any]) -> Any:
        made_by.add(threading.get_ident())
        return batch["x"] * 2

    loader = batches(collate)
    for _ in range(2):
        assert np.concatenate(list(loader)).tolist() == [2 * n for n in range(40)]
    assert threading.get_ident() not in made_by
    assert not makers()


@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_are_made_ahead_as_asked_and_no_more(depth: int) -> None:
    made: list[int] = []
    loop = iter(batches(lambda batch: made.append(1) or batch["x"], prefetch=depth))
    next(loop)
    assert comes_true(lambda: len(made) == 1 + depth)
    time.sleep(0.05)
    assert len(made) == 1 + depth
    loop.close()  # type: ignore[attr-defined]
    assert not makers()


def test_large_batches_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_BYTES", 40)
    made: list[int] = []
    loop = iter(batches(lambda batch: made.append(1) or batch["x"], prefetch=5))  # 32 bytes each
    next(loop)
    assert comes_true(lambda: len(made) == 3)
    time.sleep(0.05)
    assert len(made) == 3
    loop.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"deterministic": True}])
def test_where_random_numbers_must_be_drawn_in_order_the_loop_makes_them(options: dict[str, Any]) -> None:
    made_by = set()
    list(batches(lambda batch: made_by.add(threading.get_ident()), **options))
    assert made_by == {threading.get_ident()}


def test_what_takes_no_work_needs_no_thread() -> None:
    loop = iter(batches(None))
    next(loop)
    assert not makers()
    loop.close()  # type: ignore[attr-defined]


def test_only_what_was_handed_out_is_consumed_and_an_error_keeps_the_position() -> None:
    plan = resolve_datasets({"x": np.arange(40)}, _same)
    context = DataContext(plan, 0, 1, 0, fetch=_same)

    def collate(batch: dict[str, Any]) -> Any:
        if is_broken and 20 in batch["x"]:
            raise ValueError("row 20 is bad")
        return batch["x"].tolist()

    is_broken = True
    loader = context.get().get_split().to_torch(4, collate_fn=collate)
    seen: list[int] = []

    def loop() -> None:
        for batch in loader:
            seen.extend(batch)
            assert context.get().position.consumed == len(seen)

    with pytest.raises(ValueError, match="row 20 is bad"):
        loop()
    assert seen == list(range(20))
    is_broken = False
    loop()
    assert seen == list(range(40)) and context.get().position.epoch == 1
    assert not makers()


def test_leaving_the_loop_ends_the_thread_and_the_epoch() -> None:
    loader = batches(lambda batch: batch["x"])
    for _ in loader:
        break
    assert comes_true(lambda: not makers())
    assert loader.epoch == 1


def test_a_peek_beside_a_loop_disturbs_neither() -> None:
    loader = batches(lambda batch: batch["x"].tolist())
    seen = []
    for batch in loader:
        seen += batch
        assert loader.first_batch() == [0, 1, 2, 3]
    assert seen == list(range(40))


def test_an_iterator_tells_what_fails_once() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("x")

    made = MadeAhead(items(), 2, lambda item: 0)
    assert next(made) == 1
    with pytest.raises(KeyError):
        next(made)
    with pytest.raises(StopIteration):
        next(made)
    made.close()


def test_the_size_of_a_batch_is_that_of_its_tensors() -> None:
    import torch

    assert num_bytes({"x": np.zeros(4), "y": [torch.zeros(2), "text"], "z": None}) == 40


def test_prefetch_is_checked() -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        batches(None, prefetch=-1)


def test_a_loop_that_is_kept_makes_no_more_when_the_data_are_let_go() -> None:
    plan = resolve_datasets({"x": np.arange(40)}, _same)
    context = DataContext(plan, 0, 1, 0, fetch=_same)
    made: list[int] = []
    loop = iter(context.get().get_split().to_torch(4, collate_fn=lambda batch: made.append(1) or batch["x"]))
    next(loop)
    context.close()
    assert comes_true(lambda: not makers())
    assert len(made) <= 4
    loop.close()  # type: ignore[attr-defined]


def test_a_batch_that_takes_long_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_CLOSE_S", 0.3)
    is_let_go = threading.Event()

    def collate(batch: dict[str, Any]) -> Any:
        if 4 in batch["x"]:
            is_let_go.wait(30)
        return batch["x"]

    loop = iter(batches(collate))
    next(loop)
    began = time.monotonic()
    loop.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 20
    is_let_go.set()
    assert comes_true(lambda: not makers())


def test_containers_that_know_how_to_move_are_left_whole() -> None:
    from raysgd.data.trees import map_leaves

    class Movable(dict[str, Any]):
        def to(self, device: Any, **_: Any) -> Any:
            return self

    batch = {"a": Movable(x=1), "b": [2, 3]}
    found = map_leaves(lambda leaf: leaf if isinstance(leaf, Movable) else -leaf, batch)
    assert found == {"a": {"x": 1}, "b": [-2, -3]} and type(found["a"]) is Movable
